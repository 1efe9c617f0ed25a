// SPDX-License-Identifier: GPL-2.0

//! Bindings to the RDMA core.
//!
//! Only what `bindgen` made; for use by the crate `rdma` and nobody else.

// Of generated code nothing can be asked, as in the kernel's own `bindings`.
#![allow(
    clippy::all,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    improper_ctypes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn
)]

#[allow(dead_code)]
#[allow(clippy::as_underscore)]
#[allow(clippy::cast_lossless)]
#[allow(clippy::ptr_as_ptr)]
#[allow(clippy::ref_as_ptr)]
#[allow(clippy::undocumented_unsafe_blocks)]
#[cfg_attr(not(CONFIG_RUSTC_HAS_UNNECESSARY_TRANSMUTES), allow(unknown_lints))]
#[allow(unnecessary_transmutes)]
mod raw {
    use kernel::bindings::*;
    use kernel::ffi;
    use pin_init::MaybeZeroable;

    type __kernel_size_t = usize;
    type __kernel_ssize_t = isize;
    type __kernel_ptrdiff_t = isize;

    include!(concat!(
        env!("RDMA_BINDINGS_DIR"),
        "/rdma_bindings_generated.rs"
    ));
    include!(concat!(
        env!("RDMA_BINDINGS_DIR"),
        "/rdma_helpers_generated.rs"
    ));
}

pub use raw::*;

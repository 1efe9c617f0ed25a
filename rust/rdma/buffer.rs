// SPDX-License-Identifier: GPL-2.0

//! Memory that a device may read and write.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_dma_map_single()`)

use core::ops::{
    Deref,
    DerefMut, //
};
use kernel::{
    bindings::dma_data_direction,
    error::to_result,
    prelude::*, //
};
use rdma_bindings as bindings;

use crate::{
    context::MaySleep,
    device::Device, //
};

pub(crate) const DIRECTION: dma_data_direction = dma_data_direction::DMA_BIDIRECTIONAL;

/// Memory that is mapped for a device for as long as it lives.
///
/// Whoever has it may read and write it, as the slice of bytes that it derefs to. While a work request
/// is in flight nobody has it. It may be dropped in any context, which unmaps and frees it. It can't
/// leave the window in which the device may be used:
///
/// ```compile_fail,E0521
/// use rdma::buffer::DmaBuffer;
///
/// fn keep(_: DmaBuffer<'static>) {}
///
/// fn escape<'bound>(buffer: DmaBuffer<'bound>) {
///     keep(buffer)
/// }
/// ```
///
/// ```
/// # use kernel::prelude::*;
/// use rdma::{buffer::DmaBuffer, context::MaySleep, device::Device, request::WorkRequest};
///
/// fn greeting<'bound>(
///     dev: &'bound Device<'bound>,
///     may_sleep: MaySleep<'_>,
/// ) -> Result<WorkRequest<'bound, ()>> {
///     let mut buffer = DmaBuffer::new(dev, 5, may_sleep)?;
///     buffer.copy_from_slice(b"hello");
///     WorkRequest::new(buffer, (), GFP_KERNEL)
/// }
/// ```
///
/// C functions: `ib_dma_map_single()`, `ib_dma_unmap_single()`, and those that keep the caches in step,
/// `ib_dma_sync_single_for_device()` and `ib_dma_sync_single_for_cpu()`.
///
/// # Invariants
///
/// - `memory` is physically contiguous, and has at most `u32::MAX` bytes.
/// - It is mapped for `device` at `addr`.
pub struct DmaBuffer<'bound> {
    device: &'bound Device<'bound>,
    memory: Pin<KBox<[u8]>>,
    addr: u64,
}

impl<'bound> DmaBuffer<'bound> {
    /// Allocates `len` bytes, all zero, and maps them. Sleeps.
    ///
    /// C function: `ib_dma_map_single()`.
    ///
    /// # Errors
    ///
    /// - `EINVAL` if `len` is zero or more than `i32::MAX`.
    /// - `ENOMEM` if there isn't so much contiguous memory, or it can't be mapped.
    /// - `EDEADLK` where sleeping is not possible.
    pub fn new(dev: &'bound Device<'bound>, len: usize, may_sleep: MaySleep<'_>) -> Result<Self> {
        may_sleep.check("DmaBuffer::new")?;
        if len == 0 || i32::try_from(len).is_err() {
            log_refusal!(
                "{}: buffer of {} bytes is out of range 1..={}\n",
                dev.name(),
                len,
                i32::MAX
            );
            return Err(EINVAL);
        }
        let zero = |_| Ok::<_, Error>(0u8);
        let mut memory: Pin<KBox<[u8]>> = KBox::pin_slice(zero, len, GFP_KERNEL | __GFP_NOWARN)?;
        // SAFETY: The memory comes from `kmalloc()`, has `len` bytes and stays where it is.
        let addr = unsafe {
            bindings::ib_dma_map_single(dev.as_raw(), memory.as_mut_ptr().cast(), len, DIRECTION)
        };
        // SAFETY: The device is valid, and the address comes from a mapping for it.
        to_result(unsafe { bindings::ib_dma_mapping_error(dev.as_raw(), addr) })?;
        // INVARIANT: Allocated and mapped above.
        Ok(Self {
            device: dev,
            memory,
            addr,
        })
    }

    /// The device for which the memory is mapped.
    pub fn device(&self) -> &'bound Device<'bound> {
        self.device
    }

    pub(crate) fn dma_addr(&self) -> u64 {
        self.addr
    }
}

impl Deref for DmaBuffer<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.memory
    }
}

impl DerefMut for DmaBuffer<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().get_mut()
    }
}

impl Drop for DmaBuffer<'_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant; this may be done in any context.
        unsafe {
            bindings::ib_dma_unmap_single(
                self.device.as_raw(),
                self.addr,
                self.memory.len(),
                DIRECTION,
            )
        };
    }
}

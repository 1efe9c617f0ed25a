// SPDX-License-Identifier: GPL-2.0

//! Atomic operations on the way of a request, without a call.
//!
//! The methods of [`Atomic`] call a helper in C, a function for each load and each addition, where the
//! kernel is built without `CONFIG_RUST_INLINE_HELPERS`: on the way of a request that is a third of all
//! instructions. The operations here are the ones that C's own inline functions come down to, so they
//! mean the same to the kernel's memory model.
//!
//! C header: [`include/linux/atomic.h`](srctree/include/linux/atomic.h)

use kernel::sync::atomic::Atomic;

/// C macro: `READ_ONCE()`.
#[inline(always)]
pub(crate) fn load_relaxed(word: &Atomic<u32>) -> u32 {
    // SAFETY: The pointer is valid and aligned. A volatile read of a word is what the kernel's memory
    // model has for a relaxed atomic load, so it doesn't race with atomic stores.
    unsafe { word.as_ptr().read_volatile() }
}

/// Adds, and returns what it was before. Where all such operations are ordered, this one is, too.
///
/// C function: `atomic64_fetch_add()`, in the variant that is all that x86 has.
#[cfg(CONFIG_X86_64)]
#[inline(always)]
fn xadd(word: &Atomic<u64>, mut value: u64) -> u64 {
    // SAFETY: The pointer is valid and aligned, and the instruction is atomic. It is taken for one that
    // touches any memory, so the compiler moves nothing across it.
    unsafe {
        kernel::asm!(
            "lock xaddq {value}, ({word})";
            value = inout(reg) value,
            word = in(reg) word.as_ptr(),
            options(nostack),
        );
    }
    value
}

/// C function: `atomic64_fetch_add_relaxed()`.
#[inline(always)]
pub(crate) fn fetch_add_relaxed(word: &Atomic<u64>, value: u64) -> u64 {
    #[cfg(CONFIG_X86_64)]
    return xadd(word, value);
    #[cfg(not(CONFIG_X86_64))]
    return word.fetch_add(value, kernel::sync::atomic::Relaxed);
}

/// C function: `atomic64_fetch_sub_release()`.
#[inline(always)]
pub(crate) fn fetch_sub_release(word: &Atomic<u64>, value: u64) -> u64 {
    #[cfg(CONFIG_X86_64)]
    return xadd(word, value.wrapping_neg());
    #[cfg(not(CONFIG_X86_64))]
    return word.fetch_sub(value, kernel::sync::atomic::Release);
}

/// Sets a flag, and returns whether it was set.
///
/// C function: `xchg_acquire()`.
#[inline(always)]
pub(crate) fn set_acquire(flag: &Atomic<bool>) -> bool {
    #[cfg(CONFIG_X86_64)]
    {
        let mut value = 1u8;
        // SAFETY: The pointer is valid, and one is `true`; else as in `xadd`. An exchange with memory is
        // atomic by itself.
        unsafe {
            kernel::asm!(
                "xchgb {value}, ({flag})";
                value = inout(reg_byte) value,
                flag = in(reg) flag.as_ptr(),
                options(nostack),
            );
        }
        value != 0
    }
    #[cfg(not(CONFIG_X86_64))]
    flag.xchg(true, kernel::sync::atomic::Acquire)
}

/// Clears a flag.
///
/// C macro: `smp_store_release()`.
#[inline(always)]
pub(crate) fn clear_release(flag: &Atomic<bool>) {
    #[cfg(CONFIG_X86_64)]
    {
        // All that x86 needs for it: what comes before stays before.
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::Release);
        // SAFETY: The pointer is valid. A volatile write of a byte is a relaxed atomic store.
        unsafe { flag.as_ptr().write_volatile(false) };
    }
    #[cfg(not(CONFIG_X86_64))]
    flag.store(false, kernel::sync::atomic::Release);
}

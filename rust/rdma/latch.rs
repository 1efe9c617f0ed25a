// SPDX-License-Identifier: GPL-2.0

//! A gate that opens once.
//!
//! C header: [`include/linux/completion.h`](srctree/include/linux/completion.h)

use crate::context::MayWait;
use kernel::{
    bindings,
    prelude::*,
    time::{
        msecs_to_jiffies,
        Msecs, //
    },
    types::Opaque, //
};

/// A `struct completion` that is initialized.
#[pin_data]
struct Waitable {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: `struct completion` is made to be used from several threads.
unsafe impl Send for Waitable {}
// SAFETY: As above.
unsafe impl Sync for Waitable {}

impl Waitable {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::completion| {
                // SAFETY: `slot` is valid for writes and stays where it is.
                unsafe { bindings::init_completion(slot) };
            }),
        })
    }

    /// Waits in a context that may sleep.
    fn wait(&self, limit: Msecs) -> bool {
        // SAFETY: Initialized in `new`.
        let left = unsafe {
            bindings::wait_for_completion_timeout(self.inner.get(), msecs_to_jiffies(limit))
        };
        left != 0
    }
}

/// A gate that is closed at first, and open for good once somebody opened it.
///
/// It may be opened from any context, a completion handler among them. Waiting takes a [`MayWait`],
/// which no completion handler has: a handler that waits for another completion of its own queue
/// would wait for ever.
///
/// Unlike [`kernel::sync::Completion`] it can be waited for with a limit. C type: `struct completion`.
#[pin_data]
pub struct Latch {
    #[pin]
    gate: Waitable,
}

impl Latch {
    /// Makes a closed latch.
    ///
    /// C function: `init_completion()`.
    pub fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            gate <- Waitable::new(),
        })
    }

    /// Opens the latch and wakes all who wait. May be called from any context, more than once.
    ///
    /// C function: `complete_all()`.
    pub fn open(&self) {
        // SAFETY: Initialized in `new`.
        unsafe { bindings::complete_all(self.gate.inner.get()) };
    }

    /// Waits for the latch to open, for `limit` milliseconds at most. Says whether it is open. Sleeps;
    /// where that is not possible it doesn't wait, logs that, and returns false.
    ///
    /// C function: `wait_for_completion_timeout()`.
    pub fn wait(&self, limit: Msecs, may_wait: MayWait<'_>) -> bool {
        if may_wait.may_sleep().check("Latch::wait").is_err() {
            return false;
        }
        self.wait_unchecked(limit)
    }

    /// As [`Self::wait`], for a caller inside this crate that is known to be able to sleep.
    pub(crate) fn wait_unchecked(&self, limit: Msecs) -> bool {
        self.gate.wait(limit)
    }
}

/// Tickets that are given out and taken, each once.
#[pin_data]
pub(crate) struct Tickets {
    #[pin]
    counter: Waitable,
}

impl Tickets {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            counter <- Waitable::new(),
        })
    }

    /// Gives a ticket. May be called from any context.
    ///
    /// C function: `complete()`.
    pub(crate) fn give(&self) {
        // SAFETY: Initialized in `new`.
        unsafe { bindings::complete(self.counter.inner.get()) };
    }

    /// Waits for a ticket, for `limit` milliseconds at most. Says whether there was one.
    pub(crate) fn take(&self, limit: Msecs, may_wait: MayWait<'_>) -> bool {
        may_wait.may_sleep().check("Tickets::take").is_ok() && self.counter.wait(limit)
    }
}

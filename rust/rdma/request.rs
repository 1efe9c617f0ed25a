// SPDX-License-Identifier: GPL-2.0

//! Work requests: what is posted to a queue pair.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cqe`)

use core::ptr::NonNull;
use kernel::{
    fmt,
    prelude::*,
    sync::Arc, //
};
use rdma_bindings as bindings;

use crate::{
    buffer::{
        DmaBuffer,
        DIRECTION, //
    },
    device::Device,
    flight::{
        Done,
        Entry,
        Header,
        Roll,
        Way, //
    }, //
};

/// A buffer, and what the owner keeps with it, ready to be posted as a send or as a receive.
///
/// Posting takes the request; its completion gives it back, so that it can be posted again without
/// an allocation. Nobody can reach the buffer or the tag meanwhile:
///
/// ```compile_fail,E0382
/// use rdma::{qp::{Handler, QueuePair}, request::WorkRequest};
/// fn f<'bound, H: Handler<'bound>>(
///     qp: &QueuePair<'bound, H>,
///     request: WorkRequest<'bound, H::Tag>,
/// ) {
///     let _ = qp.post_recv(request);
///     let _ = request.buffer();
/// }
/// ```
///
/// Only memory that is mapped for the device can be in it, not any address:
///
/// ```compile_fail,E0308
/// # use kernel::prelude::*;
/// use rdma::request::WorkRequest;
/// fn f(address: u64) -> Result<WorkRequest<'static, ()>> {
///     WorkRequest::new(address, (), GFP_KERNEL)
/// }
/// ```
pub struct WorkRequest<'bound, T> {
    inner: KBox<Inner<'bound, T>>,
}

/// What is in flight. It stays where it is meanwhile, and begins with what it is found by.
///
/// All that is needed on its way is here, in one cache line if the tag has 16 bytes.
///
/// # Invariants
///
/// - `data` and `addr` are where the buffer is for the CPU, and for the device; `header.len` is not more than
///   it has.
/// - While it is in flight as the last of a chain, `header.nth` others are before it: three of them in
///   `rest.before`, the next three in that of the third, and so on. They are in flight as well until one of them
///   completes by itself.
#[repr(C, align(64))]
pub(crate) struct Inner<'bound, T> {
    pub(crate) header: Header,
    data: NonNull<u8>,
    addr: u64,
    pub(crate) rest: KBox<Rest<'bound, T>>,
    tag: T,
}

const _: () = assert!(size_of::<Inner<'static, [u64; 2]>>() == 64);

/// What isn't needed on the way of a request.
pub(crate) struct Rest<'bound, T> {
    buffer: DmaBuffer<'bound>,
    entry: Entry,
    /// Of a chain that was posted as one. Not of each: that would be a cache line more for each.
    pub(crate) before: [*mut Inner<'bound, T>; BEFORE],
}

/// How many of those before it a request in a chain may lead to.
pub(crate) const BEFORE: usize = 3;

// SAFETY: `header` and `entry` are only used by who has the request, or the lock of the roll that it is on,
// `before` by who has the chain, and `data` by who has the buffer, which is `Send`.
unsafe impl<T: Send> Send for Inner<'_, T> {}
// SAFETY: As above: a shared reference only leads to the buffer and the tag.
unsafe impl<T: Sync> Sync for Inner<'_, T> {}

impl<T> Inner<'_, T> {
    /// Notes that the request is about to be posted to the queue pair `qp`, whose roll is `roll`, and what is
    /// to be done when it is complete.
    ///
    /// # Safety
    ///
    /// The caller has the request, which stays where it is until its entry leaves the roll.
    #[inline]
    pub(crate) unsafe fn take_off(
        &mut self,
        qp: *const c_void,
        roll: &Arc<Roll>,
        way: Way,
        done: Done,
    ) {
        if !self.header.is_listed(qp, way) {
            // SAFETY: By the function's requirements.
            unsafe { self.header.list(&self.rest.entry, qp, roll, way, done) };
        }
        self.header.take_off();
    }
}

impl<'bound, T> WorkRequest<'bound, T> {
    /// Makes a request. May sleep, as `flags` say.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn new(mut buffer: DmaBuffer<'bound>, tag: T, flags: kernel::alloc::Flags) -> Result<Self> {
        let len = u32::try_from(buffer.len())?;
        let data = NonNull::from(&mut *buffer).cast();
        let addr = buffer.dma_addr();
        let rest = KBox::new(
            Rest {
                buffer,
                entry: Entry::new(),
                before: [core::ptr::null_mut(); BEFORE],
            },
            flags,
        )?;
        // INVARIANT: As the buffer has them. Its memory is of its own, and doesn't move with it.
        let inner = Inner {
            header: Header::new(len),
            data,
            addr,
            rest,
            tag,
        };
        Ok(Self {
            inner: KBox::new(inner, flags)?,
        })
    }

    /// The buffer, all of it.
    #[inline]
    pub fn buffer(&self) -> &DmaBuffer<'bound> {
        &self.inner.rest.buffer
    }

    /// The bytes that are sent, or may be received: the first [`Self::len`] of the buffer.
    #[inline]
    pub fn data(&self) -> &[u8] {
        // SAFETY: By the type invariant of `Inner`. Nobody but the request has the buffer.
        unsafe { core::slice::from_raw_parts(self.inner.data.as_ptr(), self.len() as usize) }
    }

    /// As the above, for reading and writing.
    #[inline]
    pub fn data_mut(&mut self) -> &mut [u8] {
        // SAFETY: As above.
        unsafe { core::slice::from_raw_parts_mut(self.inner.data.as_ptr(), self.len() as usize) }
    }

    /// What the owner keeps with the request.
    #[inline]
    pub fn tag(&self) -> &T {
        &self.inner.tag
    }

    /// What the owner keeps with the request.
    #[inline]
    pub fn tag_mut(&mut self) -> &mut T {
        &mut self.inner.tag
    }

    /// How many bytes are sent, or may be received: all of the buffer, unless [`Self::set_len`] said
    /// otherwise.
    #[inline]
    pub fn len(&self) -> u32 {
        self.inner.header.len
    }

    /// Whether there is nothing to send.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.inner.header.len == 0
    }

    /// Sets how many bytes, from the start of the buffer, are sent or may be received.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the buffer is shorter.
    pub fn set_len(&mut self, len: u32) -> Result {
        let buffer = self.buffer();
        if u32::try_from(buffer.len()).is_ok_and(|max| len <= max) {
            // INVARIANT: Not more than the buffer has.
            self.inner.header.len = len;
            return Ok(());
        }
        log_refusal!(
            "{}: len={} is out of range 0..={}\n",
            buffer.device().name(),
            len,
            buffer.len()
        );
        Err(EINVAL)
    }

    /// Gives up the request for its parts.
    pub fn into_parts(self) -> (DmaBuffer<'bound>, T) {
        // It moves now.
        self.inner.rest.entry.leave();
        let inner = KBox::into_inner(self.inner);
        (KBox::into_inner(inner.rest).buffer, inner.tag)
    }

    /// Where the device has the bytes.
    #[inline]
    pub(crate) fn dma_addr(&self) -> u64 {
        self.inner.addr
    }

    /// Gives the bytes to the device, which [needs that](Device::needs_sync).
    pub(crate) fn sync_for_device(&self, dev: &Device<'bound>) {
        // SAFETY: By the type invariant they are mapped, for the one device whose window this is.
        unsafe {
            bindings::ib_dma_sync_single_for_device(
                dev.as_raw(),
                self.inner.addr,
                self.len() as usize,
                DIRECTION,
            )
        };
    }

    /// Takes the bytes back from the device, as above.
    pub(crate) fn sync_for_cpu(&self, dev: &Device<'bound>) {
        // SAFETY: As above.
        unsafe {
            bindings::ib_dma_sync_single_for_cpu(
                dev.as_raw(),
                self.inner.addr,
                self.len() as usize,
                DIRECTION,
            )
        };
    }

    /// Notes that the request is the `nth` of a chain that is posted as one.
    #[inline]
    pub(crate) fn set_nth(&mut self, nth: u8) {
        self.inner.header.nth = nth;
    }

    /// Links the request to those before it in a chain.
    #[inline]
    pub(crate) fn link(&mut self, before: [*mut Inner<'bound, T>; BEFORE]) {
        self.inner.rest.before = before;
    }

    /// Notes that it is back.
    #[inline]
    pub(crate) fn land(&mut self) {
        self.inner.header.land();
    }

    /// Turns the request into what is in flight.
    #[inline]
    pub(crate) fn into_raw(self) -> NonNull<Inner<'bound, T>> {
        let inner = KBox::into_raw(self.inner);
        // SAFETY: A box is never null.
        unsafe { NonNull::new_unchecked(inner) }
    }

    /// Turns what was in flight into the request again.
    ///
    /// # Safety
    ///
    /// `inner` comes from [`Self::into_raw`], and neither the device nor anybody else uses it.
    #[inline]
    pub(crate) unsafe fn from_raw(inner: NonNull<Inner<'bound, T>>) -> Self {
        Self {
            // SAFETY: By the function's requirements.
            inner: unsafe { KBox::from_raw(inner.as_ptr()) },
        }
    }
}

/// A request that was not posted.
pub struct PostError<'bound, T> {
    /// Why.
    pub error: Error,
    /// The request. It is missing in one case only: the driver reported an error and didn't say
    /// whether it had taken the request. If it had, the request comes back by its completion.
    pub request: Option<WorkRequest<'bound, T>>,
}

impl<'bound, T> PostError<'bound, T> {
    pub(crate) fn new(error: Error, request: WorkRequest<'bound, T>) -> Self {
        Self {
            error,
            request: Some(request),
        }
    }
}

impl<T> From<PostError<'_, T>> for Error {
    fn from(e: PostError<'_, T>) -> Self {
        e.error
    }
}

impl<T> fmt::Debug for PostError<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostError")
            .field("error", &self.error)
            .field("returned", &self.request.is_some())
            .finish()
    }
}

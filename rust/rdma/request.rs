// SPDX-License-Identifier: GPL-2.0

//! Work requests: what is posted to a queue pair.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cqe`)

use core::{
    mem::offset_of,
    ptr::NonNull, //
};
use kernel::{
    fmt,
    prelude::*, //
};

use crate::{
    buffer::DmaBuffer,
    flight::{
        Entry,
        Header, //
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
/// What is needed on its way comes first: with a tag of 16 bytes, just one cache line of it.
///
/// # Invariants
///
/// While it is in flight as the last of a chain, `before` leads to the others, `header.nth` of them, which are
/// in flight as well until one of them completes by itself.
#[repr(C, align(64))]
pub(crate) struct Inner<'bound, T> {
    pub(crate) header: Header,
    tag: T,
    buffer: DmaBuffer<'bound>,
    /// Of a chain that was posted as one: the request before it.
    pub(crate) before: *mut Self,
    pub(crate) entry: Entry,
}

const _: () = {
    type Usual = Inner<'static, [u64; 2]>;
    assert!(offset_of!(Usual, buffer.device) <= align_of::<Usual>());
    assert!(size_of::<Usual>() == 2 * align_of::<Usual>());
};

// SAFETY: `header` and `entry` are only used by who has the request, or the lock of the roll that it is on,
// and `before` by who has the chain.
unsafe impl<T: Send> Send for Inner<'_, T> {}
// SAFETY: As above: a shared reference only leads to the buffer and the tag.
unsafe impl<T: Sync> Sync for Inner<'_, T> {}

impl<'bound, T> WorkRequest<'bound, T> {
    /// Makes a request. May sleep, as `flags` say.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn new(buffer: DmaBuffer<'bound>, tag: T, flags: kernel::alloc::Flags) -> Result<Self> {
        let len = u32::try_from(buffer.len())?;
        Ok(Self {
            inner: KBox::new(
                Inner {
                    header: Header::new(len),
                    tag,
                    buffer,
                    before: core::ptr::null_mut(),
                    entry: Entry::new(),
                },
                flags,
            )?,
        })
    }

    /// The buffer.
    #[inline]
    pub fn buffer(&self) -> &DmaBuffer<'bound> {
        &self.inner.buffer
    }

    /// The bytes of the buffer, for reading and writing.
    #[inline]
    pub fn data_mut(&mut self) -> &mut [u8] {
        &mut self.inner.buffer
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
        if u32::try_from(self.inner.buffer.len()).is_ok_and(|max| len <= max) {
            self.inner.header.len = len;
            return Ok(());
        }
        let device = self.inner.buffer.device();
        let max = self.inner.buffer.len();
        log_refusal!(
            "{}: len={} is out of range 0..={}\n",
            device.name(),
            len,
            max
        );
        Err(EINVAL)
    }

    /// Gives up the request for its parts.
    pub fn into_parts(self) -> (DmaBuffer<'bound>, T) {
        // It moves now.
        self.inner.entry.leave();
        let inner = KBox::into_inner(self.inner);
        (inner.buffer, inner.tag)
    }

    /// Links the request, as the `nth` of a chain that is posted as one, to the one before it.
    #[inline]
    pub(crate) fn link(&mut self, nth: u8, before: *mut Inner<'bound, T>) {
        self.inner.header.nth = nth;
        self.inner.before = before;
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

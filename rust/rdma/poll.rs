// SPDX-License-Identifier: GPL-2.0

//! Polling a completion queue, without handlers.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`ib_poll_cq()`)

use core::{
    cell::Cell,
    marker::PhantomData,
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::{
    fmt,
    prelude::*, //
};
use rdma_bindings as bindings;

use crate::{
    completion::{
        Completion,
        Failure,
        Success, //
    },
    context::Direct,
    cq::{
        CompletionQueue,
        Turn, //
    },
    flight::{
        Header,
        Way, //
    },
    qp::{
        Handler,
        QueuePair, //
    },
    request::WorkRequest, //
};

/// Room for one completion.
#[repr(transparent)]
pub struct PollSlot(MaybeUninit<bindings::ib_wc>);

impl PollSlot {
    /// Makes an empty slot.
    pub const fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
}

impl Default for PollSlot {
    fn default() -> Self {
        Self::new()
    }
}

/// How many slots of so many the kernel can be told of: it counts them by an `int`.
const fn usable(slots: usize) -> c_int {
    const MAX: c_int = c_int::MAX;
    if slots < MAX as usize {
        slots as c_int
    } else {
        MAX
    }
}

const _: () = assert!(usable(0) == 0 && usable(16) == 16);
const _: () = assert!(usable(1 << 31) == c_int::MAX && usable(usize::MAX) == c_int::MAX);

impl<'bound> CompletionQueue<'bound, Direct> {
    /// Takes as many completions off the queue as there are, and as `slots` has room for. May be called
    /// from any context; never waits, and doesn't allocate.
    ///
    /// Several threads may poll one queue. One at a time takes completions off it: while somebody else
    /// does, that is until what it took is dropped, there are none.
    ///
    /// ```
    /// use kernel::prelude::*;
    /// use rdma::{context::Direct, cq::CompletionQueue, poll::PollSlot, qp::*};
    ///
    /// fn repost_receives<'bound, H: Handler<'bound, Context = Direct>>(
    ///     cq: &CompletionQueue<'bound, Direct>,
    ///     qp: &QueuePair<'bound, H>,
    /// ) -> Result {
    ///     let mut slots = [const { PollSlot::new() }; 16];
    ///     for completion in &cq.poll(&mut slots)? {
    ///         let result = completion.result();
    ///         // A completion of another queue pair is dropped here, and so gets to its handler.
    ///         let Ok(request) = completion.into_request(qp) else {
    ///             continue;
    ///         };
    ///         match result {
    ///             Ok(success) => pr_info!("{} bytes\n", success.byte_len()),
    ///             Err(failure) => pr_err!("{}\n", failure),
    ///         }
    ///         qp.post_recv(request)?;
    ///     }
    ///     Ok(())
    /// }
    /// # const __LOG_PREFIX: &[u8] = b"poll\0";
    /// ```
    ///
    /// C function: `ib_poll_cq()`.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub fn poll<'a>(&'a self, slots: &'a mut [PollSlot]) -> Result<PolledCompletions<'a, 'bound>> {
        let number = usable(slots.len());
        if number == c_int::MAX {
            log_refusal!(
                "{}: poll: of {} slots {} are used\n",
                self.device().name(),
                slots.len(),
                number
            );
        }
        let turn = self.try_turn();
        let cq = turn.as_ref().map_or(core::ptr::null_mut(), Turn::as_raw);
        let polled = match &turn {
            Some(_) if number > 0 => {
                // SAFETY: The queue is valid, and a slot is room for a completion.
                unsafe {
                    let poll = (*(*cq).device).ops.poll_cq.ok_or(EOPNOTSUPP)?;
                    poll(cq, number, slots.as_mut_ptr().cast())
                }
            }
            _ => 0,
        };
        let polled = usize::try_from(polled).map_err(|_| Error::from_errno(polled))?;
        if let (Some(turn), 1..) = (&turn, polled) {
            turn.by_hand(true);
        }
        // INVARIANT: So many were just written, and nobody else takes completions off the queue.
        Ok(PolledCompletions {
            slots: slots.get(..polled).unwrap_or(&[]),
            next: Cell::new(0),
            cq,
            turn,
            _bound: PhantomData,
        })
    }
}

/// Completions that were taken off a queue.
///
/// What is not looked at is not lost: when this is dropped it goes to the handlers of its queue pairs.
///
/// As long as it exists nobody else takes completions off the queue, the teardown of queue pairs among
/// them: that waits 20 seconds, and then keeps for ever what didn't come back.
///
/// # Invariants
///
/// - Each of `slots` holds the completion of a request, which from `next` on nobody was given.
/// - `turn` is held, and is one of `cq`, unless there are no slots.
pub struct PolledCompletions<'a, 'bound> {
    slots: &'a [PollSlot],
    next: Cell<usize>,
    cq: *mut bindings::ib_cq,
    turn: Option<Turn<'a, Direct>>,
    _bound: PhantomData<fn(&'bound ()) -> &'bound ()>,
}

impl<'a, 'bound> PolledCompletions<'a, 'bound> {
    /// How many there are that weren't looked at yet.
    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len().saturating_sub(self.next.get())
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Goes on where the last iteration stopped.
    #[inline]
    pub fn iter(&self) -> Iter<'_, 'a, 'bound> {
        Iter(self)
    }
}

impl Drop for PolledCompletions<'_, '_> {
    fn drop(&mut self) {
        for completion in self.iter() {
            drop(completion);
        }
        // The turn ends after that.
        if let Some(turn) = self.turn.take() {
            turn.by_hand(false);
        }
    }
}

impl<'p, 'a, 'bound> IntoIterator for &'p PolledCompletions<'a, 'bound> {
    type Item = WorkCompletion<'p, 'bound>;
    type IntoIter = Iter<'p, 'a, 'bound>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// An iterator over completions that were taken off a queue.
pub struct Iter<'p, 'a, 'bound>(&'p PolledCompletions<'a, 'bound>);

impl<'p, 'bound> Iterator for Iter<'p, '_, 'bound> {
    type Item = WorkCompletion<'p, 'bound>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.0.next.get();
        let slot = self.0.slots.get(next)?;
        self.0.next.set(next + 1);
        // SAFETY: By the type invariant.
        let wc = unsafe { slot.0.assume_init_ref() };
        // INVARIANT: Nobody was given it, and nobody is given it again.
        Some(WorkCompletion {
            wc,
            cq: self.0.cq,
            _bound: PhantomData,
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.len(), Some(self.0.len()))
    }
}

impl ExactSizeIterator for Iter<'_, '_, '_> {}

/// The completion of one request.
///
/// [`Self::into_request`] hands back the request. If it is dropped instead, it goes to the handler of its
/// queue pair.
///
/// # Invariants
///
/// `wc` is the completion of a request that is in flight, and nobody else has it. It comes from `cq`, which
/// nobody else takes completions off meanwhile.
pub struct WorkCompletion<'p, 'bound> {
    wc: &'p bindings::ib_wc,
    cq: *mut bindings::ib_cq,
    _bound: PhantomData<fn(&'bound ()) -> &'bound ()>,
}

impl<'bound> WorkCompletion<'_, 'bound> {
    fn header(&self) -> NonNull<Header> {
        // SAFETY: `wr_cqe` is what was posted, which is never null, and is the start of a header.
        unsafe { NonNull::new_unchecked(self.wc.__bindgen_anon_1.wr_cqe.cast()) }
    }

    /// As what the request was posted.
    #[inline]
    fn way(&self) -> Way {
        // SAFETY: By the type invariant the request is in flight, so that its queue pair exists. Who sweeps a
        // roll takes completions off the queue meanwhile, as nobody else does now.
        unsafe { self.header().as_ref().way() }
    }

    /// Success, or why not.
    #[inline]
    pub fn result(&self) -> Result<Success, Failure> {
        Completion::new(self.wc).result()
    }

    /// Whether the request was a receive.
    pub fn is_recv(&self) -> bool {
        self.way() == Way::Recv
    }

    /// Whether the request was posted to `qp`.
    #[inline]
    pub fn is_of<H: Handler<'bound>>(&self, qp: &QueuePair<'bound, H>) -> bool {
        // SAFETY: By the type invariant the request is there, and nobody changes it.
        core::ptr::eq(unsafe { self.header().as_ref() }.qp, qp.identity())
    }

    /// Hands back the request, if it was posted to `qp`. There is room for another in its place.
    ///
    /// # Errors
    ///
    /// The completion, if the request was posted to another queue pair, or is the last of those that were
    /// posted by [`QueuePair::post_sends_as_one`]: these go to the handler, all together.
    #[inline]
    pub fn into_request<H: Handler<'bound>>(
        self,
        qp: &QueuePair<'bound, H>,
    ) -> Result<WorkRequest<'bound, H::Tag>, Self> {
        let way = self.way();
        if !self.is_of(qp) || way == Way::Last {
            return Err(self);
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant, and it was posted to this queue pair. One that isn't the last of a
        // chain speaks for no other.
        Ok(unsafe { qp.take_back(way, this.wc) })
    }
}

impl Drop for WorkCompletion<'_, '_> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant: this is the one completion of the request, which has what to
        // do then in its header.
        unsafe {
            if let Some(done) = self.header().as_ref().cqe.done {
                done(self.cq, core::ptr::from_ref(self.wc).cast_mut());
            }
        }
    }
}

impl fmt::Debug for WorkCompletion<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkCompletion")
            .field("recv", &self.is_recv())
            .field("result", &self.result())
            .finish()
    }
}

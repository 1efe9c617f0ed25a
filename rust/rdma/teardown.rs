// SPDX-License-Identifier: GPL-2.0

//! How everything that a client makes on a device is taken down again.
//!
//! A [`Register`] knows every live object of one client on one device. A handle that is dropped
//! only puts its object on a list, without a lock, so that it can be dropped anywhere: in a
//! completion handler, under a spinlock, with interrupts disabled. A work item, or the client's
//! `remove`, whichever comes first, takes the objects down.
//!
//! Handles are safe to forget, and reference cycles keep them alive. Since their lifetime ends with
//! the window from `add` to `remove`, nobody can use them any more when `remove` gets to them: it
//! takes down what they stand for in the kernel, says so in the log, and leaves their memory alone.

use core::{
    cell::UnsafeCell,
    marker::{
        PhantomData,
        PhantomPinned, //
    },
    ops::Deref,
    ptr::NonNull,
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        Mutex, //
    },
    types::Opaque, //
};
use rdma_bindings as bindings;

use crate::device::Device;

/// The kinds of objects, in the order in which those that were leaked have to go.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Directory,
    Work,
    EventHandler,
    Connection,
    QueuePair,
    Lease,
    CompletionQueue,
    ProtectionDomain,
}

impl Kind {
    const IN_ORDER: [Kind; 8] = [
        Kind::Directory,
        Kind::Work,
        Kind::EventHandler,
        Kind::Connection,
        Kind::QueuePair,
        Kind::Lease,
        Kind::CompletionQueue,
        Kind::ProtectionDomain,
    ];

    fn name(self) -> &'static str {
        match self {
            Kind::Directory => "debugfs directory",
            Kind::Work => "work item",
            Kind::EventHandler => "event handler",
            Kind::Connection => "connection",
            Kind::QueuePair => "queue pair",
            Kind::Lease => "lease of a pooled queue",
            Kind::CompletionQueue => "completion queue",
            Kind::ProtectionDomain => "protection domain",
        }
    }
}

/// What became of an object that was taken down.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Nothing refers to its memory any more.
    Free,
    /// The kernel could not let go of it: its memory has to stay for ever.
    Keep,
}

/// An object that a [`Register`] takes down.
///
/// # Safety
///
/// - [`Self::node`] returns a node that is part of the object, and always the same.
/// - Once [`Self::destroy`] has returned [`Fate::Free`] nothing refers to the object's memory.
pub(crate) unsafe trait Resource {
    /// What the object is.
    const KIND: Kind;

    /// Whether taking it down waits for nothing, so that a drop may do so where sleeping is fine.
    const IMMEDIATE: bool = false;

    /// The node through which the register knows the object.
    fn node(&self) -> &Node;

    /// Starts what takes time, without waiting for it. May sleep.
    fn begin(&self) {}

    /// Gives back what the object stands for in the kernel. Sleeps, and waits.
    ///
    /// # Safety
    ///
    /// Called once, after [`Self::begin`], when no handle can be used any more.
    unsafe fn destroy(&self) -> Fate;
}

/// The part of an object that its register looks at.
pub(crate) struct Node {
    kind: Kind,
    begin: unsafe fn(NonNull<c_void>),
    destroy: unsafe fn(NonNull<c_void>) -> Fate,
    free: unsafe fn(NonNull<c_void>),
    /// The next on the stack of the discarded; belongs to who puts the node there or takes it off.
    next: UnsafeCell<*mut Node>,
    /// Only touched with the register's lock held.
    state: UnsafeCell<State>,
    _pin: PhantomPinned,
}

/// Who takes an object down.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Who dropped it.
    Owner,
    /// `close`, since it was leaked.
    Close,
}

struct State {
    /// The start of the object, and with it the right to all of its memory.
    object: NonNull<c_void>,
    /// Where the object's entry is in the list of the living.
    index: usize,
    /// Who takes the object down, or has.
    claimed: Option<Claim>,
    /// Whether the handle is gone, so that nothing in Rust refers to the object.
    dropped: bool,
    /// How taking it down ended.
    fate: Option<Fate>,
}

// SAFETY: `next` belongs to who has the node on a stack, `state` to who holds the register's lock; the
// rest doesn't change.
unsafe impl Send for Node {}
// SAFETY: As above.
unsafe impl Sync for Node {}

impl Node {
    /// Makes the node of an object of type `R`.
    pub(crate) fn new<R: Resource>() -> Self {
        /// # Safety
        ///
        /// `object` is a live `R`.
        unsafe fn begin<R: Resource>(object: NonNull<c_void>) {
            // SAFETY: By the function's requirements.
            unsafe { object.cast::<R>().as_ref() }.begin();
        }

        /// # Safety
        ///
        /// `object` is a live `R`, and those of `Resource::destroy`.
        unsafe fn destroy<R: Resource>(object: NonNull<c_void>) -> Fate {
            // SAFETY: By the function's requirements.
            unsafe { object.cast::<R>().as_ref().destroy() }
        }

        /// # Safety
        ///
        /// `object` came from `KBox::<R>::into_raw`, and nothing refers to it.
        unsafe fn free<R: Resource>(object: NonNull<c_void>) {
            // SAFETY: By the function's requirements.
            drop(unsafe { KBox::from_raw(object.cast::<R>().as_ptr()) });
        }

        Self {
            kind: R::KIND,
            begin: begin::<R>,
            destroy: destroy::<R>,
            free: free::<R>,
            next: UnsafeCell::new(core::ptr::null_mut()),
            state: UnsafeCell::new(State {
                object: NonNull::dangling(),
                index: 0,
                claimed: None,
                dropped: false,
                fate: None,
            }),
            _pin: PhantomPinned,
        }
    }
}

/// A node that the register holds.
///
/// # Invariants
///
/// It points to the node of an object that is still allocated, and whose `State::object` is set.
#[derive(Clone, Copy)]
struct Entry(NonNull<Node>);

// SAFETY: The node's parts are each touched by one thread at a time, see `Node`, and the objects may
// be used from any thread.
unsafe impl Send for Entry {}

impl Entry {
    fn node(&self) -> &Node {
        // SAFETY: By the type invariant.
        unsafe { self.0.as_ref() }
    }
}

/// What the register's lock protects.
struct Living {
    entries: KVec<Entry>,
    /// Set for the rest of its time when the window ends: entries then stay where they are.
    closing: bool,
}

impl Living {
    /// The state of a node of this register.
    fn state(&mut self, entry: Entry) -> &mut State {
        // SAFETY: `self` is only reached with the lock held, and the borrow of `self` sees to it that
        // there is one reference at a time.
        unsafe { &mut *entry.0.as_ref().state.get() }
    }

    /// Marks the object as being taken down by the caller, unless somebody else does.
    fn claim(&mut self, entry: Entry, claim: Claim) -> Option<NonNull<c_void>> {
        let state = self.state(entry);
        if state.claimed.is_some() {
            return None;
        }
        state.claimed = Some(claim);
        Some(state.object)
    }

    /// Finds an object that was taken down, whose handle is gone, and that is still there since the
    /// register is closing.
    fn find_done(&mut self) -> Option<Entry> {
        let mut index = 0;
        while let Some(&entry) = self.entries.get(index) {
            let state = self.state(entry);
            if state.dropped && state.fate == Some(Fate::Free) {
                return Some(entry);
            }
            index += 1;
        }
        None
    }

    /// Takes the entry off the list.
    fn strike(&mut self, entry: Entry) {
        let index = self.state(entry).index;
        let Some(last) = self.entries.pop() else {
            return;
        };
        if let Some(hole) = self.entries.get_mut(index) {
            *hole = last;
            self.state(last).index = index;
        }
    }
}

/// All that one client made on one device and that still lives.
#[pin_data]
pub(crate) struct Register {
    #[pin]
    living: Mutex<Living>,
    /// Whether there was anything that the kernel could not let go of.
    kept: Atomic<bool>,
    /// Nodes whose handles were dropped.
    discarded: Stack,
    /// Those of them whose objects are being taken down, but have yet to be waited for.
    begun: Stack,
    /// Begins with what was discarded. It never waits, so that one that takes its time holds up none.
    #[pin]
    beginner: Opaque<kernel::bindings::work_struct>,
    /// Ends what was begun, and waits for it.
    #[pin]
    finisher: Opaque<kernel::bindings::work_struct>,
}

/// A stack of nodes, which anybody may put one on, in any context.
///
/// # Invariants
///
/// The nodes on it are enrolled, and their links belong to the stack.
struct Stack(Atomic<*mut Node>);

impl Stack {
    fn new() -> Self {
        Self(Atomic::new(core::ptr::null_mut()))
    }

    /// Puts a node on the stack. Says whether it is the first.
    ///
    /// # Safety
    ///
    /// The node is enrolled, and on no stack.
    unsafe fn push(&self, entry: Entry) -> bool {
        let mut head = self.0.load(Relaxed);
        loop {
            // SAFETY: The link is ours until the node is on the stack.
            unsafe { *entry.node().next.get() = head };
            // Release: who takes the stack sees all that was done to the object.
            match self.0.cmpxchg(head, entry.0.as_ptr(), Release) {
                Ok(_) => return head.is_null(),
                Err(current) => head = current,
            }
        }
    }

    /// Takes all nodes off the stack and calls `f` for each, which may free it. Says whether there
    /// was any.
    fn take(&self, mut f: impl FnMut(Entry)) -> bool {
        // Acquire: pairs with the release in `push`.
        let first = self.0.xchg(core::ptr::null_mut(), Acquire);
        let mut next = first;
        while let Some(node) = NonNull::new(next) {
            // INVARIANT: By the type invariant the nodes are enrolled.
            let entry = Entry(node);
            // SAFETY: By the type invariant the link was the stack's, and is ours now.
            next = unsafe { *entry.node().next.get() };
            f(entry);
        }
        !first.is_null()
    }
}

// SAFETY: The nodes on the stack belong to objects that may be used from any thread.
unsafe impl Send for Register {}
// SAFETY: As above; the stack is lock-free, the rest is behind the lock.
unsafe impl Sync for Register {}

impl Register {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            living <- new_mutex!(
                Living {
                    entries: KVec::new(),
                    closing: false,
                },
                "rdma::Register::living"
            ),
            kept: Atomic::new(false),
            discarded: Stack::new(),
            begun: Stack::new(),
            beginner <- Self::new_work(Self::begin_work),
            finisher <- Self::new_work(Self::finish_work),
        })
    }

    /// Not the lock class of a `ScopedWork`: the finisher waits for those, and lockdep would take that for
    /// waiting for itself.
    fn new_work(
        run: unsafe extern "C" fn(*mut kernel::bindings::work_struct),
    ) -> impl PinInit<Opaque<kernel::bindings::work_struct>> {
        Opaque::ffi_init(move |slot| {
            // SAFETY: `slot` is valid for writes and stays where it is; the lock class is static.
            unsafe {
                kernel::bindings::init_work_with_key(
                    slot,
                    Some(run),
                    false,
                    c"rdma::Register".as_char_ptr(),
                    kernel::static_lock_class!().as_ptr(),
                )
            }
        })
    }

    /// # Safety
    ///
    /// `work` is the field `beginner` of a live register.
    unsafe extern "C" fn begin_work(work: *mut kernel::bindings::work_struct) {
        // SAFETY: By the function's requirements. `close` waits for the work before the register
        // goes.
        let register = unsafe { &*kernel::container_of!(Opaque::cast_from(work), Self, beginner) };
        if register.begin() {
            // SAFETY: As above.
            unsafe { bindings::rdma_queue_work(register.finisher.get()) };
        }
    }

    /// # Safety
    ///
    /// `work` is the field `finisher` of a live register.
    unsafe extern "C" fn finish_work(work: *mut kernel::bindings::work_struct) {
        // SAFETY: As in `begin_work`.
        let register = unsafe { &*kernel::container_of!(Opaque::cast_from(work), Self, finisher) };
        register.finish_begun();
    }

    /// Hands an object over to the register of `device`.
    ///
    /// May sleep. If it fails, the object is taken down at once.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if memory for the entry is short. `ENODEV` if the window is ending: only what was leaked
    /// still runs then, and could go on making objects of kinds that have been taken down already.
    pub(crate) fn enroll<'bound, R: Resource>(
        device: &'bound Device<'bound>,
        object: Pin<KBox<R>>,
    ) -> Result<Owned<'bound, R>> {
        // SAFETY: The object is not moved: it stays in its box until `free`.
        let object = KBox::into_raw(unsafe { Pin::into_inner_unchecked(object) });
        // SAFETY: A box is never null.
        let object = unsafe { NonNull::new_unchecked(object) };
        // SAFETY: It comes from a box.
        let entry = Entry(NonNull::from(unsafe { object.as_ref() }.node()));

        let mut living = device.register().living.lock();
        let index = living.entries.len();
        let state = living.state(entry);
        // INVARIANT: The object is freed only after its entry was struck off the list.
        state.object = object.cast();
        state.index = index;
        let enrolled = if living.closing {
            Err(ENODEV)
        } else {
            living.entries.push(entry, GFP_KERNEL).map_err(Error::from)
        };
        drop(living);

        if let Err(e) = enrolled {
            let node = entry.node();
            // SAFETY: The object is live, and nobody else knows it.
            unsafe {
                (node.begin)(object.cast());
                match (node.destroy)(object.cast()) {
                    Fate::Free => (node.free)(object.cast()),
                    Fate::Keep => device.register().kept.store(true, Relaxed),
                }
            }
            return Err(e);
        }

        // INVARIANT: The object is enrolled.
        Ok(Owned {
            object,
            device,
            _owns: PhantomData,
        })
    }

    /// Sees to it that an object is taken down. May be called from any context.
    ///
    /// # Safety
    ///
    /// The node is enrolled here, was not discarded before, and its handle is not used any more.
    unsafe fn discard(&self, entry: Entry) {
        // SAFETY: By the function's requirements.
        let first = unsafe { self.discarded.push(entry) };
        // Otherwise who put the first one there has seen to it.
        if first {
            // SAFETY: The work item is initialized; `close` ends it before the register goes.
            unsafe { bindings::rdma_queue_work(self.beginner.get()) };
        }
    }

    /// Begins to take down what was discarded. Sleeps, but waits for nothing. Says whether there was
    /// any.
    fn begin(&self) -> bool {
        self.discarded.take(|entry| {
            let mut living = self.living.lock();
            living.state(entry).dropped = true;
            let object = living.claim(entry, Claim::Owner);
            drop(living);
            if let Some(object) = object {
                // SAFETY: The object is enrolled, so it is live.
                unsafe { (entry.node().begin)(object) };
            }
            // SAFETY: It was just taken off the other stack.
            unsafe { self.begun.push(entry) };
        })
    }

    /// Ends what was begun. Sleeps, and waits. Says whether there was any.
    fn finish_begun(&self) -> bool {
        // SAFETY: They were claimed by `begin`. Where they weren't, `close` has finished them.
        self.begun.take(|entry| unsafe { self.finish(entry) })
    }

    /// Takes down what was discarded, and what is discarded by doing so. Sleeps, and waits.
    fn reap(&self) {
        // All begin before the first is waited for: hundreds of queue pairs flush side by side.
        while self.begin() | self.finish_begun() {}
    }

    /// Destroys the object, if that wasn't done, and frees it, unless the window is closing.
    ///
    /// # Safety
    ///
    /// The object is enrolled here, the caller claimed it and called `begin`; or it is finished.
    unsafe fn finish(&self, entry: Entry) {
        let mut living = self.living.lock();
        let State { object, fate, .. } = *living.state(entry);
        drop(living);

        let fate = match fate {
            Some(fate) => fate,
            // SAFETY: By the function's requirements it is live, and this is done once.
            None => unsafe { (entry.node().destroy)(object) },
        };
        // SAFETY: By the function's requirements, and destroying it has ended, above or before.
        unsafe { self.finished(entry, object, fate) };
    }

    /// Frees an object that was destroyed, unless the window is closing or there still is a handle.
    ///
    /// # Safety
    ///
    /// The object is enrolled here, the caller claimed it or it is finished, and destroying it ended in
    /// `fate`.
    unsafe fn finished(&self, entry: Entry, object: NonNull<c_void>, fate: Fate) {
        if fate == Fate::Keep {
            self.kept.store(true, Relaxed);
        }
        let mut living = self.living.lock();
        living.state(entry).fate = Some(fate);
        if living.closing || !living.state(entry).dropped {
            return;
        }
        living.strike(entry);
        drop(living);
        if fate == Fate::Free {
            // SAFETY: The handle is gone, and `destroy` says that the kernel doesn't refer to it.
            unsafe { (entry.node().free)(object) };
        }
    }

    /// Takes down a single object now. Sleeps, and waits.
    ///
    /// # Safety
    ///
    /// The object is enrolled here, and its handle is gone without having been discarded.
    unsafe fn take_down(&self, entry: Entry) {
        let mut living = self.living.lock();
        living.state(entry).dropped = true;
        let Some(object) = living.claim(entry, Claim::Owner) else {
            return;
        };
        drop(living);
        // SAFETY: The object is live, and was claimed here.
        unsafe {
            (entry.node().begin)(object);
            let fate = (entry.node().destroy)(object);
            self.finished(entry, object, fate);
        }
    }

    /// Takes down all there is: the end of the window. Sleeps, and waits. Says whether the kernel could
    /// let go of all of it.
    ///
    /// # Safety
    ///
    /// The client's data is gone, so that a handle which still exists was leaked. It can only be
    /// used by a work item, an event handler or a completion handler that was leaked as well.
    pub(crate) unsafe fn close(&self, device: &Device<'_>) -> bool {
        self.reap();
        // What a worker still has in hand may hold others, which are only dropped when it is freed.
        //
        // SAFETY: Initialized in `new`.
        unsafe {
            kernel::bindings::disable_work_sync(self.beginner.get());
            kernel::bindings::disable_work_sync(self.finisher.get());
        }
        self.reap();
        // From here on nobody but this function frees anything, so that entries stay valid.
        self.living.lock().closing = true;
        self.reap();

        for kind in Kind::IN_ORDER {
            // SAFETY: What is of an earlier kind was taken down, and `enroll` lets nobody make more of
            // it, so nobody can use a handle of this kind but to drop it.
            let leaked = unsafe { self.take_down_leaked(kind) };
            if leaked > 0 {
                pr_err!(
                    "{}: client={} leaked={} kind=\"{}\": taken down by remove\n",
                    device.name(),
                    device.owner(),
                    leaked,
                    kind.name()
                );
            }
        }

        loop {
            self.reap();
            let mut living = self.living.lock();
            let Some(entry) = living.find_done() else {
                break;
            };
            let object = living.state(entry).object;
            living.strike(entry);
            drop(living);
            // SAFETY: The handle is gone, and `destroy` says that the kernel doesn't refer to it.
            unsafe { (entry.node().free)(object) };
        }

        // The RDMA core frees the pooled queues next. Its softirq handler may still look at one
        // after the last completion was handled; it does so in an RCU read-side section. And no
        // handler may be inside this module's code when the module goes.
        //
        // SAFETY: The caller may sleep.
        unsafe { kernel::bindings::synchronize_rcu() };
        !self.kept.load(Relaxed)
    }

    /// Takes down all of one kind that nobody has claimed. Returns how many.
    ///
    /// # Safety
    ///
    /// The register is closing, and nobody uses a handle of this kind, but to drop it.
    unsafe fn take_down_leaked(&self, kind: Kind) -> usize {
        let mut leaked = 0;
        // All begin before the first is waited for, as in `reap`.
        self.each_living(kind, |entry| {
            let object = self.living.lock().claim(entry, Claim::Close);
            if let Some(object) = object {
                leaked += 1;
                // SAFETY: It is enrolled, so it is live.
                unsafe { (entry.node().begin)(object) };
            }
        });
        self.each_living(kind, |entry| {
            if self.living.lock().state(entry).claimed == Some(Claim::Close) {
                // SAFETY: It was claimed above.
                unsafe { self.finish(entry) };
            }
        });
        leaked
    }

    /// Calls `f` for each object of a kind. The register is closing, so that entries stay where they
    /// are.
    fn each_living(&self, kind: Kind, mut f: impl FnMut(Entry)) {
        let mut index = 0;
        loop {
            let entry = self.living.lock().entries.get(index).copied();
            let Some(entry) = entry else { return };
            if entry.node().kind == kind {
                f(entry);
            }
            index += 1;
        }
    }
}

/// The one handle to an object that a [`Register`] takes down.
///
/// Dropping it never waits and may happen in any context.
///
/// # Invariants
///
/// `object` is enrolled in the register of `device`, and was not discarded.
pub(crate) struct Owned<'bound, R: Resource> {
    object: NonNull<R>,
    device: &'bound Device<'bound>,
    _owns: PhantomData<R>,
}

// SAFETY: It owns an `R`, and the register may free it on any thread.
unsafe impl<R: Resource + Send> Send for Owned<'_, R> {}
// SAFETY: It only gives out shared references to the `R`.
unsafe impl<R: Resource + Sync> Sync for Owned<'_, R> {}

// The object is pinned, not the handle.
impl<R: Resource> Unpin for Owned<'_, R> {}

impl<'bound, R: Resource> Owned<'bound, R> {
    /// The device on which the object was made.
    pub(crate) fn device(&self) -> &'bound Device<'bound> {
        self.device
    }

    /// Takes the object down now, and waits until it is gone. Sleeps.
    pub(crate) fn take_down(self) {
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: By the type invariant; the handle is gone, and its drop does not run.
        unsafe { this.device.register().take_down(this.entry()) };
    }

    /// The kernel holds on to what the object stands for: nobody takes it down any more.
    pub(crate) fn abandon(&self) {
        let register = self.device.register();
        register.kept.store(true, Relaxed);
        let mut living = register.living.lock();
        let state = living.state(self.entry());
        state.claimed = Some(Claim::Owner);
        state.fate = Some(Fate::Keep);
    }

    fn entry(&self) -> Entry {
        // INVARIANT: By the type invariant the object is enrolled.
        Entry(NonNull::from(self.node()))
    }
}

impl<R: Resource> Deref for Owned<'_, R> {
    type Target = R;

    fn deref(&self) -> &R {
        // SAFETY: By the type invariant the object lives.
        unsafe { self.object.as_ref() }
    }
}

impl<R: Resource> Drop for Owned<'_, R> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant, and a handle is dropped once.
        unsafe {
            if R::IMMEDIATE && bindings::rdma_surely_may_sleep() {
                self.device.register().take_down(self.entry());
            } else {
                self.device.register().discard(self.entry());
            }
        }
    }
}

// SPDX-License-Identifier: GPL-2.0

//! Connections by address, made by the connection manager.
//!
//! It speaks for every transport, and is the only way to connect a queue pair of an iWARP device.
//! One side listens and accepts, the other connects:
//!
//! ```
//! # use core::net::SocketAddrV4;
//! # use kernel::{prelude::*, time::Msecs};
//! # use rdma::{cm::*, context::MayWait, device::{Device, Port}, qp::{Handler, QueuePair}};
//! fn connect<'bound, H: Handler<'bound>>(
//!     port: Port<'bound>,
//!     sender: &QueuePair<'bound, H>,
//!     receiver: &QueuePair<'bound, H>,
//!     may_wait: MayWait<'_>,
//! ) -> Result<(Connection<'bound>, Connection<'bound>)> {
//!     const LIMIT: Msecs = 5_000;
//!     let dev = port.device();
//!     let ip = port.ipv4(may_wait.may_sleep())?.ok_or(EADDRNOTAVAIL)?;
//!     // At port 0 the connection manager takes one that is free.
//!     let at = SocketAddrV4::new(ip, 0);
//!     let listener = Listener::new(dev, at, 16, may_wait.may_sleep())?;
//!     let connecting = Connecting::new(sender, listener.address()?, LIMIT, may_wait)?;
//!     let accepted = listener.accept(LIMIT, may_wait)?.accept(receiver, may_wait)?;
//!     let connected = connecting.finish(LIMIT, may_wait)?;
//!     Ok((connected, accepted.finish(LIMIT, may_wait)?))
//! }
//! ```
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h)

use core::{
    net::{
        Ipv4Addr,
        SocketAddrV4, //
    },
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
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
    time::Msecs, //
};
use rdma_bindings as bindings;

use crate::{
    context::{
        MaySleep,
        MayWait, //
    },
    device::Device,
    latch::{
        Latch,
        Tickets, //
    },
    qp::{
        Handler,
        QueuePair, //
    },
    teardown::{
        Fate,
        Kind,
        Node,
        Owned,
        Register,
        Resource, //
    }, //
};

/// One side of a connection, as the connection manager knows it.
///
/// C type: `struct rdma_cm_id`.
///
/// # Invariants
///
/// `raw` is null or valid, until `destroy`. Its context points to `self`.
#[pin_data]
struct Id {
    node: Node,
    raw: Atomic<*mut bindings::rdma_cm_id>,
    /// Opens when the other side's address is known.
    #[pin]
    address: Latch,
    /// Opens when the way to it is.
    #[pin]
    route: Latch,
    /// Opens when the other side has answered, or is connected.
    #[pin]
    answer: Latch,
    /// What went wrong, or zero.
    error: Atomic<i32>,
    disconnected: Atomic<bool>,
}

// SAFETY: The connection manager does its own locking.
unsafe impl Send for Id {}
// SAFETY: As above.
unsafe impl Sync for Id {}

// SAFETY: `node` is part of the object. After `destroy` the connection manager doesn't call `event`.
unsafe impl Resource for Id {
    const KIND: Kind = Kind::Connection;

    fn node(&self) -> &Node {
        &self.node
    }

    fn begin(&self) {
        let raw = self.raw.load(Acquire);
        // siw forgets the sends of a queue pair that is closed in an orderly way. There, `destroy`
        // ends the connection at one stroke, which gives them back.
        //
        // SAFETY: By the type invariant; the caller may sleep.
        unsafe {
            if raw.is_null() || (*raw).device.is_null() {
                return;
            }
            if !bindings::rdma_protocol_iwarp((*raw).device, (*raw).port_num) {
                // Where nothing is connected this says so, and does nothing.
                let _ = bindings::rdma_disconnect(raw);
            }
        }
    }

    unsafe fn destroy(&self) -> Fate {
        let raw = self.raw.load(Acquire);
        if !raw.is_null() {
            // SAFETY: By the type invariant. This waits for a call of `event` that is under way.
            unsafe { bindings::rdma_destroy_id(raw) };
        }
        Fate::Free
    }
}

impl Id {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            node: Node::new::<Self>(),
            raw: Atomic::new(core::ptr::null_mut()),
            address <- Latch::new(),
            route <- Latch::new(),
            answer <- Latch::new(),
            error: Atomic::new(0),
            disconnected: Atomic::new(false),
        })
    }

    /// Makes the connection manager's part of it.
    fn create(&self, dev: &Device<'_>) -> Result {
        let raw = create_id(dev, Self::event, core::ptr::from_ref(self).cast())?;
        // INVARIANT: `raw` is valid, and its context points to `self`.
        self.raw.store(raw.as_ptr(), Release);
        Ok(())
    }

    fn raw(&self) -> *mut bindings::rdma_cm_id {
        self.raw.load(Acquire)
    }

    /// # Safety
    ///
    /// `id` is valid, and its context points to a live `Self`.
    unsafe extern "C" fn event(
        id: *mut bindings::rdma_cm_id,
        event: *mut bindings::rdma_cm_event,
    ) -> c_int {
        // SAFETY: By the function's requirements.
        let (this, event) = unsafe { (&*(*id).context.cast::<Self>(), &*event) };
        match event.event {
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => this.address.open(),
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => this.route.open(),
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_RESPONSE
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED => this.answer.open(),
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE => {
                // The status is an errno.
                this.end(if event.status < 0 {
                    event.status
                } else {
                    EHOSTUNREACH.to_errno()
                });
            }
            // The status is the reason of the rejection.
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => {
                this.end(ECONNREFUSED.to_errno());
            }
            bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED
            | bindings::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => {
                this.disconnected.store(true, Release);
                this.end(ECONNRESET.to_errno());
            }
            _ => (),
        }
        0
    }

    /// Nothing more will come of it.
    fn end(&self, errno: c_int) {
        self.error.store(errno, Release);
        self.address.open();
        self.route.open();
        self.answer.open();
    }

    /// Waits for a step of the way.
    fn wait(&self, step: &Latch, limit: Msecs, may_wait: MayWait<'_>) -> Result {
        if !step.wait(limit, may_wait) {
            return Err(ETIMEDOUT);
        }
        to_result(self.error.load(Acquire))
    }
}

/// Makes a `struct rdma_cm_id` in the network namespace of the device.
fn create_id(
    dev: &Device<'_>,
    event: unsafe extern "C" fn(*mut bindings::rdma_cm_id, *mut bindings::rdma_cm_event) -> c_int,
    context: *const c_void,
) -> Result<NonNull<bindings::rdma_cm_id>> {
    // SAFETY: The device is valid, the context is for `event`, and the owner's name outlives what
    // is made.
    let raw = from_err_ptr(unsafe {
        bindings::rdma_create_kernel_id(
            dev.as_raw(),
            Some(event),
            context.cast_mut(),
            dev.owner().as_char_ptr(),
        )
    })?;
    NonNull::new(raw).ok_or(ENOMEM)
}

/// Turns an address into the C type.
fn sockaddr(address: SocketAddrV4) -> kernel::bindings::__kernel_sockaddr_storage {
    let mut storage = kernel::bindings::__kernel_sockaddr_storage::default();
    // SAFETY: The storage is large enough for every kind of address, and aligned for it.
    unsafe {
        let v4 = (&raw mut storage).cast::<kernel::bindings::sockaddr_in>();
        (*v4).sin_family = AF_INET;
        (*v4).sin_port = address.port().to_be();
        (*v4).sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
    }
    storage
}

const AF_INET: u16 = kernel::bindings::AF_INET as u16;

/// The parameters of a connection to or from a queue pair.
fn parameters<'bound, H: Handler<'bound>>(qp: &QueuePair<'bound, H>) -> bindings::rdma_conn_param {
    bindings::rdma_conn_param {
        qp_num: qp.num(),
        responder_resources: 1,
        initiator_depth: 1,
        // As often as the fields can say; 7 stands for any number of receivers not ready.
        retry_count: 7,
        rnr_retry_count: 7,
        ..Default::default()
    }
}

/// A connection. Dropping it disconnects, in any context, and never waits.
///
/// Disconnecting leaves what is posted to the queue pair where it is, until the queue pair is taken
/// down. C functions: `rdma_disconnect()`, `rdma_destroy_id()`.
pub struct Connection<'bound>(Owned<'bound, Id>);

impl Connection<'_> {
    /// Whether the other side has gone, or the device. May be called from any context.
    ///
    /// C constants: `RDMA_CM_EVENT_DISCONNECTED`, `RDMA_CM_EVENT_DEVICE_REMOVAL`.
    pub fn is_disconnected(&self) -> bool {
        self.0.disconnected.load(Acquire)
    }
}

/// A connection that the other side has yet to accept.
pub struct Connecting<'a, 'bound, H: Handler<'bound>> {
    id: Owned<'bound, Id>,
    qp: &'a QueuePair<'bound, H>,
}

impl<'a, 'bound, H: Handler<'bound>> Connecting<'a, 'bound, H> {
    /// Finds the way to `to`, and asks the one who listens there for a connection. Sleeps.
    ///
    /// Each step takes at most `limit` milliseconds, but for one: siw connects by TCP while it is asked
    /// to, and if nobody answers goes on as long as TCP does, for two minutes by default
    /// (`net.ipv4.tcp_syn_retries`). Where that is, taking down a [`Task`](crate::work::Task) waits for
    /// it too.
    ///
    /// C functions: `rdma_create_id()`, `rdma_resolve_addr()`, `rdma_resolve_route()`, `rdma_connect()`.
    ///
    /// # Errors
    ///
    /// - `EADDRNOTAVAIL`, with a line in the log, if the way leads through another device.
    /// - `ETIMEDOUT`, `EHOSTUNREACH`, and others of the connection manager.
    /// - `ENOMEM`; `EDEADLK` where sleeping is not possible.
    pub fn new(
        qp: &'a QueuePair<'bound, H>,
        to: SocketAddrV4,
        limit: Msecs,
        may_wait: MayWait<'_>,
    ) -> Result<Self> {
        may_wait.may_sleep().check("Connecting::new")?;
        let dev = qp.device();
        let id = Register::enroll(dev, KBox::pin_init(Id::new(), GFP_KERNEL)?)?;
        id.create(dev)?;

        let limit_ms = c_ulong::try_from(limit)?;
        let mut to = sockaddr(to);
        // SAFETY: The id is valid, and the address is.
        to_result(unsafe {
            bindings::rdma_resolve_addr(
                id.raw(),
                core::ptr::null_mut(),
                (&raw mut to).cast(),
                limit_ms,
            )
        })?;
        id.wait(&id.address, limit, may_wait)?;
        check_device(dev, id.raw())?;
        // SAFETY: The id is valid.
        to_result(unsafe { bindings::rdma_resolve_route(id.raw(), limit_ms) })?;
        id.wait(&id.route, limit, may_wait)?;

        let mut parameters = parameters(qp);
        // SAFETY: The id and the parameters are valid.
        to_result(unsafe { bindings::rdma_connect(id.raw(), &mut parameters) })?;
        Ok(Self { id, qp })
    }

    /// Waits for the other side to accept, for `limit` milliseconds at most, and makes the queue
    /// pair ready to send. Sleeps.
    ///
    /// C functions: `rdma_init_qp_attr()`, `ib_modify_qp()`, `rdma_accept()`.
    ///
    /// # Errors
    ///
    /// `ECONNREFUSED` if the other side did not; `ETIMEDOUT`, also where sleeping is not possible;
    /// others of the connection manager and the driver.
    pub fn finish(self, limit: Msecs, may_wait: MayWait<'_>) -> Result<Connection<'bound>> {
        self.id.wait(&self.id.answer, limit, may_wait)?;
        if !self.qp.is_iwarp() {
            self.qp.follow(self.id.raw())?;
            // SAFETY: The id is valid. Without parameters this says that we are ready.
            to_result(unsafe { accept(self.id.raw(), core::ptr::null_mut()) })?;
        }
        self.qp.open_sends();
        Ok(Connection(self.id))
    }
}

/// Whether an id belongs to `dev`, on which the queue pair is.
fn check_device(dev: &Device<'_>, id: *mut bindings::rdma_cm_id) -> Result {
    // SAFETY: The id is valid.
    let device = unsafe { (*id).device };
    if device == dev.as_raw() {
        return Ok(());
    }
    log_refusal!(
        "{}: the address is not reached through this device\n",
        dev.name()
    );
    Err(EADDRNOTAVAIL)
}

/// # Safety
///
/// `id` is valid, and `parameters` are or are null.
unsafe fn accept(
    id: *mut bindings::rdma_cm_id,
    parameters: *mut bindings::rdma_conn_param,
) -> c_int {
    // SAFETY: By the function's requirements. Accepting takes the lock that keeps events away.
    unsafe {
        bindings::rdma_lock_handler(id);
        let result = bindings::rdma_accept(id, parameters);
        bindings::rdma_unlock_handler(id);
        result
    }
}

/// Somebody who takes connections at an address. Dropping it never waits, wherever that is: who has
/// asked and was not accepted is rejected. C type: `struct rdma_cm_id`.
pub struct Listener<'bound>(Owned<'bound, Listening<'bound>>);

/// # Invariants
///
/// `raw` is null or valid, until `destroy`. Its context points to `self`.
#[pin_data]
struct Listening<'bound> {
    node: Node,
    device: &'bound Device<'bound>,
    raw: Atomic<*mut bindings::rdma_cm_id>,
    /// Who asks for a connection; first come, first served.
    #[pin]
    asking: Mutex<KVec<Owned<'bound, Id>>>,
    /// How many may ask at a time.
    backlog: usize,
    /// A ticket for each.
    #[pin]
    tickets: Tickets,
}

// SAFETY: The connection manager does its own locking.
unsafe impl Send for Listening<'_> {}
// SAFETY: As above.
unsafe impl Sync for Listening<'_> {}

// SAFETY: `node` is part of the object. After `destroy` the connection manager doesn't call `event`.
unsafe impl Resource for Listening<'_> {
    const KIND: Kind = Kind::Connection;

    fn node(&self) -> &Node {
        &self.node
    }

    unsafe fn destroy(&self) -> Fate {
        let raw = self.raw.load(Acquire);
        if !raw.is_null() {
            // SAFETY: By the type invariant. This waits for a call of `event` that is under way.
            unsafe { bindings::rdma_destroy_id(raw) };
        }
        Fate::Free
    }
}

impl<'bound> Listening<'bound> {
    /// # Safety
    ///
    /// `id` is valid, and its context points to a live `Self`.
    unsafe extern "C" fn event(
        id: *mut bindings::rdma_cm_id,
        event: *mut bindings::rdma_cm_event,
    ) -> c_int {
        // SAFETY: By the function's requirements.
        let (this, event) = unsafe { (&*(*id).context.cast::<Self>(), &*event) };
        if event.event != bindings::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_REQUEST {
            return 0;
        }
        // Of a request the id is new, and only the context is the listener's.
        match this.ask(id) {
            Ok(()) => 0,
            // The connection manager rejects the request, and destroys the id.
            Err(e) => e.to_errno(),
        }
    }

    /// Puts a request where `accept` finds it.
    fn ask(&self, raw: *mut bindings::rdma_cm_id) -> Result {
        // SAFETY: The id is valid.
        if unsafe { (*raw).device } != self.device.as_raw() {
            return Err(EADDRNOTAVAIL);
        }
        let id = Register::enroll(self.device, KBox::pin_init(Id::new(), GFP_KERNEL)?)?;
        let mut asking = self.asking.lock();
        if asking.len() >= self.backlog {
            return Err(EBUSY);
        }
        asking.reserve(1, GFP_KERNEL)?;
        // INVARIANT: `raw` is valid, and is ours now; its context points to the id.
        //
        // SAFETY: The id's events are held off while this one is handled.
        unsafe {
            (*raw).context = core::ptr::from_ref::<Id>(&id).cast_mut().cast();
            (*raw).event_handler = Some(Id::event);
        }
        id.raw.store(raw, Release);
        // There is room.
        let _ = asking.push(id, GFP_KERNEL);
        drop(asking);
        self.tickets.give();
        Ok(())
    }
}

impl<'bound> Listener<'bound> {
    /// Listens at an address of the device; at port 0 one that is free is taken. At most `backlog`
    /// requests wait to be accepted, from 1. Sleeps.
    ///
    /// C functions: `rdma_bind_addr()`, `rdma_listen()`.
    ///
    /// # Errors
    ///
    /// - `EINVAL`, with a line in the log, if `backlog` is zero or more than `i32::MAX`.
    /// - `EADDRNOTAVAIL`, with a line in the log, if the address is of another device.
    /// - `EADDRINUSE` and others of the connection manager; `ENOMEM`; `EDEADLK` where sleeping is not
    ///   possible.
    pub fn new(
        dev: &'bound Device<'bound>,
        at: SocketAddrV4,
        backlog: usize,
        may_sleep: MaySleep<'_>,
    ) -> Result<Self> {
        may_sleep.check("Listener::new")?;
        let Ok(c_backlog @ 1..) = c_int::try_from(backlog) else {
            log_refusal!(
                "{}: backlog={} is out of range 1..={}\n",
                dev.name(),
                backlog,
                c_int::MAX
            );
            return Err(EINVAL);
        };
        let listening = KBox::pin_init(
            pin_init!(Listening {
                node: Node::new::<Listening<'bound>>(),
                device: dev,
                raw: Atomic::new(core::ptr::null_mut()),
                asking <- new_mutex!(KVec::new(), "rdma::Listening::asking"),
                backlog,
                tickets <- Tickets::new(),
            }),
            GFP_KERNEL,
        )?;
        let this = Self(Register::enroll(dev, listening)?);
        let context = core::ptr::from_ref::<Listening<'bound>>(&this.0);
        let raw = create_id(dev, Listening::event, context.cast())?.as_ptr();
        // INVARIANT: `raw` is valid, and its context points to the listener.
        this.0.raw.store(raw, Release);

        let mut at = sockaddr(at);
        // SAFETY: The id is valid, and the address is.
        to_result(unsafe { bindings::rdma_bind_addr(raw, (&raw mut at).cast()) })?;
        check_device(dev, raw)?;
        // SAFETY: As above.
        to_result(unsafe { bindings::rdma_listen(raw, c_backlog) })?;
        Ok(this)
    }

    /// The address to connect to. May be called from any context.
    ///
    /// C field: `rdma_cm_id.route.addr.src_addr`.
    ///
    /// # Errors
    ///
    /// `EAFNOSUPPORT` if it isn't an IPv4 address.
    pub fn address(&self) -> Result<SocketAddrV4> {
        let raw = self.0.raw.load(Relaxed);
        // SAFETY: The id is valid, and its address doesn't change once it listens. The storage is
        // large enough for every kind of address.
        unsafe {
            let v4 =
                (&raw const (*raw).route.addr.src_addr).cast::<kernel::bindings::sockaddr_in>();
            if (*v4).sin_family != AF_INET {
                return Err(EAFNOSUPPORT);
            }
            let ip = Ipv4Addr::from((*v4).sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddrV4::new(ip, u16::from_be((*v4).sin_port)))
        }
    }

    /// Waits for somebody to ask for a connection, for `limit` milliseconds at most. Sleeps.
    ///
    /// C constant: `RDMA_CM_EVENT_CONNECT_REQUEST`.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`, also where sleeping is not possible.
    pub fn accept(&self, limit: Msecs, may_wait: MayWait<'_>) -> Result<Request<'bound>> {
        if !self.0.tickets.take(limit, may_wait) {
            return Err(ETIMEDOUT);
        }
        let mut asking = self.0.asking.lock();
        // Whoever has a ticket finds a request.
        let id = asking.remove(0).map_err(|_| ETIMEDOUT)?;
        Ok(Request(id))
    }
}

/// A request for a connection. Dropping it rejects it, and never waits. C function: `rdma_destroy_id()`.
pub struct Request<'bound>(Owned<'bound, Id>);

impl<'bound> Request<'bound> {
    /// Accepts the connection for a queue pair. Sleeps.
    ///
    /// C function: `rdma_accept()`.
    ///
    /// # Errors
    ///
    /// Those of the connection manager and the driver; `EDEADLK` where sleeping is not possible.
    pub fn accept<'a, H: Handler<'bound>>(
        self,
        qp: &'a QueuePair<'bound, H>,
        may_wait: MayWait<'_>,
    ) -> Result<Accepted<'a, 'bound, H>> {
        may_wait.may_sleep().check("Request::accept")?;
        let id = self.0;
        if !qp.is_iwarp() {
            qp.follow(id.raw())?;
        }
        let mut parameters = parameters(qp);
        // SAFETY: The id and the parameters are valid.
        to_result(unsafe { accept(id.raw(), &mut parameters) })?;
        Ok(Accepted { id, qp })
    }
}

/// A connection that was accepted, of which the other side may not know yet.
pub struct Accepted<'a, 'bound, H: Handler<'bound>> {
    id: Owned<'bound, Id>,
    qp: &'a QueuePair<'bound, H>,
}

impl<'bound, H: Handler<'bound>> Accepted<'_, 'bound, H> {
    /// Waits until the connection is established, for `limit` milliseconds at most. The queue pair
    /// is ready to send then. Sleeps.
    ///
    /// C constant: `RDMA_CM_EVENT_ESTABLISHED`.
    ///
    /// # Errors
    ///
    /// `ETIMEDOUT`, also where sleeping is not possible; `ECONNRESET` and others of the connection manager.
    pub fn finish(self, limit: Msecs, may_wait: MayWait<'_>) -> Result<Connection<'bound>> {
        self.id.wait(&self.id.answer, limit, may_wait)?;
        self.qp.open_sends();
        Ok(Connection(self.id))
    }
}

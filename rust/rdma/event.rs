// SPDX-License-Identifier: GPL-2.0

//! Events of a device: a port that comes up, an address that changes.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)
//! (`ib_register_event_handler()`)

use kernel::{
    fmt,
    prelude::*,
    str::CStr,
    types::Opaque, //
};
use rdma_bindings as bindings;

use crate::{
    context::{
        MaySleep,
        MayWait, //
    },
    device::{
        Device,
        Port, //
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

/// What happened to a device.
///
/// Printed, it is the kernel's words for it, with the number of the port.
///
/// C type: `struct ib_event`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event<'bound> {
    /// The device failed, and won't complete anything any more: its `remove` follows, as a rule.
    /// C constant: `IB_EVENT_DEVICE_FATAL`.
    DeviceFatal,
    /// The device became faster or slower. C constant: `IB_EVENT_DEVICE_SPEED_CHANGE`.
    DeviceSpeedChange,
    /// Traffic can flow through the port. C constant: `IB_EVENT_PORT_ACTIVE`.
    PortActive(Port<'bound>),
    /// Traffic can't flow through the port any more. C constant: `IB_EVENT_PORT_ERR`.
    PortError(Port<'bound>),
    /// The port has another local identifier: paths to it are to be resolved anew.
    /// C constant: `IB_EVENT_LID_CHANGE`.
    LidChange(Port<'bound>),
    /// The port's table of partitions changed. C constant: `IB_EVENT_PKEY_CHANGE`.
    PkeyChange(Port<'bound>),
    /// Another subnet manager is in charge of the port. C constant: `IB_EVENT_SM_CHANGE`.
    SmChange(Port<'bound>),
    /// The subnet manager has forgotten what it was told through the port, such as the membership of
    /// multicast groups: tell it again. C constant: `IB_EVENT_CLIENT_REREGISTER`.
    ClientReregister(Port<'bound>),
    /// The port's table of addresses changed. C constant: `IB_EVENT_GID_CHANGE`.
    GidChange(Port<'bound>),
    /// Any other: of a kind that is about a queue or a queue pair, whose owner is told by its own
    /// handler; of a kind that nobody knows; or of a port that the device doesn't have.
    Other(EventKind),
}

impl<'bound> Event<'bound> {
    /// # Safety
    ///
    /// `raw` is an event of `device`.
    unsafe fn new(device: &'bound Device<'bound>, raw: &bindings::ib_event) -> Self {
        let kind = EventKind::from(raw.event);
        let event: fn(Port<'bound>) -> Self = match kind {
            EventKind::DeviceFatal => return Self::DeviceFatal,
            EventKind::DeviceSpeedChange => return Self::DeviceSpeedChange,
            EventKind::PortActive => Self::PortActive,
            EventKind::PortError => Self::PortError,
            EventKind::LidChange => Self::LidChange,
            EventKind::PkeyChange => Self::PkeyChange,
            EventKind::SmChange => Self::SmChange,
            EventKind::ClientReregister => Self::ClientReregister,
            EventKind::GidChange => Self::GidChange,
            other => return Self::Other(other),
        };
        // SAFETY: By the function's requirements: of these kinds, the union has the number of a port.
        let number = unsafe { raw.element.port_num };
        if (1..=device.num_ports()).contains(&number) {
            device.port(number).map_or(Self::Other(kind), event)
        } else {
            Self::Other(kind)
        }
    }

    /// What kind of event it is.
    pub fn kind(&self) -> EventKind {
        match self {
            Self::DeviceFatal => EventKind::DeviceFatal,
            Self::DeviceSpeedChange => EventKind::DeviceSpeedChange,
            Self::PortActive(_) => EventKind::PortActive,
            Self::PortError(_) => EventKind::PortError,
            Self::LidChange(_) => EventKind::LidChange,
            Self::PkeyChange(_) => EventKind::PkeyChange,
            Self::SmChange(_) => EventKind::SmChange,
            Self::ClientReregister(_) => EventKind::ClientReregister,
            Self::GidChange(_) => EventKind::GidChange,
            Self::Other(kind) => *kind,
        }
    }

    /// The port that the event is about, if it is about one.
    pub fn port(&self) -> Option<Port<'bound>> {
        match self {
            Self::PortActive(port)
            | Self::PortError(port)
            | Self::LidChange(port)
            | Self::PkeyChange(port)
            | Self::SmChange(port)
            | Self::ClientReregister(port)
            | Self::GidChange(port) => Some(*port),
            Self::DeviceFatal | Self::DeviceSpeedChange | Self::Other(_) => None,
        }
    }
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.kind(), f)?;
        match self.port() {
            Some(port) => f.write_fmt(fmt!(" (port {})", port.number())),
            None => Ok(()),
        }
    }
}

numbers! {
    /// The kinds of events.
    ///
    /// ```
    /// use rdma::event::EventKind;
    ///
    /// assert_eq!(EventKind::from(8), EventKind::DeviceFatal);
    /// assert_eq!(EventKind::GidChange.raw(), 18);
    /// assert_eq!(EventKind::from(1000), EventKind::Unknown(1000));
    /// ```
    ///
    /// C type: `enum ib_event_type`.
    EventKind: ib_event_type;
    /// A completion queue overran, or failed otherwise.
    CqError = IB_EVENT_CQ_ERR,
    /// A queue pair failed in a way that no completion tells of.
    QpFatal = IB_EVENT_QP_FATAL,
    /// A queue pair got a request that makes no sense.
    QpRequestError = IB_EVENT_QP_REQ_ERR,
    /// A queue pair got a request for memory that it may not access.
    QpAccessError = IB_EVENT_QP_ACCESS_ERR,
    /// A queue pair got its first message, before its owner knew that it is connected.
    CommunicationEstablished = IB_EVENT_COMM_EST,
    /// The send queue of a queue pair has come to rest.
    SqDrained = IB_EVENT_SQ_DRAINED,
    /// A queue pair took its alternate path.
    PathMigrated = IB_EVENT_PATH_MIG,
    /// A queue pair failed to take its alternate path.
    PathMigrationError = IB_EVENT_PATH_MIG_ERR,
    /// The device failed.
    DeviceFatal = IB_EVENT_DEVICE_FATAL,
    /// Traffic can flow through a port.
    PortActive = IB_EVENT_PORT_ACTIVE,
    /// Traffic can't flow through a port any more.
    PortError = IB_EVENT_PORT_ERR,
    /// A port has another local identifier.
    LidChange = IB_EVENT_LID_CHANGE,
    /// A port's table of partitions changed.
    PkeyChange = IB_EVENT_PKEY_CHANGE,
    /// Another subnet manager is in charge of a port.
    SmChange = IB_EVENT_SM_CHANGE,
    /// A shared receive queue failed.
    SrqError = IB_EVENT_SRQ_ERR,
    /// A shared receive queue has fewer receives than its owner wanted to be warned of.
    SrqLimitReached = IB_EVENT_SRQ_LIMIT_REACHED,
    /// A queue pair has taken its last receive from a shared queue.
    LastWqeReached = IB_EVENT_QP_LAST_WQE_REACHED,
    /// The subnet manager has forgotten what it was told through a port.
    ClientReregister = IB_EVENT_CLIENT_REREGISTER,
    /// A port's table of addresses changed.
    GidChange = IB_EVENT_GID_CHANGE,
    /// A work queue failed.
    WqFatal = IB_EVENT_WQ_FATAL,
    /// The device became faster or slower.
    DeviceSpeedChange = IB_EVENT_DEVICE_SPEED_CHANGE,
}

/// The kernel's words for it. C function: `ib_event_msg()`.
impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: Takes any number and returns a static string.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_event_msg(self.raw())) };
        f.write_str(text.to_str().unwrap_or("?"))
    }
}

/// Somebody who wants to know of a device's events.
pub trait Listener<'bound>: Send + Sync + Sized + 'bound {
    /// Something happened. Runs in process context, with a lock of the RDMA core held: none can be
    /// registered here, and one that is dropped stays until this returned.
    fn event(&self, event: Event<'bound>, may_sleep: MaySleep<'_>);
}

/// The registration of a [`Listener`].
///
/// Dropping it never waits: the last event is delivered before the window ends.
///
/// ```
/// # use kernel::prelude::*;
/// use kernel::sync::atomic::{Atomic, Relaxed};
/// use rdma::{
///     context::{MaySleep, MayWait},
///     device::{Device, Port},
///     event::{Event, EventHandler, Listener},
/// };
///
/// /// Whether traffic can flow through a port.
/// struct Up<'bound>(Port<'bound>, Atomic<bool>);
///
/// impl<'bound> Listener<'bound> for Up<'bound> {
///     fn event(&self, event: Event<'bound>, _: MaySleep<'_>) {
///         match event {
///             Event::PortActive(port) if port == self.0 => self.1.store(true, Relaxed),
///             Event::PortError(port) if port == self.0 => self.1.store(false, Relaxed),
///             Event::DeviceFatal => self.1.store(false, Relaxed),
///             _ => {}
///         }
///     }
/// }
///
/// fn watch<'bound>(
///     dev: &'bound Device<'bound>,
///     may_wait: MayWait<'_>,
/// ) -> Result<EventHandler<'bound, Up<'bound>>> {
///     let up = Up(dev.port(1)?, Atomic::new(false));
///     EventHandler::new::<Error>(dev, Ok::<_, Error>(up), may_wait)
/// }
/// ```
///
/// C type: `struct ib_event_handler`.
pub struct EventHandler<'bound, T: Listener<'bound>>(
    #[expect(dead_code, reason = "held for its drop")] Owned<'bound, Inner<'bound, T>>,
);

/// # Invariants
///
/// `handler` is registered until `destroy`.
#[pin_data]
struct Inner<'bound, T: Listener<'bound>> {
    node: Node,
    device: &'bound Device<'bound>,
    #[pin]
    listener: T,
    #[pin]
    handler: Opaque<bindings::ib_event_handler>,
}

// SAFETY: A registration may be used from any thread, and the listener is `Send` and `Sync`.
unsafe impl<'bound, T: Listener<'bound>> Send for Inner<'bound, T> {}
// SAFETY: As above.
unsafe impl<'bound, T: Listener<'bound>> Sync for Inner<'bound, T> {}

// SAFETY: `node` is part of the object. After `destroy` the kernel doesn't call the handler.
unsafe impl<'bound, T: Listener<'bound>> Resource for Inner<'bound, T> {
    const KIND: Kind = Kind::EventHandler;

    fn node(&self) -> &Node {
        &self.node
    }

    unsafe fn destroy(&self) -> Fate {
        // SAFETY: By the type invariant. This waits for a call that is under way.
        unsafe { bindings::ib_unregister_event_handler(self.handler.get()) };
        Fate::Free
    }
}

impl<'bound, T: Listener<'bound>> Inner<'bound, T> {
    /// # Safety
    ///
    /// `handler` is the field of a live `Self`, and `event` is valid.
    unsafe extern "C" fn call(
        handler: *mut bindings::ib_event_handler,
        event: *mut bindings::ib_event,
    ) {
        // SAFETY: By the function's requirements.
        let this = unsafe { &*kernel::container_of!(Opaque::cast_from(handler), Self, handler) };
        // SAFETY: As above. The handler is registered with this device.
        let event = unsafe { Event::new(this.device, &*event) };
        this.listener.event(event, MaySleep::new());
    }
}

impl<'bound, T: Listener<'bound>> EventHandler<'bound, T> {
    /// Registers a listener, which may be called before this returns. Sleeps, until all listeners
    /// were told of an event that is on its way. So a listener, which may sleep but not wait, can't do
    /// this:
    ///
    /// ```compile_fail,E0308
    /// # use kernel::prelude::*;
    /// use rdma::{context::MaySleep, device::Device, event::{Event, EventHandler, Listener}};
    ///
    /// struct Ear<'bound>(&'bound Device<'bound>);
    ///
    /// impl<'bound> Listener<'bound> for Ear<'bound> {
    ///     fn event(&self, _: Event<'bound>, may_sleep: MaySleep<'_>) {
    ///         let _ = EventHandler::new::<Error>(self.0, Ok::<_, Error>(Ear(self.0)), may_sleep);
    ///     }
    /// }
    /// ```
    ///
    /// C function: `ib_register_event_handler()`.
    ///
    /// # Errors
    ///
    /// That of `listener`; `ENOMEM`; `EDEADLK` where sleeping is not possible.
    pub fn new<E>(
        dev: &'bound Device<'bound>,
        listener: impl PinInit<T, E>,
        may_wait: MayWait<'_>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        may_wait.may_sleep().check("EventHandler::new")?;
        let inner = KBox::pin_init::<Error>(
            try_pin_init!(Inner {
                node: Node::new::<Inner<'bound, T>>(),
                device: dev,
                listener <- listener,
                // INVARIANT: Registered here.
                handler <- Opaque::ffi_init(|slot: *mut bindings::ib_event_handler| {
                    // SAFETY: `slot` is valid for writes and stays where it is. The listener, which
                    // the callback leads to, is initialized, and nothing after this can fail.
                    unsafe {
                        slot.write(bindings::ib_event_handler {
                            device: dev.as_raw(),
                            handler: Some(Inner::<'bound, T>::call),
                            ..Default::default()
                        });
                        bindings::ib_register_event_handler(slot);
                    }
                }),
            }? Error),
            GFP_KERNEL,
        )?;
        Ok(Self(Register::enroll(dev, inner)?))
    }
}

// SPDX-License-Identifier: GPL-2.0

//! Events of a device: a port that comes up, an address that changes.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)
//! (`ib_register_event_handler()`)

use core::marker::PhantomData;
use kernel::{
    prelude::*,
    types::Opaque, //
};
use rdma_bindings as bindings;

use crate::{
    context::MaySleep,
    device::Device,
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
/// C type: `struct ib_event`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// Traffic can flow through the port with this number.
    PortActive(u32),
    /// Traffic can't flow any more through the port with this number.
    PortError(u32),
    /// The table of addresses of the port with this number changed.
    GidChange(u32),
    /// Any other.
    Other(u32),
}

/// Somebody who wants to know of a device's events.
pub trait Listener<'bound>: Send + Sync + Sized + 'bound {
    /// Something happened. Runs in process context, with a lock of the RDMA core held.
    fn event(&self, event: Event, may_sleep: MaySleep<'_>);
}

/// The registration of a [`Listener`].
///
/// Dropping it never waits: the last event is delivered before the window ends.
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
    #[pin]
    listener: T,
    #[pin]
    handler: Opaque<bindings::ib_event_handler>,
    _bound: PhantomData<&'bound ()>,
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
        // SAFETY: By the function's requirements. Which member of the union is valid follows from
        // the kind of event.
        let (this, event) = unsafe {
            let this = &*kernel::container_of!(Opaque::cast_from(handler), Self, handler);
            let port = || (*event).element.port_num;
            let event = match (*event).event {
                bindings::ib_event_type_IB_EVENT_PORT_ACTIVE => Event::PortActive(port()),
                bindings::ib_event_type_IB_EVENT_PORT_ERR => Event::PortError(port()),
                bindings::ib_event_type_IB_EVENT_GID_CHANGE => Event::GidChange(port()),
                other => Event::Other(other),
            };
            (this, event)
        };
        this.listener.event(event, MaySleep::new());
    }
}

impl<'bound, T: Listener<'bound>> EventHandler<'bound, T> {
    /// Registers a listener, which may be called before this returns. Sleeps.
    ///
    /// C function: `ib_register_event_handler()`.
    ///
    /// # Errors
    ///
    /// That of `listener`; `ENOMEM`; `EDEADLK` where sleeping is not possible.
    pub fn new<E>(
        dev: &'bound Device<'bound>,
        listener: impl PinInit<T, E>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        may_sleep.check("EventHandler::new")?;
        let inner = KBox::pin_init::<Error>(
            try_pin_init!(Inner {
                node: Node::new::<Inner<'bound, T>>(),
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
                _bound: PhantomData,
            }? Error),
            GFP_KERNEL,
        )?;
        Ok(Self(Register::enroll(dev, inner)?))
    }
}

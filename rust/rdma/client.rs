// SPDX-License-Identifier: GPL-2.0

//! Clients: those who are told of every RDMA device.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_client`)

use core::{
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_result,
        to_result, //
    },
    new_condvar,
    new_mutex,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Release, //
        },
        CondVar,
        Mutex, //
    },
    types::Opaque, //
};
use rdma_bindings as bindings;

use crate::{
    context::MayWait,
    debugfs::Root,
    device::{
        Device,
        Name, //
    }, //
};

/// Somebody who wants to be told of RDMA devices.
///
/// C type: `struct ib_client`.
///
/// # Examples
///
/// ```
/// use kernel::prelude::*;
/// use rdma::{client::Client, context::MayWait, device::Device};
///
/// struct Hello;
///
/// impl Client for Hello {
///     type Data<'bound> = ();
///     const NAME: &'static CStr = c"hello";
///
///     fn add<'bound>(
///         dev: &'bound Device<'bound>,
///         _: MayWait<'bound>,
///     ) -> impl PinInit<(), Error> + 'bound {
///         pr_info!("{}: {} completion vectors\n", dev.name(), dev.num_comp_vectors());
///         Ok(())
///     }
/// }
///
/// rdma::module_client! {
///     type: Hello,
///     name: "hello",
///     authors: ["Somebody"],
///     description: "Greets RDMA devices",
///     license: "GPL",
/// }
/// ```
pub trait Client: 'static {
    /// What the client keeps for a device, from `add` until the device goes.
    ///
    /// It is dropped when the device or the client goes. All that was made on the device is then
    /// taken down.
    type Data<'bound>: Send + 'bound;

    /// The name of the client. It shows in `rdma resource show` beside what the client makes.
    ///
    /// C field: `ib_client.name`.
    const NAME: &'static CStr;

    /// The module is being loaded. If this fails, it isn't, and who loads it gets the error. Runs in
    /// process context, and may sleep.
    fn load() -> Result {
        Ok(())
    }

    /// A device appeared, or was there already when the client registered.
    ///
    /// Runs in process context under locks of the RDMA core: start work here, don't do it. If it
    /// fails, the error is logged, and the client doesn't get the device.
    ///
    /// C field: `ib_client.add`.
    fn add<'bound>(
        dev: &'bound Device<'bound>,
        may_wait: MayWait<'bound>,
    ) -> impl PinInit<Self::Data<'bound>, Error> + 'bound;
}

/// Declares a module that is a [`Client`].
///
/// `type` names the client; the rest is that of [`kernel::prelude::module!`]. The client is registered
/// while the module is loaded. There is no other way to register one: registering or unregistering in
/// a callback of the RDMA core, or in a completion handler, would wait for itself.
///
/// C functions: `ib_register_client()`, `ib_unregister_client()`.
#[macro_export]
macro_rules! module_client {
    (type: $client:ty, $($module:tt)*) => {
        // SAFETY: The slot is declared here, so it is nobody else's.
        unsafe impl $crate::client::Registered for $client {
            fn slot() -> &'static $crate::client::Slot {
                static SLOT: $crate::client::Slot = $crate::client::Slot::new();
                &SLOT
            }
        }

        #[::kernel::prelude::pin_data]
        struct ClientModule {
            #[pin]
            _registration: $crate::client::Registration<$client>,
        }

        impl ::kernel::InPlaceModule for ClientModule {
            fn init(
                _: &'static ::kernel::ThisModule,
            ) -> impl ::pin_init::PinInit<Self, ::kernel::error::Error> {
                ::kernel::try_pin_init!(Self {
                    _: {
                        <$client as $crate::client::Client>::load()?;
                    },
                    // SAFETY: A module is made and dropped by the kernel's module loader only, once,
                    // in no callback.
                    _registration <- unsafe { $crate::client::Registration::new() },
                })
            }
        }

        ::kernel::prelude::module! {
            type: ClientModule,
            $($module)*
        }
    };
}

/// A client that [`module_client!`](crate::module_client) registers.
///
/// # Safety
///
/// [`Self::slot`] always returns the same slot, which no other client's does.
#[doc(hidden)]
pub unsafe trait Registered: Client {
    /// Where the callbacks of the RDMA core, which don't say for which client they are, find the
    /// registration.
    fn slot() -> &'static Slot;
}

/// The place of a registration.
#[doc(hidden)]
pub struct Slot(Atomic<*mut Shared>);

impl Slot {
    /// Makes an empty slot.
    #[allow(clippy::new_without_default)] // It is for a static.
    pub const fn new() -> Self {
        Self(Atomic::new(core::ptr::null_mut()))
    }
}

/// What a client has on one device: the window, and in it the client's data.
///
/// # Invariants
///
/// `data` is only dropped before `device` is closed. `device` stays for ever if the kernel can't let
/// go of what was made on it.
struct Added<C: Client> {
    device: ManuallyDrop<Pin<KBox<Device<'static>>>>,
    data: Option<Pin<KBox<C::Data<'static>>>>,
}

impl<C: Client> Added<C> {
    /// # Safety
    ///
    /// `raw` is valid until what is returned is dropped, and `C` may use it until then. `debugfs` is
    /// valid until then as well.
    unsafe fn new(raw: NonNull<bindings::ib_device>, debugfs: NonNull<Root>) -> Result<KBox<Self>> {
        // SAFETY: By the function's requirements; `drop` closes the register.
        let device = unsafe { Device::<'static>::new(raw, C::NAME, debugfs) };
        let device = KBox::pin_init::<Error>(device, GFP_KERNEL)?;
        let device = ManuallyDrop::new(device);
        let mut added = KBox::new(Self { device, data: None }, GFP_KERNEL)?;
        // SAFETY: The box isn't moved out of while `added` lives, and `Device` is pinned in it. The
        // lifetime is a made-up one: `add` is generic over it and so can't know how long it is, and
        // `drop` ends it before the device goes.
        let device: &'static Device<'static> =
            unsafe { &*core::ptr::from_ref::<Device<'static>>(&added.device) };
        added.data = Some(KBox::pin_init(C::add(device, MayWait::new()), GFP_KERNEL)?);
        Ok(added)
    }
}

impl<C: Client> Drop for Added<C> {
    fn drop(&mut self) {
        self.data = None;
        // SAFETY: The data is gone, and with it every handle that wasn't leaked.
        let all_gone = unsafe { self.device.register().close(&self.device) };
        if all_gone {
            // SAFETY: It is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.device) };
        }
    }
}

/// The place of a window that has closed: no device is there.
const CLOSED: usize = 0;

/// What the callbacks of the RDMA core share.
#[doc(hidden)]
#[pin_data]
pub struct Shared {
    #[pin]
    client: Opaque<bindings::ib_client>,
    /// The addresses of the devices on which the client has a window, or [`CLOSED`].
    #[pin]
    windows: Mutex<KVec<usize>>,
    /// Notified when a window has closed.
    #[pin]
    closed: CondVar,
    #[pin]
    debugfs: Root,
}

// SAFETY: The RDMA core does its own locking, and the rest is behind a lock.
unsafe impl Send for Shared {}
// SAFETY: As above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(name: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self {
            // SAFETY: All zero is what the RDMA core expects of a client that isn't filled in.
            client <- Opaque::ffi_init(|client: *mut bindings::ib_client| unsafe {
                client.write_bytes(0, 1)
            }),
            windows <- new_mutex!(KVec::new(), "rdma::client::Shared::windows"),
            closed <- new_condvar!("rdma::client::Shared::closed"),
            debugfs <- Root::new(name),
        })
    }

    fn window_opens(&self, device: NonNull<bindings::ib_device>) -> Result {
        let mut windows = self.windows.lock();
        match windows.iter_mut().find(|window| **window == CLOSED) {
            Some(window) => *window = device.addr().get(),
            None => windows.push(device.addr().get(), GFP_KERNEL)?,
        }
        Ok(())
    }

    fn window_closed(&self, device: *mut bindings::ib_device) {
        let mut windows = self.windows.lock();
        if let Some(window) = windows.iter_mut().find(|window| **window == device.addr()) {
            *window = CLOSED;
        }
        drop(windows);
        self.closed.notify_all();
    }

    fn wait_until_closed(&self, device: *mut bindings::ib_device) {
        let mut windows = self.windows.lock();
        while windows.contains(&device.addr()) {
            self.closed.wait(&mut windows);
        }
    }
}

/// The registration of a client with the RDMA core.
///
/// Dropping it takes the client off every device, and sleeps. C functions: `ib_register_client()`,
/// `ib_unregister_client()`.
///
/// # Invariants
///
/// `main` was registered after `guard`, and is unregistered before; `shared` is there before and after
/// both.
#[doc(hidden)]
#[pin_data]
pub struct Registration<C: Registered> {
    main: Main<C>,
    #[pin]
    guard: Guard<C>,
    #[pin]
    shared: Shared,
}

/// The client itself.
///
/// # Invariants
///
/// `shared` is valid, its `client` is registered, and it is in `C::slot()`.
struct Main<C: Registered> {
    shared: NonNull<Shared>,
    _client: PhantomData<C>,
}

/// A client that has nothing to do but to wait.
///
/// When a device goes while its client is being unregistered, the RDMA core finds nobody to call any
/// more, and goes on to free the pool of queues that the client has leases in: the client's `remove`
/// is still running, in the other thread. This one is still registered then. It was registered earlier,
/// so it is called later, and doesn't return before that `remove` has.
///
/// # Invariants
///
/// `client` is registered.
#[pin_data(PinnedDrop)]
struct Guard<C: Registered> {
    #[pin]
    client: Opaque<bindings::ib_client>,
    _client: PhantomData<C>,
}

// SAFETY: The RDMA core does its own locking, and `C::Data` is `Send`.
unsafe impl<C: Registered> Send for Registration<C> {}
// SAFETY: Nothing can be done with a shared reference.
unsafe impl<C: Registered> Sync for Registration<C> {}

impl<C: Registered> Registration<C> {
    /// Registers the client. [`Client::add`] is called for each device that is there before this
    /// returns. Sleeps.
    ///
    /// # Errors
    ///
    /// `EBUSY` if `C` is registered already, `ENOMEM` if there is no memory.
    ///
    /// # Safety
    ///
    /// Neither this is called nor is the registration dropped in a callback of the RDMA core, in a
    /// completion handler, or in a [`Task`](crate::work::Task).
    pub unsafe fn new() -> impl PinInit<Self, Error> {
        // INVARIANT: What is written first is initialized first, and what is declared first is dropped
        // first.
        try_pin_init!(Self {
            shared <- Shared::new(C::NAME),
            guard <- Guard::new(),
            main: Main::new(&shared)?,
        })
    }
}

impl<C: Registered> Main<C> {
    /// `shared` has to outlive what is made.
    fn new(shared: &Shared) -> Result<Self> {
        Self::register(shared)?;
        Ok(Self {
            shared: NonNull::from(shared),
            _client: PhantomData,
        })
    }

    fn register(shared: &Shared) -> Result {
        let client = shared.client.get();
        // SAFETY: The client is ours until it is registered.
        unsafe {
            (*client).name = C::NAME.as_char_ptr();
            (*client).add = Some(Self::add_callback);
            (*client).remove = Some(Self::remove_callback);
        }
        let shared = core::ptr::from_ref(shared).cast_mut();
        // Full: the client is initialized before a callback finds it.
        C::slot()
            .0
            .cmpxchg(core::ptr::null_mut(), shared, Full)
            .map_err(|_| EBUSY)?;
        // SAFETY: `client` is initialized and stays where it is until it is unregistered.
        let registered = to_result(unsafe { bindings::ib_register_client(client) });
        if registered.is_err() {
            C::slot().0.store(core::ptr::null_mut(), Release);
        }
        registered
    }

    /// # Safety
    ///
    /// For the RDMA core only, as `ib_client.add` of this registration.
    unsafe extern "C" fn add_callback(raw: *mut bindings::ib_device) -> c_int {
        let Some(raw) = NonNull::new(raw) else {
            return EINVAL.to_errno();
        };
        from_result(|| {
            // SAFETY: The slot leads to the registration for as long as there are callbacks.
            let shared = unsafe { &*C::slot().0.load(Acquire) };
            let added = shared
                .window_opens(raw)
                .and_then(|()| {
                    // SAFETY: The RDMA core calls `add` with a device on which the client may work
                    // until `remove` returns; if this fails, nothing is kept. `shared` stays longer.
                    unsafe { Added::<C>::new(raw, NonNull::from(&shared.debugfs)) }
                })
                .inspect_err(|e| {
                    shared.window_closed(raw.as_ptr());
                    // SAFETY: The device is valid.
                    let name = unsafe { Name::of(raw.as_ptr()) };
                    pr_err!("{}: client={}: add failed: {:?}\n", name, C::NAME, e);
                })?;
            // SAFETY: The client is being added to the device.
            unsafe {
                bindings::ib_set_client_data(
                    raw.as_ptr(),
                    shared.client.get(),
                    KBox::into_raw(added).cast(),
                )
            };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// For the RDMA core only, as `ib_client.remove` of this registration.
    unsafe extern "C" fn remove_callback(raw: *mut bindings::ib_device, data: *mut c_void) {
        if data.is_null() {
            return;
        }
        // SAFETY: The data was set by `add_callback`, and `remove` is called once for it.
        drop(unsafe { KBox::from_raw(data.cast::<Added<C>>()) });
        // SAFETY: As in `add_callback`.
        unsafe { &*C::slot().0.load(Acquire) }.window_closed(raw);
    }
}

impl<C: Registered> Drop for Main<C> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant. The guard may be waiting for a window of `shared`, which goes
        // after the guard.
        unsafe { bindings::ib_unregister_client(self.shared.as_ref().client.get()) };
        C::slot().0.store(core::ptr::null_mut(), Release);
    }
}

impl<C: Registered> Guard<C> {
    fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            client <- Opaque::try_ffi_init(|client: *mut bindings::ib_client| {
                // The callbacks would find the one who is registered already.
                if !C::slot().0.load(Acquire).is_null() {
                    return Err(EBUSY);
                }
                // SAFETY: `client` is valid for writes, all its fields may be zero, and it stays where
                // it is until it is unregistered.
                to_result(unsafe {
                    client.write_bytes(0, 1);
                    (*client).name = C::NAME.as_char_ptr();
                    (*client).add = Some(Self::add_callback);
                    (*client).remove = Some(Self::remove_callback);
                    bindings::ib_register_client(client)
                })
            }),
            _client: PhantomData,
        })
    }

    /// # Safety
    ///
    /// For the RDMA core only, as `ib_client.add` of this registration.
    unsafe extern "C" fn add_callback(_: *mut bindings::ib_device) -> c_int {
        0
    }

    /// # Safety
    ///
    /// For the RDMA core only, as `ib_client.remove` of this registration.
    unsafe extern "C" fn remove_callback(raw: *mut bindings::ib_device, _: *mut c_void) {
        let shared = C::slot().0.load(Acquire);
        // SAFETY: The registration stays until this client is unregistered, which waits for this call.
        if let Some(shared) = unsafe { shared.as_ref() } {
            shared.wait_until_closed(raw);
        }
    }
}

#[pinned_drop]
impl<C: Registered> PinnedDrop for Guard<C> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant.
        unsafe { bindings::ib_unregister_client(self.client.get()) };
    }
}

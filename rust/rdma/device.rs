// SPDX-License-Identifier: GPL-2.0

//! RDMA devices, as a client sees them between `add` and `remove`.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h)

use core::{
    marker::PhantomData,
    net::Ipv4Addr,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    fmt,
    prelude::*,
    str::{
        CStr,
        CString, //
    }, //
};
use rdma_bindings as bindings;

use crate::{
    context::MaySleep,
    teardown::Register, //
};

/// An RDMA device in the window in which one client may use it.
///
/// All that is made on the device carries the lifetime `'bound` of that window, which can neither be
/// stretched nor shrunk, and is taken down when it ends at the latest:
///
/// ```compile_fail,E0521
/// use rdma::device::Device;
///
/// fn keep(_: &'static Device<'static>) {}
///
/// fn escape<'bound>(dev: &'bound Device<'bound>) {
///     keep(dev)
/// }
/// ```
///
/// Nor can the window be made to look shorter than it is, so that what is taken down when it ends would
/// refer to what is gone by then (rustc has no code for this error):
///
/// ```compile_fail
/// # use rdma::device::Device;
/// fn shrink<'short, 'bound: 'short>(dev: &'bound Device<'bound>) -> &'short Device<'short> {
///     dev
/// }
/// ```
///
/// A plain reference to the device may be as short as one likes:
///
/// ```
/// # use rdma::device::Device;
/// fn borrow<'short, 'bound: 'short>(dev: &'bound Device<'bound>) -> &'short Device<'bound> {
///     dev
/// }
/// ```
///
/// C type: `struct ib_device`.
///
/// # Invariants
///
/// `raw` is valid, and the client is added to it, for as long as `self` lives.
#[pin_data]
pub struct Device<'bound> {
    raw: NonNull<bindings::ib_device>,
    /// A copy: what the kernel can't let go of still has a pointer to it when the module is gone.
    owner: CString,
    #[pin]
    register: Register,
    /// Invariant in `'bound`: what borrows for less than the window must not get into an object
    /// that lives until its end.
    _bound: PhantomData<fn(&'bound ()) -> &'bound ()>,
}

// SAFETY: The functions of the RDMA core that are called with `raw` do their own locking, and the
// attributes read through it don't change after registration.
unsafe impl Send for Device<'_> {}
// SAFETY: As above.
unsafe impl Sync for Device<'_> {}

impl<'bound> Device<'bound> {
    /// Opens a client's window on a device.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    ///
    /// # Safety
    ///
    /// `raw` is valid, and the client `owner` added to it, until the device made here is dropped.
    /// [`Register::close`] is called before that.
    pub(crate) unsafe fn new(
        raw: NonNull<bindings::ib_device>,
        owner: &'static CStr,
    ) -> impl PinInit<Self, Error> {
        // INVARIANT: By the function's requirements.
        try_pin_init!(Self {
            raw,
            owner: CString::try_from(owner)?,
            register <- Register::new(),
            _bound: PhantomData,
        })
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.raw.as_ptr()
    }

    pub(crate) fn register(&self) -> &Register {
        &self.register
    }

    /// The name of the client, by which the RDMA core's resource tracking knows its objects.
    pub fn owner(&self) -> &CStr {
        &self.owner
    }

    fn attrs(&self) -> &bindings::ib_device_attr {
        // SAFETY: By the type invariant `raw` is valid; `attrs` is written before registration only.
        unsafe { &(*self.as_raw()).attrs }
    }

    /// The name of the device, such as `rxe0`.
    ///
    /// A device may be renamed by its administrator at any time; the name is then as it was before,
    /// as it is after, or a mixture.
    pub fn name(&self) -> Name {
        // SAFETY: By the type invariant `raw` is valid.
        unsafe { Name::of(self.as_raw()) }
    }

    /// The most entries that one completion queue of the device can have.
    ///
    /// C field: `ib_device_attr.max_cqe`.
    pub fn max_cqe(&self) -> u32 {
        self.attrs().max_cqe
    }

    /// The most work requests that one queue of a queue pair can hold.
    ///
    /// C field: `ib_device_attr.max_qp_wr`.
    pub fn max_qp_wr(&self) -> u32 {
        self.attrs().max_qp_wr
    }

    /// How many completion vectors the device has, zero for a device without any.
    ///
    /// C field: `ib_device.num_comp_vectors`.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: By the type invariant `raw` is valid.
        u32::try_from(unsafe { (*self.as_raw()).num_comp_vectors }).unwrap_or(0)
    }

    /// How many ports the device has. They are numbered from 1.
    pub fn num_ports(&self) -> u32 {
        // SAFETY: By the type invariant `raw` is valid.
        unsafe { (*self.as_raw()).phys_port_cnt }
    }

    /// A port of the device.
    ///
    /// # Errors
    ///
    /// `EINVAL` if `number` isn't within 1 and [`Self::num_ports`].
    pub fn port(&'bound self, number: u32) -> Result<Port<'bound>> {
        if !(1..=self.num_ports()).contains(&number) {
            log_refusal!(
                "{}: port {} is out of range 1..={}\n",
                self.name(),
                number,
                self.num_ports()
            );
            return Err(EINVAL);
        }
        // INVARIANT: `number` was just checked.
        Ok(Port {
            device: self,
            number,
        })
    }
}

/// The name of a device.
#[derive(Clone, Copy)]
pub struct Name {
    bytes: [u8; 64],
}

impl Name {
    /// # Safety
    ///
    /// `device` is valid.
    pub(crate) unsafe fn of(device: *const bindings::ib_device) -> Self {
        let mut bytes = [0; 64];
        // SAFETY: By the function's requirements.
        let source = unsafe { (&raw const (*device).name).cast::<u8>() };
        // The last byte stays zero.
        for (i, byte) in bytes.iter_mut().enumerate().take(63) {
            // SAFETY: The source has 64 bytes. It may be written meanwhile, byte for byte.
            *byte = unsafe { source.add(i).read_volatile() };
        }
        Self { bytes }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.bytes.split(|byte| *byte == 0).next().unwrap_or(&[]);
        f.write_str(core::str::from_utf8(text).unwrap_or("?"))
    }
}

/// The state of a port.
///
/// C type: `enum ib_port_state`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortState {
    /// Nothing can be sent.
    Down,
    /// Being set up.
    Initializing,
    /// Traffic can flow.
    Active,
    /// Any other.
    Other(u32),
}

/// The transport that a port speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// InfiniBand, or what is addressed like it.
    InfiniBand,
    /// RDMA over Converged Ethernet.
    RoCE,
    /// RDMA over TCP. Its queue pairs are connected by the connection manager only.
    IWarp,
}

/// A port of a device.
///
/// # Invariants
///
/// `number` is the number of a port of `device`.
#[derive(Clone, Copy)]
pub struct Port<'bound> {
    device: &'bound Device<'bound>,
    number: u32,
}

impl<'bound> Port<'bound> {
    /// The device of the port.
    pub fn device(&self) -> &'bound Device<'bound> {
        self.device
    }

    /// The number of the port, from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn query(&self, may_sleep: MaySleep<'_>) -> Result<bindings::ib_port_attr> {
        may_sleep.check("Port::query")?;
        let mut attr = bindings::ib_port_attr::default();
        // SAFETY: The device and the number are valid by the type invariants.
        to_result(unsafe {
            bindings::ib_query_port(self.device.as_raw(), self.number, &mut attr)
        })?;
        Ok(attr)
    }

    /// The state of the port now. Sleeps.
    ///
    /// C function: `ib_query_port()`.
    ///
    /// # Errors
    ///
    /// Those of the driver; `EDEADLK` where sleeping is not possible.
    pub fn state(&self, may_sleep: MaySleep<'_>) -> Result<PortState> {
        Ok(match self.query(may_sleep)?.state {
            bindings::ib_port_state_IB_PORT_DOWN => PortState::Down,
            bindings::ib_port_state_IB_PORT_INIT | bindings::ib_port_state_IB_PORT_ARMED => {
                PortState::Initializing
            }
            bindings::ib_port_state_IB_PORT_ACTIVE => PortState::Active,
            other => PortState::Other(other),
        })
    }

    /// The transport that the port speaks.
    pub fn protocol(&self) -> Protocol {
        // SAFETY: The device and the number are valid by the type invariants.
        unsafe {
            if bindings::rdma_protocol_iwarp(self.device.as_raw(), self.number) {
                Protocol::IWarp
            } else if bindings::rdma_protocol_roce(self.device.as_raw(), self.number) {
                Protocol::RoCE
            } else {
                Protocol::InfiniBand
            }
        }
    }

    /// The entry at `index` of the port's table of GIDs. May be called from any context in which a
    /// reader-writer lock may be taken.
    ///
    /// C function: `rdma_query_gid()`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is no such entry, `ENOENT` if it is empty.
    pub fn gid(&self, index: u8) -> Result<Gid> {
        let mut raw = bindings::ib_gid::default();
        // SAFETY: The device and the number are valid by the type invariants.
        to_result(unsafe {
            bindings::rdma_query_gid(self.device.as_raw(), self.number, index.into(), &mut raw)
        })?;
        // SAFETY: Every member of the union is plain bytes.
        Ok(Gid(unsafe { raw.raw }))
    }
}

impl Port<'_> {
    /// The first IPv4 address of the network interface behind the port, if it has one.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        let mut address = 0;
        // SAFETY: The device and the number are valid by the type invariants.
        unsafe { bindings::rdma_port_ipv4(self.device.as_raw(), self.number, &mut address) }
            .then(|| Ipv4Addr::from(address.to_ne_bytes()))
    }

    /// The Ethernet address behind the entry at `index` of the port's table of GIDs.
    ///
    /// C function: `rdma_read_gid_l2_fields()`.
    pub(crate) fn mac(&self, index: u8) -> Result<[u8; 6]> {
        // SAFETY: The device and the number are valid by the type invariants.
        let attr =
            unsafe { bindings::rdma_get_gid_attr(self.device.as_raw(), self.number, index.into()) };
        let attr = from_err_ptr(attr.cast_mut())?;
        let mut mac = [0; 6];
        // SAFETY: `attr` was just got, and is given back.
        let result = to_result(unsafe {
            bindings::rdma_read_gid_l2_fields(attr, core::ptr::null_mut(), mac.as_mut_ptr())
        });
        // SAFETY: As above.
        unsafe { bindings::rdma_put_gid_attr(attr) };
        result.map(|()| mac)
    }
}

/// A global identifier: the address of a port.
///
/// C type: `union ib_gid`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid([u8; 16]);

impl Gid {
    /// Whether no address is set.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether the address is an IPv4 address mapped into IPv6.
    pub fn is_ipv4_mapped(&self) -> bool {
        self.0
            .starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
    }

    pub(crate) fn into_raw(self) -> bindings::ib_gid {
        bindings::ib_gid { raw: self.0 }
    }
}

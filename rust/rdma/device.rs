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
    debugfs::Root,
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
    /// Not used any more when the window has ended.
    debugfs: NonNull<Root>,
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
    /// [`Register::close`] is called before that, and `debugfs` is valid until then.
    pub(crate) unsafe fn new(
        raw: NonNull<bindings::ib_device>,
        owner: &'static CStr,
        debugfs: NonNull<Root>,
    ) -> impl PinInit<Self, Error> {
        // INVARIANT: By the function's requirements.
        try_pin_init!(Self {
            raw,
            owner: CString::try_from(owner)?,
            debugfs,
            register <- Register::new(),
            _bound: PhantomData,
        })
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::ib_device {
        self.raw.as_ptr()
    }

    /// Whether mapping memory is a matter of hardware, so that caches have to be kept in step.
    ///
    /// C function: `ib_uses_virt_dma()`.
    pub(crate) fn needs_sync(&self) -> bool {
        // SAFETY: The device is valid.
        unsafe { !bindings::ib_uses_virt_dma(self.as_raw()) }
    }

    pub(crate) fn register(&self) -> &Register {
        &self.register
    }

    /// Where the client's directories in debugfs are.
    pub(crate) fn debugfs(&self) -> &Root {
        // SAFETY: It is valid until the register is closed, and only what is made before that needs it.
        unsafe { self.debugfs.as_ref() }
    }

    /// The name of the client, by which the RDMA core's resource tracking knows its objects.
    pub fn owner(&self) -> &CStr {
        &self.owner
    }

    fn attrs(&self) -> &bindings::ib_device_attr {
        // SAFETY: By the type invariant `raw` is valid; `attrs` is written before registration only.
        unsafe { &(*self.as_raw()).attrs }
    }

    /// The name of the device, such as `rxe0`. May be called from any context.
    ///
    /// A device may be renamed by its administrator at any time; the name is then as it was before,
    /// as it is after, or a mixture.
    ///
    /// C field: `ib_device.name`.
    pub fn name(&self) -> Name {
        // SAFETY: By the type invariant `raw` is valid.
        unsafe { Name::of(self.as_raw()) }
    }

    /// The version of the device's firmware, as the driver writes it; empty if there is none, as in
    /// rxe and siw. In process context.
    ///
    /// C function: `ib_get_device_fw_str()`.
    ///
    /// # Errors
    ///
    /// `EDEADLK` where sleeping is not possible: a driver may take a mutex.
    pub fn firmware(&self, may_sleep: MaySleep<'_>) -> Result<Text<32>> {
        may_sleep.check("Device::firmware")?;
        // The kernel takes for granted that this is enough.
        let mut text = Text([0; bindings::IB_FW_VERSION_NAME_MAX as usize]);
        // SAFETY: By the type invariant `raw` is valid; there is room for what a driver may write.
        unsafe { bindings::ib_get_device_fw_str(self.as_raw(), text.0.as_mut_ptr().cast()) };
        Ok(text)
    }

    /// The identifier that the device has for itself, in the manner of an EUI-64; zero if it has none.
    /// May be called from any context.
    ///
    /// C field: `ib_device.node_guid`.
    pub fn node_guid(&self) -> Guid {
        // SAFETY: By the type invariant `raw` is valid. A driver may write the field meanwhile, as a
        // whole.
        Guid(u64::from_be(unsafe {
            (&raw const (*self.as_raw()).node_guid).read_volatile()
        }))
    }

    /// The identifier of what the device is part of: the same for all devices of one adapter.
    /// May be called from any context.
    ///
    /// C field: `ib_device_attr.sys_image_guid`.
    pub fn sys_image_guid(&self) -> Guid {
        Guid(u64::from_be(self.attrs().sys_image_guid))
    }

    /// How many completion vectors the device has, zero for a device without any.
    ///
    /// C field: `ib_device.num_comp_vectors`.
    pub fn num_comp_vectors(&self) -> u32 {
        // SAFETY: By the type invariant `raw` is valid.
        u32::try_from(unsafe { (*self.as_raw()).num_comp_vectors }).unwrap_or(0)
    }

    /// How many ports the device has. They are numbered from 1. A switch, which has but one for
    /// itself, with the number 0, counts as having none.
    ///
    /// C field: `ib_device.phys_port_cnt`.
    pub fn num_ports(&self) -> u32 {
        // SAFETY: By the type invariant `raw` is valid; the fields don't change.
        unsafe {
            if (*self.as_raw()).is_switch() != 0 {
                0
            } else {
                (*self.as_raw()).phys_port_cnt
            }
        }
    }

    /// A port of the device. May be called from any context.
    ///
    /// ```
    /// # use kernel::prelude::*;
    /// use rdma::{context::MaySleep, device::{Device, PortState}};
    ///
    /// /// How many ports are up.
    /// fn active<'bound>(dev: &'bound Device<'bound>, may_sleep: MaySleep<'_>) -> Result<usize> {
    ///     let mut active = 0;
    ///     for number in 1..=dev.num_ports() {
    ///         if dev.port(number)?.state(may_sleep)? == PortState::Active {
    ///             active += 1;
    ///         }
    ///     }
    ///     Ok(active)
    /// }
    /// ```
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

macro_rules! attributes {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        /// What the driver says of the device. All of it stays as it is while the device is there, and
        /// may be asked for from any context.
        impl Device<'_> {
            $(
                $(#[$doc])*
                #[doc = concat!("\n\nC field: `ib_device_attr.", stringify!($name), "`.")]
                pub fn $name(&self) -> $type {
                    self.attrs().$name
                }
            )*
        }
    };
}

attributes! {
    /// The vendor, by its OUI, in the lower 24 bits; 0 if the driver does not say.
    vendor_id: u32,
    /// The vendor's number for the kind of device.
    vendor_part_id: u32,
    /// The vendor's number for the version of the hardware.
    hw_ver: u32,
    /// The most queue pairs that there can be on the device.
    max_qp: u32,
    /// The most work requests that one queue of a queue pair can hold.
    max_qp_wr: u32,
    /// The most pieces that the data of a send can be in.
    max_send_sge: u32,
    /// The most pieces that the buffer of a receive can be in.
    max_recv_sge: u32,
    /// The most pieces that the destination of an RDMA read can be in; 0 if the driver does not say.
    max_sge_rd: u32,
    /// The most RDMA reads and atomics of the other side that a queue pair answers at a time.
    max_qp_rd_atom: u32,
    /// The most RDMA reads and atomics that a queue pair has under way at a time.
    max_qp_init_rd_atom: u32,
    /// The most completion queues that there can be on the device.
    max_cq: u32,
    /// The most entries that one completion queue of the device can have.
    max_cqe: u32,
    /// The most protection domains that there can be on the device.
    max_pd: u32,
    /// The most memory regions that there can be on the device.
    max_mr: u32,
    /// The most bytes that one memory region can have.
    max_mr_size: u64,
    /// The page sizes that the device knows, each a power of two of bytes: a mask of them all.
    page_size_cap: u64,
    /// The most pages that a memory region for fast registration can have.
    max_fast_reg_page_list_len: u32,
    /// The most shared receive queues that there can be on the device; 0 if it knows none.
    max_srq: u32,
    /// The most work requests that a shared receive queue can hold.
    max_srq_wr: u32,
    /// The most pieces that the buffer of a receive in a shared receive queue can be in.
    max_srq_sge: u32,
}

impl fmt::Debug for Device<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .field("client", &self.owner)
            .field("vendor_id", &self.vendor_id())
            .field("vendor_part_id", &self.vendor_part_id())
            .field("hw_ver", &self.hw_ver())
            .field("node_guid", &self.node_guid())
            .field("num_ports", &self.num_ports())
            .field("num_comp_vectors", &self.num_comp_vectors())
            .field("max_cqe", &self.max_cqe())
            .field("max_qp_wr", &self.max_qp_wr())
            .finish_non_exhaustive()
    }
}

/// A short text that the kernel or a driver had, copied: of less than `N` bytes.
///
/// Where it isn't UTF-8 it is a question mark.
#[derive(Clone, Copy)]
pub struct Text<const N: usize>([u8; N]);

impl<const N: usize> Text<N> {
    /// # Safety
    ///
    /// `source` points to `N` bytes, which may be written meanwhile.
    unsafe fn copy(source: *const u8) -> Self {
        let mut bytes = [0; N];
        // The last byte stays zero.
        for (i, byte) in bytes.iter_mut().enumerate().take(N.saturating_sub(1)) {
            // SAFETY: By the function's requirements.
            *byte = unsafe { source.add(i).read_volatile() };
        }
        Self(bytes)
    }

    /// The text, up to its first zero byte, without blanks and newlines at its end.
    pub fn as_str(&self) -> &str {
        let text = self.0.split(|byte| *byte == 0).next().unwrap_or(&[]);
        core::str::from_utf8(text).unwrap_or("?").trim_end()
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.as_str().is_empty()
    }
}

impl<const N: usize> fmt::Display for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// The name of a device.
pub type Name = Text<64>;

impl Name {
    /// # Safety
    ///
    /// `device` is valid.
    pub(crate) unsafe fn of(device: *const bindings::ib_device) -> Self {
        // SAFETY: By the function's requirements; the field has 64 bytes.
        unsafe { Self::copy((&raw const (*device).name).cast()) }
    }
}

/// A globally unique identifier of a device, or of what it is part of.
///
/// Printed, it has the form that sysfs and `rdma dev show` have for it.
///
/// ```
/// use rdma::device::Guid;
///
/// assert_eq!(Guid::from(0x0002_c903_0012_3456).raw(), 0x0002_c903_0012_3456);
/// assert!(Guid::from(0).is_zero());
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Guid(u64);

impl Guid {
    /// As a number, in the byte order of this machine.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// Whether none is set.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

impl From<u64> for Guid {
    fn from(raw: u64) -> Self {
        Self(raw)
    }
}

/// Writes numbers of 16 bits as InfiniBand's identifiers are written.
fn write_words(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    for (i, byte) in bytes.iter().enumerate() {
        if i > 0 && i % 2 == 0 {
            f.write_str(":")?;
        }
        f.write_fmt(fmt!("{:02x}", *byte))?;
    }
    Ok(())
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_words(f, &self.0.to_be_bytes())
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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
    /// Any other, such as active but deferred (`IB_PORT_ACTIVE_DEFER`), by its number.
    Other(u32),
}

/// The transport that a port speaks.
///
/// C functions: `rdma_protocol_iwarp()`, `rdma_protocol_roce()`.
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

    /// How many entries the port's table of GIDs has, empty ones included.
    ///
    /// C field: `ib_port_immutable.gid_tbl_len`.
    pub fn num_gids(&self) -> u32 {
        // SAFETY: The device and the number are valid by the type invariants. The RDMA core has a
        // place for each port, which is written before registration only.
        let len = unsafe {
            let number = usize::try_from(self.number).unwrap_or(0);
            (*(*self.device.as_raw()).port_data.add(number))
                .immutable
                .gid_tbl_len
        };
        u32::try_from(len).unwrap_or(0)
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

    /// The transport that the port speaks. May be called from any context.
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
    /// The name of the network interface behind the port, such as `eth0`, if there is one: InfiniBand
    /// has none.
    ///
    /// An interface may be renamed by its administrator at any time; the name is then as it was before,
    /// as it is after, or a mixture.
    ///
    /// C function: `ib_device_get_netdev()`. The interface is let go of again before this returns.
    ///
    /// # Errors
    ///
    /// `EDEADLK` where sleeping is not possible.
    pub fn netdev_name(&self, may_sleep: MaySleep<'_>) -> Result<Option<NetdevName>> {
        may_sleep.check("Port::netdev_name")?;
        let mut name = Text([0; 16]);
        // SAFETY: The device and the number are valid by the type invariants; there is room for the
        // name of an interface.
        let found = unsafe {
            bindings::rdma_port_netdev_name(
                self.device.as_raw(),
                self.number,
                name.0.as_mut_ptr().cast(),
            )
        };
        Ok(found.then_some(name))
    }

    /// The first IPv4 address of the network interface behind the port, if it has one.
    ///
    /// C function: `ib_device_get_netdev()`.
    ///
    /// # Errors
    ///
    /// `EDEADLK` where sleeping is not possible.
    pub fn ipv4(&self, may_sleep: MaySleep<'_>) -> Result<Option<Ipv4Addr>> {
        may_sleep.check("Port::ipv4")?;
        let mut address = 0;
        // SAFETY: The device and the number are valid by the type invariants.
        let found =
            unsafe { bindings::rdma_port_ipv4(self.device.as_raw(), self.number, &mut address) };
        Ok(found.then(|| Ipv4Addr::from(address.to_ne_bytes())))
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

impl PartialEq for Port<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.device.as_raw() == other.device.as_raw() && self.number == other.number
    }
}

impl Eq for Port<'_> {}

impl fmt::Debug for Port<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("device", &self.device.name())
            .field("number", &self.number)
            .finish()
    }
}

/// The name of a network interface.
pub type NetdevName = Text<16>;

/// A global identifier: the address of a port.
///
/// Printed, it has the form that sysfs has for it: as an IPv6 address, with no zero left out.
///
/// ```
/// use rdma::device::Gid;
///
/// let mapped = Gid::from([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
/// assert!(mapped.is_ipv4_mapped());
/// assert!(!mapped.is_zero());
/// assert_eq!(mapped.octets()[12..], [10, 0, 0, 1]);
/// ```
///
/// C type: `union ib_gid`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Gid([u8; 16]);

impl Gid {
    /// Its bytes, in the order of the wire.
    pub fn octets(&self) -> [u8; 16] {
        self.0
    }

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

impl From<[u8; 16]> for Gid {
    fn from(octets: [u8; 16]) -> Self {
        Self(octets)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_words(f, &self.0)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

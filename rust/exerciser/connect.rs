// SPDX-License-Identifier: GPL-2.0

//! How queue pairs on a device find to each other.

#![forbid(unsafe_code)]

use core::net::{
    Ipv4Addr,
    SocketAddrV4, //
};
use kernel::prelude::*;
use rdma::{
    cm::{
        Connecting,
        Connection,
        Listener, //
    },
    context::{
        MaySleep,
        MayWait, //
    },
    device::{
        Device,
        Port,
        PortState,
        Protocol, //
    },
    qp::{
        Handler,
        QueuePair, //
    }, //
};

/// A port, and how queue pairs on it are connected.
#[derive(Clone, Copy)]
pub(crate) struct Path<'bound> {
    pub(crate) port: Port<'bound>,
    way: Way,
}

impl<'bound> Path<'bound> {
    /// One through which traffic can flow now, if there is.
    pub(crate) fn find(
        dev: &'bound Device<'bound>,
        may_sleep: MaySleep<'_>,
    ) -> Result<Option<Self>> {
        for number in 1..=dev.num_ports() {
            let port = dev.port(number)?;
            if port.state(may_sleep)? != PortState::Active {
                continue;
            }
            let way = match port.protocol() {
                Protocol::IWarp => port.ipv4(may_sleep)?.map(Way::Manager),
                _ => usable_gid(&port).map(Way::Direct),
            };
            if let Some(way) = way {
                return Ok(Some(Self { port, way }));
            }
        }
        Ok(None)
    }

    /// Whether a message may find no receive and wait for one. On iWARP it ends the connection.
    pub(crate) fn waits_for_receives(&self) -> bool {
        self.port.protocol() != Protocol::IWarp
    }
}

/// How queue pairs are connected.
#[derive(Clone, Copy)]
enum Way {
    /// By telling each what it has to know of the other; from an entry of the port's table of
    /// addresses.
    Direct(u8),
    /// By the connection manager, at an address of the port.
    Manager(Ipv4Addr),
}

/// Connects queue pairs.
pub(crate) enum Connector<'bound> {
    Direct(u8),
    Manager(Listener<'bound>),
}

/// How long a step of connecting by the connection manager may take.
const CONNECT_MS: u32 = 10_000;

impl<'bound> Connector<'bound> {
    pub(crate) fn new(path: Path<'bound>, may_sleep: MaySleep<'_>) -> Result<Self> {
        Ok(match path.way {
            Way::Direct(gid_index) => Self::Direct(gid_index),
            Way::Manager(ip) => {
                let any_port = SocketAddrV4::new(ip, 0);
                Self::Manager(Listener::new(path.port.device(), any_port, 1, may_sleep)?)
            }
        })
    }

    /// Connects two queue pairs to each other. Returns what keeps them connected, if anything.
    pub(crate) fn connect<H: Handler<'bound>>(
        &self,
        sender: &QueuePair<'bound, H>,
        receiver: &QueuePair<'bound, H>,
        may_wait: MayWait<'_>,
    ) -> Result<impl Iterator<Item = Connection<'bound>>> {
        let connections = match self {
            Self::Direct(gid_index) => {
                let may_sleep = may_wait.may_sleep();
                let a = sender.endpoint(*gid_index, may_sleep)?;
                let b = receiver.endpoint(*gid_index, may_sleep)?;
                receiver.connect(&a, *gid_index, may_sleep)?;
                sender.connect(&b, *gid_index, may_sleep)?;
                [None, None]
            }
            Self::Manager(listener) => {
                let to = listener.address()?;
                let connecting = Connecting::new(sender, to, CONNECT_MS, may_wait)?;
                let request = listener.accept(CONNECT_MS, may_wait)?;
                let accepted = request.accept(receiver, may_wait)?;
                let connected = connecting.finish(CONNECT_MS, may_wait)?;
                [
                    Some(connected),
                    Some(accepted.finish(CONNECT_MS, may_wait)?),
                ]
            }
        };
        Ok(connections.into_iter().flatten())
    }
}

/// The entry of the port's table of addresses to use: an IPv4 address if there is one, since it is
/// routed wherever the network is set up, else the first.
fn usable_gid(port: &Port<'_>) -> Option<u8> {
    let mut first = None;
    for index in 0..=u8::MAX {
        match port.gid(index) {
            Ok(gid) if gid.is_ipv4_mapped() => return Some(index),
            Ok(gid) if !gid.is_zero() => first = first.or(Some(index)),
            _ => (),
        }
    }
    first
}

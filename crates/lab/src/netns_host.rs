// SPDX-License-Identifier: Apache-2.0
//! A host among other hosts: a network namespace with one bridge, in which daemons and labs run.
//! Cables between the bridges of two hosts put all their guests into one subnet, as behind one
//! switch.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::holder::{Holder, in_netns};
use crate::spec::{BridgeSpec, DEFAULT_BRIDGE, Spec, Vmm};
use viola_netdev::{add_veth, device};

/// Prefix length of the common subnet.
const PREFIX: u8 = 24;

/// One host. The kernel removes its network when the last process in it ends.
pub struct NetnsHost {
    name: String,
    address: Ipv4Addr,
    holder: Holder,
    cables: AtomicUsize,
}

impl NetnsHost {
    /// Creates a host whose bridge `br0` has this address of a /24 subnet. Needs root.
    ///
    /// # Errors
    /// [`Error::Net`].
    pub fn new(name: &str, address: Ipv4Addr) -> Result<Self> {
        let spec = Spec {
            name: name.to_owned(),
            guests: Vec::new(),
            bridges: vec![BridgeSpec {
                name: DEFAULT_BRIDGE.into(),
                address,
                prefix: PREFIX,
            }],
            vmm: Vmm::default(),
        };
        Ok(Self {
            name: name.to_owned(),
            address,
            holder: Holder::start(&spec, None)?,
            cables: AtomicUsize::new(0),
        })
    }

    /// Connects two hosts by a cable.
    ///
    /// # Errors
    /// [`Error::Net`].
    pub fn connect(&self, other: &Self) -> Result<()> {
        let (here, there) = (self.next_port(), other.next_port());
        let failed = |what: &str| {
            Error::net(format!(
                "{what} a cable from {} to {}",
                self.name, other.name
            ))
        };
        let far = other.netns();
        self.in_netns(|| add_veth(&here, &there, Some(far)))?
            .map_err(failed("creating"))?;
        for (host, port) in [(self, here), (other, there)] {
            host.in_netns(|| {
                device::add_port(DEFAULT_BRIDGE, &port)?;
                device::up(&port)
            })?
            .map_err(failed("plugging in"))?;
        }
        Ok(())
    }

    fn next_port(&self) -> String {
        format!("cable{}", self.cables.fetch_add(1, Ordering::Relaxed))
    }

    /// Address of its bridge.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its network namespace.
    pub fn netns(&self) -> BorrowedFd<'_> {
        self.holder.netns().as_fd()
    }

    /// Runs `job` on a fresh thread inside the namespace; processes that it starts are inside too.
    ///
    /// # Errors
    /// [`Error::Net`] if the thread cannot enter the namespace.
    pub fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T> {
        in_netns(self.holder.netns(), job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn only_connected_hosts_reach_each_other() {
        let host =
            |n: u8| NetnsHost::new(&format!("host{n}"), Ipv4Addr::new(10, 99, 0, n)).unwrap();
        let (a, b, c) = (host(1), host(2), host(3));
        a.connect(&b).unwrap();
        let listener = b
            .in_netns(|| TcpListener::bind((b.address(), 7000)).unwrap())
            .unwrap();
        let call = |from: &NetnsHost, seconds| {
            from.in_netns(|| {
                let to = (b.address(), 7000).into();
                TcpStream::connect_timeout(&to, Duration::from_secs(seconds))
            })
            .unwrap()
        };
        let mut near = call(&a, 30).unwrap();
        near.write_all(b"hello").unwrap();
        let mut word = [0; 5];
        listener.accept().unwrap().0.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"hello");
        assert!(call(&c, 2).is_err());
    }
}

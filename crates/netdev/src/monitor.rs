// SPDX-License-Identifier: Apache-2.0
//! A socket that tells when an interface changes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

/// Multicast group of interface messages (`RTMGRP_LINK`).
const RTMGRP_LINK: u32 = 1;

/// A socket that is readable when an interface of the calling thread's network namespace was added,
/// removed or changed.
#[derive(Debug)]
pub struct LinkMonitor(OwnedFd);

impl LinkMonitor {
    /// Subscribes to interface messages.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // protocol `None` is number 0, NETLINK_ROUTE
        let socket =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, RTMGRP_LINK))?;
        Ok(Self(socket))
    }

    /// Reads all waiting messages. Returns whether there were any.
    pub fn drain(&self) -> bool {
        let mut any = false;
        loop {
            match rustix::net::recv(&self.0, &mut [0; 8192], RecvFlags::empty()) {
                Err(rustix::io::Errno::AGAIN) => return any,
                Err(rustix::io::Errno::INTR) => {}
                // the kernel dropped messages: there were some
                Err(rustix::io::Errno::NOBUFS) => any = true,
                Ok(_) => any = true,
                Err(_) => return any,
            }
        }
    }
}

impl AsFd for LinkMonitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::tests::in_new_netns;
    use crate::{add_veth, link, set_alias, set_up};

    #[test]
    fn a_monitor_reports_new_and_changed_interfaces() {
        in_new_netns(|_| {
            let monitor = LinkMonitor::open().unwrap();
            assert!(!monitor.drain());
            add_veth("a0", "b0", None).unwrap();
            assert!(monitor.drain());
            let a = link("a0").unwrap();
            set_alias(a.index, "a word").unwrap();
            monitor.drain();
            set_up(a.index, true).unwrap();
            assert!(monitor.drain());
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What the kernel says about devices and CPUs that come and go.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fd::OwnedFd;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

/// The kernel's own group; udev's words are in another one.
const KERNEL: u32 = 1;

/// Kinds of devices that a plan depends on.
const SUBSYSTEMS: [&str; 7] = ["net", "cpu", "block", "pci", "virtio", "nvme", "queues"];

/// A socket that is readable when there is news.
pub struct Uevents(OwnedFd);

impl Uevents {
    /// Begins to listen.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::DGRAM;
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
        Ok(Self(socket))
    }

    /// Takes all that has been said; whether it matters here.
    pub fn take(&self) -> bool {
        let mut matters = false;
        loop {
            let mut message = [0; 8192];
            match recvfrom(&self.0, &mut message, RecvFlags::empty()) {
                Ok((count, _, from)) => {
                    let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    // anybody of this VM could send; port 0 is the kernel's
                    if from.is_some_and(|from| from.pid() == 0) {
                        matters |= is_news(&message[..count]);
                    }
                }
                // something was lost
                Err(rustix::io::Errno::NOBUFS) => matters = true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return matters,
            }
        }
    }
}

impl AsFd for Uevents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `add@/devices/...`, then words `KEY=VALUE`, each ended by a zero byte.
fn is_news(message: &[u8]) -> bool {
    message
        .split(|byte| *byte == 0)
        .filter_map(|word| word.strip_prefix(b"SUBSYSTEM="))
        .any(|word| SUBSYSTEMS.iter().any(|name| name.as_bytes() == word))
}

#[cfg(test)]
mod tests {
    use super::is_news;

    #[test]
    fn news_is_of_devices_that_a_plan_depends_on() {
        let says = |text: &str| is_news(text.replace(' ', "\0").as_bytes());
        assert!(says(
            "online@/devices/system/cpu/cpu1 ACTION=online SUBSYSTEM=cpu SEQNUM=9 "
        ));
        assert!(says(
            "add@/devices/x ACTION=add SUBSYSTEM=net INTERFACE=eth1"
        ));
        assert!(!says("change@/devices/y ACTION=change SUBSYSTEM=thermal"));
        assert!(!says(""));
    }
}

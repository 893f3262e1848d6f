// SPDX-License-Identifier: Apache-2.0
//! Kernel uevents of devices and CPUs that come and go.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fd::OwnedFd;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

/// The kernel's multicast group; udev's messages are in another one.
const KERNEL_GROUP: u32 = 1;

/// Subsystems that a plan depends on.
const SUBSYSTEMS: [&str; 7] = ["net", "cpu", "block", "pci", "virtio", "nvme", "queues"];

/// A netlink socket that is readable when an event has arrived.
pub struct Uevents(OwnedFd);

/// What the events are about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceEvents {
    /// A subsystem that a plan depends on.
    pub relevant: bool,
    /// CPUs; one that went may be back by now.
    pub cpus: bool,
}

impl DeviceEvents {
    fn add(&mut self, more: Self) {
        self.relevant |= more.relevant;
        self.cpus |= more.cpus;
    }
}

impl Uevents {
    /// Opens the socket.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::DGRAM;
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        Ok(Self(socket))
    }

    /// Reads all events that have arrived.
    pub fn drain(&self) -> DeviceEvents {
        let mut all = DeviceEvents::default();
        loop {
            let mut message = [0; 8192];
            match recvfrom(&self.0, &mut message, RecvFlags::empty()) {
                Ok((count, _, from)) => {
                    let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    // any process could send; port 0 is the kernel's
                    if from.is_some_and(|from| from.pid() == 0) {
                        all.add(parse_event(&message[..count]));
                    }
                }
                // events were lost
                Err(rustix::io::Errno::NOBUFS) => {
                    all = DeviceEvents {
                        relevant: true,
                        cpus: true,
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return all,
            }
        }
    }
}

impl AsFd for Uevents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Parses one event: `add@/devices/...`, then `KEY=VALUE` words, each ended by a zero byte.
fn parse_event(message: &[u8]) -> DeviceEvents {
    let mut all = DeviceEvents::default();
    let words = message.split(|byte| *byte == 0);
    for subsystem in words.filter_map(|word| word.strip_prefix(b"SUBSYSTEM=")) {
        all.add(DeviceEvents {
            relevant: SUBSYSTEMS.iter().any(|name| name.as_bytes() == subsystem),
            cpus: subsystem == b"cpu",
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::{DeviceEvents, parse_event};

    #[test]
    fn only_subsystems_of_a_plan_are_relevant() {
        let says = |text: &str| parse_event(text.replace(' ', "\0").as_bytes());
        let of = |relevant, cpus| DeviceEvents { relevant, cpus };
        let cpu = "online@/devices/system/cpu/cpu1 ACTION=online SUBSYSTEM=cpu SEQNUM=9 ";
        assert_eq!(says(cpu), of(true, true));
        let nic = "add@/devices/x ACTION=add SUBSYSTEM=net INTERFACE=eth1";
        assert_eq!(says(nic), of(true, false));
        let other = "change@/devices/y ACTION=change SUBSYSTEM=thermal";
        assert_eq!(says(other), DeviceEvents::default());
        assert_eq!(says(""), DeviceEvents::default());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What a process can send that has a VM's network namespace on the host, as a worker has it: packets that were held
//! reach this VM and its connections, and nothing else reaches anybody.
#![allow(clippy::unwrap_used)]

mod tenant;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use tenant::{CLIENT, Tenant};
use viola_netdev::{Netns, device};
use viola_vpipe::Steering;

/// Address of the VM's NIC in [`Tenant`].
const GUEST: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
/// How long a frame may take.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for a frame that must not come.
const ABSENCE: Duration = Duration::from_millis(300);

/// A socket for whole frames at an interface of the calling thread's namespace.
struct Frames(OwnedFd);

impl Frames {
    fn open(interface: &str) -> Self {
        let index = device::index(interface).unwrap();
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: numbers only.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        assert!(fd >= 0);
        // SAFETY: a new descriptor that nobody else owns.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let address = address(index, libc::ETH_P_ALL as u16);
        // SAFETY: the pointer is valid for the structure's size.
        let bound = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as u32,
            )
        };
        assert_eq!(bound, 0);
        Self(socket)
    }

    /// Sends a frame out of an interface.
    fn send(&self, interface: u32, frame: &[u8]) -> io::Result<()> {
        let address = address(interface, 0x0800);
        // SAFETY: both pointers are valid for their sizes.
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const address).cast(),
                size_of_val(&address) as u32,
            )
        };
        match sent {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether a frame that ends in `mark` arrives within `time`.
    fn receives(&self, mark: &[u8], time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut frame = [0; 2048];
        while Instant::now() < end {
            match rustix::io::read(&self.0, &mut frame) {
                Ok(length) if frame[..length].ends_with(mark) => return true,
                Ok(_) => {}
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        false
    }
}

fn address(interface: u32, protocol: u16) -> libc::sockaddr_ll {
    // SAFETY: all zeros is a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = interface as i32;
    address
}

/// An IPv4 packet with 20 bytes of TCP or UDP header and `mark` as its data; its checksums are zero.
fn frame(to: [u8; 6], from: [u8; 6], protocol: u8, ends: [[u8; 4]; 2], mark: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from, &[8, 0]].concat();
    let length = (40 + mark.len()) as u16;
    frame.extend([0x45, 0]);
    frame.extend(length.to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
    frame.extend(ends.concat());
    frame.extend([
        0x1f, 0x90, 0x1f, 0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 1, 0, 0, 0, 0, 0,
    ]);
    frame.extend(mark);
    frame
}

const TCP: u8 = 6;
const UDP: u8 = 17;
const VM: [u8; 4] = [10, 66, 0, 2];
const PEER: [u8; 4] = [10, 66, 0, 3];

#[test]
fn frames_of_a_worker_reach_its_own_vm_only() {
    let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
    let tenant = Tenant::new(&host, &steering, "5");
    let at_client = tenant.client.run(|| Frames::open("eth0")).unwrap();
    let at_guest = tenant.guest.run(|| Frames::open("eth0")).unwrap();
    let netns = tenant.vm_netns.netns();
    let (hold, vm, hold_index, vm_index) = netns
        .run(|| {
            (
                Frames::open("hold"),
                Frames::open("vm"),
                device::index("hold").unwrap(),
                device::index("vm").unwrap(),
            )
        })
        .unwrap();

    // What was held for the VM reaches it.
    let held = frame(GUEST, CLIENT, TCP, [PEER, VM], b"held for the VM");
    hold.send(hold_index, &held).unwrap();
    assert!(at_guest.receives(b"held for the VM", ARRIVAL_TIMEOUT));

    // It reaches no other machine of the bridge, whatever addresses it has; nor does another protocol.
    let outwards = frame(CLIENT, GUEST, TCP, [VM, PEER], b"forged");
    let datagram = frame(CLIENT, GUEST, UDP, [VM, PEER], b"forged");
    for forged in [&outwards, &datagram] {
        hold.send(hold_index, forged).unwrap();
        vm.send(vm_index, forged).unwrap();
    }
    assert!(!at_client.receives(b"forged", ABSENCE));

    // The host's interfaces do not exist here.
    let host_interfaces = [
        tenant.vm_netns.veth(),
        tenant.vm_netns.hold_veth(),
        tenant.tap,
    ];
    for interface in host_interfaces {
        if ![hold_index, vm_index].contains(&interface) {
            let refused = hold.send(interface, &outwards).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENXIO), "{interface}");
        }
    }
    assert!(!at_client.receives(b"forged", ABSENCE));
}

// SPDX-License-Identifier: Apache-2.0
//! TUN and TAP devices (kernel Documentation/networking/tuntap).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Longest packet, including `struct virtio_net_hdr` in front of it.
pub(crate) const MAX_PACKET_BYTES: usize = 10 + (64 << 10);

/// A device for IP packets. Dropping it removes the device.
pub(crate) struct Tun(File);

impl Tun {
    /// Creates a device in the calling thread's network namespace. Large segments pass whole and
    /// without checksums, as between two network namespaces: packets of one device can be written
    /// to another one unchanged.
    pub(crate) fn new(name: &str) -> io::Result<Self> {
        let file = open(name, libc::IFF_TUN | libc::IFF_VNET_HDR)?;
        let whole = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        // SAFETY: the request takes a number, and no memory.
        let set = unsafe {
            libc::ioctl(
                file.as_raw_fd(),
                libc::TUNSETOFFLOAD as _,
                libc::c_ulong::from(whole),
            )
        };
        match set {
            0 => Ok(Self(file)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Reads the next packet; `None` if none is waiting.
    pub(crate) fn read(&self, data: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.0).read(data) {
            Ok(length) => Ok(Some(length)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Passes a packet to the kernel. Returns whether the kernel took it.
    pub(crate) fn write(&self, packet: &[u8]) -> bool {
        (&self.0).write(packet).is_ok()
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Creates a TAP device for a VM in the calling thread's network namespace. It stays until the namespace goes.
pub(crate) fn add_tap(name: &str) -> io::Result<()> {
    let file = open(name, libc::IFF_TAP | libc::IFF_VNET_HDR)?;
    // SAFETY: the request takes a number, and no memory.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETPERSIST as _, 1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens a device of this name and these flags, which is made if it does not exist.
fn open(name: &str, flags: libc::c_int) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: all zeros is an empty request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (flags | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request lives through the call, and its name ends with a zero.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

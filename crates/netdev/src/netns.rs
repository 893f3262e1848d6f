// SPDX-License-Identifier: Apache-2.0
//! Network namespaces of a program's own.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// A network namespace. The kernel removes it with the last of its descriptors, sockets and
/// threads.
#[derive(Debug)]
pub struct Netns(OwnedFd);

impl Netns {
    /// Creates an empty namespace. Needs CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> io::Result<Self> {
        on_a_thread(|| {
            // SAFETY: only this thread, which ends here, gets another network namespace; it
            // unshares no descriptors.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            let netns = std::fs::File::open("/proc/thread-self/ns/net")?;
            Ok(Self(netns.into()))
        })
    }

    /// Runs `work` on a fresh thread inside the namespace.
    ///
    /// # Errors
    /// The kernel's, if the thread cannot enter the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        in_netns(self.0.as_fd(), work)
    }

    /// Opens a TCP socket in the namespace, for an address of this family.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tcp_socket(&self, address: IpAddr) -> io::Result<OwnedFd> {
        self.run(|| tcp_socket(address))?
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Opens a TCP socket in the calling thread's namespace, for an address of this family.
///
/// # Errors
/// The kernel's.
pub fn tcp_socket(address: IpAddr) -> io::Result<OwnedFd> {
    let family = match address {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Runs `work` on a fresh thread inside a network namespace.
///
/// # Errors
/// The kernel's, if the thread cannot enter the namespace.
pub fn in_netns<T: Send>(netns: BorrowedFd<'_>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_a_thread(|| {
        move_into_link_name_space(netns, Some(LinkNameSpaceType::Network))?;
        Ok(work())
    })
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

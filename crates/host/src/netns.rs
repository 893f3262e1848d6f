// SPDX-License-Identifier: Apache-2.0
//! Resolves interfaces in the network namespace of a VM's process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::proc;
use crate::thread::Tid;
use crate::vm::{Nic, NicKind};

/// A NIC as the hypervisor's arguments and descriptors describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConfiguredNic {
    pub(crate) interface: Interface,
    pub(crate) kind: NicKind,
    pub(crate) mac: Option<String>,
}

/// An interface, by name or by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Interface {
    Name(String),
    Index(u32),
}

/// Completes names and numbers by asking the kernel inside the namespace of `pid`. An interface that cannot be resolved
/// stays as it was found; one that was known only by number is left out.
pub(crate) fn resolve(pid: Tid, found: &[ConfiguredNic]) -> Vec<Nic> {
    if found.is_empty() {
        return Vec::new();
    }
    let Ok(Some(netns)) = proc::netns(pid) else {
        return Vec::new();
    };
    let names = within(pid, netns, || names_and_numbers(found)).unwrap_or_default();
    found
        .iter()
        .enumerate()
        .filter_map(|(i, nic)| {
            let asked = names.get(i).cloned().flatten();
            let (tap, ifindex) = match (asked, &nic.interface) {
                (Some((name, index)), _) => (name, Some(index)),
                (None, Interface::Name(name)) => (name.clone(), None),
                (None, Interface::Index(_)) => return None,
            };
            let (kind, mac) = (nic.kind, nic.mac.clone());
            Some(Nic {
                tap,
                kind,
                mac,
                netns,
                ifindex,
            })
        })
        .collect()
}

fn names_and_numbers(found: &[ConfiguredNic]) -> io::Result<Vec<Option<(String, u32)>>> {
    let fd: OwnedFd = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    Ok(found
        .iter()
        .map(|nic| match &nic.interface {
            Interface::Name(name) => {
                let index = netdevice::name_to_index(fd.as_fd(), name).ok()?;
                Some((name.clone(), index))
            }
            Interface::Index(index) => {
                let name = netdevice::index_to_name(fd.as_fd(), *index).ok()?;
                Some((name, *index))
            }
        })
        .collect())
}

/// Runs `f` in the network namespace of `pid`: in this thread when the namespace is its own, else in a short-lived
/// thread, so that no other thread changes its namespace.
pub(crate) fn within<T: Send>(
    pid: Tid,
    netns: u64,
    f: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    if proc::netns(std::process::id()).ok().flatten() == Some(netns) {
        return f();
    }
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    std::thread::scope(|scope| {
        scope
            .spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                f()
            })
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread for the namespace failed")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_the_own_namespace_are_resolved() {
        let found = |interface| ConfiguredNic {
            interface,
            kind: NicKind::Tap,
            mac: None,
        };
        let me = std::process::id();
        let nics = resolve(
            me,
            &[
                found(Interface::Name("lo".into())),
                found(Interface::Index(1)),
                found(Interface::Name("no-such-tap".into())),
                found(Interface::Index(0x7fff_0000)),
            ],
        );
        let seen: Vec<_> = nics.iter().map(|n| (n.tap.as_str(), n.ifindex)).collect();
        assert_eq!(
            seen,
            [("lo", Some(1)), ("lo", Some(1)), ("no-such-tap", None)]
        );
        assert_eq!(Some(nics[0].netns), proc::netns(me).unwrap());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Which of the interfaces that a VM's command line names its process holds. A name alone would let a VM pass for the owner
//! of another VM's tap.

use crate::error::HostError;
use crate::proc::packet_sockets::packet_interfaces;
use crate::proc::{self, TapFd};
use crate::thread::Tid;
use crate::vm::{Nic, NicKind};

/// The descriptors by which a process holds interfaces.
#[derive(Debug, Default)]
pub(crate) struct HeldNics {
    taps: Vec<TapFd>,
    /// Interfaces of packet sockets, by number.
    packets: Vec<u32>,
}

impl HeldNics {
    /// Reads the descriptors of a process that concern these NICs.
    pub(crate) fn read(pid: Tid, nics: &[Nic]) -> Result<Self, HostError> {
        let has = |raw: bool| nics.iter().any(|n| (n.kind == NicKind::Raw) == raw);
        Ok(Self {
            taps: match has(false) {
                true => proc::taps(pid)?,
                false => Vec::new(),
            },
            packets: match has(true) {
                true => packet_interfaces(pid)?,
                false => Vec::new(),
            },
        })
    }

    /// Whether the process holds the NIC's interface.
    pub(crate) fn has(&self, nic: &Nic) -> bool {
        match nic.kind {
            NicKind::Raw => nic.ifindex.is_some_and(|i| self.packets.contains(&i)),
            NicKind::Tap | NicKind::Macvtap => self.taps.iter().any(|tap| match tap {
                TapFd::Tap { name, .. } => nic.kind == NicKind::Tap && *name == nic.tap,
                TapFd::Macvtap { ifindex, .. } => {
                    nic.kind == NicKind::Macvtap && nic.ifindex == Some(*ifindex)
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(tap: &str, kind: NicKind, ifindex: u32) -> Nic {
        Nic {
            tap: tap.into(),
            kind,
            mac: None,
            netns: 1,
            ifindex: Some(ifindex),
        }
    }

    #[test]
    fn an_interface_counts_only_with_a_descriptor_of_its_kind() {
        let held = HeldNics {
            taps: vec![
                TapFd::Tap {
                    fd: 3,
                    name: "vnet3".into(),
                },
                TapFd::Macvtap { fd: 4, ifindex: 12 },
            ],
            packets: vec![7],
        };
        for yes in [
            nic("vnet3", NicKind::Tap, 5),
            nic("macvtap0", NicKind::Macvtap, 12),
            nic("nic0", NicKind::Raw, 7),
        ] {
            assert!(held.has(&yes), "{yes:?}");
        }
        for no in [
            nic("vnet4", NicKind::Tap, 12),
            nic("vnet3", NicKind::Raw, 5),
            nic("vnet3", NicKind::Macvtap, 7),
        ] {
            assert!(!held.has(&no), "{no:?}");
        }
        let me = std::process::id();
        let nics = [nic("vnet3", NicKind::Tap, 5), nic("lo", NicKind::Raw, 1)];
        let held = HeldNics::read(me, &nics).unwrap();
        assert!(!nics.iter().any(|n| held.has(n)));
    }
}

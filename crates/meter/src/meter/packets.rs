// SPDX-License-Identifier: Apache-2.0
//! The NICs whose packets the accounting program sees: those of all followed VMs that are host interfaces.

use std::collections::BTreeMap;

use viola_host::{Nic, NicKind, VmId};

use super::Meter;
use super::groups::TimeSource;
use crate::acct::{AcctError, GuestPackets, MAX_NICS};

/// An interface: index and network namespace.
type NicKey = (u32, u32);

/// Index of the VM, its core if a controller is told of packets, and which packets go to the VM.
type Owner = (u32, Option<u32>, GuestPackets);

/// The interfaces that the accounting program watches.
#[derive(Debug, Default)]
pub(super) struct WatchedNics {
    nics: BTreeMap<NicKey, Owner>,
    /// The core of each VM whose controller is told of packets.
    controllers: BTreeMap<VmId, u32>,
    /// Why the program refused an interface.
    refusal: Option<String>,
}

/// Why the packets of a VM are not seen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unseen {
    /// Times are sampled.
    #[error("without BPF viola cannot see packets")]
    Sampled,
    /// The VM has no NIC that is an interface of the host.
    #[error("the VM has no NIC on the host")]
    NoNic,
    /// The kernel's tracepoints do not show macvtap.
    #[error("the kernel does not show packets of macvtap interfaces")]
    Macvtap,
    /// The interface is missing, or in a network namespace that viola may not enter.
    #[error("the VM's interfaces were not found")]
    NotFound,
    /// The accounting program does not take the interface.
    #[error("the accounting program does not see packets: {0}")]
    Refused(String),
}

/// What the accounting program needs to know of a NIC.
fn seen(nic: &Nic) -> Result<(NicKey, GuestPackets), Unseen> {
    let to_guest = match nic.kind {
        NicKind::Tap => GuestPackets::Transmitted,
        NicKind::Raw => GuestPackets::Received,
        NicKind::Macvtap => return Err(Unseen::Macvtap),
    };
    let ifindex = nic.ifindex.ok_or(Unseen::NotFound)?;
    Ok(((ifindex, nic.netns as u32), to_guest))
}

impl Meter {
    /// Reports packets for exactly these VMs, each to the controller of the core on which the VM takes interrupts. Returns the
    /// VMs that this works for: those whose NICs are all host interfaces whose packets the kernel shows (no macvtap).
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn watch_packets(&mut self, cores: &[(VmId, u32)]) -> Result<Vec<VmId>, AcctError> {
        if matches!(self.source, TimeSource::SchedStat) {
            return Ok(Vec::new());
        }
        let sees_all = |id: &VmId| {
            let mut followed = self.followed.iter();
            let vm = followed.find(|vm| vm.id == *id);
            vm.is_some_and(|vm| !vm.nics.is_empty() && vm.nics.iter().all(|n| seen(n).is_ok()))
        };
        let served = cores.iter().filter(|(id, _)| sees_all(id));
        self.nics.controllers = served.cloned().collect();
        self.try_watch_nics()?;
        let served = cores.iter().map(|(id, _)| id.clone());
        Ok(served
            .filter(|id| self.nics.controllers.contains_key(id))
            .collect())
    }

    /// Has the accounting program watch the NICs of all followed VMs. If it refuses, the VMs have no
    /// packet delays; all other figures stay.
    pub(super) fn watch_nics(&mut self) {
        self.nics.refusal = self.try_watch_nics().err().map(|e| e.to_string());
    }

    fn try_watch_nics(&mut self) -> Result<(), AcctError> {
        let TimeSource::Acct(acct) = &mut self.source else {
            return Ok(());
        };
        let mut wanted: BTreeMap<NicKey, Owner> = BTreeMap::new();
        for vm in &self.followed {
            let Some(t) = self.vms.get(&vm.id) else {
                continue;
            };
            let cpu = self.nics.controllers.get(&vm.id).copied();
            for (key, to_guest) in vm.nics.iter().filter_map(|nic| seen(nic).ok()) {
                if wanted.len() < MAX_NICS {
                    wanted.insert(key, (t.index, cpu, to_guest));
                }
            }
        }
        let watched = &mut self.nics.nics;
        let gone: Vec<NicKey> = watched
            .keys()
            .filter(|key| !wanted.contains_key(*key))
            .copied()
            .collect();
        for (ifindex, netns) in gone {
            acct.unwatch_nic(ifindex, netns)?;
            watched.remove(&(ifindex, netns));
        }
        for (key, owner) in wanted {
            if watched.get(&key) != Some(&owner) {
                let (vm, cpu, to_guest) = owner;
                acct.watch_nic(key.0, key.1, to_guest, vm, cpu)?;
                watched.insert(key, owner);
            }
        }
        Ok(())
    }

    /// Why no packet of a VM is seen; `None` when packets of at least one of its NICs are.
    pub fn unseen(&self, id: &VmId) -> Option<Unseen> {
        if matches!(self.source, TimeSource::SchedStat) {
            return Some(Unseen::Sampled);
        }
        let mut followed = self.followed.iter();
        let Some(vm) = followed.find(|vm| vm.id == *id) else {
            return Some(Unseen::NotFound);
        };
        let mut why = Unseen::NoNic;
        for nic in &vm.nics {
            match seen(nic) {
                Ok((key, _)) if self.nics.nics.contains_key(&key) => return None,
                Ok(_) => {
                    let room = format!("there is room for {MAX_NICS} interfaces");
                    why = Unseen::Refused(self.nics.refusal.clone().unwrap_or(room));
                }
                Err(reason) => why = reason,
            }
        }
        Some(why)
    }
}

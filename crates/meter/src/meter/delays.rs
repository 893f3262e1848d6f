// SPDX-License-Identifier: Apache-2.0
//! Waits and delays of the followed VMs. Only the accounting program sees them; schedstat has no single waits.

use viola_host::VmId;

use super::Meter;
use super::groups::{TimeSource, TrackedVm, now};
use crate::acct::Acct;
use crate::hist::{Histogram, Waits};

/// How long events for a VM waited until one of its vCPUs ran, over the last [`crate::WAIT_WINDOW_SECONDS`] seconds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Delays {
    /// Packets for the VM, but TCP segments without data. A packet that came while a vCPU ran has delay 0.
    pub packets: Histogram,
    /// Wake-ups of the VM while no vCPU ran or waited: an interrupt, for example by a packet, a timer or a completed request.
    pub wakes: Histogram,
}

impl Meter {
    /// The accounting program and a VM; `None` for a VM that is not followed, and without the program.
    pub(super) fn counted(&self, id: &VmId) -> Option<(&Acct, &TrackedVm)> {
        match &self.source {
            TimeSource::Acct(acct) => Some((acct, self.vms.get(id)?)),
            TimeSource::SchedStat => None,
        }
    }

    /// Waits of each vCPU over the last [`crate::WAIT_WINDOW_SECONDS`] seconds; `None` where they are not known.
    pub fn waits(&self, id: &VmId) -> Option<Vec<Waits>> {
        let (acct, vm) = self.counted(id)?;
        let at = now();
        let groups = vm.vcpus.iter();
        let since = groups.map(|g| g.wait_log.since(at, &acct.accounts().waits(g.account)));
        Some(since.collect())
    }

    /// Waits of all vCPUs of a VM together, see [`Meter::waits`].
    pub fn vm_waits(&self, id: &VmId) -> Option<Waits> {
        let mut sum = Waits::default();
        for waits in self.waits(id)? {
            sum.merge(&waits);
        }
        Some(sum)
    }

    /// The delays of a VM; `None` where they are not known. [`Meter::unseen`] tells whether its packets are seen.
    pub fn delays(&self, id: &VmId) -> Option<Delays> {
        let (acct, vm) = self.counted(id)?;
        let (at, now) = (now(), acct.delays().vm(vm.index));
        Some(Delays {
            packets: vm.delays.packets.since(at, &now.packets).histogram,
            wakes: vm.delays.wakes.since(at, &now.wakes).histogram,
        })
    }

    /// The packets of [`Meter::delays`] alone.
    pub fn packet_delays(&self, id: &VmId) -> Option<Histogram> {
        let (acct, vm) = self.counted(id)?;
        let (at, now) = (now(), acct.delays().vm(vm.index));
        Some(vm.delays.packets.since(at, &now.packets).histogram)
    }

    /// The delays of all packets for a VM since it was first followed, up to a second ago; `None` where they are not known.
    pub fn packet_delay_total(&self, id: &VmId) -> Option<&Histogram> {
        let (_, vm) = self.counted(id)?;
        self.unseen(id).is_none().then_some(&vm.delays.packet_total)
    }
}

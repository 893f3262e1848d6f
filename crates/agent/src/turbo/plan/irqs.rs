// SPDX-License-Identifier: Apache-2.0
//! Finds the interrupts of I/O devices and moves them to the turbo vCPU.

use std::collections::BTreeSet;

use super::Planner;
use crate::turbo::cpus::Cpus;
use crate::turbo::knob::{Knob, Part};
use crate::turbo::snapshot::{Irq, Nic, Snapshot, numbers};

/// The device kind of an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A network interface.
    Net,
    /// A disk or another block device.
    Disk,
    /// Another channel to the host: console, vsock, 9p.
    Channel,
    /// Another device, whose interrupts stay: timer, keyboard, balloon, sound.
    Other,
}

/// PCI base classes: mass storage, network.
const PCI_DISK: u32 = 1;
const PCI_NET: u32 = 2;

/// Storage drivers whose interrupts begin with their name, where no PCI device tells the class.
const STORAGE_DRIVERS: [&str; 16] = [
    "nvme",
    "ahci",
    "ata_",
    "sata",
    "pata",
    "megasas",
    "megaraid",
    "mpt2sas",
    "mpt3sas",
    "mptsas",
    "blkif",
    "vmw_pvscsi",
    "ubd",
    "aacraid",
    "hpsa",
    "sym53c",
];

/// The kind of an interrupt; of a shared one, the first I/O kind counts.
pub fn kind(irq: &Irq, now: &Snapshot) -> Kind {
    let by_name = irq.actions.iter().map(|action| of_action(action, now));
    let by_class = irq.class.map(|class| match class >> 16 {
        PCI_DISK => Kind::Disk,
        PCI_NET => Kind::Net,
        _ => Kind::Other,
    });
    // a virtio device's own type says more than its PCI class
    let mut kinds: Vec<Kind> = by_name.flatten().collect();
    if kinds.is_empty() {
        kinds.extend(by_class);
    }
    let best = [Kind::Net, Kind::Disk, Kind::Channel];
    let found = best.into_iter().find(|kind| kinds.contains(kind));
    // an interrupt without a handler never arrives
    found
        .filter(|_| !irq.actions.is_empty())
        .unwrap_or(Kind::Other)
}

/// The kind by the handler's name: `virtio1-input.0`, `eth0-rx-1`, `nvme0q2`.
fn of_action(action: &str, now: &Snapshot) -> Option<Kind> {
    let first = action.split(['-', ':', '.', '[', '@', ' ']).next()?;
    if let Some(device) = now.virtio.get(first) {
        return Some(match device {
            1 => Kind::Net,
            2 | 8 | 26 | 27 => Kind::Disk,
            3 | 9 | 11 | 19 => Kind::Channel,
            _ => Kind::Other,
        });
    }
    if now.nics.contains_key(first) {
        return Some(Kind::Net);
    }
    let is_store = STORAGE_DRIVERS.iter().any(|store| first.starts_with(store));
    is_store.then_some(Kind::Disk)
}

/// Whether an interrupt belongs to this interface.
pub(super) fn is_of(irq: &Irq, name: &str, nic: &Nic) -> bool {
    let below = irq.device.as_ref().is_some_and(|device| {
        let rest = nic.device.strip_prefix(device.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    });
    let last = nic.device.rsplit('/').next().unwrap_or_default();
    let called = |action: &String| {
        let first = action.split(['-', ':', '.', '[', '@', ' ']).next();
        first == Some(name) || first == Some(last) && !last.is_empty()
    };
    below || irq.actions.iter().any(called)
}

/// Whether an interrupt is delivered to these CPUs alone, whatever its mask says.
fn stays(irq: &Irq, cpus: &Cpus) -> bool {
    match &irq.effective {
        Some(effective) if !effective.is_empty() => effective == cpus,
        // without effective affinity, past deliveries count
        _ => irq.seen == *cpus,
    }
}

impl Planner<'_> {
    /// Moves all I/O interrupts to the turbo vCPU. irqbalance must be told to leave them alone first.
    pub(super) fn interrupts(&mut self) {
        let now = self.now;
        let all: Vec<(u32, &Irq)> = now
            .irqs
            .iter()
            .filter(|(_, irq)| kind(irq, now) != Kind::Other)
            .map(|(number, irq)| (*number, irq))
            .collect();
        let part = Part::Interrupts;
        let held: Vec<u32> = all
            .iter()
            .filter(|(_, irq)| !irq.settable && irq.cpus != self.turbo)
            .filter(|(_, irq)| !stays(irq, &self.turbo))
            .map(|(number, _)| *number)
            .collect();
        for number in &held {
            let text = format!("{}: {}", self.name_irq(*number), MANAGED_IRQ);
            self.note(part, text);
        }
        let movable: Vec<u32> = all
            .iter()
            .filter(|(_, irq)| irq.settable)
            .map(|(number, _)| *number)
            .collect();
        if !self.irqbalance_lets(&movable) {
            return;
        }
        for irq in movable {
            self.step(part, Knob::Irq { irq }, self.turbo.to_string());
        }
    }

    /// Makes irqbalance leave these interrupts alone; `false` when it does not.
    fn irqbalance_lets(&mut self, irqs: &[u32]) -> bool {
        let Some(daemon) = &self.now.irqbalance else {
            return true;
        };
        let pid = daemon.pid;
        let knob = Knob::Irqbalance { pid };
        let wanted: BTreeSet<u32> = irqs.iter().copied().filter(|irq| *irq > 0).collect();
        let lets = daemon.banned.as_ref().is_some_and(|banned| {
            // an interrupt that somebody else has unbanned stays so
            banned.is_superset(&wanted) || {
                let all: BTreeSet<u32> = banned | &wanted;
                self.add(Part::Interrupts, knob, numbers(&all), true)
            }
        });
        if !lets && !wanted.is_empty() {
            let text = format!(
                "irqbalance (process {pid}) does not leave I/O interrupts alone: stop it, or ban them with --banirq"
            );
            self.note(Part::Interrupts, text);
        }
        lets
    }

    fn name_irq(&self, number: u32) -> String {
        let actions = self.now.irqs.get(&number).map(|irq| irq.actions.join(", "));
        format!("interrupt {number} ({})", actions.unwrap_or_default())
    }

    /// Whether all interrupts of this interface arrive at the turbo vCPU once the plan is carried out.
    pub(super) fn comes_to_turbo(&self, name: &str, nic: &Nic) -> bool {
        let mut all = self
            .now
            .irqs
            .iter()
            .filter(|(_, irq)| !irq.actions.is_empty() && is_of(irq, name, nic))
            .peekable();
        all.peek().is_some()
            && all.all(|(number, irq)| {
                let knob = Knob::Irq { irq: *number };
                irq.cpus == self.turbo
                    || stays(irq, &self.turbo)
                    || self.plan.steps.iter().any(|step| step.knob == knob)
                    // somebody else has moved it, which is accepted
                    || self.skips.overridden.contains(&knob)
            })
    }
}

/// Why an interrupt cannot be moved.
pub const MANAGED_IRQ: &str = "the kernel does not let its affinity be set: the kernel manages it (give the device one queue, or boot with isolcpus=managed_irq and the other vCPUs), or the interrupt controller cannot move it";

// SPDX-License-Identifier: Apache-2.0
//! Sets queues of network interfaces, and the CPU that completes disk requests.
//!
//! RPS forwards packets to other CPUs after the interrupt: the plan forwards them only to the turbo
//! vCPU, and only where the interrupt cannot be moved. RFS would follow programs to other vCPUs, so
//! it is switched off. XPS keeps one transmit queue for the turbo vCPU alone: otherwise a program
//! that is preempted on a regular core while it holds a queue's lock delays acknowledgements. See
//! the kernel's `Documentation/networking/scaling.rst`.

use super::Planner;
use crate::turbo::cpus::Cpus;
use crate::turbo::knob::{Knob, Part};

impl Planner<'_> {
    pub(super) fn queues(&mut self) {
        let now = self.now;
        for (name, nic) in &now.nics {
            let comes = self.comes_to_turbo(name, nic);
            for (queue, cpus) in nic.rps.iter().enumerate() {
                if !(comes && cpus.is_empty()) {
                    let nic = name.clone();
                    let knob = Knob::Rps { nic, queue };
                    self.step(Part::Queues, knob, self.turbo.to_string());
                }
            }
            for queue in 0..nic.rfs.len() {
                let nic = name.clone();
                self.step(Part::Queues, Knob::Rfs { nic, queue }, "0".into());
            }
            // the kernel keeps only online CPUs in these masks
            let regular = now.online.difference(&self.turbo);
            for (queue, cpus) in xps(&nic.xps, self.goal.turbo, &regular)
                .into_iter()
                .enumerate()
            {
                let nic = name.clone();
                self.step(Part::Queues, Knob::Xps { nic, queue }, cpus.to_string());
            }
        }
    }

    pub(super) fn disks(&mut self) {
        for disk in self.now.disks.keys() {
            let disk = disk.clone();
            self.step(Part::Disks, Knob::Completion { disk }, "0".into());
        }
    }
}

/// CPUs of each transmit queue: one queue has the turbo vCPU alone, the others share the regular CPUs, each CPU in at
/// least one. Empty for fewer than two queues.
fn xps(queues: &[Cpus], turbo: u32, regular: &Cpus) -> Vec<Cpus> {
    if queues.len() < 2 {
        return Vec::new();
    }
    let own = queues.iter().position(|cpus| cpus.has(turbo)).unwrap_or(0);
    let mut new: Vec<Cpus> = queues
        .iter()
        .map(|cpus| cpus.intersection(regular).without(turbo))
        .collect();
    new[own] = Cpus::one(turbo);
    let others: Vec<usize> = (0..queues.len()).filter(|queue| *queue != own).collect();
    let all = new
        .iter()
        .fold(Cpus::default(), |all, cpus| all.union(cpus));
    // Add to the queue with the fewest CPUs: then the masks come out the same when one of them was refused.
    for cpu in regular.difference(&all).iter() {
        let fewest = others.iter().min_by_key(|queue| new[**queue].len());
        if let Some(queue) = fewest {
            new[*queue] = new[*queue].union(&Cpus::one(cpu));
        }
    }
    for queue in others {
        // with more queues than CPUs: an empty mask would switch XPS off for the queue
        if new[queue].is_empty() {
            new[queue] = regular.clone();
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(lists: &[&str]) -> Vec<Cpus> {
        lists.iter().map(|l| Cpus::parse_list(l).unwrap()).collect()
    }

    #[test]
    fn the_turbo_vcpu_has_a_queue_of_its_own() {
        for (cpus, turbo, before, after) in [
            ("0-1", 0, &["0", "1"][..], &["0", "1"][..]),
            ("0-3", 0, &["0-1", "2-3"], &["0", "1-3"]),
            ("0-3", 3, &["0-1", "2-3"], &["0-2", "3"]),
            ("0-3", 0, &["", "", ""], &["0", "1,3", "2"]),
            ("0-1", 0, &["0", "1", ""], &["0", "1", "1"]),
            ("0-3", 0, &["0-3", "0-3"], &["0", "1-3"]),
            ("0-1", 0, &["0-1"], &[]),
        ] {
            let regular = Cpus::parse_list(cpus).unwrap().without(turbo);
            let once = xps(&sets(before), turbo, &regular);
            assert_eq!(once, sets(after), "{before:?}");
            assert!(once.is_empty() || xps(&once, turbo, &regular) == once);
            // a refused mask changes no other
            for refused in 0..once.len() {
                let mut now = once.clone();
                now[refused] = sets(before)[refused].clone();
                let mut again = xps(&now, turbo, &regular);
                again[refused] = once[refused].clone();
                assert_eq!(again, once, "{before:?} but for {refused}");
            }
        }
    }
}

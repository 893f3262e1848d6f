// SPDX-License-Identifier: Apache-2.0
//! Class auto on a simulated host: the counters that it reads are made from what the simulated VMs got.

use super::*;
use crate::testing::vm;
use viola_meter::acct::{HistCounters, bucket_of};
use viola_meter::{Histogram, Times, Traffic, VmCounters, Waits};
use viola_policy::slices::US;
use viola_policy::slices::classify::advise;
use viola_policy::slices::simulate::Usage;

pub(super) const S: Nanos = 1000 * MS;
/// Windows in which a VM must not be worse off than on stock.
pub(super) const WINDOW: Nanos = 10 * S;
/// Ticks of the control loop.
pub(super) const TICK: Nanos = 100 * MS;
pub(super) const MICROSLICE: Nanos = 300 * US;

/// Class auto as the daemon has it, fed by simulated counters.
pub(super) struct Auto {
    classes: Classes,
    vms: Vec<Vm>,
    now: Nanos,
    counters: Counters,
    /// Packets and waits of the last ten seconds, tick by tick.
    recent: BTreeMap<VmId, Vec<Vec<(bool, Nanos)>>>,
    /// Lines of the log, by the time.
    pub(super) changes: Vec<(Nanos, String)>,
}

impl Auto {
    pub(super) fn new(vms: usize) -> Self {
        let name = |i: usize| vm(&format!("vm{i}"), 10 + 10 * i as u32, &[&[1]]);
        Self {
            classes: Classes::default(),
            vms: (0..vms).map(name).collect(),
            now: 0,
            counters: Counters::new(),
            recent: BTreeMap::new(),
            changes: Vec::new(),
        }
    }

    /// The classes for the next tick, by what the VMs got in the last one, and which of them get packets.
    pub(super) fn tick(&mut self, got: &[Usage], serves: impl Fn(usize) -> bool) -> Vec<bool> {
        self.now += TICK;
        for (i, got) in got.iter().enumerate() {
            self.count(i, serves(i), got);
        }
        for (i, got) in got.iter().enumerate() {
            self.observe(i, serves(i), got);
        }
        let is_ls = |vm: &Vm| self.classes.class(&vm.id, ClassSetting::Auto) == Class::Ls;
        self.vms.iter().map(is_ls).collect()
    }

    fn count(&mut self, i: usize, serves: bool, got: &Usage) {
        let id = self.vms[i].id.clone();
        let blank = || VmCounters {
            at: 0,
            run: 0,
            packets: HistCounters::ZERO,
            waits: vec![HistCounters::ZERO],
        };
        let counters = self.counters.entry(id.clone()).or_insert_with(blank);
        counters.at = self.now;
        counters.run += got.run;
        let count = |counters: &mut HistCounters, ns: Nanos| {
            let bucket = bucket_of(ns);
            counters.counts[bucket] += 1;
            counters.sums[bucket] += ns;
        };
        let mut tick = Vec::new();
        for &wait in &got.wakes {
            count(&mut counters.waits[0], wait);
            tick.push((serves, wait));
            if serves {
                count(&mut counters.packets, wait);
            }
        }
        for &wait in &got.preempted {
            count(&mut counters.waits[0], wait);
            tick.push((false, wait));
        }
        let recent = self.recent.entry(id).or_default();
        recent.push(tick);
        if recent.len() as u64 > WINDOW / TICK {
            recent.remove(0);
        }
    }

    fn figures(&self, id: &VmId) -> Figures {
        let mut packets = Histogram::default();
        let mut waits = Waits {
            time: WINDOW,
            ..Waits::default()
        };
        for &(is_packet, ns) in self.recent[id].iter().flatten() {
            if is_packet {
                packets.add(ns, 1);
            }
            waits.histogram.add(ns, 1);
        }
        Figures {
            packet_delay: packets.quantile(0.99).filter(|_| packets.count() >= 100),
            residual_wait: waits
                .residual_quantile(0.99)
                .filter(|_| waits.histogram.count() >= 100),
            mean_wait: None,
        }
    }

    fn observe(&mut self, i: usize, serves: bool, got: &Usage) {
        let vm = &self.vms[i];
        let requests = if serves { got.wakes.len() as u64 } else { 0 };
        let sample = VmSample {
            id: vm.id.clone(),
            vcpus: vec![Times {
                run: got.run,
                wait: got.wait,
                blocked: TICK.saturating_sub(got.run + got.wait),
                wakes: got.wakes.len() as u64,
                ..Times::default()
            }],
            service: Times::default(),
            traffic: Traffic {
                rx_packets: requests,
                tx_packets: requests,
                ..Traffic::default()
            },
        };
        let ls = self.vms.iter().filter(|other| {
            other.id != vm.id && self.classes.class(&other.id, ClassSetting::Auto) == Class::Ls
        });
        let advice = self.classes.is_candidate(&vm.id).then(|| {
            let (count, share) = (self.vms.len() as u32, 1.0 / self.vms.len() as f64);
            let best = self.figures(&vm.id).best();
            advise(
                best,
                count - 1,
                4 * MS,
                (share, self.classes.used(&vm.id)),
                MICROSLICE,
                ls.map(|_| MICROSLICE),
            )
        });
        let mut classes = std::mem::take(&mut self.classes);
        let change = classes.observe(&Observation {
            vm,
            setting: ClassSetting::Auto,
            sample: &sample,
            at: self.now,
            span: TICK,
            figures: &|| self.figures(&vm.id),
            advice,
            near: &|| self.vms.iter().map(|vm| vm.id.clone()).collect(),
            counters: &|| self.counters.clone(),
            name: &|id| id.to_string(),
        });
        self.classes = classes;
        for (id, line) in change.unwrap_or_default().lines {
            let named = self.vms.iter().find(|vm| vm.id == id).unwrap();
            (self.changes).push((self.now, format!("{}: {line}", named.name)));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Signs that an accelerator could help a VM: what the meter measured of it, in windows of some seconds.

use std::collections::BTreeMap;
use std::fmt::Display;

use viola_host::VmId;
use viola_meter::{Snapshot, Times, Traffic, VmSample};
use viola_policy::slices::Nanos;

use super::recent::add_sample;

/// Shortest window, ns. It ends with a snapshot that has disk counters, which come once a second.
const WINDOW: Nanos = 5_000_000_000;

/// A sign of one VM. Displayed, it is a verb and its figures, for a sentence about the VM.
pub trait Sign: Default + Display {
    /// Takes a window that ended at `at` (ns); `true` when [`Sign::is_there`] has changed.
    fn observe(&mut self, at: Nanos, window: &Sum) -> bool;

    /// Whether the VM has the sign.
    fn is_there(&self) -> bool;
}

/// What a VM spent in a window.
#[derive(Debug)]
pub struct Sum {
    /// Length, ns.
    span: Nanos,
    /// Number of samples.
    samples: u32,
    /// Number of samples with packets.
    with_packets: u32,
    /// Their sum.
    pub total: VmSample,
}

impl Sum {
    /// An empty window of the VM of a sample.
    fn of(sample: &VmSample) -> Self {
        Self {
            span: 0,
            samples: 0,
            with_packets: 0,
            total: VmSample {
                id: sample.id.clone(),
                vcpus: vec![Times::default(); sample.vcpus.len()],
                service: Times::default(),
                traffic: Traffic::default(),
            },
        }
    }

    fn add(&mut self, sample: &VmSample, span: Nanos) {
        self.span += span;
        self.samples += 1;
        let has_packets = sample.traffic.rx_packets + sample.traffic.tx_packets > 0;
        self.with_packets += u32::from(has_packets);
        add_sample(&mut self.total, sample);
    }

    /// A count per second.
    pub fn per_s(&self, count: u64) -> f64 {
        count as f64 * 1e9 / self.span.max(1) as f64
    }

    /// CPU time (ns) as a part of a core.
    pub fn cores(&self, time: u64) -> f64 {
        time as f64 / self.span.max(1) as f64
    }

    /// Part of the samples with packets, 0.0 ..= 1.0.
    pub fn part_with_packets(&self) -> f64 {
        f64::from(self.with_packets) / f64::from(self.samples.max(1))
    }
}

/// A sign of each VM, and its window.
#[derive(Debug, Default)]
pub struct Signs<S>(BTreeMap<VmId, (S, Option<Sum>)>);

impl<S: Sign> Signs<S> {
    /// Takes what each VM did in a snapshot. Returns the VMs that have the sign from now on.
    pub fn observe<'a>(&mut self, snapshot: &'a Snapshot) -> Vec<&'a VmSample> {
        let mut began = Vec::new();
        for sample in &snapshot.vms {
            // An identity is copied only for a new VM and a new window.
            let (sign, window) = match self.0.get_mut(&sample.id) {
                Some(state) => state,
                None => self.0.entry(sample.id.clone()).or_default(),
            };
            let sum = window
                .take()
                .filter(|sum| sum.total.vcpus.len() == sample.vcpus.len());
            let mut sum = sum.unwrap_or_else(|| Sum::of(sample));
            sum.add(sample, snapshot.span);
            if sum.span < WINDOW || !snapshot.with_disks {
                *window = Some(sum);
            } else if sign.observe(snapshot.at, &sum) && sign.is_there() {
                began.push(sample);
            }
        }
        began
    }

    /// The sign of a VM that has it.
    pub fn get(&self, id: &VmId) -> Option<&S> {
        let (sign, _) = self.0.get(id)?;
        Some(sign).filter(|sign| sign.is_there())
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.0.remove(id);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What `GET /v1/vms` shows of each VM.

use viola_host::{CpuSet, Vm};
use viola_meter::{Meter, VmSample, Waits};
use viola_policy::slices;
use viola_proto::{Class, ClassSetting, SchedulerCounts, VmReport};
use viola_sched::Usage;

use crate::vms::delays::{delay, residual_wait};
use crate::vms::recent::{self, Recent};
use crate::vms::settings::Controls;

/// State of a VM beside its measurements.
#[derive(Debug)]
pub struct VmState<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// What was set.
    pub controls: Controls,
    /// The class in force.
    pub class: slices::Class,
    /// Whether it has a turbo vCPU.
    pub turbo: bool,
    /// The mechanism that schedules it, if one does.
    pub scheduled_by: Option<&'static str>,
    /// What the mechanism counts of it.
    pub turns: Option<SchedulerCounts>,
    /// Why a setting has no effect.
    pub remarks: Vec<String>,
    /// Why it has its class, one sentence; empty without a daemon.
    pub why: String,
    /// Advice to the operator, one sentence.
    pub advice: Option<String>,
}

/// What the mechanism counted of one VM on all its cores; `None` when it counts nothing.
pub fn turns(usage: &[Usage], pid: u32) -> Option<SchedulerCounts> {
    let mut sum: Option<SchedulerCounts> = None;
    for u in usage.iter().filter(|u| u.pid == pid as i32) {
        let s = sum.get_or_insert_default();
        s.turns += u.turns;
        s.run_ns += u.run;
        s.waits += u.waits;
        s.wait_ns += u.wait_sum;
        s.wait_max_ns = s.wait_max_ns.max(u.wait_max);
        s.boosts += u.boosts;
    }
    sum
}

/// Reports of VMs, in the order given.
pub fn reports(states: Vec<VmState<'_>>, meter: &Meter, recent: &Recent) -> Vec<VmReport> {
    let claims: Vec<_> = states
        .iter()
        .map(|s| {
            (
                &s.vm.cores,
                s.vm.vcpus.len(),
                s.controls.weight.value,
                s.controls.cap.value,
            )
        })
        .collect();
    let shares = recent::shares(&claims);
    states
        .into_iter()
        .zip(shares)
        .map(|(state, share)| report(state, share, meter, recent))
        .collect()
}

fn report(state: VmState<'_>, share: f64, meter: &Meter, recent: &Recent) -> VmReport {
    let VmState {
        vm,
        controls: c,
        class,
        turbo,
        scheduled_by,
        turns,
        remarks,
        why,
        advice,
    } = state;
    // Adding up ten seconds of waits is slow, so it is done once.
    let by_vcpu: Vec<Waits> = meter.waits(&vm.id).unwrap_or_default();
    let mut waits = Waits::default();
    by_vcpu.iter().for_each(|vcpu| waits.merge(vcpu));
    let (delays, unseen) = (meter.delays(&vm.id), meter.unseen(&vm.id));
    let packets = delays.as_ref().filter(|_| unseen.is_none());
    let answers = meter.answer_times(&vm.id);
    let answers = answers.as_ref().filter(|_| unseen.is_none());
    let sample = recent.vm(&vm.id);
    let total = sample.map(VmSample::vcpu_total).unwrap_or_default();
    let traffic = sample.map(|s| s.traffic).unwrap_or_default();
    let core_time = recent.span as f64 * vm.cores.len().max(1) as f64;
    VmReport {
        id: vm.id.to_string(),
        name: vm.name.clone(),
        hypervisor: vm.hypervisor.to_string(),
        pid: vm.pid,
        vcpus: vm.vcpus.len(),
        class: match class {
            _ if turbo => Class::Turbo,
            slices::Class::Ls => Class::Ls,
            slices::Class::Batch => Class::Batch,
        },
        class_setting: c.class.value,
        class_source: c.class.source,
        why,
        microslice_ns: c.microslice.value,
        weight: c.weight.value,
        weight_source: c.weight.source,
        cap_permille: c.cap.value,
        cap_source: c.cap.source,
        cores: vm.cores.iter().collect(),
        share,
        used: if core_time > 0.0 {
            total.run as f64 / core_time
        } else {
            0.0
        },
        waiting: recent.waiting(&vm.id),
        wait_share: total.wait_share(),
        packet_delay: packets.map(|delays| delay(&delays.packets)),
        packet_delay_absent: unseen.map(|why| why.to_string()),
        wake_delay: delays.as_ref().map(|delays| delay(&delays.wakes)),
        answer_time: answers.map(|times| delay(&times.answers)),
        connect_time: answers.map(|times| delay(&times.connects)),
        residual_wait: residual_wait(&waits),
        wakes_per_s: recent.per_s(total.wakes),
        net_bytes_per_s: recent.per_s(traffic.rx_bytes + traffic.tx_bytes),
        net_packets_per_s: recent.per_s(traffic.rx_packets + traffic.tx_packets),
        disk_bytes_per_s: recent.disk(&vm.id),
        by_vcpu: sample
            .map(|s| recent::by_vcpu(s, &by_vcpu))
            .unwrap_or_default(),
        service: sample
            .map(|s| recent::spent(&s.service))
            .unwrap_or_default(),
        scheduled_by: scheduled_by.unwrap_or("stock").to_owned(),
        turns,
        remarks,
        help: if advice.is_some() {
            vec!["slices".into()]
        } else {
            Vec::new()
        },
        advice,
    }
}

/// Adds to a report that an accelerator would help the VM, with the reason.
pub fn propose(report: &mut VmReport, what: &str, why: String) {
    report.help.push(what.into());
    report.advice = Some(match report.advice.take() {
        Some(other) => format!("{other}; {why}"),
        None => why,
    });
}

/// A class setting as `viola set --class` takes it.
pub fn class_text(class: ClassSetting) -> &'static str {
    match class {
        ClassSetting::Ls => "ls",
        ClassSetting::Batch => "batch",
        ClassSetting::Auto => "auto",
        ClassSetting::Turbo => "turbo",
    }
}

/// A list of cores for messages, `-` when it is empty.
pub fn cores_text(cores: &CpuSet) -> String {
    if cores.is_empty() {
        "-".into()
    } else {
        cores.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_cores_are_added_up() {
        let on = |cpu, pid, wait_max| Usage {
            pid,
            cpu,
            run: 5,
            turns: 2,
            wait_max,
            ..Usage::default()
        };
        let usage = [on(1, 7, 30), on(1, 8, 90), on(2, 7, 20)];
        let of = turns(&usage, 7).unwrap();
        assert_eq!((of.turns, of.run_ns, of.wait_max_ns), (4, 10, 30));
        assert_eq!(turns(&usage, 9), None);
    }
}

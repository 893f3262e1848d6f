// SPDX-License-Identifier: Apache-2.0
//! What the control socket shows: drawn up by the control loop from time to time, read by the server at any time.

use std::collections::BTreeMap;

use viola_host::Vm;
use viola_meter::{Meter, VmSample, WaitHist};
use viola_policy::slices;
use viola_proto::vread::{self, Vread};
use viola_proto::{Check, Class, SchedulerCounts, Status, VmList, VmReport};
use viola_sched::Usage;

use crate::vms::recent::{self, Recent};
use crate::vms::settings::Controls;

/// Everything that can be asked for.
#[derive(Debug, Clone)]
pub struct View {
    /// `GET /v1/status`
    pub status: Status,
    /// `GET /v1/vms`
    pub vms: VmList,
    /// `GET /v1/vread`
    pub vread: viola_proto::vread::Vread,
    /// `GET /v1/lanes`
    pub lanes: viola_proto::lanes::Lanes,
    /// `GET /v1/check`
    pub check: Check,
    /// What each VM spent since the daemon met it, by identity; for `GET /metrics`.
    pub totals: BTreeMap<String, VmSample>,
}

/// What is known of a VM beside its measurements.
#[derive(Debug)]
pub struct Known<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// What was asked for.
    pub controls: Controls,
    /// What it is.
    pub class: slices::Class,
    /// Whether it has a turbo vCPU.
    pub turbo: bool,
    /// Mechanism that schedules it, if any.
    pub scheduled_by: Option<&'static str>,
    /// What that counts of it.
    pub turns: Option<SchedulerCounts>,
    /// Why it is not, and the like.
    pub remarks: Vec<String>,
    /// Advice in a sentence.
    pub advice: Option<String>,
}

/// What a mechanism counted of one VM, on all its cores; nothing where it counts nothing.
pub fn turns(got: &[Usage], pid: u32) -> Option<SchedulerCounts> {
    let mut sum: Option<SchedulerCounts> = None;
    for g in got.iter().filter(|g| g.pid == pid as i32) {
        let s = sum.get_or_insert_default();
        s.turns += g.turns;
        s.run_ns += g.run;
        s.waits += g.waits;
        s.wait_ns += g.wait_sum;
        s.wait_max_ns = s.wait_max_ns.max(g.wait_max);
        s.boosts += g.boosts;
    }
    sum
}

/// Reports of all VMs, in the order given.
pub fn reports(known: Vec<Known<'_>>, meter: &Meter, recent: &Recent) -> Vec<VmReport> {
    let claims: Vec<_> = known
        .iter()
        .map(|k| {
            (
                &k.vm.cores,
                k.vm.vcpus.len(),
                k.controls.weight.value,
                k.controls.cap.value,
            )
        })
        .collect();
    let shares = recent::shares(&claims);
    known
        .into_iter()
        .zip(shares)
        .map(|(k, share)| report(k, share, meter, recent))
        .collect()
}

/// Adds what vread would do for VMs that may read blocks and cannot: nothing in them is connected.
pub fn add_vread(vms: &mut [VmReport], vread: &Vread) {
    let blocks = |id: &String| {
        let datanodes = vread.datanodes.iter();
        datanodes
            .filter(|d| d.vm == *id && d.serving)
            .map(|d| d.blocks)
            .sum::<u64>()
    };
    for vm in vms {
        let is_it = |r: &&vread::Reader| r.name == vm.name || r.name == vm.id;
        let Some(reader) = vread.readers.iter().find(is_it) else {
            continue;
        };
        let waiting: u64 = reader.datanodes.iter().map(blocks).sum();
        if !reader.running || reader.connected || waiting == 0 {
            continue;
        }
        vm.help.push("vread".into());
        let sentence = format!(
            "{}: {waiting} HDFS blocks lie on this host that it may read past {}, and it has no mount for them; the \
             book's page on vread tells what it needs",
            vm.name,
            reader.datanodes.join(", ")
        );
        vm.advice = Some(match vm.advice.take() {
            Some(other) => format!("{other}; {sentence}"),
            None => sentence,
        });
    }
}

fn report(k: Known<'_>, share: f64, meter: &Meter, recent: &Recent) -> VmReport {
    let Known {
        vm,
        controls: c,
        class,
        turbo,
        scheduled_by,
        turns,
        remarks,
        advice,
    } = k;
    // Adding ten seconds up is dear, so it is done once.
    let by_vcpu: Vec<WaitHist> = meter.waits(&vm.id);
    let mut waits = WaitHist::default();
    by_vcpu.iter().for_each(|hist| waits.merge(hist));
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
        wait: total.wait_share(),
        wait_p50_ns: waits.quantile(0.5),
        wait_p99_ns: waits.quantile(0.99),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_vm_got_on_several_cores_is_added_up() {
        let on = |cpu, pid, wait_max| Usage {
            pid,
            cpu,
            run: 5,
            turns: 2,
            wait_max,
            ..Usage::default()
        };
        let got = [on(1, 7, 30), on(1, 8, 90), on(2, 7, 20)];
        let of = turns(&got, 7).unwrap();
        assert_eq!((of.turns, of.run_ns, of.wait_max_ns), (4, 10, 30));
        assert_eq!(turns(&got, 9), None);
    }

    #[test]
    fn a_vm_that_may_read_and_has_no_mount_is_told_of_vread() {
        let mut view = crate::testing::view(&["client", "web"]);
        let mut vread = Vread {
            readers: vec![vread::Reader {
                name: "client".into(),
                running: true,
                datanodes: vec!["uml:dn1".into()],
                ..vread::Reader::default()
            }],
            datanodes: vec![vread::Datanode {
                vm: "uml:dn1".into(),
                serving: true,
                blocks: 7,
                ..vread::Datanode::default()
            }],
            ..Vread::default()
        };
        let mut help = |vread: &Vread| {
            let mut vms = view.vms.vms.clone();
            vms.iter_mut().for_each(|vm| vm.help.clear());
            add_vread(&mut vms, vread);
            view.vms.vms = vms.clone();
            vms.iter().map(|vm| vm.help.join(",")).collect::<Vec<_>>()
        };
        assert_eq!(help(&vread), ["vread", ""]);
        vread.readers[0].connected = true;
        assert_eq!(help(&vread), ["", ""]);
        vread.readers[0].connected = false;
        vread.datanodes[0].blocks = 0;
        assert_eq!(help(&vread), ["", ""], "there is nothing to read");
    }
}

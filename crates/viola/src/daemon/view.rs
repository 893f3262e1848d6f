// SPDX-License-Identifier: Apache-2.0
//! What the control socket shows: drawn up by the control loop from time to time, read by the server at any time.

use viola_host::Vm;
use viola_meter::{Meter, WaitHist};
use viola_policy::slices;
use viola_proto::{Check, Class, Status, VmList, VmReport};

use super::settings::Controls;
use crate::measure::{self, Recent};

/// Everything that can be asked for.
#[derive(Debug, Clone)]
pub struct View {
    /// `GET /v1/status`
    pub status: Status,
    /// `GET /v1/vms`
    pub vms: VmList,
    /// `GET /v1/vread`
    pub vread: viola_proto::vread::Vread,
    /// `GET /v1/check`
    pub check: Check,
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
    /// Mechanism that schedules it, if any.
    pub scheduled_by: Option<&'static str>,
    /// Why it is not, and the like.
    pub remarks: Vec<String>,
    /// Advice in a sentence.
    pub advice: Option<String>,
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
    let shares = measure::shares(&claims);
    known
        .into_iter()
        .zip(shares)
        .map(|(k, share)| report(k, share, meter, recent))
        .collect()
}

fn report(k: Known<'_>, share: f64, meter: &Meter, recent: &Recent) -> VmReport {
    let Known {
        vm,
        controls: c,
        class,
        scheduled_by,
        remarks,
        advice,
    } = k;
    let waits: WaitHist = meter.vm_waits(&vm.id);
    let sample = recent.vm(&vm.id);
    let total = sample
        .map(viola_meter::VmSample::vcpu_total)
        .unwrap_or_default();
    let traffic = sample.map(|s| s.traffic).unwrap_or_default();
    let core_time = recent.span as f64 * vm.cores.len().max(1) as f64;
    VmReport {
        id: vm.id.to_string(),
        name: vm.name.clone(),
        hypervisor: vm.hypervisor.to_string(),
        pid: vm.pid,
        vcpus: vm.vcpus.len(),
        class: match class {
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
            .map(|s| measure::by_vcpu(s, meter))
            .unwrap_or_default(),
        service: sample
            .map(|s| measure::spent(&s.service))
            .unwrap_or_default(),
        scheduled_by: scheduled_by.unwrap_or("stock").to_owned(),
        remarks,
        help: if advice.is_some() {
            vec!["slices".into()]
        } else {
            Vec::new()
        },
        advice,
    }
}

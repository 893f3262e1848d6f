// SPDX-License-Identifier: Apache-2.0
//! Metrics of each VM. Name, unit and labels are those of libvirt's exporter where it has a metric of the same meaning.

use std::collections::BTreeMap;

use viola_meter::{Histogram, Times, VmSample};
use viola_proto::{ClassSetting, VmReport};

use crate::prometheus::{Kind, Text, metrics};

metrics! {
    const GAUGES: fn(&VmReport) -> Option<f64> = {
        Gauge "libvirt_domain_info_virtual_cpus" "Virtual CPUs of the VM", |vm| Some(vm.vcpus as f64);
        Gauge "viola_domain_share_ratio" "Part of its cores that it gets by weight while all VMs want to run", |vm| Some(vm.share);
        Gauge "viola_domain_used_ratio" "Part of its cores that its vCPUs got in the last second", |vm| Some(vm.used);
        Gauge "viola_domain_weight" "Proportional share, 256 is neutral", |vm| Some(vm.weight.into());
        Gauge "viola_domain_cap_cores" "Cap, in cores; absent without a cap", |vm| vm.cap_permille.map(|p| f64::from(p) / 1e3);
        Gauge "viola_domain_microslice_seconds" "Length of its slice while it is latency-sensitive", |vm| Some(seconds(vm.microslice_ns));
        Gauge "viola_domain_packet_delay_p50_seconds" "Time from a packet's arrival until a vCPU ran that half of the packets of the last 10 s did not exceed", |vm| vm.packet_delay.as_ref()?.p50_ns.map(seconds);
        Gauge "viola_domain_packet_delay_p99_seconds" "Time from a packet's arrival until a vCPU ran that 99 of 100 packets of the last 10 s did not exceed", |vm| vm.packet_delay.as_ref()?.p99_ns.map(seconds);
        Gauge "viola_domain_wake_delay_p99_seconds" "Time from an interrupt that woke the VM until a vCPU ran that 99 of 100 of the last 10 s did not exceed", |vm| vm.wake_delay.as_ref()?.p99_ns.map(seconds);
        Gauge "viola_domain_residual_wait_mean_seconds" "How long a vCPU still waited for a core at a random moment of the last 10 s, mean", |vm| vm.residual_wait.map(|wait| seconds(wait.mean_ns));
        Gauge "viola_domain_residual_wait_p99_seconds" "How long a vCPU still waited for a core at 99 of 100 moments of the last 10 s, at most", |vm| vm.residual_wait.map(|wait| seconds(wait.p99_ns));
    }

    const COUNTERS: fn(&VmSample) -> f64 = {
        Counter "libvirt_domain_info_cpu_time_seconds_total" "CPU time of the VM, all threads of its processes", |vm| seconds(vm.vcpu_total().run + vm.service.run);
        Counter "viola_domain_service_seconds_total" "CPU time of its threads that are no vCPUs: vhost, I/O, emulator", |vm| seconds(vm.service.run);
        Counter "viola_domain_wakeups_total" "Wake-ups of its vCPUs", |vm| vm.vcpu_total().wakes as f64;
        Counter "viola_domain_switches_total" "Times that one of its vCPUs was switched to", |vm| vm.vcpu_total().switches as f64;
        Counter "viola_domain_preemptions_total" "Times that one of its vCPUs was preempted", |vm| vm.vcpu_total().preempted as f64;
        Counter "viola_domain_network_receive_bytes_total" "Bytes that the VM got, all NICs together", |vm| vm.traffic.rx_bytes as f64;
        Counter "viola_domain_network_receive_packets_total" "Packets that the VM got, all NICs together", |vm| vm.traffic.rx_packets as f64;
        Counter "viola_domain_network_transmit_bytes_total" "Bytes that the VM sent, all NICs together", |vm| vm.traffic.tx_bytes as f64;
        Counter "viola_domain_network_transmit_packets_total" "Packets that the VM sent, all NICs together", |vm| vm.traffic.tx_packets as f64;
        Counter "viola_domain_disk_read_bytes_total" "Bytes that its processes read from storage", |vm| vm.traffic.disk_read as f64;
        Counter "viola_domain_disk_written_bytes_total" "Bytes that its processes wrote to storage", |vm| vm.traffic.disk_written as f64;
    }

    const BY_VCPU: fn(&Times) -> f64 = {
        Counter "libvirt_domain_vcpu_time_seconds_total" "Time that the vCPU ran", |t| seconds(t.run);
        Counter "libvirt_domain_vcpu_delay_seconds_total" "Time that the vCPU waited for a core while it could run (steal time, seen from the host)", |t| seconds(t.wait);
    }
}

/// Nanoseconds as seconds.
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Bounds of the buckets of packet delays, as powers of two of a nanosecond: 16 us to 1.07 s.
const DELAY_BOUNDS: std::ops::RangeInclusive<u32> = 14..=30;

/// Writes what each VM got. `totals` and `packet_delays` are by identity.
pub fn write(
    out: &mut Text,
    vms: &[VmReport],
    totals: &BTreeMap<String, VmSample>,
    packet_delays: &BTreeMap<String, Histogram>,
) {
    let domains = domains(vms);
    let name = "viola_domain_info";
    out.head(name, Kind::Gauge, "What the VM is, and how it is scheduled");
    for (vm, domain) in vms.iter().zip(&domains) {
        let labels = [
            ("domain", *domain),
            ("id", &vm.id),
            ("hypervisor", &vm.hypervisor),
            ("class", class(vm)),
            ("auto", auto(vm)),
            ("scheduled_by", &vm.scheduled_by),
        ];
        out.line(name, &labels, 1.0);
    }
    for (name, kind, help, value) in GAUGES {
        out.head(name, *kind, help);
        for (vm, domain) in vms.iter().zip(&domains) {
            if let Some(value) = value(vm) {
                out.line(name, &[("domain", domain)], value);
            }
        }
    }
    let name = "viola_domain_packet_delay_seconds";
    let help = "Time from a packet's arrival at the VM's NIC until one of its vCPUs ran";
    out.head(name, Kind::Histogram, help);
    for (vm, domain) in vms.iter().zip(&domains) {
        if let Some(delays) = packet_delays.get(&vm.id) {
            let bounds = DELAY_BOUNDS.map(|octave| 1_u64 << octave);
            let below = bounds.map(|ns| (seconds(ns), delays.count_below(ns)));
            let (sum, count) = (seconds(delays.sum()), delays.count());
            out.histogram(name, &[("domain", domain)], below, sum, count);
        }
    }
    let mut sums: Vec<(&VmSample, &str)> = Vec::new();
    for (vm, domain) in vms.iter().zip(&domains) {
        sums.extend(totals.get(&vm.id).map(|sum| (sum, *domain)));
    }
    for (name, kind, help, value) in COUNTERS {
        out.head(name, *kind, help);
        for (vm, domain) in &sums {
            out.line(name, &[("domain", domain)], value(vm));
        }
    }
    for (name, kind, help, value) in BY_VCPU {
        out.head(name, *kind, help);
        for (vm, domain) in &sums {
            for (i, times) in vm.vcpus.iter().enumerate() {
                let labels = [("domain", *domain), ("vcpu", &i.to_string())];
                out.line(name, &labels, value(times));
            }
        }
    }
}

/// The label `domain` of each VM: its name, or its identity where two VMs have the same name.
pub fn domains(vms: &[VmReport]) -> Vec<&str> {
    vms.iter().map(|vm| domain(vm, vms)).collect()
}

fn domain<'a>(vm: &'a VmReport, all: &[VmReport]) -> &'a str {
    match all.iter().filter(|o| o.name == vm.name).count() {
        1 => &vm.name,
        _ => &vm.id,
    }
}

fn class(vm: &VmReport) -> &'static str {
    match vm.class {
        viola_proto::Class::Ls => "ls",
        viola_proto::Class::Batch => "batch",
        viola_proto::Class::Turbo => "turbo",
    }
}

fn auto(vm: &VmReport) -> &'static str {
    match vm.class_setting {
        ClassSetting::Auto => "1",
        _ => "0",
    }
}

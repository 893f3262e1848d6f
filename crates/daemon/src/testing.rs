// SPDX-License-Identifier: Apache-2.0
//! VMs and views for unit tests, also of other crates.

use viola_host::cgroup::{Cgroup, Version};
use viola_host::{CpuSet, Hypervisor, ServiceKind, ServiceThread, Thread, Vcpu, Vm};

/// A UML guest: vCPU `i` has thread `pid + i` (the first one is the guest's kernel), and may run on `vcpus[i]`.
pub fn vm(name: &str, pid: u32, vcpus: &[&[u32]]) -> Vm {
    vm_with_id(&format!("uml:{name}"), name, pid, vcpus)
}

/// The same with another identity.
pub fn vm_with_id(id: &str, name: &str, pid: u32, vcpus: &[&[u32]]) -> Vm {
    let vcpus: Vec<Vcpu> = vcpus
        .iter()
        .enumerate()
        .map(|(i, cores)| Vcpu {
            index: i as u32,
            threads: vec![thread(pid, pid + i as u32)],
            kernel_thread: Some(pid + i as u32),
            cores: cores.iter().copied().collect(),
        })
        .collect();
    let mut cores = CpuSet::new();
    vcpus.iter().for_each(|v| cores.extend(&v.cores));
    Vm {
        id: serde_json::from_value(id.into()).expect("an identity"),
        name: name.into(),
        hypervisor: Hypervisor::Uml,
        pid,
        start_time: 1,
        vcpus,
        service: Vec::new(),
        disks: Vec::new(),
        nics: Vec::new(),
        cgroup: None,
        cores,
        status: None,
        uuid: None,
        libvirt: false,
        confirmed: Some(viola_host::confirm::Confirmation::Registered),
    }
}

/// A thread that started at tick 1.
pub fn thread(pid: u32, tid: u32) -> Thread {
    Thread {
        pid,
        tid,
        start_time: 1,
    }
}

/// Adds a service thread to a VM.
pub fn serve(vm: &mut Vm, tid: u32) {
    vm.service.push(ServiceThread {
        thread: thread(vm.pid, tid),
        kind: ServiceKind::Iothread,
    });
}

/// A control group with a weight and a quota.
pub fn cgroup(weight: Option<u32>, quota: Option<u32>) -> Cgroup {
    Cgroup {
        version: Version::V2,
        path: "/machine.slice/x".into(),
        weight,
        quota_permille_of_one_core: quota,
        vcpu_quota_permille: None,
    }
}

/// CPUs 0..n of a host with one node and no SMT.
pub fn cpus(n: u32) -> Vec<viola_host::topology::Cpu> {
    (0..n)
        .map(|cpu| viola_host::topology::Cpu {
            cpu,
            node: 0,
            package: 0,
            siblings: [cpu].into_iter().collect(),
        })
        .collect()
}

/// The view of a daemon with these VMs.
pub fn view(names: &[&str]) -> crate::api::view::View {
    use viola_proto::{
        Check, Class, ClassSetting, CpuTime, Delay, ResidualWait, Source, Stage, Status, VmList,
        VmReport,
    };
    let delay = |count, p50_ns, p99_ns| Delay {
        count,
        p50_ns: Some(p50_ns),
        p99_ns: Some(p99_ns),
        buckets: Vec::new(),
    };
    let report = |name: &&str| VmReport {
        id: format!("uml:{name}"),
        name: (*name).to_owned(),
        hypervisor: "uml".into(),
        pid: 10,
        vcpus: 1,
        class: Class::Batch,
        class_setting: ClassSetting::Batch,
        class_source: Source::Default,
        why: "set by default".into(),
        microslice_ns: 300_000,
        weight: 256,
        weight_source: Source::Default,
        cap_permille: None,
        cap_source: Source::Default,
        cores: vec![1],
        share: 0.25,
        used: 0.25,
        waiting: Some(0.15),
        wait_share: 0.38,
        packet_delay: Some(delay(10_000, 4_000_000, 17_000_000)),
        packet_delay_absent: None,
        wake_delay: Some(delay(1_000, 1_280, 6_000_000)),
        answer_time: None,
        connect_time: None,
        residual_wait: Some(ResidualWait {
            mean_ns: 600_000,
            p50_ns: 0,
            p99_ns: 9_000_000,
        }),
        wakes_per_s: 100.0,
        net_bytes_per_s: 12e6,
        net_packets_per_s: 1000.0,
        disk_bytes_per_s: 3e6,
        by_vcpu: vec![CpuTime::default()],
        service: CpuTime::default(),
        scheduled_by: "stock".into(),
        turns: None,
        remarks: Vec::new(),
        help: Vec::new(),
        advice: None,
    };
    crate::api::view::View {
        status: Status {
            pid: std::process::id(),
            version: "0".into(),
            config: "/etc/viola/viola.toml".into(),
            uptime_ns: 1,
            interval_ns: 100_000_000,
            stage: Stage::Idle,
            why: "no VM is latency-sensitive".into(),
            mechanism: None,
            accounting: "exact".into(),
            cores: Vec::new(),
            unmanaged: Vec::new(),
            libvirt: viola_proto::Libvirt::default(),
            failures: 0,
            decisions: viola_proto::Decisions::default(),
            warnings: Vec::new(),
        },
        vms: VmList {
            vms: names.iter().map(report).collect(),
            measured_ns: 1_000_000_000,
            warnings: Vec::new(),
        },
        vread: viola_proto::vread::Vread::default(),
        lanes: viola_proto::lanes::Lanes::default(),
        check: Check::default(),
        packet_delays: names
            .iter()
            .map(|n| (format!("uml:{n}"), packet_delays()))
            .collect(),
        totals: names
            .iter()
            .map(|n| (format!("uml:{n}"), total(n)))
            .collect(),
    }
}

/// The delays of 7 packets.
fn packet_delays() -> viola_meter::Histogram {
    let mut delays = viola_meter::Histogram::default();
    delays.add(0, 4);
    delays.add(17_000_000, 3);
    delays
}

/// Totals of a VM.
fn total(name: &str) -> viola_meter::VmSample {
    viola_meter::VmSample {
        id: viola_host::VmId::new(Hypervisor::Uml, name),
        vcpus: vec![viola_meter::Times::default()],
        service: viola_meter::Times::default(),
        traffic: viola_meter::Traffic::default(),
    }
}

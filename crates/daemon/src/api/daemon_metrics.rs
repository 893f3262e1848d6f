// SPDX-License-Identifier: Apache-2.0
//! The daemon itself, and the cores that it manages.

use viola_proto::{Core, EventKind, Stage, Status};

use crate::prometheus::{Kind, Metric, Text};
use viola_cli::log;

const STAGES: [(Stage, &str); 6] = [
    (Stage::Running, "running"),
    (Stage::Idle, "idle"),
    (Stage::Waiting, "waiting"),
    (Stage::Off, "off"),
    (Stage::Stopped, "stopped"),
    (Stage::Advising, "advising"),
];

const KINDS: [(EventKind, &str); 4] = [
    (EventKind::Error, "error"),
    (EventKind::Warning, "warning"),
    (EventKind::Change, "change"),
    (EventKind::Info, "info"),
];

const CORES: [Metric<Core>; 4] = [
    (
        "viola_core_managed",
        Kind::Gauge,
        "Whether viola schedules this core now",
        |c| u8::from(c.managed).into(),
    ),
    (
        "viola_core_decisions_total",
        Kind::Counter,
        "Decisions of the core's controller",
        |c| c.decisions as f64,
    ),
    (
        "viola_core_controller_seconds_total",
        Kind::Counter,
        "CPU time of the core's controller",
        |c| c.controller_ns as f64 / 1e9,
    ),
    (
        "viola_core_late_max_seconds",
        Kind::Gauge,
        "Longest time by which the core's controller came late",
        |c| c.late_max_ns as f64 / 1e9,
    ),
];

/// All of them.
pub fn write(out: &mut Text, status: &Status) {
    let name = "viola_build_info";
    out.head(name, Kind::Gauge, "Version, and how times are taken");
    let labels = [
        ("version", status.version.as_str()),
        ("accounting", &status.accounting),
        ("mechanism", status.mechanism.as_deref().unwrap_or("")),
    ];
    out.line(name, &labels, 1.0);
    let name = "viola_stage";
    out.head(
        name,
        Kind::Gauge,
        "What the daemon is doing: 1 at one of them",
    );
    for (stage, word) in STAGES {
        let is = f64::from(u8::from(stage == status.stage));
        out.line(name, &[("stage", word)], is);
    }
    let name = "viola_uptime_seconds";
    out.head(name, Kind::Gauge, "How long the daemon has run");
    out.line(name, &[], status.uptime_ns as f64 / 1e9);
    let name = "viola_interval_seconds";
    out.head(name, Kind::Gauge, "Time between two looks at the VMs");
    out.line(name, &[], status.interval_ns as f64 / 1e9);
    let name = "viola_failures_total";
    let help = "Times that a mechanism ended without being asked to";
    out.head(name, Kind::Counter, help);
    out.line(name, &[], status.failures.into());
    let name = "viola_domains_left_out";
    let help = "VMs that asked for something they cannot get";
    out.head(name, Kind::Gauge, help);
    out.line(name, &[], status.left_out.len() as f64);
    let name = "viola_events_total";
    out.head(name, Kind::Counter, "Lines in the journal, by kind");
    for (kind, word) in KINDS {
        out.line(name, &[("kind", word)], log::count(kind) as f64);
    }
    let told = &status.libvirt;
    let name = "viola_libvirt_connected";
    out.head(
        name,
        Kind::Gauge,
        "Whether libvirt tells what happens to its VMs",
    );
    out.line(name, &[], f64::from(u8::from(told.connected)));
    let name = "viola_libvirt_domains";
    out.head(name, Kind::Gauge, "Domains that run, as libvirt says");
    out.line(name, &[], told.domains as f64);
    let name = "viola_libvirt_events_total";
    out.head(name, Kind::Counter, "What libvirt told of its domains");
    out.line(name, &[], told.events as f64);
    out.all("", &CORES, &status.cores, |core| {
        ("cpu", core.cpu.to_string())
    });
    process(out);
}

/// Names that all programs have which Prometheus asks.
fn process(out: &mut Text) {
    let name = "process_cpu_seconds_total";
    out.head(name, Kind::Counter, "CPU time of the daemon's process");
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    out.line(name, &[], used.tv_sec as f64 + used.tv_nsec as f64 / 1e9);
    let name = "process_resident_memory_bytes";
    out.head(name, Kind::Gauge, "Memory of the daemon's process");
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    if let Some(pages) = statm.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()) {
        let bytes = pages * rustix::param::page_size() as u64;
        out.line(name, &[], bytes as f64);
    }
}

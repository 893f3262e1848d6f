// SPDX-License-Identifier: Apache-2.0
//! Metrics of the daemon itself.

use viola_proto::{EventKind, Stage, Status};

use crate::prometheus::{Kind, Text};
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

/// Writes what the daemon does.
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
        "What the daemon is doing: 1 for the current stage",
    );
    for (stage, word) in STAGES {
        let is = f64::from(u8::from(stage == status.stage));
        out.line(name, &[("stage", word)], is);
    }
    let name = "viola_uptime_seconds";
    out.head(name, Kind::Gauge, "How long the daemon has run");
    out.line(name, &[], status.uptime_ns as f64 / 1e9);
    let name = "viola_interval_seconds";
    out.head(
        name,
        Kind::Gauge,
        "Time between two ticks of the control loop",
    );
    out.line(name, &[], status.interval_ns as f64 / 1e9);
    let name = "viola_decisions_total";
    let help = "Looks at what all VMs spent in a window, for their classes and turbo vCPUs";
    out.head(name, Kind::Counter, help);
    out.line(name, &[], status.decisions.count as f64);
    let name = "viola_decision_cpu_seconds_total";
    let help = "CPU time of these";
    out.head(name, Kind::Counter, help);
    out.line(name, &[], status.decisions.cpu_ns as f64 / 1e9);
    let name = "viola_failures_total";
    let help = "Failures of a mechanism";
    out.head(name, Kind::Counter, help);
    out.line(name, &[], status.failures.into());
    let name = "viola_domains_unmanaged";
    let help = "VMs that do not get the class or cap that was set";
    out.head(name, Kind::Gauge, help);
    out.line(name, &[], status.unmanaged.len() as f64);
    let name = "viola_events_total";
    out.head(name, Kind::Counter, "Log lines, by kind");
    for (kind, word) in KINDS {
        out.line(name, &[("kind", word)], log::count(kind) as f64);
    }
    let libvirt = &status.libvirt;
    let name = "viola_libvirt_connected";
    out.head(
        name,
        Kind::Gauge,
        "Whether the daemon is connected to libvirt",
    );
    out.line(name, &[], f64::from(u8::from(libvirt.connected)));
    let name = "viola_libvirt_domains";
    out.head(name, Kind::Gauge, "Running domains of libvirt");
    out.line(name, &[], libvirt.domains as f64);
    let name = "viola_libvirt_events_total";
    out.head(name, Kind::Counter, "Events of libvirt");
    out.line(name, &[], libvirt.events as f64);
    process(out);
}

/// Metrics that every program has which Prometheus scrapes.
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

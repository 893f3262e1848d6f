// SPDX-License-Identifier: Apache-2.0
//! The tables and keys of a scenario file.

use serde::Deserialize;
use toml::Spanned;

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) name: Option<String>,
    pub(super) seconds: Spanned<f64>,
    #[serde(default = "one")]
    pub(super) seed: u64,
    pub(super) host: Host,
    pub(super) vm: Vec<Spanned<Vm>>,
}

fn one() -> u64 {
    1
}

/// `[host]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Host {
    pub(super) scheduler: Scheduler,
    pub(super) cores: Option<Spanned<usize>>,
    pub(super) turbo_cores: Option<Spanned<usize>>,
    pub(super) slice_us: Option<Spanned<u64>>,
    pub(super) slot_us: Option<Spanned<u64>>,
    pub(super) switch_ns: Option<u64>,
    pub(super) decision_ns: Option<u64>,
    pub(super) nic_mbit: Option<Spanned<u64>>,
    pub(super) ring: Option<Spanned<usize>>,
    pub(super) interrupt_ns: Option<u64>,
    pub(super) packet_ns: Option<u64>,
    pub(super) host_packet_ns: Option<u64>,
    pub(super) coalesce_us: Option<u64>,
    pub(super) call_ns: Option<u64>,
    pub(super) copy_ns_per_kb: Option<Spanned<f64>>,
    pub(super) send_ns: Option<u64>,
    pub(super) lanes: Option<Lanes>,
}

/// `[host.lanes]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Lanes {
    pub(super) vfs: Spanned<u32>,
    pub(super) every_ms: Option<Spanned<u64>>,
    pub(super) hold_ms: Option<u64>,
}

/// The scheduler of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Scheduler {
    Credit,
    CreditNoBoost,
    Vslicer,
    Viola,
    Eevdf,
    Turbo,
}

/// `[[vm]]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Vm {
    pub(super) name: Option<Spanned<String>>,
    pub(super) count: Option<Spanned<usize>>,
    #[serde(default)]
    pub(super) class: Class,
    pub(super) weight: Option<Spanned<u32>>,
    pub(super) cap_percent: Option<Spanned<f64>>,
    pub(super) microslice_us: Option<Spanned<u64>>,
    pub(super) core: Option<Spanned<usize>>,
    pub(super) turbo_core: Option<Spanned<usize>>,
    pub(super) load_percent: Option<Spanned<u64>>,
    pub(super) refill_us: Option<u64>,
    #[serde(default)]
    pub(super) work: Vec<Spanned<Work>>,
}

/// Class of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Class {
    Ls,
    #[default]
    Batch,
}

/// `[[vm.work]]`
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Work {
    Ping {
        pause_ms: Option<f64>,
        delay_ms: Option<f64>,
        process_us: Option<f64>,
    },
    Udp {
        mbit: f64,
        bytes: Option<u32>,
        buffer_kb: Option<u64>,
    },
    Tcp {
        buffer_kb: Option<u64>,
        delay_ms: Option<f64>,
        megabytes: Option<f64>,
        #[serde(default)]
        early_ack: bool,
    },
    Http {
        rate: f64,
        page: Option<u32>,
        process_us: Option<f64>,
        delay_ms: Option<[f64; 2]>,
    },
    Requests {
        connections: Option<u32>,
        rate: Option<f64>,
        process_us: Option<f64>,
        delay_ms: Option<f64>,
    },
    Voice {
        #[serde(default)]
        down: bool,
        lines: Option<u64>,
        delay_ms: Option<[f64; 2]>,
    },
    Write {
        mb_per_s: f64,
        request_kb: Option<u64>,
        depth: Option<u64>,
        megabytes: Option<f64>,
    },
    Read {
        mb_per_s: f64,
        request_kb: Option<u64>,
        depth: Option<u64>,
    },
    Files {
        kb: u64,
        connections: Option<u64>,
        mb_per_s: Option<f64>,
    },
    Blocks {
        from: String,
        kb: Option<u64>,
        mb_per_s: Option<f64>,
    },
}

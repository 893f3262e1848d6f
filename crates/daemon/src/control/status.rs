// SPDX-License-Identifier: Apache-2.0
//! Builds the view that the control socket serves.

use std::collections::BTreeMap;
use std::time::Instant;

use viola_host::Vm;
use viola_meter::Histogram;
use viola_proto::{Check, Status, UnmanagedVm, VmList, VmReport};

use super::Control;
use crate::api::view::View;
use crate::check::{self, Daemon};
use crate::host::libvirt::Libvirt;
use crate::vread;
use viola_config::Accelerator;

/// Why lanes, vread and vpipe are off in a dry run.
const DRY_RUN: &str = "this is a dry run";

impl Control {
    /// All that the control socket serves.
    pub(crate) fn view(&self, now: Instant) -> View {
        let recent = self.recent();
        let mut vms = self.slices.reports(&self.inputs, &self.meter, &recent);
        let shown = self.workers.as_ref().map(|w| w.shown());
        let vread = shown.unwrap_or_else(|| viola_proto::vread::Vread {
            why: DRY_RUN.into(),
            ..Default::default()
        });
        let config = &self.inputs.config;
        if config.advises(Accelerator::Turbo) {
            self.turbo.add_advice(&mut vms, self.inputs.vms());
        }
        if config.advises(Accelerator::Vread) {
            vread::status::add_advice(&mut vms, &vread);
            (self.block_readers).add_advice(&mut vms, self.inputs.vms(), config);
        }
        if config.advises(Accelerator::Vpipe) {
            (self.file_senders).add_advice(&mut vms, self.inputs.vms(), config);
        }
        if config.advises(Accelerator::Lanes) {
            (self.packet_loads).add_advice(&mut vms, self.inputs.vms(), config);
        }
        let lanes = self.lanes_status();
        let libvirt = self.libvirt_status();
        let daemon = Daemon {
            libvirt: &libvirt,
            lanes: &lanes,
            vread: &vread,
        };
        let rows = check::rows(
            &self.inputs.config,
            &self.inputs.facts,
            self.slices.support(),
            self.inputs.vms(),
            Some(daemon),
        );
        View {
            status: self.status(now),
            check: Check {
                rows,
                advice: vms.iter().filter_map(|vm| vm.advice.clone()).collect(),
                warnings: self.warnings.clone(),
            },
            vms: VmList {
                vms,
                measured_ns: recent.span,
                warnings: self.warnings.clone(),
            },
            vread,
            totals: self.totals.shown(),
            packet_delays: self.packet_delays(),
            lanes,
        }
    }

    fn packet_delays(&self) -> BTreeMap<String, Histogram> {
        let vms = self.inputs.vms().iter();
        let delays = |vm: &Vm| {
            Some((
                vm.id.to_string(),
                self.meter.packet_delay_total(&vm.id)?.clone(),
            ))
        };
        vms.filter_map(delays).collect()
    }

    pub(super) fn reports(&self) -> Vec<VmReport> {
        (self.slices).reports(&self.inputs, &self.meter, &self.recent())
    }

    fn lanes_status(&self) -> viola_proto::lanes::Lanes {
        let shown = self.lanes.as_ref().map(|l| l.shown());
        shown.unwrap_or_else(|| viola_proto::lanes::Lanes {
            why: DRY_RUN.into(),
            ..Default::default()
        })
    }

    fn libvirt_status(&self) -> viola_proto::Libvirt {
        let shown = self.libvirt.as_ref().map(Libvirt::shown);
        shown.unwrap_or_default()
    }

    pub(super) fn status(&self, now: Instant) -> Status {
        let (stage, why) = self.slices.stage(&self.inputs);
        let unmanaged = |(id, why): &(viola_host::VmId, String)| UnmanagedVm {
            vm: id.to_string(),
            why: why.clone(),
        };
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            config: self.inputs.config.path.display().to_string(),
            uptime_ns: now.saturating_duration_since(self.started).as_nanos() as u64,
            interval_ns: self.inputs.config.daemon.interval,
            cores: self.slices.cores(&why),
            stage,
            why,
            mechanism: self.slices.mechanism_name().map(str::to_owned),
            accounting: self.slices.accounting_text(),
            unmanaged: self.slices.left_out().iter().map(unmanaged).collect(),
            libvirt: self.libvirt_status(),
            failures: self.slices.failures(),
            decisions: self.decisions,
            warnings: self.warnings.clone(),
        }
    }
}

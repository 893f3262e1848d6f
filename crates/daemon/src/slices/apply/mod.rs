// SPDX-License-Identifier: Apache-2.0
//! Carries a plan out: affinities first, then the mechanism.
//!
//! | file | does |
//! |---|---|
//! | `engine` | starts, feeds and stops the mechanism |
//! | `pins` | sets affinities, and gives threads back what they had |
//! | `changes` | the log lines about what a plan changes |

mod changes;
pub mod engine;
pub mod pins;

use std::time::{Duration, Instant};

use viola_meter::Meter;

use super::Slices;
use super::decide::placement::NewPlacement;
use super::decide::plan::Draft;
use crate::vms::Inputs;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::MechanismChoice;

/// The daemon leaves a VM that the kernel refused alone for this time.
const REFUSED_RETRY_DELAY: Duration = Duration::from_secs(60);

impl Slices {
    /// Stops the mechanism in use when another one, or none, is chosen.
    pub fn select_mechanism(&mut self, inputs: &Inputs) {
        if !inputs.dry_run {
            let choice = self.active_choice(inputs);
            self.engine.select(choice);
        }
    }

    /// Puts a plan in force. `false` when the kernel refused a VM: the next plan leaves it out.
    pub fn apply(
        &mut self,
        now: Instant,
        draft: Draft,
        placement: NewPlacement,
        inputs: &Inputs,
        meter: &mut Meter,
    ) -> bool {
        let choice = self.active_choice(inputs);
        self.draft = draft;
        self.log_moves(&placement, inputs);
        self.placement.commit(now, placement);
        // Only the slot controllers are told of packets.
        if choice == Some(MechanismChoice::Slots) && !inputs.dry_run {
            self.watch_packets(inputs, meter);
        }
        if inputs.dry_run {
            self.engine.log_dry_run(choice, &self.draft, inputs.vms());
            return true;
        }
        let refused = self
            .engine
            .apply(now, &self.draft, inputs.vms(), meter.acct());
        let is_complete = refused.is_empty();
        for (id, why) in refused {
            self.blocked.insert(id.clone(), why.clone());
            self.refused.insert(id, (now + REFUSED_RETRY_DELAY, why));
        }
        is_complete
    }

    /// Logs why vCPUs that are pinned move to another core.
    fn log_moves(&self, placement: &NewPlacement, inputs: &Inputs) {
        for (id, vcpu, why) in &placement.moved {
            let vcpus = inputs.inventory.get(id).map(|vm| &vm.vcpus);
            let thread = vcpus.and_then(|v| v.get(*vcpu)?.threads.first());
            if let Some(cpus) = thread.and_then(|t| self.draft.pins.get(t)) {
                let what = format!("vCPU {vcpu} goes to core {cpus}: {why}");
                log::about(Level::Notice, id, what);
            }
        }
    }

    /// Lets the accounting program report packets for latency-sensitive VMs to the controllers of their cores.
    fn watch_packets(&mut self, inputs: &Inputs, meter: &mut Meter) {
        match meter.watch_packets(&self.draft.interrupts) {
            Ok(served) => self.draft.set_sees_packets(&served, inputs.vms()),
            // Controllers then give such a VM its core in case a packet waits.
            Err(e) => {
                let what = format!("packets are not seen: {}", chain(&e));
                self.packet_error.line(Level::Warning, what);
            }
        }
    }
}

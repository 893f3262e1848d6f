// SPDX-License-Identifier: Apache-2.0
//! The control loop: host -> meter -> policy -> act, once each `daemon.interval` (100 ms unless configured).
//!
//! | step | what happens | where |
//! |---|---|---|
//! | host | kernel facts, VMs, their threads, workers and ends | `control/observe.rs`, `slices/observe/` |
//! | meter | CPU times at each tick; packets, wakes and waits each 100 ms | `control/measure.rs` |
//! | policy | class of each VM, turbo vCPUs, a core for each vCPU | `turbo/decide/`, `slices/decide/` |
//! | act | affinities, then the mechanism; put back at the end | `slices/apply/` |
//!
//! Lanes, vread and vpipe move VFs and blocks, which can take seconds. They have loops of their own on other threads
//! (`background.rs`, `lanes/manager.rs`, `supervisor/reconcile.rs`), which get the VMs from [`Control::scan_host`].

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use crate::api::http::{Request, Shared};
use crate::control::{Control, thread_cpu_time};
use viola_cli::log::{self, Level};
use viola_config::Accelerator;
use viola_meter::Snapshot;

/// Ticks and answers requests until SIGTERM or SIGINT.
pub fn run(control: &mut Control, shared: &Shared, requests: &Receiver<Request>) {
    let mut next_tick = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next_tick {
            control.tick(now);
            // A loop that was late skips the ticks that it missed.
            next_tick = (next_tick + control.interval()).max(Instant::now());
        }
        match requests.recv_timeout(next_tick.saturating_duration_since(Instant::now())) {
            Ok(Request::Quit(signal)) => {
                log::line(Level::Info, format!("{signal}: putting everything back"));
                return;
            }
            Ok(request) => control.answer(request, shared),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Control {
    /// One turn. Most turns only read CPU times: the host is scanned and planned again only after a change.
    fn tick(&mut self, now: Instant) {
        // Host: what can this kernel do, does the mechanism still work, which VMs run?
        self.refresh_facts(now);
        let mut replan = self.slices.check_health(now, &self.inputs);
        if self.scan_is_due(now) || replan {
            self.scan_host(now);
            replan = true;
        }
        replan |= self.end_temporary_classes(now);
        // Meter: what did each VM spend in the window that just ended?
        if let Some(window) = self.measure(now) {
            // Policy: does a VM need another class, a turbo vCPU, or the host another number of turbo cores?
            let cpu_time_before = thread_cpu_time();
            let can_act = self.slices.can_act(&self.inputs);
            replan |= self.turbo.decide(&window, &self.inputs, can_act);
            replan |= self.slices.classify(&window, &self.inputs, &self.meter);
            self.watch_signs(&window);
            let cpu_time = thread_cpu_time().saturating_sub(cpu_time_before);
            self.decisions.count += 1;
            self.decisions.cpu_ns += cpu_time.as_nanos() as u64;
        }
        if replan {
            self.plan_and_apply(now);
        }
    }

    /// Says in the log which VMs vread, vpipe and lanes could help, unless no advice is wanted.
    fn watch_signs(&mut self, window: &Snapshot) {
        let (config, vms) = (&self.inputs.config, self.inputs.vms());
        let mut lines = Vec::new();
        match config.advises(Accelerator::Vread) {
            true => lines.extend(
                self.block_readers
                    .observe(window, vms, config, &mut self.meter),
            ),
            false => self.block_readers.rest(&mut self.meter),
        }
        if config.advises(Accelerator::Vpipe) {
            lines.extend(self.file_senders.observe(window, vms, config));
        }
        if config.advises(Accelerator::Lanes) {
            lines.extend(self.packet_loads.observe(window, vms, config));
        }
        for (id, line) in lines {
            log::about(Level::Info, &id, line);
        }
    }

    /// Policy and act: gives each vCPU a core, and carries out what the new plan changes.
    pub(crate) fn plan_and_apply(&mut self, now: Instant) {
        let Self {
            inputs,
            meter,
            slices,
            turbo,
            ..
        } = self;
        slices.select_mechanism(inputs);
        // The next plan leaves out a VM that the kernel refuses, so each VM is refused at most once.
        for _ in 0..=inputs.vms().len() {
            let (plan, placement) = slices.plan(now, inputs, turbo, meter);
            let is_complete = slices.apply(now, plan, placement, inputs, meter);
            if is_complete {
                break;
            }
        }
        slices.log_left_out();
    }
}

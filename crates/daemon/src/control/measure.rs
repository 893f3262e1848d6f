// SPDX-License-Identifier: Apache-2.0
//! Reads what the VMs spent.

use std::time::{Duration, Instant};

use viola_meter::Snapshot;

use super::Control;
use crate::vms::recent::Recent;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};

/// Length of the windows by which VMs are classified: 100 ms hold enough events. A tick may come up to 5 ms early.
const WINDOW: Duration = Duration::from_millis(95);

impl Control {
    /// Reads CPU times at each tick, which costs no system call. Once each [`WINDOW`] it reads what NICs and disks counted as
    /// well, and returns what each VM spent in that window.
    pub(crate) fn measure(&mut self, now: Instant) -> Option<Snapshot> {
        if now.saturating_duration_since(self.window_start) < WINDOW {
            self.meter.read_times();
            return None;
        }
        self.window_start = now;
        self.measure_answers();
        let window = self.meter.snapshot().clone();
        self.totals.add(&window);
        Some(window)
    }

    /// Measures the times of answers while a VM has a class for some time: somebody compares then.
    fn measure_answers(&mut self) {
        let wanted = self.inputs.settings.has_temporary();
        if let Err(e) = self.meter.measure_answers(wanted) {
            let line = format!("the times of answers are not measured: {}", chain(&e));
            log::line(Level::Warning, line);
        }
    }

    /// What the VMs spent in the last second.
    pub(super) fn recent(&self) -> Recent {
        Recent::from_history(self.meter.history())
    }
}

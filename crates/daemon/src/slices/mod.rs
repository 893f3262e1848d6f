// SPDX-License-Identifier: Apache-2.0
//! Slices (vSlicer): a latency-sensitive VM gets short slices, more often, at the same share. This accelerator also plans and
//! schedules the cores of [`crate::turbo`], since one mechanism drives both.
//!
//! | file | role |
//! |---|---|
//! | `observe` | which mechanisms this kernel supports, what keeps a VM from being managed, and what its threads may run on |
//! | `decide` | the class of each VM, and a core for each vCPU |
//! | `apply` | affinities first, then the mechanism |
//! | `restore` | puts back what an earlier run changed |
//! | `status`, `metrics`, `check` | what the control socket, Prometheus and `viola check` show |

pub(crate) mod apply;
pub mod check;
pub(crate) mod decide;
pub mod metrics;
pub(crate) mod observe;
pub mod restore;
mod status;

use std::collections::BTreeMap;
use std::time::Instant;

use viola_host::{CpuSet, Tid, VmId};
use viola_sched::SchedError;

use self::apply::engine::Engine;
use self::decide::classes::Classes;
use self::decide::placement::Placement;
use self::decide::plan::Draft;
use self::observe::mechanisms::{Support, try_scheduler};
use crate::host::check::Obstacle;
use crate::vms::Inputs;
use viola_cli::log::{self, Level};
use viola_config::MechanismChoice;

/// State of slices, and of the cores that they and turbo share.
pub struct Slices {
    /// Whether the kernel takes the BPF programs.
    support: Support,
    /// The mechanism in use, or why there is none.
    mechanism: Result<MechanismChoice, Obstacle>,
    classes: Classes,
    placement: Placement,
    engine: Engine,
    /// CPUs that the threads of each VM may run on, without viola's own pins.
    allowed: BTreeMap<VmId, BTreeMap<Tid, CpuSet>>,
    /// VMs that cannot be managed, and why.
    blocked: BTreeMap<VmId, String>,
    /// VMs that the kernel refused: until when the daemon leaves each alone, and why.
    refused: BTreeMap<VmId, (Instant, String)>,
    /// The last plan.
    draft: Draft,
    /// VMs of the last plan that do not get what they ask for, as far as that was logged.
    logged_left_out: Vec<(VmId, String)>,
    /// Why the accounting program does not report packets.
    packet_error: log::OnChange,
}

impl Slices {
    /// Asks the kernel to verify the sched_ext scheduler. `accounting` says whether the accounting program runs, or why not.
    pub fn new(inputs: &Inputs, accounting: Result<(), String>) -> Self {
        let (scheduler, ready) = match try_scheduler(&inputs.facts) {
            Ok(ready) => (Ok(()), Some(ready)),
            Err(why) => (Err(why), None),
        };
        let mut engine = Engine::new(&inputs.config.daemon.run_dir);
        if let Some(ready) = ready.filter(|_| !inputs.dry_run) {
            engine.set_scheduler(ready);
        }
        let support = Support {
            accounting,
            scheduler,
        };
        Self {
            mechanism: support.choose(&inputs.facts, &inputs.config.slices),
            support,
            classes: Classes::new(&inputs.config.daemon.state_dir),
            placement: Placement::default(),
            engine,
            allowed: BTreeMap::new(),
            blocked: BTreeMap::new(),
            refused: BTreeMap::new(),
            draft: Draft::default(),
            logged_left_out: Vec::new(),
            packet_error: log::OnChange::default(),
        }
    }

    /// Logs how waits are measured and which mechanism is used.
    pub fn log_start(&self, inputs: &Inputs) {
        if let Err(why) = &self.support.accounting {
            let what = format!("waits are sampled, and there are no slots: {why}");
            log::line(Level::Warning, what);
        }
        self.log_mechanism(inputs);
    }

    /// Whether a class may be tried: the mechanism works, and this is no dry run.
    pub fn can_act(&self, inputs: &Inputs) -> bool {
        let retry = &self.engine.retry;
        !(inputs.dry_run || retry.is_off() || retry.is_pending())
    }

    /// Tries mechanisms and VMs again that failed: the operator has changed something.
    pub fn retry_all(&mut self, inputs: &Inputs) {
        self.engine.retry.reset();
        if self.support.scheduler.is_err() {
            self.support.scheduler = match try_scheduler(&inputs.facts) {
                Ok(ready) => {
                    self.engine.set_scheduler(ready);
                    Ok(())
                }
                Err(why) => Err(why),
            };
        }
        self.refused.clear();
    }

    /// Stops the mechanism and gives all threads back what they had.
    ///
    /// # Errors
    /// When a thread or file cannot be restored.
    pub fn stop(&mut self) -> Result<(), SchedError> {
        self.engine.stop()
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.classes.forget(id);
    }
}

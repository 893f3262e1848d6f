// SPDX-License-Identifier: Apache-2.0
//! Shorter slices for latency-sensitive VMs in the kernel's fair class (Linux 6.12: the runtime of sched_setattr(2) is the slice
//! of a fair task).
//!
//! It is for hosts whose cores have other work too: the threads stay in the fair class, and it
//! needs neither a controller nor cores set aside for VMs. A VM that wakes gains; a busy VM gains
//! little, since the kernel enforces slices at its tick.

use std::path::PathBuf;

use viola_host::Vm;
use viola_host::attrs::{self, Policy};
use viola_meter::acct::Acct;
use viola_policy::slices::{Class, MS, US};

use crate::mechanism::{Health, Mechanism, SchedError};
use crate::plan::Plan;
use crate::restore::{SavedState, restore_slices};

/// Range to which the kernel limits slices (sched_setattr(2)), ns.
const SLICE: std::ops::RangeInclusive<u64> = 100 * US..=100 * MS;

/// The EEVDF mechanism.
#[derive(Debug)]
pub struct Eevdf {
    saved: PathBuf,
    state: SavedState,
}

impl Eevdf {
    /// `saved` is the file for the attributes that the threads had before.
    pub fn new(saved: PathBuf) -> Self {
        Self {
            saved,
            state: SavedState::default(),
        }
    }
}

impl Mechanism for Eevdf {
    fn name(&self) -> &'static str {
        "eevdf"
    }

    fn apply(
        &mut self,
        plan: &Plan,
        vms: &[Vm],
        _acct: Option<&mut Acct>,
    ) -> Result<(), SchedError> {
        let ls: Vec<_> = plan
            .cores
            .iter()
            .flat_map(|c| &c.vms)
            .filter(|v| v.params.class == Class::Ls)
            .collect();
        // First restore the VMs that are no longer latency-sensitive.
        let (keep, back): (Vec<_>, Vec<_>) = self
            .state
            .vms
            .drain(..)
            .partition(|s| ls.iter().any(|v| v.pid as u32 == s.pid));
        self.state.vms = keep;
        restore_slices(&back)?;
        for v in &ls {
            if let Some(vm) = vms.iter().find(|vm| vm.pid == v.pid as u32) {
                self.state.record(vm, false)?;
            }
        }
        self.state.write(&self.saved)?;
        for v in &ls {
            for thread in &v.threads {
                let Some(mut attr) = attrs::get(thread.tid as u32)? else {
                    continue;
                };
                let slice = v.params.microslice.clamp(*SLICE.start(), *SLICE.end());
                if matches!(attr.policy, Policy::Normal | Policy::Batch) && attr.runtime != slice {
                    attr.runtime = slice;
                    let _ = attrs::set(thread.tid as u32, &attr)?;
                }
            }
        }
        Ok(())
    }

    fn health(&mut self) -> Health {
        Health::default()
    }

    fn stop(&mut self) -> Result<(), SchedError> {
        let vms = std::mem::take(&mut self.state.vms);
        restore_slices(&vms)?;
        match std::fs::remove_file(&self.saved) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(SchedError::Io {
                what: self.saved.display().to_string(),
                source: e,
            }),
            _ => Ok(()),
        }
    }
}

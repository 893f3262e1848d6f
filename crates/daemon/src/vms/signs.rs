// SPDX-License-Identifier: Apache-2.0
//! Signs that an accelerator could help a VM: what the meter measured of it, window by window.

use std::collections::BTreeMap;
use std::fmt::Display;

use viola_host::VmId;
use viola_meter::{Snapshot, VmSample};

/// A sign of one VM. Displayed, it is a verb and its figures, for a sentence about the VM.
pub trait Sign: Default + Display {
    /// Takes a sample; `true` when [`Sign::is_there`] has changed.
    fn observe(&mut self, sample: &VmSample, window: &Snapshot) -> bool;

    /// Whether the VM has the sign.
    fn is_there(&self) -> bool;
}

/// A sign of each VM.
#[derive(Debug, Default)]
pub struct Signs<S>(BTreeMap<VmId, S>);

impl<S: Sign> Signs<S> {
    /// Takes what each VM did in a window. Returns the VMs that have the sign from now on.
    pub fn observe<'a>(&mut self, window: &'a Snapshot) -> Vec<&'a VmSample> {
        let mut began = Vec::new();
        for sample in &window.vms {
            // An identity is copied only for a new VM.
            let sign = match self.0.get_mut(&sample.id) {
                Some(sign) => sign,
                None => self.0.entry(sample.id.clone()).or_default(),
            };
            if sign.observe(sample, window) && sign.is_there() {
                began.push(sample);
            }
        }
        began
    }

    /// The sign of a VM that has it.
    pub fn get(&self, id: &VmId) -> Option<&S> {
        self.0.get(id).filter(|sign| sign.is_there())
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.0.remove(id);
    }
}

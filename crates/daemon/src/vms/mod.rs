// SPDX-License-Identifier: Apache-2.0
//! What the daemon knows of each VM, whichever accelerator uses it.
//!
//! | file | holds |
//! |---|---|
//! | `inputs` | all that the control loop decides by |
//! | `settings` | class, weight, cap, microslice and lane of a VM, and who set them |
//! | `find` | VMs by name or identity |
//! | `recent`, `totals` | what VMs spent in the last second, and since the daemon found them |
//! | `delays` | how long packets, interrupts and random moments waited |
//! | `signs` | which VMs an accelerator could help |
//! | `report`, `metrics` | how the control socket and Prometheus show it |

mod delays;
pub mod find;
mod inputs;
pub mod metrics;
pub mod recent;
pub mod report;
pub mod settings;
pub mod signs;
pub mod totals;

pub use inputs::Inputs;

use viola_config::vread::Named;
use viola_host::Vm;

/// A VM as the configuration can name it.
pub fn named(vm: &Vm) -> Named {
    Named {
        id: vm.id.to_string(),
        name: vm.name.clone(),
    }
}

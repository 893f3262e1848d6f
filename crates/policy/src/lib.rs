// SPDX-License-Identifier: Apache-2.0
//! Pure decisions of viola: no clock, no file, no thread.
//!
//! Everything here takes what was observed and returns what should be done. The daemon, the real-time
//! controller and the simulator run the very same code, so what is tested in one holds in the others.
//!
//! - [`slices`]: who runs on a core next, and until when; the class of a VM.
//! - [`turbo`]: the same for turbo cores; which VMs use them, and how many there are.
//! - [`place`]: which vCPU runs on which core.
//! - [`lanes`]: which VMs hold the few virtual functions of a NIC.
//! - [`pipes`]: whose pipe the host serves next, and how much.

pub mod lanes;
pub mod pipes;
pub mod place;
pub mod slices;
pub mod turbo;

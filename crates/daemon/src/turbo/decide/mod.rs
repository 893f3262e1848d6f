// SPDX-License-Identifier: Apache-2.0
//! Which VMs have a turbo vCPU, and on which cores.

pub mod cores;
pub mod plan;
pub mod vms;

// SPDX-License-Identifier: Apache-2.0
//! Decides which VMs get a turbo vCPU (`vms`), how many turbo cores there are (`cores`), and what that changes in the plan of all
//! cores (`plan`).

pub mod cores;
pub mod plan;
pub mod vms;

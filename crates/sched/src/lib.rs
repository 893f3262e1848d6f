// SPDX-License-Identifier: Apache-2.0
//! CPU mechanisms behind one trait: real-time slots and EEVDF slices.
//!
//! | mechanism | class of the VMs' threads | needs | gives |
//! |---|---|---|---|
//! | [`slots::Slots`] | SCHED_FIFO, priorities 10-23 | Linux 6.12, BPF, cores set aside for VMs | exact slices, weights and caps |
//! | [`eevdf::Eevdf`] | as they were | Linux 6.12 | shorter slices for VMs that wake |
//!
//! sched_ext is to be the third: the same algorithm in the kernel, without real-time priorities.

pub mod eevdf;
mod mechanism;
mod plan;
pub mod restore;
pub mod slots;

pub use mechanism::{CoreHealth, Health, Mechanism, SchedError};
pub use plan::{Algorithm, BATCH_SLICE, CorePlan, PAPER_SLICE, Plan, ThreadPlan, VmPlan};

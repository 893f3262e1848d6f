// SPDX-License-Identifier: Apache-2.0
//! CPU mechanisms behind one trait: real-time slots, sched_ext and EEVDF slices.
//!
//! | mechanism | class of the VMs' threads | needs | gives |
//! |---|---|---|---|
//! | [`slots::Slots`] | SCHED_FIFO, priorities 10-23 | Linux 6.12, BPF, cores set aside for VMs | exact slices, weights and caps |
//! | [`scx::Scx`] | SCHED_EXT | Linux 6.12 with sched_ext, BPF, cores kept for VMs | the same in the kernel, not real-time |
//! | [`eevdf::Eevdf`] | as they were | Linux 6.12 | shorter slices for VMs that wake |

pub mod eevdf;
mod mechanism;
mod plan;
pub mod restore;
pub mod scx;
pub mod slots;

pub use mechanism::{CoreHealth, Health, Mechanism, SchedError, Usage};
pub use plan::{Algorithm, BATCH_SLICE, CorePlan, PAPER_SLICE, Plan, ThreadPlan, VmPlan};

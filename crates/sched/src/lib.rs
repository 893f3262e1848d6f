// SPDX-License-Identifier: Apache-2.0
//! CPU mechanisms behind one trait, [`Mechanism`]: they carry a [`Plan`] out.
//!
//! | mechanism | class of the VMs' threads | needs | gives |
//! |---|---|---|---|
//! | [`slots::Slots`] | SCHED_FIFO, priorities 10-23 | Linux 6.12, BPF, cores set aside for VMs | exact slices, weights and caps |
//! | [`scx::Scx`] | SCHED_EXT | Linux 6.12 with sched_ext, BPF, cores kept for VMs | the same in the kernel, not real-time |
//! | [`eevdf::Eevdf`] | unchanged | Linux 6.12 | shorter slices for VMs that wake |
//!
//! [`restore`] keeps the attributes that threads had before, and restores them.

mod core_lock;
pub mod eevdf;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod mechanism;
mod plan;
mod priorities;
pub mod restore;
pub mod scx;
pub mod slots;

pub use mechanism::{CoreHealth, Health, Mechanism, SchedError, Usage};
pub use plan::{Algorithm, BATCH_SLICE, CorePlan, PAPER_SLICE, Plan, ThreadPlan, VmPlan};

// SPDX-License-Identifier: Apache-2.0
//! Time accounting per VM and vCPU, after XenMon, and the snapshots that policy decides on.
//!
//! [`Meter`] follows the VMs of the inventory. It reads exact times, single waits and the delays of packets from a BPF program
//! ([`acct`]), or samples times from schedstat where BPF is unavailable.

pub mod acct;
mod hist;
mod meter;
mod schedstat;
mod snapshot;
mod waits;

pub use hist::{Histogram, Waits};
pub use meter::{AnswerTimes, BlockReads, Delays, Meter, Span, Unseen, VmCounters};
pub use snapshot::{Snapshot, Times, Traffic, VmSample};
pub use waits::WAIT_WINDOW_SECONDS;

// SPDX-License-Identifier: Apache-2.0
//! XenMon-like time accounting per VM and vCPU, and the snapshot that policy decides on.

pub mod acct;
mod hist;
mod meter;
mod schedstat;
mod snapshot;
mod waits;

pub use hist::WaitHist;
pub use meter::Meter;
pub use snapshot::{Snapshot, Times, Traffic, VmSample};
pub use waits::WAIT_WINDOW_SECONDS;

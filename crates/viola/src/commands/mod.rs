// SPDX-License-Identifier: Apache-2.0
//! The commands that an operator types; `viola run` is in [`viola_daemon`]. Each fails with a
//! [`viola_cli::error::Failure`]: one sentence, and exit status 1 or 2.

mod advise;
mod check;
mod control;
mod internal;
mod keys;
mod lanes;
mod log;
mod man;
mod pipe;
mod record;
mod register;
mod restore;
mod vms;
mod vread;
mod why;

pub use advise::advise;
pub use check::check;
pub use control::{set, start, status, stop};
pub use internal::internal;
pub use keys::keys;
pub use lanes::lanes;
pub use log::log;
pub use man::man;
pub use pipe::pipe;
pub use record::{host, record};
pub use register::register;
pub use restore::restore;
pub use vms::vms;
pub use vread::vread;
pub use why::why;

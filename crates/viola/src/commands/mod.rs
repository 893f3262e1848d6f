// SPDX-License-Identifier: Apache-2.0
//! The commands that an operator types; `viola run` is in [`crate::daemon`].

mod check;
mod control;
mod internal;
mod keys;
mod lab;
mod lanes;
mod man;
mod pipe;
mod record;
mod restore;
mod vms;
mod vread;
mod worker;

pub use check::check;
pub use control::{set, start, status, stop};
pub use internal::internal;
pub use keys::keys;
pub use lab::lab;
pub use lanes::lanes;
pub use man::man;
pub use pipe::pipe;
pub use record::{host, record};
pub use restore::restore;
pub use vms::vms;
pub use vread::vread;
pub use worker::worker;

use crate::client::ClientError;
use crate::error::Failure;

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        match &e {
            // What was asked for is wrong, not the daemon.
            ClientError::Refused {
                status: 400 | 404 | 409,
                ..
            } => Self::usage(e),
            _ => Self::run(e),
        }
    }
}

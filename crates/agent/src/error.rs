// SPDX-License-Identifier: Apache-2.0
//! Why the agent cannot start.

use std::io;

/// The agent cannot start: what failed, and the system's reason. Displays as one sentence.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct StartError {
    what: String,
    source: io::Error,
}

/// Adds what failed to an I/O error.
///
/// # Errors
/// The error of `result`, as a [`StartError`].
pub fn start_error<T>(what: impl Into<String>, result: io::Result<T>) -> Result<T, StartError> {
    let what = what.into();
    result.map_err(|source| StartError { what, source })
}

// SPDX-License-Identifier: Apache-2.0
//! The program `viola` that the demo and the benchmarks measure.

use std::path::PathBuf;

use viola_cli::error::{Failure, Outcome};

/// Path of `viola`, which must be in the folder of this program.
///
/// # Errors
/// [`Failure::Usage`] if it is missing.
pub fn viola() -> Outcome<PathBuf> {
    let viola = lab()?.with_file_name("viola");
    match viola.is_file() {
        true => Ok(viola),
        false => Err(Failure::usage(format!(
            "{} is missing; the benchmarks measure it. Run make build",
            viola.display()
        ))),
    }
}

/// Path of this program. It also runs inside guests.
///
/// # Errors
/// The kernel does not report the path.
pub fn lab() -> Outcome<PathBuf> {
    std::env::current_exe()
        .map_err(|e| Failure::run(format!("cannot find the path of this program: {e}")))
}

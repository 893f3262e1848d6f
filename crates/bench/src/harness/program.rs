// SPDX-License-Identifier: Apache-2.0
//! The program `viola` that the demo and the benchmarks measure.

use std::path::PathBuf;

use viola_cli::error::{Failure, Outcome};

/// Path of `viola` in the folder of this program.
///
/// # Errors
/// [`Failure::Usage`] when it is not there.
pub fn viola() -> Outcome<PathBuf> {
    let this = std::env::current_exe()
        .map_err(|e| Failure::run(format!("the path of this program: {e}")))?;
    let viola = this.with_file_name("viola");
    match viola.is_file() {
        true => Ok(viola),
        false => Err(Failure::usage(format!(
            "{} is missing, and it is what this program measures; build both: make build",
            viola.display()
        ))),
    }
}

/// Path of this program, which is also what runs inside guests.
///
/// # Errors
/// When the kernel does not tell it.
pub fn lab() -> Outcome<PathBuf> {
    std::env::current_exe().map_err(|e| Failure::run(format!("the path of this program: {e}")))
}

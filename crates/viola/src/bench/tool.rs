// SPDX-License-Identifier: Apache-2.0
//! Programs of this machine that a benchmark runs.

use std::path::Path;
use std::process::{Command, Output};

use crate::error::{Failure, Outcome};

/// Runs it to its end, in the calling thread's network namespace.
///
/// # Errors
/// It is not there, or fails: with what it says.
pub fn output(command: &mut Command) -> Outcome<Output> {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    let output = command.output().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::run(format!("there is no {name}: run scripts/setup.sh --bench"))
        }
        _ => Failure::run(format!("{name}: {e}")),
    })?;
    match output.status.success() {
        true => Ok(output),
        false => {
            let why = String::from_utf8_lossy(&output.stderr);
            Err(Failure::run(format!("{name}: {}", why.trim())))
        }
    }
}

/// A program of the lab's image (its path below `/usr`), run on this machine with the image's loader and libraries.
pub fn of_image(image: &Path, program: &str) -> Command {
    let root = image.join("root/usr");
    let libraries = root.join("lib/x86_64-linux-gnu");
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries);
    command.arg(root.join(program));
    command
}

// SPDX-License-Identifier: Apache-2.0
//! Runs host programs for a benchmark.

use std::path::Path;
use std::process::{Command, Output};

use viola_cli::error::{Failure, Outcome};

/// Runs a program to its end, in the network namespace of the calling thread.
///
/// # Errors
/// The program is missing or fails; the error quotes its stderr.
pub fn output(command: &mut Command) -> Outcome<Output> {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    let output = command.output().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Failure::run(format!("cannot find {name}; run scripts/setup.sh --bench"))
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

/// First line of a program's output, trimmed.
pub fn first_line(text: &str) -> String {
    let first = text.trim().lines().next().unwrap_or_default();
    first.trim().to_owned()
}

/// Command for a program of the lab's image (path below `/usr`) that runs on the host with the image's loader and
/// libraries.
pub fn image_program(image: &Path, program: &str) -> Command {
    let root = image.join("root/usr");
    folder_program(image, &root, "lib/x86_64-linux-gnu", program)
}

/// Command for a program in a folder beside the image with its own libraries, the image's loader and the image's C
/// library. Both paths are relative to the folder.
pub fn folder_program(image: &Path, folder: &Path, libraries: &str, program: &str) -> Command {
    let image_libraries = image.join("root/usr/lib/x86_64-linux-gnu");
    let own = folder.join(libraries);
    let mut path = image_libraries.clone().into_os_string();
    if own != image_libraries {
        path.push(":");
        path.push(&own);
    }
    let mut command = Command::new(image_libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(path);
    command.arg(folder.join(program));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_a_folder_have_the_images_loader_and_both_libraries() {
        let words = |command: Command| -> Vec<String> {
            let all = std::iter::once(command.get_program()).chain(command.get_args());
            all.map(|word| word.to_string_lossy().into_owned())
                .collect()
        };
        let lib = "/i/root/usr/lib/x86_64-linux-gnu";
        let loader = format!("{lib}/ld-linux-x86-64.so.2");
        assert_eq!(
            words(image_program("/i".as_ref(), "bin/x")),
            [&loader, "--library-path", lib, "/i/root/usr/bin/x"]
        );
        assert_eq!(
            words(folder_program("/i".as_ref(), "/m".as_ref(), "lib", "bin/x")),
            [
                &loader,
                "--library-path",
                &format!("{lib}:/m/lib"),
                "/m/bin/x"
            ]
        );
        assert_eq!(first_line("\n a b \nc\n"), "a b");
    }
}

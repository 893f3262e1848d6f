// SPDX-License-Identifier: Apache-2.0
//! `viola man`

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::{self, Viola};
use viola_cli::error::{Failure, Outcome};

/// Shells that completions are written for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Writes man pages and completions.
pub fn man(args: &args::Man) -> Outcome {
    let dir = &args.dir;
    write(dir).map_err(|e| Failure::run(format!("{}: {e}", dir.display())))
}

fn write(dir: &Path) -> std::io::Result<()> {
    fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Viola::command(), dir)?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut Viola::command(), "viola", dir)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_page_for_each_command_and_none_for_hidden_ones() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("man");
        write(&dir).unwrap();
        for name in [
            "viola.1",
            "viola-set.1",
            "viola-vread-ls.1",
            "viola.bash",
            "viola.fish",
            "_viola",
        ] {
            let text = fs::read_to_string(dir.join(name)).unwrap();
            assert!(text.contains("viola"), "{name}");
        }
        assert!(
            fs::read_to_string(dir.join("viola-set.1"))
                .unwrap()
                .contains("microslice")
        );
        assert!(!dir.join("viola-worker.1").exists());
        assert!(!dir.join("viola-internal.1").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let args = args::Man {
            dir: "/proc/no/such".into(),
        };
        let Err(Failure::Run(said)) = man(&args) else {
            panic!("it was made");
        };
        assert!(said.contains("/proc/no/such"), "{said}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola-lab up`, `sh`, `net`, `list`, `reboot`, `down`, `sweep`: manage labs of guests.

use std::process::ExitCode;

use viola_lab::cli::{self as lab_cli, Up};

use crate::args::Lab;
use crate::harness::side::lab_failure;
use viola_cli::error::Outcome;
use viola_cli::table::print;

/// Runs the subcommand. `sh` returns the exit status of its command.
pub fn run(what: &Lab) -> Outcome<ExitCode> {
    match what {
        Lab::Up { spec, foreground } => {
            let supervise = vec!["supervise".into()];
            lab_cli::up(&Up {
                spec: spec.clone(),
                foreground: *foreground,
                supervise,
            })
            .map_err(lab_failure)?;
        }
        Lab::Sh { guest, command } => {
            return Ok(ExitCode::from(
                lab_cli::sh(guest, command).map_err(lab_failure)?,
            ));
        }
        Lab::Net { lab, command } => {
            match lab_cli::net(lab.as_deref(), command).map_err(lab_failure)? {}
        }
        Lab::List => print(&lab_cli::list())?,
        Lab::Reboot { guest } => lab_cli::reboot(guest).map_err(lab_failure)?,
        Lab::Down { lab } => {
            let name = lab_cli::down(lab.as_deref()).map_err(lab_failure)?;
            print(&format!("lab {name} is gone\n"))?;
        }
        Lab::Sweep => {
            let swept = lab_cli::sweep().map_err(lab_failure)?;
            let text = if swept.is_empty() {
                "nothing to remove".into()
            } else {
                format!("removed the remains of {}", swept.join(", "))
            };
            print(&format!("{text}\n"))?;
        }
        Lab::Supervise { spec } => lab_cli::supervise(spec).map_err(lab_failure)?,
    }
    Ok(ExitCode::SUCCESS)
}

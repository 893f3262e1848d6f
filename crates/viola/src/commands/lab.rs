// SPDX-License-Identifier: Apache-2.0
//! `viola lab`

use std::process::ExitCode;

use viola_lab::cli::{self as lab_cli, Up};

use crate::cli::Lab;
use crate::error::{Failure, Outcome};
use crate::table::print;

/// Carries out one of them; `sh` ends with the status of its command.
pub fn lab(what: &Lab) -> Outcome<ExitCode> {
    match what {
        Lab::Up { spec, foreground } => {
            let supervise = ["lab", "supervise"].map(Into::into).to_vec();
            lab_cli::up(&Up {
                spec: spec.clone(),
                foreground: *foreground,
                supervise,
            })?;
        }
        Lab::Sh { guest, command } => return Ok(ExitCode::from(lab_cli::sh(guest, command)?)),
        Lab::Net { lab, command } => match lab_cli::net(lab.as_deref(), command)? {},
        Lab::List => print(&lab_cli::list())?,
        Lab::Reboot { guest } => lab_cli::reboot(guest)?,
        Lab::Down { lab } => {
            let name = lab_cli::down(lab.as_deref())?;
            print(&format!("lab {name} is gone\n"))?;
        }
        Lab::Sweep => {
            let swept = lab_cli::sweep()?;
            let text = if swept.is_empty() {
                "nothing was left".into()
            } else {
                format!("removed what was left of {}", swept.join(", "))
            };
            print(&format!("{text}\n"))?;
        }
        Lab::Supervise { spec } => lab_cli::supervise(spec)?,
    }
    Ok(ExitCode::SUCCESS)
}

impl From<viola_lab::Error> for Failure {
    fn from(e: viola_lab::Error) -> Self {
        match e.exit_code() {
            2 => Self::Usage(e.full()),
            _ => Self::Run(e.full()),
        }
    }
}

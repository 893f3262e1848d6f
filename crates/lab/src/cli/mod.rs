// SPDX-License-Identifier: Apache-2.0
//! The commands of `viola-lab`. The program only parses the command line and prints errors.

mod sh;
mod up;

pub use sh::{net, sh};
pub use up::{Up, supervise, up};

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
pub use crate::server::GuestStatus;
use crate::server::{Ask, ask, connect};
use crate::{run_folder, state};

/// Time limit for a lab's answer; guests may be busy.
const LAB_REPLY_TIMEOUT: Duration = Duration::from_secs(120);

impl Error {
    /// Exit code of a program that ends with this error: 2 for a wrong request, 1 for a failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Spec { .. }
            | Self::AlreadyRunning { .. }
            | Self::NotRunning { .. }
            | Self::NoGuest { .. } => 2,
            _ => 1,
        }
    }
}

/// Labs with a folder below /run: the name, and the guests if the lab is running.
pub fn labs() -> Vec<(String, Option<Vec<GuestStatus>>)> {
    let run = run_folder();
    let guests = |name: &str| -> Option<Vec<GuestStatus>> {
        let answer = ask(&connect(&run, name).ok()?, &Ask::List, LAB_REPLY_TIMEOUT).ok()?;
        serde_json::from_value(answer).ok()
    };
    state::labs(&run)
        .into_iter()
        .map(|(name, running)| {
            // a lab inside another program (a benchmark, a test) has no socket
            let guests = running.then(|| guests(&name).unwrap_or_default());
            (name, guests)
        })
        .collect()
}

/// A table of all labs and guests.
pub fn list() -> String {
    let labs = labs();
    if labs.is_empty() {
        return "no lab is running; start one with `viola-lab up`\n".into();
    }
    let mut rows = vec![
        [
            "LAB",
            "GUEST",
            "STATE",
            "PID",
            "CORES",
            "MEMORY",
            "ADDRESS",
            "WORKLOADS",
        ]
        .map(String::from),
    ];
    for (lab, guests) in labs {
        let Some(guests) = guests else {
            rows.push(
                [
                    &lab,
                    "-",
                    "killed; swept at the next start",
                    "",
                    "",
                    "",
                    "",
                    "",
                ]
                .map(String::from),
            );
            continue;
        };
        if guests.is_empty() {
            rows.push([&lab, "-", "running in a program", "", "", "", "", ""].map(String::from));
        }
        for guest in guests {
            let cores: Vec<String> = guest.cores.iter().map(usize::to_string).collect();
            let addresses: Vec<String> = guest.addresses.iter().map(|a| a.to_string()).collect();
            rows.push([
                lab.clone(),
                guest.name,
                if guest.alive { "up" } else { "off" }.into(),
                guest.pid.to_string(),
                if cores.is_empty() {
                    "any".into()
                } else {
                    cores.join(",")
                },
                format!("{}M", guest.memory >> 20),
                addresses.join(","),
                guest.workloads.join(","),
            ]);
        }
    }
    table(&rows)
}

fn table(rows: &[[String; 8]]) -> String {
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|r| r[column].len()).max().unwrap_or(0);
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Ends the lab (the only one if no name is given), waits until it is gone and returns its name.
/// Removes what is left if the lab was killed.
///
/// # Errors
/// [`Error::NotRunning`], [`Error::NoGuest`]; [`Error::Refused`] if the lab refuses or the name is
/// ambiguous.
pub fn down(name: Option<&str>) -> Result<String> {
    let run = run_folder();
    let name = resolve_lab(&run, name)?;
    if state::labs(&run).contains(&(name.clone(), false)) {
        state::sweep(&run)?;
        return Ok(name);
    }
    ask(&connect(&run, &name)?, &Ask::Down, LAB_REPLY_TIMEOUT)?;
    let end = Instant::now() + Duration::from_secs(60);
    while state::labs(&run).iter().any(|(lab, _)| *lab == name) {
        if Instant::now() > end {
            return Err(Error::Refused(format!(
                "lab `{name}` did not end within a minute"
            )));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(name)
}

/// Removes what killed labs left. Returns their names.
///
/// # Errors
/// [`Error::Io`] if a lock file cannot be used.
pub fn sweep() -> Result<Vec<String>> {
    state::sweep(&run_folder())
}

/// Restarts a guest's kernel and the workloads of its description.
///
/// # Errors
/// [`Error::NotRunning`], [`Error::NoGuest`]; [`Error::Refused`] if the lab refuses or the name is
/// ambiguous.
pub fn reboot(guest: &str) -> Result<()> {
    let run = run_folder();
    let (lab, guest) = resolve_guest(&run, guest)?;
    ask(
        &connect(&run, &lab)?,
        &Ask::Reboot { guest },
        LAB_REPLY_TIMEOUT,
    )
    .map(drop)
}

/// The lab of this name, or the only running one.
fn resolve_lab(run: &Path, name: Option<&str>) -> Result<String> {
    if let Some(name) = name {
        return Ok(name.into());
    }
    let mut running = state::labs(run)
        .into_iter()
        .filter(|(_, running)| *running)
        .map(|(name, _)| name);
    match (running.next(), running.next()) {
        (Some(name), None) => Ok(name),
        (None, _) => Err(Error::Refused(
            "no lab is running; start one with `viola-lab up`".into(),
        )),
        _ => Err(Error::Refused(
            "several labs are running; name one (`viola-lab list` shows them)".into(),
        )),
    }
}

/// Resolves `GUEST`, or `LAB/GUEST` if several labs have a guest of that name.
fn resolve_guest(run: &Path, name: &str) -> Result<(String, String)> {
    if let Some((lab, guest)) = name.split_once('/') {
        return Ok((lab.into(), guest.into()));
    }
    let labs: Vec<(String, Vec<GuestStatus>)> = labs()
        .into_iter()
        .filter_map(|(lab, guests)| Some((lab, guests?)))
        .collect();
    let having: Vec<&String> = labs
        .iter()
        .filter(|(_, guests)| guests.iter().any(|g| g.name == name))
        .map(|(lab, _)| lab)
        .collect();
    match having[..] {
        [lab] => Ok((lab.clone(), name.into())),
        // the lab's own error names the guests that it has
        [] => Ok((resolve_lab(run, None)?, name.into())),
        _ => Err(Error::Refused(format!(
            "several labs have a guest `{name}`; write LAB/{name}"
        ))),
    }
}

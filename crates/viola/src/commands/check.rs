// SPDX-License-Identifier: Apache-2.0
//! `viola check`

use std::path::Path;

use viola_host::Inventory;
use viola_host::facts::HostFacts;
use viola_meter::acct::Acct;
use viola_proto::{Check, Row, RowState};

use crate::args;
use viola_cli::client::{Client, ClientError};
use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::table::{Colour, align, coloured, paint, print, print_json};
use viola_config::{self as config, Config, VmScope};
use viola_daemon::check::{Support, rows, try_scheduler};
use viola_daemon::host::launchers;

/// Shows what this host supports, by the configuration of the running daemon, else by the named file, else by the default
/// one.
pub fn check(args: &args::Check) -> Outcome {
    let asked = Client::new(&args.socket.path()).get::<Check>("/check");
    let check = match (&args.config, asked) {
        (None, Ok(check)) => check,
        (file, asked) => {
            let mut check = without_daemon(file.as_deref())?;
            match asked {
                Ok(daemon) => check.advice = daemon.advice,
                Err(ClientError::NoDaemon { .. }) => {}
                Err(e) => check.warnings.push(e.to_string()),
            }
            check
        }
    };
    if args.json {
        print_json(&check)
    } else {
        print(&text(&check, args.config.as_deref(), coloured()))
    }
}

fn without_daemon(file: Option<&Path>) -> Outcome<Check> {
    let mut warnings = Vec::new();
    let facts = HostFacts::read().map_err(|e| Failure::run(e.one_line()))?;
    let config = match file {
        Some(file) => Config::read(file)?,
        None => match Config::read(Path::new(config::DEFAULT_PATH)) {
            Ok(config) => config,
            Err(e) => {
                if Path::new(config::DEFAULT_PATH).exists() {
                    warnings.push(e.to_string());
                }
                Config::parse(Path::new(config::DEFAULT_PATH), "")?
            }
        },
    };
    config.check_host(&facts.online())?;
    let failed = |e: viola_host::HostError| Failure::run(e.one_line());
    let mut inventory = Inventory::new().map_err(failed)?;
    inventory
        .restrict_to_own_netns(config.daemon.vms == VmScope::Own)
        .map_err(failed)?;
    let (sources, left_out) = launchers::sources(&config);
    inventory.set_sources(sources);
    warnings.extend(left_out);
    inventory.refresh_fully().map_err(failed)?;
    warnings.extend(inventory.warnings().iter().cloned());
    // Only loading shows whether the kernel accepts the programs.
    let support = Support {
        accounting: Acct::load().map(drop).map_err(|e| chain(&e)),
        scheduler: try_scheduler(&facts).map(drop),
    };
    let rows = rows(&config, &facts, &support, inventory.vms(), None);
    Ok(Check {
        rows,
        advice: Vec::new(),
        warnings,
    })
}

fn text(check: &Check, config: Option<&Path>, colour: bool) -> String {
    let cells = |row: &Row| {
        let why = match &row.change {
            Some(change) if row.why.is_empty() => change.clone(),
            Some(change) => format!("{}: {change}", row.why),
            None => row.why.clone(),
        };
        vec![row.name.clone(), row.value.clone(), why]
    };
    let rows: Vec<Vec<String>> = check.rows.iter().map(cells).collect();
    let mut text = String::new();
    if let Some(file) = config {
        text.push_str(&format!("{}: ok\n", file.display()));
    }
    // Colours come after the alignment, because escape sequences have no width.
    for (line, row) in align(&rows).lines().zip(&check.rows) {
        let colours = match row.state {
            RowState::Yes => Some(Colour::Green),
            RowState::No => Some(Colour::Red),
            RowState::Info => None,
        };
        match colours.filter(|_| colour) {
            Some(c) => text.push_str(&line.replacen(&row.value, &paint(&row.value, c), 1)),
            None => text.push_str(line),
        }
        text.push('\n');
    }
    for advice in &check.advice {
        text.push_str(&format!("advice: {advice}\n"));
    }
    for warning in &check.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_what_and_why_and_what_to_change() {
        let row = |name: &str, state, value: &str, why: &str, change: Option<&str>| Row {
            name: name.into(),
            state,
            value: value.into(),
            why: why.into(),
            change: change.map(str::to_owned),
        };
        let check = Check {
            rows: vec![
                row("kernel 6.18", RowState::Yes, "ok", "", None),
                row(
                    "slices: slots",
                    RowState::No,
                    "no",
                    "real-time throttling",
                    Some("sysctl x=-1"),
                ),
            ],
            advice: vec!["db01 waits".into()],
            warnings: vec!["web cannot be read".into()],
        };
        assert_eq!(
            text(&check, Some(Path::new("v.toml")), false),
            "v.toml: ok\n\
             kernel 6.18    ok\n\
             slices: slots  no  real-time throttling: sysctl x=-1\n\
             advice: db01 waits\n\
             warning: web cannot be read\n"
        );
        assert!(text(&check, None, true).contains("\x1b[31mno\x1b[0m"));
    }
}

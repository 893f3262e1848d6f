// SPDX-License-Identifier: Apache-2.0
//! `viola-agent`: the command line of the guest agent.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use viola_agent::agent::Agent;
use viola_agent::agent::standalone;
use viola_agent::config::Config;
use viola_agent::error::StartError;
use viola_agent::lane::bond;
use viola_agent::status;
use viola_agent::turbo::restore::restore_leftovers;
use viola_agent::turbo::settings::DEFAULT_JOURNAL;
use viola_agent::turbo::system::RealSystem;

const HELP: &str = "\
viola-agent names finished HDFS blocks of this VM to its host, so that other VMs read them there. In a
VM that reads such blocks, and shares no memory with its host, it keeps the mount that they are in.
In a VM whose files the host sends, it hands programs' connections to the host and takes them back.
In a VM with a vCPU on a turbo core, it moves the kernel's I/O to that vCPU, and applications off it.
In a VM that gets a virtual function of a NIC now and then, it keeps that and its other NIC in one bond.

  viola-agent [--config FILE]            runs, until a signal ends it
  viola-agent [--config FILE] status     how the running agent is; with --json as JSON
  viola-agent [--config FILE] pause      withdraws everything, before a freeze or a snapshot; fails
                                         when a read is still in flight after five seconds
  viola-agent [--config FILE] resume     goes on
  viola-agent [--config FILE] check      says whether the configuration is good
  viola-agent [--config FILE] restore    puts back what an agent that was killed has set for a turbo
                                         vCPU or a lane

FILE is /etc/viola/agent.toml unless it is given; viola.agent.KEY=VALUE on the kernel's command line
comes before it. Exits with 2 when the configuration is not usable.";

enum What {
    Run,
    Ask(&'static str),
    Check,
    Restore,
}

fn main() -> ExitCode {
    let (mut file, mut what, mut json) = (None, What::Run, false);
    let mut words = std::env::args_os().skip(1);
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("-h" | "--help") => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            Some("-V" | "--version") => {
                println!("viola-agent {}", env!("CARGO_PKG_VERSION"));
                return ExitCode::SUCCESS;
            }
            Some("--json") => json = true,
            Some("run") => what = What::Run,
            Some("status") => what = What::Ask("status"),
            Some("pause") => what = What::Ask("pause"),
            Some("resume") => what = What::Ask("resume"),
            Some("check") => what = What::Check,
            Some("restore") => what = What::Restore,
            Some("--config") => match words.next() {
                Some(path) => file = Some(PathBuf::from(path)),
                None => return usage("--config wants a file"),
            },
            _ => {
                return usage(&format!(
                    "there is no `{}`; see --help",
                    word.to_string_lossy()
                ));
            }
        }
    }
    let config = match Config::load(file.as_deref()) {
        Ok(config) => config,
        // restore must work with a broken configuration too
        Err(_) if matches!(what, What::Restore) => Config::default(),
        Err(sentence) => return usage(&sentence.to_string()),
    };
    match what {
        What::Check => ExitCode::SUCCESS,
        What::Restore => restore(&config),
        What::Run => match run(config) {
            Ok(()) => ExitCode::SUCCESS,
            Err(sentence) => fail(&sentence.to_string()),
        },
        What::Ask(wish) => match status::request(&config.status, wish) {
            Err(e) => fail(&format!(
                "no agent answers at {}: {e}",
                config.status.display()
            )),
            Ok(report) if wish == "status" && json => {
                println!("{}", serde_json::to_string(&report).unwrap_or_default());
                ExitCode::SUCCESS
            }
            Ok(report) if wish == "status" => {
                print!("{report}");
                ExitCode::SUCCESS
            }
            Ok(report) if wish == "pause" && report.outstanding > 0 => fail(&format!(
                "the host has not confirmed {} blocks and pipes yet; they may still be read",
                report.outstanding
            )),
            Ok(_) => ExitCode::SUCCESS,
        },
    }
}

fn restore(config: &Config) -> ExitCode {
    let journal = config.turbo.as_ref().map(|turbo| turbo.journal.as_path());
    let journal = journal.unwrap_or(Path::new(DEFAULT_JOURNAL));
    let runs = "an agent runs; it puts everything back when it ends";
    let turbo = match restore_leftovers(&RealSystem::new(Path::new("/")), journal) {
        Ok(Some(done)) if !done.failed.is_empty() => return fail(&done.to_string()),
        Ok(done) => done.map(|done| done.to_string()),
        Err(e) if e.kind() == ErrorKind::WouldBlock => return fail(runs),
        Err(e) => return fail(&format!("{}: {e}", journal.display())),
    };
    if status::request(&config.status, "status").is_ok() {
        return fail(runs);
    }
    let lane = match bond::restore_leftover(&config.lane.clone().unwrap_or_default()) {
        Ok(done) => done,
        Err(sentence) => return fail(&sentence),
    };
    for done in turbo.iter().chain(&lane) {
        println!("{done}");
    }
    if turbo.is_none() && lane.is_none() {
        println!("there is nothing to be put back");
    }
    ExitCode::SUCCESS
}

fn run(config: Config) -> Result<(), StartError> {
    match config.is_standalone() {
        true => standalone::run(&config),
        false => Agent::new(config).and_then(Agent::run),
    }
}

fn usage(sentence: &str) -> ExitCode {
    eprintln!("viola-agent: {sentence}");
    ExitCode::from(2)
}

fn fail(sentence: &str) -> ExitCode {
    eprintln!("viola-agent: {sentence}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_man_page_has_all_that_the_help_has() {
        let page = include_str!("../../../dist/viola-agent.8").replace('\\', "");
        let words = HELP.split([' ', '[', ']', '\n', ';', ',']);
        let wanted = words.filter(|w| w.starts_with("--"));
        for word in wanted.chain(["status", "pause", "resume", "check", "restore"]) {
            assert!(page.contains(word), "{word}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola-agent`: the command line of the guest agent.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use viola_agent::agent::Agent;
use viola_agent::agent::standalone;
use viola_agent::config::{Config, DEFAULT_PATH};
use viola_agent::error::StartError;
use viola_agent::lane::bond;
use viola_agent::setup::{self, Extent, Places, SetupError};
use viola_agent::status;
use viola_agent::turbo::restore::restore_leftovers;
use viola_agent::turbo::settings::DEFAULT_JOURNAL;
use viola_agent::turbo::system::RealSystem;

const HELP: &str = "\
viola-agent names finished HDFS blocks of this VM to its host, so that other VMs of the host read them there.
It also runs these services, each with a table of its own in the configuration:
  [mount]  the mount in which a VM without shared memory reads the blocks of other VMs
  [pipe]   hands programs' files and connections to the host, which moves the bytes, and takes them back
  [turbo]  moves the kernel's I/O to the vCPU that the host runs on a turbo core, and applications off it
  [lane]   keeps the VM's NIC and a virtual function of the host's NIC in one bond

  viola-agent [--config FILE]            runs until a signal ends it
  viola-agent [--config FILE] status     shows the state of the running agent; with --json as JSON
  viola-agent [--config FILE] pause      withdraws all blocks and ends all pipes, before a freeze or a
                                         snapshot; fails if the host still reads after five seconds
  viola-agent [--config FILE] resume     resumes naming
  viola-agent [--config FILE] check      checks the configuration
  viola-agent [--config FILE] restore    restores what a killed agent has set for a turbo vCPU or a lane
  viola-agent [--config FILE] setup      finds DataNodes, HDFS clients and web servers, and writes the configuration and
                                         units of systemd for them; --now also starts these units anew, --dry-run only
                                         says what, --remove takes it back

FILE is /etc/viola/agent.toml by default. viola.agent.KEY=VALUE on the kernel's command line overrides it.
Exits with 1 when the command failed, with 2 when usage or configuration are wrong.";

/// What the command line asks for.
enum Action {
    Run,
    Request(&'static str),
    Check,
    Restore,
}

fn main() -> ExitCode {
    let (mut file, mut action, mut json) = (None, Action::Run, false);
    let (mut sets_up, mut dry_run, mut remove, mut now) = (false, false, false, false);
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
            Some("run") => action = Action::Run,
            Some("status") => action = Action::Request("status"),
            Some("pause") => action = Action::Request("pause"),
            Some("resume") => action = Action::Request("resume"),
            Some("check") => action = Action::Check,
            Some("restore") => action = Action::Restore,
            Some("setup") => sets_up = true,
            Some("--dry-run") => dry_run = true,
            Some("--remove") => remove = true,
            Some("--now") => now = true,
            Some("--config") => match words.next() {
                Some(path) => file = Some(PathBuf::from(path)),
                None => return usage("--config needs a file name"),
            },
            _ => {
                return usage(&format!(
                    "unknown argument `{}`; see --help",
                    word.to_string_lossy()
                ));
            }
        }
    }
    if sets_up {
        let extent = match (dry_run, now) {
            (true, true) => return usage("--dry-run starts nothing; leave --now out"),
            (true, false) => Extent::DryRun,
            (false, true) => Extent::Now,
            (false, false) => Extent::Write,
        };
        return setup(file.as_deref(), extent, remove);
    }
    if dry_run || remove || now {
        return usage("--dry-run, --now and --remove belong to setup");
    }
    let config = match Config::load(file.as_deref()) {
        Ok(config) => config,
        // restore must work with a broken configuration too
        Err(_) if matches!(action, Action::Restore) => Config::default(),
        Err(sentence) => return usage(&sentence.to_string()),
    };
    match action {
        Action::Check => ExitCode::SUCCESS,
        Action::Restore => restore(&config),
        Action::Run => match run(config) {
            Ok(()) => ExitCode::SUCCESS,
            Err(sentence) => fail(&sentence.to_string()),
        },
        Action::Request(command) => match status::request(&config.status, command) {
            Err(e) => fail(&format!(
                "cannot reach a running agent at {}: {e}",
                config.status.display()
            )),
            Ok(report) if command == "status" && json => {
                println!("{}", serde_json::to_string(&report).unwrap_or_default());
                ExitCode::SUCCESS
            }
            Ok(report) if command == "status" => {
                print!("{report}");
                ExitCode::SUCCESS
            }
            Ok(report) if command == "pause" && report.outstanding > 0 => fail(&format!(
                "the host has not confirmed the end of {} leases and pipes, and may still read by them; try again",
                report.outstanding
            )),
            Ok(_) => ExitCode::SUCCESS,
        },
    }
}

fn setup(file: Option<&Path>, extent: Extent, remove: bool) -> ExitCode {
    // Only root sees the files, units and environments of all processes.
    if !std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
        return fail("setup needs root");
    }
    let places = Places::of(file.unwrap_or(Path::new(DEFAULT_PATH)));
    let say = &mut |text: &str| print!("{text}");
    let done = match (remove, extent) {
        (true, Extent::DryRun) => {
            return usage("--remove takes back at once; leave --dry-run out");
        }
        (true, _) => setup::remove(&places, extent == Extent::Now, say),
        (false, _) => setup::setup(&places, extent, say),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e @ (SetupError::Config { .. } | SetupError::OtherFile { .. })) => {
            usage(&e.to_string())
        }
        Err(e) => fail(&e.to_string()),
    }
}

fn restore(config: &Config) -> ExitCode {
    let journal = config.turbo.as_ref().map(|turbo| turbo.journal.as_path());
    let journal = journal.unwrap_or(Path::new(DEFAULT_JOURNAL));
    let runs = "an agent is running; it restores everything when it ends";
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
        println!("there is nothing to restore");
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
    fn the_man_page_has_every_word_of_the_help() {
        let page = include_str!("../../../dist/viola-agent.8").replace('\\', "");
        let words = HELP.split([' ', '[', ']', '\n', ';', ',']);
        let wanted = words.filter(|w| w.starts_with("--"));
        for word in wanted.chain(["status", "pause", "resume", "check", "restore", "setup"]) {
            assert!(page.contains(word), "{word}");
        }
    }
}

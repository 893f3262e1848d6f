// SPDX-License-Identifier: Apache-2.0
//! `viola prepare` and `viola unprepare`: what a libvirt VM needs for an accelerator, written into its domain and plugged where that
//! is possible.

mod domain;
mod virsh;

use std::path::Path;

use serde::Serialize;
use viola_config::{Config, DEFAULT_PATH};

use crate::args::{self, PrepareWhat, Role};
use domain::{Part, Use};
use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::quoted;
use viola_cli::table::{align, print, print_json};
use virsh::Virsh;

/// What became of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    /// The domain has it.
    Present,
    /// The running VM has it.
    Now,
    /// The VM has it, or is without it, once it is started anew.
    NextStart,
    /// It is removed.
    Removed,
}

impl State {
    fn text(self) -> &'static str {
        match self {
            Self::Present => "is there",
            Self::Now => "now",
            Self::NextStart => "next start",
            Self::Removed => "removed",
        }
    }
}

/// A line of the answer.
#[derive(Debug, Serialize)]
struct Line {
    part: Part,
    purpose: &'static str,
    state: State,
    /// Why a running VM does not have it yet; empty if there is no reason to give.
    why: String,
    /// Its element.
    xml: String,
}

/// The answer.
#[derive(Debug, Serialize)]
struct Answer {
    vm: String,
    dry_run: bool,
    uses: Vec<Use>,
    parts: Vec<Line>,
    /// What is left to do, by hand.
    next: Vec<String>,
}

/// Changes the domain of a VM.
pub fn prepare(args: &args::Prepare) -> Outcome {
    let uses = uses(args)?;
    let answer = prepare_by(&Virsh::default(), &args.vm, uses, args.dry_run)?;
    show(&answer, args.json)
}

/// Takes back what `prepare` has changed.
pub fn unprepare(args: &args::Unprepare) -> Outcome {
    let uses = args.what.map(|what| match what {
        PrepareWhat::Vread => vec![Use::Datanode, Use::Reader],
        PrepareWhat::Vpipe => vec![Use::Vpipe],
        PrepareWhat::Turbo => vec![Use::Turbo],
        PrepareWhat::Lane => vec![Use::Lane],
    });
    let answer = unprepare_by(&Virsh::default(), &args.vm, uses, args.dry_run)?;
    show(&answer, args.json)
}

/// What the VM is prepared for. With vread the grants of the configuration say whether it reads or is read.
fn uses(args: &args::Prepare) -> Outcome<Vec<Use>> {
    Ok(match (args.what, args.role) {
        (PrepareWhat::Vread, Some(Role::Datanode)) => vec![Use::Datanode],
        (PrepareWhat::Vread, Some(Role::Reader)) => vec![Use::Reader],
        (PrepareWhat::Vread, None) => granted(&args.vm, args.config.as_deref())?,
        (_, Some(_)) => return Err(Failure::usage("--role belongs to vread")),
        (PrepareWhat::Vpipe, None) => vec![Use::Vpipe],
        (PrepareWhat::Turbo, None) => vec![Use::Turbo],
        (PrepareWhat::Lane, None) => vec![Use::Lane],
    })
}

fn granted(vm: &str, config: Option<&Path>) -> Outcome<Vec<Use>> {
    let path = config.unwrap_or(DEFAULT_PATH.as_ref());
    let config = Config::read(path).map_err(|e| Failure::usage(e.to_string()))?;
    let mut uses = Vec::new();
    if config.vread.allow.iter().any(|a| a.is_for_datanode(vm)) {
        uses.push(Use::Datanode);
    }
    if config.vread.allow.iter().any(|a| a.is_for(vm)) {
        uses.push(Use::Reader);
    }
    if uses.is_empty() {
        return Err(Failure::usage(format!(
            "{}: allow in [vread] names VM {} neither as reader nor as datanode; write the grant first, or say --role reader or --role \
             datanode",
            path.display(),
            quoted(vm)
        )));
    }
    Ok(uses)
}

fn prepare_by(virsh: &Virsh, vm: &str, uses: Vec<Use>, dry_run: bool) -> Outcome<Answer> {
    let xml = virsh.domain(vm)?;
    let is_running = virsh.is_running(vm)?;
    let done = domain::prepare(&xml, &uses).map_err(|e| refused(vm, &e))?;
    if !dry_run && done.xml != xml {
        virsh.define(&done.xml)?;
    }
    let mut parts: Vec<Line> = (done.present.iter())
        .map(|part| line(*part, vm, State::Present, String::new()))
        .collect();
    for part in done.added {
        let plugs = is_running && part.can_be_plugged();
        let (state, why) = match plugs && !dry_run {
            true => match virsh.attach(vm, &part.xml(vm)) {
                Ok(()) => (State::Now, String::new()),
                Err(why) => (State::NextStart, why),
            },
            false if plugs || !is_running => (State::Now, String::new()),
            false => (State::NextStart, String::new()),
        };
        // A VM that does not run has nothing before its start.
        let state = if is_running { state } else { State::NextStart };
        parts.push(line(part, vm, state, why));
    }
    let mut next = Vec::new();
    if is_running && parts.iter().any(|p| p.state == State::NextStart) {
        next.push(format!(
            "start {vm} anew: virsh shutdown {vm}, then virsh start {vm} (a reboot inside the VM is not enough)"
        ));
    }
    next.extend(uses.iter().flat_map(|u| by_hand(*u, vm)));
    Ok(Answer {
        vm: vm.into(),
        dry_run,
        uses,
        parts,
        next,
    })
}

fn unprepare_by(virsh: &Virsh, vm: &str, uses: Option<Vec<Use>>, dry_run: bool) -> Outcome<Answer> {
    let xml = virsh.domain(vm)?;
    let is_running = virsh.is_running(vm)?;
    let (text, gone) = domain::unprepare(&xml, uses.as_deref()).map_err(|e| refused(vm, &e))?;
    if !dry_run && text != xml {
        virsh.define(&text)?;
    }
    let mut parts = Vec::new();
    for part in gone {
        let (state, why) = match is_running {
            true if part.can_be_plugged() && !dry_run => match virsh.detach(vm, &part.xml(vm)) {
                Ok(()) => (State::Removed, String::new()),
                Err(why) => (State::NextStart, why),
            },
            true if !part.can_be_plugged() => (State::NextStart, String::new()),
            _ => (State::Removed, String::new()),
        };
        parts.push(line(part, vm, state, why));
    }
    Ok(Answer {
        vm: vm.into(),
        dry_run,
        uses: uses.unwrap_or_default(),
        parts,
        next: Vec::new(),
    })
}

fn refused(vm: &str, e: &domain::DomainError) -> Failure {
    Failure::run(format!("VM {}: {e}", quoted(vm)))
}

fn line(part: Part, vm: &str, state: State, why: String) -> Line {
    Line {
        part,
        purpose: part.purpose(),
        state,
        why,
        xml: part.xml(vm),
    }
}

/// What viola leaves to the operator.
fn by_hand(what: Use, vm: &str) -> Vec<String> {
    let texts: &[&str] = match what {
        Use::Datanode => &["in VM: install viola-agent, then viola-agent setup"],
        Use::Reader => &[
            "in VM: mount -t virtiofs viola /mnt/viola, and viola's jar and property for the HDFS client (docs: vread)",
        ],
        Use::Vpipe => &[
            "on the host: [[vm]] name = \"VM\" with [vm.pipe] addresses in /etc/viola/viola.toml",
            "in VM: install viola-agent, then viola-agent setup",
        ],
        Use::Turbo => &[
            "on the host: viola set VM --class turbo --keep",
            "in VM: install viola-agent, with [turbo] cpu = 0 in /etc/viola/agent.toml",
        ],
        Use::Lane => &["in VM: install viola-agent, with [lane] in /etc/viola/agent.toml"],
    };
    texts.iter().map(|t| t.replace("VM", vm)).collect()
}

fn show(answer: &Answer, json: bool) -> Outcome {
    if json {
        return print_json(answer);
    }
    print(&text(answer))
}

fn text(answer: &Answer) -> String {
    let mut text = String::new();
    if answer.parts.is_empty() {
        text.push_str("nothing to change in the domain\n");
    } else {
        let mut rows = vec![["PART", "STATE", "PURPOSE"].map(str::to_owned).to_vec()];
        rows.extend(answer.parts.iter().map(|line| {
            let state = match line.why.as_str() {
                "" => line.state.text().to_owned(),
                why => format!("{} ({why})", line.state.text()),
            };
            vec![line.part.name().to_owned(), state, line.purpose.to_owned()]
        }));
        text.push_str(&align(&rows));
    }
    if answer.dry_run {
        text.push_str("\nnothing was changed (--dry-run); the elements:\n");
        for line in answer.parts.iter().filter(|l| l.state != State::Present) {
            text.push_str(&line.xml);
            text.push('\n');
        }
    }
    if !answer.next.is_empty() {
        text.push_str("\nleft to do:\n");
        for step in &answer.next {
            text.push_str(&format!("  {step}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests;

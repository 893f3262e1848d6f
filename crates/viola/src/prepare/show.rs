// SPDX-License-Identifier: Apache-2.0
//! What became of the parts of a domain, for the operator.

use serde::Serialize;

use super::domain::{Part, Use, VmNames};
use viola_cli::error::Outcome;
use viola_cli::table::{self, align, print_json};

/// What became of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The VM has it.
    Present,
    /// The running VM has it from now on.
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

/// What became of one part.
#[derive(Debug, Serialize)]
pub struct Line {
    /// The part.
    pub part: Part,
    purpose: &'static str,
    /// What became of it.
    pub state: State,
    /// Why a running VM does not have it yet; empty if there is no reason to give.
    pub why: String,
    /// Its element.
    xml: String,
}

impl Line {
    /// A line about a part.
    pub fn new(part: Part, vm: &VmNames, state: State, why: String) -> Self {
        Self {
            part,
            purpose: part.purpose(),
            state,
            why,
            xml: part.xml(vm),
        }
    }
}

/// What was done.
#[derive(Debug, Serialize)]
pub struct Answer {
    /// The VM.
    pub vm: String,
    /// Whether nothing was changed.
    pub dry_run: bool,
    /// For what.
    pub uses: Vec<Use>,
    /// The parts.
    pub parts: Vec<Line>,
    /// What is left to do, by hand.
    pub next: Vec<String>,
}

/// What viola leaves to the operator.
pub fn by_hand(what: Use, vm: &str) -> Vec<String> {
    let texts: &[&str] = match what {
        Use::Datanode => &["in VM: install viola-agent, then viola-agent setup --now"],
        Use::Reader => &[
            "on the host: viola runs before VM starts",
            "in VM: install viola-agent, then viola-agent setup --now, and start HDFS's clients anew",
        ],
        Use::Vpipe => &[
            "on the host: [[vm]] name = \"VM\" with [vm.pipe] in /etc/viola/viola.toml",
            "in VM: install viola-agent, then viola-agent setup --now",
        ],
        Use::Turbo => &[
            "on the host: viola set $VM --class turbo --keep",
            "in VM: install viola-agent, with [turbo] cpu = 0 in /etc/viola/agent.toml",
        ],
        Use::Lane => &["in VM: install viola-agent, with [lane] in /etc/viola/agent.toml"],
    };
    let named = |text: &&str| match text.contains("$VM") {
        true => text.replace("$VM", &shell_word(vm)),
        false => text.replace("VM", vm),
    };
    texts.iter().map(named).collect()
}

/// A VM's name as a word of a shell's command line.
pub fn shell_word(vm: &str) -> String {
    // Only a NUL byte cannot be quoted, which no argument has.
    shlex::try_quote(vm).map_or_else(|_| vm.to_owned(), Into::into)
}

/// Prints the answer.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(answer: &Answer, json: bool) -> Outcome {
    if json {
        return print_json(answer);
    }
    table::print(&text(answer))
}

/// The answer as a table and steps.
pub fn text(answer: &Answer) -> String {
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
            text.push_str(&format!("{}\n", line.xml));
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

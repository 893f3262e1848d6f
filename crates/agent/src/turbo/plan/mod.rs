// SPDX-License-Identifier: Apache-2.0
//! Plans the changes that put the kernel's I/O on the turbo vCPU and applications off it (paper 002 section 3.2, 000
//! section 3.3.2): a pure function of a snapshot and a goal.
//!
//! A plan that was carried out leaves nothing to plan. A step that the kernel refuses is left out of the next plan,
//! which then takes the second best way, if there is one. So the caller reads and plans until no step is left.

mod apps;
mod buffers;
mod irqs;
mod queues;
mod threads;

use std::collections::BTreeSet;

use super::cpus::Cpus;
use super::knob::{Knob, Part, Step};
use super::settings::{Applications, Settings};
use super::snapshot::Snapshot;

pub use apps::{Mode, PARTITION_TYPE, mode};
pub use buffers::min_buffer_bytes;
pub use irqs::{Kind, MANAGED_IRQ, kind};
pub use threads::serves_io;

/// What the operator wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Goal {
    /// The turbo vCPU.
    pub turbo: u32,
    /// Whether applications move off it.
    pub applications: Applications,
    /// Bandwidth to this VM in megabits per second; `None`: that of the fastest interface.
    pub mbit: Option<u32>,
    /// Longest time in milliseconds that an application waits for its vCPU; 0: buffers stay as they are.
    pub delay_ms: u32,
    /// Buffer size as a multiple of bandwidth times delay.
    pub headroom: u32,
    /// Whether sockets without a buffer size of their own get the larger buffer too.
    pub default_buffers: bool,
}

impl From<&Settings> for Goal {
    fn from(settings: &Settings) -> Self {
        Self {
            turbo: settings.cpu,
            applications: settings.applications,
            mbit: (settings.bandwidth_mbit > 0).then_some(settings.bandwidth_mbit),
            delay_ms: settings.delay_ms,
            headroom: settings.headroom,
            default_buffers: settings.default_buffers,
        }
    }
}

/// Settings that are not planned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skips {
    /// The kernel has refused them.
    pub refused: BTreeSet<Knob>,
    /// Somebody else has set them since; they are left alone.
    pub overridden: BTreeSet<Knob>,
}

/// Something that stays although the goal says otherwise, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// What it is about.
    pub part: Part,
    /// One sentence.
    pub text: String,
}

/// The changes of one round, and notes on what stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Changes in this order; they are undone in the opposite order.
    pub steps: Vec<Step>,
    /// What stays as it is.
    pub notes: Vec<Note>,
    /// How applications are kept off.
    pub mode: Mode,
}

/// Why there can be no turbo vCPU, as one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// Input and output of the planner's parts.
struct Planner<'a> {
    now: &'a Snapshot,
    goal: &'a Goal,
    skips: &'a Skips,
    /// The turbo vCPU alone.
    turbo: Cpus,
    plan: Plan,
}

/// Plans the changes that bring the guest from `now` to `goal`, except those in `skips`.
///
/// # Errors
/// One sentence when there can be no turbo vCPU; nothing is to be changed then.
pub fn plan(now: &Snapshot, goal: &Goal, skips: &Skips) -> Result<Plan, Unavailable> {
    let cpu = goal.turbo;
    if now.online.len() < 2 {
        return Err(Unavailable(
            "this VM has one vCPU; turbo needs a second one for the applications".into(),
        ));
    }
    if !now.possible.has(cpu) {
        let last = now.possible.iter().last().unwrap_or_default();
        return Err(Unavailable(format!(
            "there is no vCPU {cpu} in this VM; the last one is {last}"
        )));
    }
    if !now.online.has(cpu) {
        return Err(Unavailable(format!("vCPU {cpu} is offline")));
    }
    let mut planner = Planner {
        now,
        goal,
        skips,
        turbo: Cpus::one(cpu),
        plan: Plan {
            mode: mode(now, goal, skips),
            ..Plan::default()
        },
    };
    // a partition changes where threads and work may run, so it comes first
    planner.applications();
    planner.interrupts();
    planner.queues();
    planner.disks();
    planner.workqueues();
    planner.threads();
    planner.buffers();
    Ok(planner.plan)
}

impl Planner<'_> {
    /// Adds a step, if it changes anything and is not to be skipped; `true` when the setting will be as wanted.
    fn step(&mut self, part: Part, knob: Knob, new: String) -> bool {
        self.add(part, knob, new, false)
    }

    fn add(&mut self, part: Part, knob: Knob, new: String, chain: bool) -> bool {
        let (Some(old), Some(identity)) = (self.now.get(&knob), self.now.identity(&knob)) else {
            return false;
        };
        self.add_from(part, knob, identity, old, new, chain)
    }

    fn add_from(
        &mut self,
        part: Part,
        knob: Knob,
        identity: String,
        old: String,
        new: String,
        chain: bool,
    ) -> bool {
        if old == new {
            return true;
        }
        if self.skips.refused.contains(&knob) || self.skips.overridden.contains(&knob) {
            return false;
        }
        self.plan.steps.push(Step {
            knob,
            part,
            identity,
            old,
            new,
            chain,
        });
        true
    }

    fn note(&mut self, part: Part, text: impl Into<String>) {
        let text = text.into();
        self.plan.notes.push(Note { part, text });
    }
}

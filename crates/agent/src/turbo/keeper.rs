// SPDX-License-Identifier: Apache-2.0
//! Keeps the guest in the planned state: reads, plans, writes the journal, changes, and reads again.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use super::journal::Journal;
use super::knob::{Knob, Step};
use super::plan::{Goal, MANAGED_IRQ, Mode, Note, PARTITION_TYPE, Skips, plan};
use super::read::read_snapshot;
use super::report::{Change, Left, Report};
use super::restore::{Restored, is_gone, restore};
use super::snapshot::Snapshot;
use super::system::System;
use super::write::apply;

/// Maximum number of plans per round: one for each way that can be refused, and one to see that all is done.
const MAX_ROUNDS: usize = 8;

/// For this long after a vCPU has come or gone, the keeper attributes changed settings to the
/// kernel: drivers redistribute interrupts and queues only after the kernel has reported the vCPU.
/// Longer than the poll interval.
const HOTPLUG_SETTLE_TIME: Duration = Duration::from_secs(15);

/// A setting that is left alone, with the identity of its object.
struct Skipped {
    identity: String,
    step: Step,
    why: String,
}

/// The keeper of one guest.
pub struct Keeper {
    system: Box<dyn System>,
    goal: Goal,
    journal: Journal,
    refused: BTreeMap<Knob, Skipped>,
    overridden: BTreeMap<Knob, Skipped>,
    /// Settings that were just changed and not read back yet.
    fresh: Vec<Knob>,
    /// When a vCPU last came or went.
    hotplug: Option<Instant>,
    mode: Mode,
    notes: Vec<Note>,
    /// Why nothing is changed.
    off: Option<String>,
    /// What could not be restored.
    stuck: Vec<String>,
}

impl Keeper {
    /// A keeper with an open journal.
    pub fn new(system: Box<dyn System>, goal: Goal, journal: Journal) -> Self {
        Self {
            system,
            goal,
            journal,
            refused: BTreeMap::new(),
            overridden: BTreeMap::new(),
            fresh: Vec::new(),
            hotplug: None,
            mode: Mode::Leave,
            notes: Vec::new(),
            off: Some("not read yet".into()),
            stuck: Vec::new(),
        }
    }

    /// Brings the guest to the planned state, as far as the kernel allows.
    pub fn round(&mut self) {
        self.round_at(Instant::now());
    }

    /// The same at a given time.
    pub fn round_at(&mut self, at: Instant) {
        for _ in 0..MAX_ROUNDS {
            let now = read_snapshot(&*self.system, self.mode.needs_threads());
            self.compare(&now, at);
            match plan(&now, &self.goal, &self.skips()) {
                Err(off) => {
                    self.off = Some(off.0);
                    return self.put_back();
                }
                Ok(plan) if plan.mode.needs_threads() && !self.mode.needs_threads() => {
                    self.mode = plan.mode;
                }
                Ok(plan) => {
                    self.off = None;
                    self.mode = plan.mode;
                    self.notes = plan.notes;
                    if plan.steps.is_empty() {
                        return self.settle(&now);
                    }
                    if let Err(e) = self.carry_out(&now, &plan.steps) {
                        // without the journal nothing is changed
                        self.off = Some(format!("cannot write the old values: {e}"));
                        return;
                    }
                }
            }
        }
    }

    /// The kernel has reported that a vCPU came or went; it may be back by now.
    pub fn cpus_changed(&mut self, at: Instant) {
        self.hotplug = Some(at);
    }

    /// Restores everything.
    pub fn end(&mut self) {
        self.off = Some("ended".into());
        self.put_back();
    }

    fn put_back(&mut self) {
        let done = restore(&*self.system, &mut self.journal);
        let done = done.unwrap_or_else(|e| Restored {
            failed: vec![e.to_string()],
            ..Restored::default()
        });
        self.stuck = done.left.into_iter().chain(done.failed).collect();
        self.notes.clear();
        self.refused.clear();
        self.overridden.clear();
        self.fresh.clear();
        self.mode = Mode::Leave;
    }

    fn skips(&self) -> Skips {
        Skips {
            refused: self.refused.keys().cloned().collect(),
            overridden: self.overridden.keys().cloned().collect(),
        }
    }

    /// Compares earlier changes with the guest: their object is gone, they had no effect, or somebody else has
    /// changed them.
    fn compare(&mut self, now: &Snapshot, at: Instant) {
        let online = now.online.to_string();
        let before = &self.journal.contents.online;
        if !before.is_empty() && *before != online {
            self.hotplug = Some(at);
        }
        let by_kernel = self
            .hotplug
            .is_some_and(|then| at.saturating_duration_since(then) < HOTPLUG_SETTLE_TIME);
        for all in [&mut self.refused, &mut self.overridden] {
            all.retain(|knob, skipped| match knob {
                // with other CPUs a refused change may work, and the kernel has changed masks
                _ if by_kernel => false,
                // a group that was given up does not exist
                Knob::Group | Knob::GroupCpus | Knob::Partition => true,
                _ => now.identity(knob).as_ref() == Some(&skipped.identity),
            });
        }
        let fresh = std::mem::take(&mut self.fresh);
        let before = self.journal.contents.clone();
        for step in &before.steps {
            let hidden = matches!(step.knob, Knob::Thread { .. }) && !self.mode.needs_threads();
            if now.identity(&step.knob).as_ref() != Some(&step.identity) {
                // application threads are not in every snapshot
                if !hidden || now.get(&step.knob).is_some() {
                    self.journal.drop(&step.knob);
                }
                continue;
            }
            let Some(value) = now.get(&step.knob) else {
                continue;
            };
            if value == step.new || by_kernel && !fresh.contains(&step.knob) {
                continue;
            }
            if fresh.contains(&step.knob) {
                let why = format!("{}: {value}, not {}", step.knob, step.new);
                self.skip(step, why);
                match value == step.old {
                    true => self.journal.drop(&step.knob),
                    false => self.journal.add(&[Step {
                        new: value,
                        ..step.clone()
                    }]),
                }
            } else {
                let why = format!(
                    "{} was set to {} by somebody else, and stays so",
                    step.knob,
                    if value.is_empty() { "nothing" } else { &value }
                );
                let skipped = Skipped {
                    identity: step.identity.clone(),
                    step: step.clone(),
                    why,
                };
                self.overridden.insert(step.knob.clone(), skipped);
                self.journal.drop(&step.knob);
            }
        }
        if self.journal.contents != before {
            // the file keeps its old content; the next change writes it, or reports why not
            let _ = self.journal.save();
        }
    }

    /// Nothing is left to be done: notes the online CPUs.
    fn settle(&mut self, now: &Snapshot) {
        let online = now.online.to_string();
        if self.journal.contents.online != online {
            self.journal.contents.online = online;
            // without it the next agent attributes more changes to the kernel
            let _ = self.journal.save();
        }
    }

    fn skip(&mut self, step: &Step, why: String) {
        let skipped = Skipped {
            identity: step.identity.clone(),
            step: step.clone(),
            why,
        };
        self.refused.insert(step.knob.clone(), skipped);
    }

    /// Writes the journal, then changes.
    fn carry_out(&mut self, now: &Snapshot, steps: &[Step]) -> io::Result<()> {
        let before = self.journal.contents.clone();
        self.journal.contents.online = now.online.to_string();
        self.journal.add(steps);
        if let Err(e) = self.journal.save() {
            self.journal.contents = before;
            return Err(e);
        }
        let mut broken = false;
        for (at, step) in steps.iter().enumerate() {
            let earlier = before.steps.iter().find(|s| s.knob == step.knob);
            let forget = |journal: &mut Journal| match earlier {
                Some(earlier) => journal.add(std::slice::from_ref(earlier)),
                None => journal.drop(&step.knob),
            };
            if broken {
                forget(&mut self.journal);
                continue;
            }
            match self.change(step) {
                Ok(()) => self.fresh.push(step.knob.clone()),
                Err(e) if is_gone(&e) => self.journal.drop(&step.knob),
                Err(e) => {
                    forget(&mut self.journal);
                    self.skip(step, self.sentence(now, step, &e));
                    // later steps depend on it; there will be another plan
                    if step.chain {
                        broken = true;
                        self.undo(&steps[..at], step);
                    }
                }
            }
        }
        // on failure the file also names settings that were not changed
        let _ = self.journal.save();
        Ok(())
    }

    /// Changes one setting, and reads it back if later steps depend on it.
    fn change(&self, step: &Step) -> io::Result<()> {
        apply(&*self.system, &step.knob, &step.new)?;
        if !step.chain {
            return Ok(());
        }
        let value = read_snapshot(&*self.system, false).get(&step.knob);
        match value {
            Some(value) if value != step.new => {
                apply(&*self.system, &step.knob, &step.old)?;
                Err(io::Error::other(format!("{value}, not {}", step.new)))
            }
            _ => Ok(()),
        }
    }

    /// Undoes the steps of a broken chain.
    fn undo(&mut self, done: &[Step], broken: &Step) {
        for step in done.iter().rev() {
            let chained = step.chain && step.part == broken.part;
            // the next best way needs the controller too, and others may use it
            if chained && step.knob != Knob::Controller {
                // a step that cannot be undone stays in the journal
                if apply(&*self.system, &step.knob, &step.old).is_ok() {
                    self.journal.drop(&step.knob);
                    self.fresh.retain(|knob| *knob != step.knob);
                }
            }
        }
    }

    /// Why a step was refused.
    fn sentence(&self, now: &Snapshot, step: &Step, e: &io::Error) -> String {
        match &step.knob {
            Knob::Irq { irq } if e.raw_os_error() == Some(libc::EIO) => {
                let seen = now.irqs.get(irq).map(|irq| &irq.seen);
                let fine = seen.is_some_and(|seen| seen.to_string() == step.new);
                let fine = match fine {
                    true => "; it has come to the turbo vCPU alone so far",
                    false => "",
                };
                format!("interrupt {irq} ({}): {MANAGED_IRQ}{fine}", step.identity)
            }
            Knob::Irq { irq } => format!("interrupt {irq} ({}): {e}", step.identity),
            Knob::Partition => format!("partition of kind {PARTITION_TYPE}: {e}"),
            knob => format!("{knob}: {e}"),
        }
    }

    /// The report for `viola-agent status`.
    pub fn report(&self) -> Report {
        let steps = &self.journal.contents.steps;
        let state = match &self.off {
            Some(off) if steps.is_empty() => format!("off: {off}"),
            Some(off) => format!("off: {off}; {} settings are not restored", steps.len()),
            None => "in force".into(),
        };
        let note = |note: &Note| Left {
            part: note.part,
            why: note.text.clone(),
        };
        let skipped = self.refused.values().chain(self.overridden.values());
        let skipped = skipped.map(|skipped| Left {
            part: skipped.step.part,
            why: skipped.why.clone(),
        });
        let stuck = self.stuck.iter().filter(|_| self.off.is_some());
        Report {
            cpu: self.goal.turbo,
            active: self.off.is_none(),
            state: stuck.fold(state, |state, sentence| format!("{state}; {sentence}")),
            applications: match self.mode {
                Mode::Leave => "left",
                Mode::Partition => "partition",
                Mode::Slices => "slices",
                Mode::Threads => "threads",
            }
            .into(),
            changes: steps.iter().map(|step| self.show(step)).collect(),
            left: self.notes.iter().map(note).chain(skipped).collect(),
        }
    }

    fn show(&self, step: &Step) -> Change {
        let named = matches!(step.knob, Knob::Irq { .. });
        Change {
            part: step.part,
            what: match named {
                true => format!("{} ({})", step.knob, step.identity),
                false => step.knob.to_string(),
            },
            from: step.old.clone(),
            to: step.new.clone(),
        }
    }
}

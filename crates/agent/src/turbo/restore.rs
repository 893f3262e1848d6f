// SPDX-License-Identifier: Apache-2.0
//! Restores what a journal has, the last change first. A setting that somebody else has changed since stays as it is.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::Path;

use super::cpus::Cpus;
use super::journal::Journal;
use super::knob::{Knob, OFF, Part, Step};
use super::read::read_snapshot;
use super::snapshot::{Snapshot, numbers};
use super::system::System;
use super::write::apply;

/// The result of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    /// Number of restored settings.
    pub restored: usize,
    /// Settings that were left alone, and why; one sentence each.
    pub left: Vec<String>,
    /// Settings that could not be restored; they stay in the journal.
    pub failed: Vec<String>,
}

impl std::fmt::Display for Restored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "restored {} settings of the turbo vCPU", self.restored)?;
        for left in self.left.iter().chain(&self.failed) {
            write!(f, "; {left}")?;
        }
        Ok(())
    }
}

/// Restores all settings of the journal.
///
/// # Errors
/// When the journal cannot be written.
pub fn restore(system: &dyn System, journal: &mut Journal) -> io::Result<Restored> {
    let mut done = Restored::default();
    if journal.contents.steps.is_empty() {
        return Ok(done);
    }
    let one_by_one = |step: &Step| step.part == Part::Applications;
    let threads = journal.contents.steps.iter().filter(|s| one_by_one(s));
    let threads: Vec<Step> = threads
        .filter(|step| matches!(step.knob, Knob::Thread { .. }))
        .cloned()
        .collect();
    let now = read_snapshot(system, !threads.is_empty());
    // when a CPU comes or goes, the kernel sets masks by itself: those are not somebody's setting
    let by_kernel = journal.contents.online != now.online.to_string();
    let mut steps: Vec<Step> = journal.contents.steps.iter().rev().cloned().collect();
    // while the partition exists, no thread can be moved back to its CPU
    steps.sort_by_key(|step| step.knob != Knob::Partition);
    for step in steps {
        match restore_step(system, &now, &step, by_kernel) {
            Ok(None) => done.restored += 1,
            Ok(Some(left)) => done.left.push(left),
            Err(e) if is_gone(&e) => {}
            Err(e) => {
                done.failed.push(format!("{}: {e}", step.knob));
                continue;
            }
        }
        journal.drop(&step.knob);
    }
    restore_children(system, &now, &threads);
    journal.save()?;
    Ok(done)
}

/// Restores one setting; a sentence when it is left alone.
fn restore_step(
    system: &dyn System,
    now: &Snapshot,
    step: &Step,
    by_kernel: bool,
) -> io::Result<Option<String>> {
    if now.identity(&step.knob).as_ref() != Some(&step.identity) {
        return Err(ErrorKind::NotFound.into());
    }
    let value = now.get(&step.knob).ok_or(ErrorKind::NotFound)?;
    if let Knob::Irqbalance { .. } = step.knob {
        // interrupts that others have banned stay banned
        let set_of = |text: &str| -> BTreeSet<u32> {
            text.split(' ').filter_map(|w| w.parse().ok()).collect()
        };
        let ours = &set_of(&step.new) - &set_of(&step.old);
        return apply(system, &step.knob, &numbers(&(&set_of(&value) - &ours))).map(|()| None);
    }
    if value == step.old {
        return Ok(None);
    }
    // group and CPUs are set one after the other, and a kill may have come between
    let half_way = matches!(step.knob, Knob::Member { .. });
    if value != step.new && !by_kernel && !half_way {
        return Ok(Some(format!(
            "{} was set to {value} by somebody else, and stays so",
            step.knob
        )));
    }
    match apply(system, &step.knob, &reachable(now, step)) {
        // other groups use the controller now
        Err(e) if step.knob == Knob::Controller && step.old == OFF => {
            Ok(Some(format!("{} stays on: {e}", step.knob)))
        }
        done => done.map(|()| None),
    }
}

/// The old value. When it names only CPUs that are gone, which the kernel refuses: all online CPUs.
fn reachable(now: &Snapshot, step: &Step) -> String {
    let pins = matches!(step.knob, Knob::Irq { .. } | Knob::Thread { .. });
    match Cpus::parse_list(&step.old) {
        Some(old) if pins && old.intersection(&now.online).is_empty() => now.online.to_string(),
        _ => step.old.clone(),
    }
}

/// Restores threads that moved threads have started since: they inherited the affinity.
fn restore_children(system: &dyn System, now: &Snapshot, moved: &[Step]) {
    let of = |tid: i32| {
        let knob = Knob::Thread { tid };
        moved.iter().find(|step| step.knob == knob)
    };
    for (tid, task) in &now.tasks {
        if task.kernel || of(*tid).is_some() {
            continue;
        }
        let mut pid = task.pid;
        // the nearest ancestor that was moved; 64 is more than any real chain of processes has
        for _ in 0..64 {
            if let Some(step) = of(pid) {
                if step.new == task.cpus.to_string() {
                    // the thread may have ended meanwhile
                    let _ = apply(system, &Knob::Thread { tid: *tid }, &reachable(now, step));
                }
                break;
            }
            match now.tasks.get(&pid) {
                Some(task) if task.parent > 0 => pid = task.parent,
                _ => break,
            }
        }
    }
}

/// Whether an error says that the object is gone.
pub(super) fn is_gone(e: &io::Error) -> bool {
    e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH)
}

/// Id of this boot.
pub fn boot_id(system: &dyn System) -> String {
    let text = system.read("/proc/sys/kernel/random/boot_id");
    text.unwrap_or_default().trim().to_owned()
}

/// Restores what a killed agent has left, from `viola-agent restore` or at the start of the next agent. `None` when
/// nothing is left.
///
/// # Errors
/// [`ErrorKind::WouldBlock`] while an agent runs, or the journal's error.
pub fn restore_leftovers(system: &dyn System, path: &Path) -> io::Result<Option<Restored>> {
    if !path.exists() {
        return Ok(None);
    }
    let mut journal = Journal::open(path, &boot_id(system))?;
    restore(system, &mut journal).map(Some)
}

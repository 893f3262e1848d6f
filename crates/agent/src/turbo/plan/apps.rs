// SPDX-License-Identifier: Apache-2.0
//! Moves applications off the turbo vCPU: by a cgroup v2 partition that has it alone, else by the
//! cpusets of the groups below the root, else thread by thread. See the kernel's
//! `Documentation/admin-guide/cgroup-v2.rst`, "Cpuset".

use super::{Goal, Planner, Skips};
use crate::turbo::cpus::Cpus;
use crate::turbo::knob::{Knob, MEMBER, ON, Part, THERE};
use crate::turbo::settings::Applications;
use crate::turbo::snapshot::Snapshot;

/// Partition type of the turbo vCPU's group.
pub const PARTITION_TYPE: &str = "isolated";

/// How applications are kept off the turbo vCPU; after `Leave`, the best way first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// They stay.
    #[default]
    Leave,
    /// The turbo vCPU is in a partition of its own, which also keeps later programs off.
    Partition,
    /// By the cpusets of all groups below the root, and by affinity for threads in the root group.
    Slices,
    /// By each thread's affinity, which its children inherit.
    Threads,
}

impl Mode {
    /// Whether the snapshot needs all threads.
    pub fn needs_threads(self) -> bool {
        matches!(self, Self::Slices | Self::Threads)
    }
}

/// The best mode that the kernel has not refused.
pub fn mode(now: &Snapshot, goal: &Goal, skips: &Skips) -> Mode {
    let stands = |knob: &Knob| !skips.refused.contains(knob) && !skips.overridden.contains(knob);
    let Some(cgroup) = &now.cgroup else {
        return match goal.applications {
            Applications::Leave => Mode::Leave,
            Applications::Move => Mode::Threads,
        };
    };
    let controller = cgroup.enabled || stands(&Knob::Controller);
    let partition = [Knob::Group, Knob::GroupCpus, Knob::Partition];
    match goal.applications {
        Applications::Leave => Mode::Leave,
        Applications::Move if controller && partition.iter().all(stands) => Mode::Partition,
        Applications::Move if controller && !cgroup.slices.is_empty() => Mode::Slices,
        Applications::Move => Mode::Threads,
    }
}

impl Planner<'_> {
    pub(super) fn applications(&mut self) {
        match self.plan.mode {
            Mode::Leave => {}
            Mode::Partition => {
                self.controller();
                self.partition();
            }
            Mode::Slices => {
                let why = "there can be no partition, so the cpusets of the groups below the root are set; a new group has all vCPUs until the agent notices it";
                self.note(Part::Applications, why);
                self.controller();
                self.slices();
                self.each(|cgroup| cgroup == "/");
            }
            Mode::Threads => {
                let why = "no cpuset of cgroup v2 is available, so each thread's affinity is set; a program that sets its own undoes that";
                self.note(Part::Applications, why);
                self.each(|_| true);
            }
        }
    }

    fn controller(&mut self) {
        self.add(Part::Applications, Knob::Controller, ON.into(), true);
    }

    fn partition(&mut self) {
        let part = Part::Applications;
        self.add(part, Knob::Group, THERE.into(), true);
        let ours = self.now.cgroup.as_ref().and_then(|c| c.turbo_group.clone());
        let (cpus, kind) = match ours {
            Some(ours) => (ours.cpus, ours.partition),
            // the values of a new group
            None => (String::new(), MEMBER.into()),
        };
        for (knob, old, new) in [
            (Knob::GroupCpus, cpus, self.turbo.to_string()),
            (Knob::Partition, kind, PARTITION_TYPE.into()),
        ] {
            self.add_from(part, knob, String::new(), old, new, true);
        }
    }

    /// Sets the cpusets of the groups below the root.
    fn slices(&mut self) {
        let Some(cgroup) = &self.now.cgroup else {
            return;
        };
        for (name, cpus) in &cgroup.slices {
            let all = match cpus.is_empty() {
                true => self.now.possible.clone(),
                false => Cpus::parse_list(cpus).unwrap_or_default(),
            };
            let rest = all.without(self.goal.turbo);
            if rest.is_empty() {
                let text = format!("{name} is set to the turbo vCPU alone, and stays there");
                self.note(Part::Applications, text);
            } else if rest != all {
                let knob = Knob::Slice { name: name.clone() };
                self.step(Part::Applications, knob, rest.to_string());
            }
        }
    }

    /// Sets the affinity of each thread in these cgroups.
    fn each(&mut self, in_group: impl Fn(&str) -> bool) {
        let now = self.now;
        let mut pinned = 0;
        for (tid, task) in &now.tasks {
            if task.kernel || task.fixed || !in_group(&task.cgroup) {
                continue;
            }
            let rest = task.cpus.without(self.goal.turbo);
            if rest.intersection(&now.online).is_empty() {
                pinned += 1;
            } else if rest != task.cpus {
                let knob = Knob::Thread { tid: *tid };
                self.step(Part::Applications, knob, rest.to_string());
            }
        }
        if pinned > 0 {
            let text = format!("{pinned} threads may run on the turbo vCPU alone, and stay there");
            self.note(Part::Applications, text);
        }
    }
}

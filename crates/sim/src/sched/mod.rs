// SPDX-License-Identifier: Apache-2.0
//! Schedulers of one core: which vCPU runs, and until when.

mod eevdf;
mod policy_driver;
mod xen;

pub use eevdf::{BASE_SLICE, Config as EevdfConfig, Eevdf, TICK};
pub use policy_driver::{PolicyCore, PolicyDriver};
pub use xen::{Config as XenConfig, Xen};

use viola_policy::slices::{Nanos, Packets, Params};
use viola_policy::turbo::OtherCoreUsage;

/// State of one vCPU for the scheduler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct View {
    /// Whether it runs or wants to run.
    pub runnable: bool,
    /// Run time since the last [`Scheduler::pick`], ns.
    pub used: Nanos,
    /// Whether it blocked since then.
    pub blocked: bool,
    /// Whether an interrupt waits for it.
    pub io: bool,
    /// Packets of its VM, if it handles them.
    pub packets: Packets,
}

/// The vCPUs of a core in the order of [`Scheduler::configure`], and those that changed since the last
/// [`Scheduler::pick`].
#[derive(Debug, Default)]
pub struct Views {
    all: Vec<View>,
    changed: Vec<usize>,
}

impl Views {
    /// Adds a vCPU.
    pub fn add(&mut self) {
        self.all.push(View::default());
    }

    /// All vCPUs.
    pub fn all(&self) -> &[View] {
        &self.all
    }

    /// A vCPU, to be changed.
    pub fn change(&mut self, index: usize) -> &mut View {
        if !self.changed.contains(&index) {
            self.changed.push(index);
        }
        &mut self.all[index]
    }

    /// The vCPUs that changed, with their indexes.
    pub fn changed(&self) -> impl Iterator<Item = (usize, &View)> {
        self.changed.iter().map(|&i| (i, &self.all[i]))
    }

    /// Sorts the changed vCPUs by index.
    pub fn sort(&mut self) {
        self.changed.sort_unstable();
    }

    /// Clears what is counted since the last [`Scheduler::pick`].
    pub fn clear(&mut self) {
        for i in self.changed.drain(..) {
            let view = &mut self.all[i];
            (view.used, view.blocked) = (0, false);
        }
    }
}

/// Answer of [`Scheduler::pick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    /// The vCPU that runs from now on.
    pub who: Option<usize>,
    /// Time of the next call, ns, unless an event comes first.
    pub until: Nanos,
    /// Run time of that vCPU until the next call, ns.
    pub budget: Nanos,
}

/// A scheduler of one core. It is asked when a vCPU wakes, when the running one blocks, and at the time it named.
pub trait Scheduler {
    /// Sets the vCPUs of the core: before anything runs, and whenever a parameter changes.
    fn configure(&mut self, now: Nanos, vcpus: &[Params]);

    /// Picks the vCPU that runs.
    fn pick(&mut self, now: Nanos, views: &Views) -> Pick;

    /// Adds what each VM ran on other cores since the last call. For cores of the pools only.
    fn add_other_cores(&mut self, _ran: &[OtherCoreUsage]) {}

    /// As [`viola_policy::turbo::PoolScheduler::due`]. For regular cores of the pools only.
    fn due(&self, _index: usize) -> (Nanos, bool) {
        (0, false)
    }

    /// Whether it wants to be asked when an interrupt arrives for a vCPU that waits.
    fn wants_io_events(&self) -> bool {
        false
    }

    /// Whether it wants to be asked when an interrupt arrives for the vCPU that runs: a thread of the guest wakes
    /// beside the one that runs.
    fn wants_wake_ups(&self) -> bool {
        false
    }

    /// Core time of the scheduler itself since the last call, ns.
    fn overhead(&mut self) -> Nanos {
        0
    }
}

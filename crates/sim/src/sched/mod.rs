// SPDX-License-Identifier: Apache-2.0
//! Schedulers of one core: which vCPU runs, and until when.

mod eevdf;
mod machine;
mod xen;

pub use eevdf::{Config as EevdfConfig, Eevdf};
pub use machine::{Driver, Slots};
pub use xen::{Config as XenConfig, Xen};

use viola_policy::slices::{Nanos, Params};
use viola_policy::turbo::Elsewhere;

/// One vCPU as the scheduler sees it, in the order of [`Scheduler::configure`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct View {
    /// Runs or wants to run.
    pub runnable: bool,
    /// What it ran since the last [`Scheduler::pick`], ns.
    pub used: Nanos,
    /// It blocked since then.
    pub blocked: bool,
    /// An interrupt waits for it.
    pub io: bool,
}

/// The vCPUs of a core, in that order, and which of them something happened to since the last [`Scheduler::pick`].
#[derive(Debug, Default)]
pub struct Views {
    all: Vec<View>,
    changed: Vec<usize>,
}

impl Views {
    /// One more.
    pub fn add(&mut self) {
        self.all.push(View::default());
    }

    /// All of them.
    pub fn all(&self) -> &[View] {
        &self.all
    }

    /// One of them, to which something happens.
    pub fn change(&mut self, index: usize) -> &mut View {
        if !self.changed.contains(&index) {
            self.changed.push(index);
        }
        &mut self.all[index]
    }

    /// Those that something happened to, by index.
    pub fn changed(&self) -> impl Iterator<Item = (usize, &View)> {
        self.changed.iter().map(|&i| (i, &self.all[i]))
    }

    /// Has the changed ones come in order of their indices.
    pub fn sort(&mut self) {
        self.changed.sort_unstable();
    }

    /// The scheduler has seen it all.
    pub fn picked(&mut self) {
        for i in self.changed.drain(..) {
            let view = &mut self.all[i];
            (view.used, view.blocked) = (0, false);
        }
    }
}

/// Answer of [`Scheduler::pick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pick {
    /// Who runs from now on.
    pub who: Option<usize>,
    /// To be asked again at this time, if nothing happens before.
    pub until: Nanos,
    /// To be asked again when that one has run so long, ns.
    pub budget: Nanos,
}

/// A scheduler of one core. It is asked when a vCPU wakes, when the one that runs blocks, and at the time it named.
pub trait Scheduler {
    /// Takes the vCPUs of the core, before anything runs and whenever a control changes.
    fn configure(&mut self, now: Nanos, vcpus: &[Params]);

    /// Picks who runs.
    fn pick(&mut self, now: Nanos, views: &Views) -> Pick;

    /// Takes what each VM ran on other cores since the last call. For pools only.
    fn elsewhere(&mut self, _ran: &[Elsewhere]) {}

    /// All that a VM was ever due on this core, ns, and whether it wants the core while others do. For regular cores of pools
    /// only.
    fn due(&self, _index: usize) -> (Nanos, bool) {
        (0, false)
    }

    /// Whether it wants to be asked when an interrupt comes for a vCPU that waits.
    fn hears_io(&self) -> bool {
        false
    }

    /// Core time that the scheduler itself took since the last call, ns.
    fn overhead(&mut self) -> Nanos {
        0
    }
}

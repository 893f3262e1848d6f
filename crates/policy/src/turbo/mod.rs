// SPDX-License-Identifier: Apache-2.0
//! Turbo cores: the vCPU on which a VM serves its I/O runs on a core of 0.1 ms slots (vTurbo: paper "vTurbo:
//! Accelerating Virtual Machine I/O Processing Using Designated Turbo-Sliced Core", dissertation chapter 3).
//!
//! # Model
//! Cores are in two pools. **Regular** cores have ordinary slices (30 ms in the paper, 4 ms is what stock EEVDF comes
//! to). **Turbo** cores have slots of 0.1 ms, so that among n VMs an interrupt waits (n - 1)·0.1 ms at most. A VM that
//! does I/O has one turbo vCPU, placed on one turbo core; all its others are regular. No vCPU is in both pools.
//!
//! What a VM runs on a turbo core it pays for on the regular ones: FS^R = FS - what it ran there ([`shares`], where the
//! equations and their Table 1 are). The machines below keep that by the lags of EEVDF, which are the same equations
//! at every moment instead of once per accounting period: whatever anybody runs in either pool is owed to those that
//! compete, by weight, and owed by the one that ran. The turbo pool itself is shared by weight among those that want
//! it, whatever they run elsewhere: nobody's interrupts wait because his processes compute.
//!
//! # Machines
//! Each core has a machine of its own, as under [`crate::slices`], and a driver that asks it:
//! - [`RegularCore`]: the VM that had least of both pools for its weight has the core for a slice.
//! - [`TurboCore`]: turbo vCPUs in slots; below them, in the gaps, regular vCPUs that have their place on this core, so
//!   that a turbo core that is idle is a regular one. They lose it the moment a turbo vCPU wakes.
//!
//! The machines of different cores share nothing. What a VM ran elsewhere their drivers tell them ([`Pooled`]), from
//! the accounting program's counters.
//!
//! # Departures from the paper
//! - Accounting is done at each decision: at the end of every slot or slice, and at least each 30 ms
//!   ([`ACCOUNTING`]) while VMs contend for a regular core. The paper's 30 ms and 0.1 ms are the longest times.
//! - A turbo vCPU that wakes with share in hand (at most a slot's) takes the core at once.
//! - Table 1, scenario 2, leaves a VM nothing of the regular core, for as long as its I/O goes on. Here it gets 1 ms of
//!   each 150 ms ([`RegularConfig::floor`]), so that it can read what it receives; 0 turns that off.
//! - A VM's turbo vCPU uses no more than a part of what the VM is due while its regular vCPUs wait
//!   ([`TurboConfig::reserve`]): then it waits itself. The paper has no bound there, and with more I/O than the VM's
//!   share pays for nothing of it would be read. 0 turns that off.
//! - Caps, which the paper does not treat, limit both pools together. A VM's vCPUs spend its quota as they come.
//!   No cap is exceeded for longer than a window or two; a quota that a VM could not use is carried over for one
//!   window only, so beside others it may stay some percent below its cap.
//!
//! # Decisions of the control loop
//! [`choose`]: which VMs get a turbo vCPU. [`count`]: how many turbo cores there are. [`model`]: waits and buffers.

pub mod choose;
pub mod count;
pub mod model;
pub mod shares;
pub mod simulate;

mod floor;
mod regular;
mod reserve;
mod settle;
mod turbo_core;
mod turns;

pub use regular::{Config as RegularConfig, RegularCore};
pub use turbo_core::{Config as TurboConfig, TurboCore};

use crate::slices::{MS, Machine, Nanos, US};

/// Slot of a turbo core (section 3.1).
pub const TURBO_SLOT: Nanos = 100 * US;
/// Slice of a regular core (section 3.1).
pub const REGULAR_SLICE: Nanos = 30 * MS;
/// Longest time between two accountings of a regular core that VMs contend for (section 4).
pub const ACCOUNTING: Nanos = 30 * MS;

/// What a VM ran on other cores since the machine was last told, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Elsewhere {
    /// On turbo cores, as far as the VM pays for it on this one: all of it when its regular vCPUs are all placed
    /// here, else this core's [`portion`]. Without meaning for a turbo vCPU.
    pub turbo: Nanos,
    /// On all other cores, turbo and regular: counts against its cap.
    pub total: Nanos,
    /// What it was due on all regular cores ([`Pooled::due`]). For turbo vCPUs only.
    pub due: Nanos,
    /// Whether a regular vCPU of it wants to run while others do. For turbo vCPUs only.
    pub waits: bool,
}

/// The machine of a core that belongs to one of the two pools.
///
/// [`crate::slices::Params`] are read so: `cap_permille` is a cap on both pools together (1000 is one whole core, more
/// may be given). On a turbo core `class` tells turbo vCPUs ([`crate::slices::Class::Ls`]; `microslice` is the slot)
/// from regular ones in the gaps ([`crate::slices::Class::Batch`]); a VM may not have both on one core. On a regular
/// core `class` and `microslice` mean nothing.
pub trait Pooled: Machine {
    /// Takes what each VM ran elsewhere since the last call, in the order of [`Machine::configure`]. Adds up until
    /// the next [`Machine::decide`], before which it is best called. Missing entries stand for nothing.
    fn elsewhere(&mut self, ran: &[Elsewhere]);

    /// All that a VM (by its place in [`Machine::configure`]) was ever due on this core, ns: its fair share of what
    /// was run, turbo cores included as far as they are paid for here. And whether it wants the core while others do.
    /// Nothing on turbo cores.
    fn due(&self, _index: usize) -> (Nanos, bool) {
        (0, false)
    }
}

impl<P: Pooled + ?Sized> Pooled for Box<P> {
    fn elsewhere(&mut self, ran: &[Elsewhere]) {
        (**self).elsewhere(ran);
    }

    fn due(&self, index: usize) -> (Nanos, bool) {
        (**self).due(index)
    }
}

/// What one regular core charges of a VM's turbo usage: the part `here` of its `all` regular vCPUs that are placed on
/// it. `counter` is all that the VM has ever run on turbo cores, ns; differences of this function's values are what to
/// charge. Over all cores they add up to the whole but for 1 ns per core.
pub fn portion(counter: Nanos, here: u32, all: u32) -> Nanos {
    if all == 0 {
        return 0;
    }
    let part = u128::from(counter) * u128::from(here.min(all)) / u128::from(all);
    u64::try_from(part).unwrap_or(Nanos::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_portions_of_all_cores_are_the_whole() {
        for counter in [0, 1, 999, 1_000_003, Nanos::MAX] {
            let sum = portion(counter, 1, 3) + portion(counter, 2, 3);
            assert!(sum <= counter && counter - sum <= 2, "{sum} of {counter}");
        }
        assert_eq!((portion(10, 3, 2), portion(10, 1, 0)), (10, 0));
    }
}

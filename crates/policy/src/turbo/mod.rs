// SPDX-License-Identifier: Apache-2.0
//! Turbo cores: the vCPU that serves a VM's I/O runs on a core of 0.1 ms slots (vTurbo: paper "vTurbo: Accelerating
//! Virtual Machine I/O Processing Using Designated Turbo-Sliced Core", dissertation chapter 3).
//!
//! # Model
//! Cores form two pools. **Regular** cores have ordinary slices (30 ms in the paper; 4 ms is the effective slice of
//! stock EEVDF). **Turbo** cores have slots of 0.1 ms, so that an interrupt waits (n - 1)·0.1 ms at most among n VMs. A
//! VM that does I/O has one turbo vCPU, placed on one turbo core; all its other vCPUs are regular. No vCPU is in both
//! pools.
//!
//! A VM pays on the regular cores for what it runs on a turbo core: FS^R = FS - what it ran there (`shares`, for tests
//! and the simulator, has the equations and the paper's Table 1). The schedulers below keep that by the lags of EEVDF,
//! which are the same equations at every moment instead of once per accounting period: whatever a VM runs in either
//! pool is debited to it and credited, by weight, to the VMs that compete. The turbo pool is shared by weight among the
//! VMs that want it, whatever they run on regular cores: the interrupts of a VM do not wait because its processes compute.
//!
//! # Schedulers
//! Each core has a scheduler of its own, as under [`crate::slices`], and a driver that asks it:
//! - [`RegularCore`]: the VM with the least service from both pools for its weight has the core for a slice.
//! - [`TurboCore`]: turbo vCPUs run in slots. In the gaps between them run the regular vCPUs that are placed on this
//!   core, so that an idle turbo core serves as a regular one. A turbo vCPU that wakes preempts them at once.
//!
//! The schedulers of different cores share no state. Their drivers pass them what each VM ran on other cores
//! ([`PoolScheduler`]), from the counters of the accounting program.
//!
//! # Departures from the paper
//! - Accounting happens at each decision: at the end of every slot or slice, and at least every 30 ms
//!   ([`ACCOUNTING_INTERVAL`]) while VMs contend for a regular core. The paper accounts every 30 ms and 0.1 ms.
//! - A turbo vCPU that wakes with positive lag (at most a slot's) gets the core at once.
//! - In Table 1, scenario 2, a VM gets nothing of the regular core while its I/O continues. Here it gets 1 ms of each
//!   150 ms ([`RegularConfig::floor`]), so that it can read what it receives; 0 turns that off.
//! - While regular vCPUs of a VM wait, its turbo vCPU uses at most a part of what the VM is due
//!   ([`TurboConfig::reserve`]). The paper has no bound: a VM that receives more than its share pays for would never
//!   read any of it. 0 turns that off.
//! - Caps, which the paper does not have, limit both pools together; the vCPUs of a VM share its quota first come first
//!   served. A VM exceeds its cap for three windows at most. An unused quota is carried over for two windows only, so beside
//!   other VMs it may stay some percent below its cap.
//!
//! # Decisions of the control loop
//! | module | decides |
//! |---|---|
//! | [`choose`] | which VMs get a turbo vCPU |
//! | [`pool_size`] | how many turbo cores there are |
//! | [`model`] | (equations) how long interrupts wait, and how large buffers must be |

pub mod choose;
pub mod model;
pub mod pool_size;
#[cfg(any(test, feature = "testing"))]
pub mod shares;

mod fair_queue;
mod floor;
mod regular;
mod reserve;
mod turbo_core;

pub use regular::{Config as RegularConfig, RegularCore};
pub use turbo_core::{Config as TurboConfig, TurboCore};

use crate::slices::{CoreScheduler, MS, Nanos, US};

/// Slot of a turbo core, ns: 0.1 ms (paper section 3.1).
pub const TURBO_SLOT: Nanos = 100 * US;
/// Slice of a regular core, ns: 30 ms (paper section 3.1).
pub const REGULAR_SLICE: Nanos = 30 * MS;
/// Maximum time between two accountings of a contended regular core (paper section 4).
pub const ACCOUNTING_INTERVAL: Nanos = 30 * MS;

/// What a VM ran on other cores since the last call of [`PoolScheduler::add_other_cores`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OtherCoreUsage {
    /// On turbo cores, as far as the VM pays for it on this core, ns: all of it if all its regular vCPUs are placed
    /// here, otherwise this core's [`portion`]. Ignored for a turbo vCPU.
    pub turbo: Nanos,
    /// On all other cores, turbo and regular, ns: counts against its cap.
    pub total: Nanos,
    /// What it was due on all regular cores ([`PoolScheduler::due`]), ns. For turbo vCPUs only.
    pub due: Nanos,
    /// Whether a regular vCPU of it wants to run while other VMs do. For turbo vCPUs only.
    pub waits: bool,
}

/// The scheduler of a core that belongs to one of the two pools.
///
/// It reads [`crate::slices::Params`] as follows. `cap_permille` is a cap on both pools together: 1000 is one whole
/// core, and more is allowed. On a turbo core `class` tells turbo vCPUs ([`crate::slices::Class::Ls`]; `microslice` is
/// the slot) from regular vCPUs in the gaps ([`crate::slices::Class::Batch`]); a VM must not have both on one core. On
/// a regular core `class` and `microslice` are ignored.
pub trait PoolScheduler: CoreScheduler {
    /// Adds what each VM ran on other cores since the last call, in the order of [`CoreScheduler::configure`]. Takes
    /// effect with the next [`CoreScheduler::decide`]. Missing entries count as none.
    fn add_other_cores(&mut self, ran: &[OtherCoreUsage]);

    /// Of a VM, by its index in [`CoreScheduler::configure`]: all that it was ever due on this core, ns (its fair share
    /// of what was run, including the part of turbo usage that is paid for here), and whether it wants the core while
    /// other VMs do. (0, false) on turbo cores.
    fn due(&self, _index: usize) -> (Nanos, bool) {
        (0, false)
    }
}

impl<P: PoolScheduler + ?Sized> PoolScheduler for Box<P> {
    fn add_other_cores(&mut self, ran: &[OtherCoreUsage]) {
        (**self).add_other_cores(ran);
    }

    fn due(&self, index: usize) -> (Nanos, bool) {
        (**self).due(index)
    }
}

/// The part of a VM's turbo usage that one regular core charges: `here` of its `all` regular vCPUs are placed on that
/// core. `counter` is all that the VM ever ran on turbo cores, ns; the core charges the difference of two results. The
/// results of all cores add up to the whole, less 1 ns per core at most.
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

// SPDX-License-Identifier: Apache-2.0
//! Who runs on a core next, and until when (vSlicer, dissertation chapter 2).
//!
//! A [`Machine`] is a pure state machine for **one core**. Whoever drives it (the slot controller on a real
//! host, the simulator, a test) calls [`Machine::decide`] with what each VM ran since the last call and
//! whether it wants to run now; the machine answers with a [`Decision`]: a rank for every VM, the time at
//! which it must be asked again, and how long each VM may run before it must be asked earlier.
//!
//! Ranks instead of a single "next VM" let the kernel itself pick the highest-ranked VM that is runnable:
//! a VM that wakes preempts a lower-ranked one at once, without a round trip through the controller, and a
//! VM that blocks leaves the core to the next.
//!
//! [`Interleaved`] is the default, [`Paper`] is Algorithm 1 of the dissertation, [`Credit`] the scheduler that
//! it was measured against. [`model`] has the equations, [`classify`] chooses the class of a VM, [`simulate`]
//! runs any machine on a model of one core.

pub(crate) mod caps;
mod credit;
mod interleaved;
pub(crate) mod lag;
mod paper;
mod set;

pub mod classify;
pub mod model;
pub mod simulate;

pub use credit::Credit;
pub use interleaved::{Config as InterleavedConfig, Interleaved};
pub use paper::Paper;

/// Nanoseconds, as a duration or as a point on the driver's monotonic clock.
pub type Nanos = u64;

/// One microsecond in [`Nanos`].
pub const US: Nanos = 1_000;
/// One millisecond in [`Nanos`].
pub const MS: Nanos = 1_000_000;

/// "Never", "without limit".
pub const FOREVER: Nanos = Nanos::MAX;

/// Most VMs a [`Machine`] takes on one core. Fixed, because the controller must not allocate.
pub const MAX_VMS: usize = 64;

/// Weight of a VM about which nothing is said (Xen's credit scheduler's default).
pub const DEFAULT_WEIGHT: u32 = 256;

/// What a VM is on this core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Latency-sensitive VM (LSVM): short slices, more often, same share.
    Ls,
    /// Non-latency-sensitive VM (NLSVM): whole slices.
    Batch,
}

/// The controls of one VM on one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// Identity that outlives reconfiguration (any number the driver likes; unique on the core).
    pub id: u32,
    /// Latency-sensitive or not.
    pub class: Class,
    /// Proportional share, 1..=65535; [`DEFAULT_WEIGHT`] when nothing is said.
    pub weight: u32,
    /// Most of this core the VM may use even if nobody else wants it, in thousandths (1..=1000).
    pub cap_permille: Option<u32>,
    /// Length of an LSVM's slice (ignored for [`Class::Batch`]).
    pub microslice: Nanos,
}

/// Whether I/O waits for a VM that is busy anyway (one that sleeps is woken by it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// The driver cannot see this VM's packets.
    #[default]
    Unseen,
    /// None came since the VM last had the core.
    Quiet,
    /// A packet waits for the VM to run.
    Pending,
}

/// What the driver saw of one VM since the last [`Machine::decide`], in the order of [`Machine::configure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seen {
    /// Time the VM ran on this core since the last call.
    pub used: Nanos,
    /// Whether it runs or waits to run now.
    pub runnable: bool,
    /// Whether it blocked (at least once) since the last call.
    pub blocked: bool,
    /// Whether I/O waits for it.
    pub io: Io,
}

/// Precedence of a VM on the core; of two runnable VMs the higher one runs, equal ones in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rank {
    /// Must not run even if the core would idle (over its cap).
    Capped,
    /// Runs only when nobody else wants to.
    Out,
    /// Waits for its turn.
    Waiting,
    /// It is its turn.
    Owner,
    /// Asleep with share in hand: takes the core from the owner when it wakes. Also an LSVM with micro credit
    /// that waits for the microslice of another.
    Eager,
    /// LSVM in its microslice, or with micro credit left.
    Boost,
}

/// Answer of [`Machine::decide`]. Reused from call to call, so that nothing is allocated.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Rank of each VM, in the order of [`Machine::configure`].
    pub ranks: [Rank; MAX_VMS],
    /// Ask again as soon as this VM has run so long from now ([`FOREVER`]: no limit).
    pub budgets: [Nanos; MAX_VMS],
    /// Ask again at this time at the latest ([`FOREVER`]: not before something happens).
    pub until: Nanos,
    /// Ask again as soon as a VM that was not runnable becomes so. Set while one VM has the core without limit and
    /// another that wakes might have to wait behind it; never while VMs contend.
    pub notify_wake: bool,
    /// Ask again as soon as the highest-ranked runnable VM blocks.
    pub notify_block: bool,
}

impl Default for Decision {
    fn default() -> Self {
        Self {
            ranks: [Rank::Waiting; MAX_VMS],
            budgets: [FOREVER; MAX_VMS],
            until: FOREVER,
            notify_wake: false,
            notify_block: false,
        }
    }
}

/// A scheduling algorithm for one core.
pub trait Machine {
    /// Takes the VMs that are on the core from now on, keeping the state of those that stay (by
    /// [`Params::id`]). Called when a VM comes, goes, changes a control or moves core. At most [`MAX_VMS`];
    /// more are ignored.
    fn configure(&mut self, now: Nanos, vms: &[Params]);

    /// Decides who runs. `seen` has one entry for each configured VM, in the same order. `now` never goes
    /// back. Allocates nothing.
    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision);
}

impl<M: Machine + ?Sized> Machine for Box<M> {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        (**self).configure(now, vms);
    }

    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision) {
        (**self).decide(now, seen, out);
    }
}

/// What was seen of VM `i`; nothing if the driver's list is too short.
pub(crate) fn seen_at(seen: &[Seen], i: usize) -> Seen {
    seen.get(i).copied().unwrap_or_default()
}

/// `slice` scaled by a VM's weight over the mean weight of `vms` VMs whose weights sum up to `total`; at least
/// 50 us, so that a very light VM gets something done in its turn.
fn scaled_slice(slice: Nanos, weight: u32, total: u64, vms: usize) -> Nanos {
    (slice * u64::from(weight.max(1)) * vms as u64 / total.max(1)).max(50 * US)
}

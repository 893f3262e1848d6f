// SPDX-License-Identifier: Apache-2.0
//! Which VM runs on a core next, and until when (vSlicer, dissertation chapter 2).
//!
//! A [`CoreScheduler`] is a pure state machine for **one core**. A driver (the slot controller on a real host, the
//! simulator, a test) calls [`CoreScheduler::decide`] with what each VM ran since the last call and whether it wants to
//! run now. The answer is a [`Decision`]: a rank for every VM, the time of the next call at the latest, and how long
//! each VM may run before an earlier call.
//!
//! The scheduler returns ranks instead of one "next VM", so the kernel itself picks the highest-ranked runnable VM. A
//! VM that wakes preempts a lower-ranked one at once, without a round trip through the controller, and a VM that blocks
//! leaves the core to the next one.
//!
//! | part | what it is |
//! |---|---|
//! | [`Interleaved`] | the default algorithm |
//! | [`Paper`] | Algorithm 1 of the dissertation |
//! | [`Credit`] | Xen's credit scheduler, the dissertation's baseline |
//! | [`model`] | the dissertation's equations |
//! | [`OpenRequests`] | the requests that a VM has to answer, from its packets |
//! | [`classify`] | the choice of a VM's class |
//! | `simulate` | a simulated core that runs any scheduler, for tests (feature `testing`) |

pub(crate) mod caps;
mod credit;
mod interleaved;
pub(crate) mod lag;
mod paper;
mod requests;
mod vm_set;

pub mod classify;
pub mod model;
#[cfg(any(test, feature = "testing"))]
pub mod simulate;

pub use credit::Credit;
pub use interleaved::{Config as InterleavedConfig, Interleaved};
pub use paper::Paper;
pub use requests::{OpenRequests, Packets, RequestCounts};

/// Nanoseconds: a duration, or a time on the driver's monotonic clock.
pub type Nanos = u64;

/// One microsecond in [`Nanos`].
pub const US: Nanos = 1_000;
/// One millisecond in [`Nanos`].
pub const MS: Nanos = 1_000_000;

/// The time "never"; the duration "without limit".
pub const FOREVER: Nanos = Nanos::MAX;

/// Maximum number of VMs on one core. Fixed, because the controller must not allocate.
pub const MAX_VMS: usize = 64;

/// Weight of a VM without a configured weight (the default of Xen's credit scheduler).
pub const DEFAULT_WEIGHT: u32 = 256;

/// Scheduling class of a VM on this core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Latency-sensitive VM (LSVM): short slices, more often, same share of the core.
    Ls,
    /// Non-latency-sensitive VM (NLSVM): full slices.
    Batch,
}

/// The scheduling parameters of one VM on one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Params {
    /// Identity that survives reconfiguration: any number of the driver's choice, unique on the core.
    pub id: u32,
    /// Scheduling class.
    pub class: Class,
    /// Proportional share, 1..=65535; [`DEFAULT_WEIGHT`] if none is configured.
    pub weight: u32,
    /// Cap: maximum part of this core in thousandths (1..=1000), kept even while the core would idle.
    pub cap_permille: Option<u32>,
    /// Microslice T_m: slice of an LSVM, ns (ignored for [`Class::Batch`]).
    pub microslice: Nanos,
}

/// The packets of a VM since the last decision. They matter for a VM that wants to run; a sleeping
/// VM is woken by its packets in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// The driver does not see this VM's packets.
    #[default]
    Unknown,
    /// There was no packet, and none waits.
    Idle,
    /// Packets arrived or the VM has sent some, and no request is known to be open. An answer may have more packets.
    Answered,
    /// The same, and the VM's clients ask again soon after an answer ([`Packets::think`]).
    Expected,
    /// A request is open.
    Pending,
    /// Packets come so often that a request is always open.
    Flood,
}

impl Io {
    /// Whether a request is open.
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, Self::Pending | Self::Flood)
    }

    /// Whether there were packets since the last decision, or a packet waits.
    #[must_use]
    pub fn has_packets(self) -> bool {
        !matches!(self, Self::Unknown | Self::Idle)
    }
}

/// What one VM did since the last [`CoreScheduler::decide`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// Time the VM ran on this core, ns.
    pub used: Nanos,
    /// Whether it runs or wants to run now.
    pub runnable: bool,
    /// Whether it blocked at least once.
    pub blocked: bool,
    /// Its packets.
    pub io: Io,
    /// Its requests; 0 where the driver does not see its packets.
    pub requests: RequestCounts,
}

/// Precedence of a VM on the core. Of two runnable VMs the one of higher rank runs; equal ranks take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rank {
    /// Over its cap: must not run even if the core idles.
    Capped,
    /// Runs only while no other VM wants the core, such as an LSVM that has used up its microslice.
    Background,
    /// Waits for its turn.
    Waiting,
    /// Owns the turn: runs for a slice.
    Owner,
    /// Preempts the owner: a VM that sleeps and is owed service, or an LSVM that waits for the microslice of another.
    Preempt,
    /// LSVM in its microslice, or owed one.
    Boost,
}

/// Answer of [`CoreScheduler::decide`]. The driver reuses it from call to call, so nothing is allocated.
#[derive(Debug, Clone)]
pub struct Decision {
    /// Rank of each VM, in the order of [`CoreScheduler::configure`].
    pub ranks: [Rank; MAX_VMS],
    /// The driver asks again when the VM has run this long from now, ns ([`FOREVER`]: no limit).
    pub budgets: [Nanos; MAX_VMS],
    /// The driver asks again at this time at the latest, ns of its own clock ([`FOREVER`]: only after an event).
    pub until: Nanos,
    /// The driver asks again as soon as a VM wakes. Set while one VM runs without limit and another one that wakes
    /// might have to wait behind it; never while several VMs want the core.
    pub notify_wake: bool,
    /// The driver asks again as soon as the highest-ranked runnable VM blocks.
    pub notify_block: bool,
    /// The driver asks again as soon as this VM has no open request any more ([`Io::is_open`] ends), by index.
    pub notify_reply: [bool; MAX_VMS],
    /// Whether packets may wait while a vCPU of this VM runs, so that several are carried at once, by index.
    pub gathers: [bool; MAX_VMS],
}

impl Default for Decision {
    fn default() -> Self {
        Self {
            ranks: [Rank::Waiting; MAX_VMS],
            budgets: [FOREVER; MAX_VMS],
            until: FOREVER,
            notify_wake: false,
            notify_block: false,
            notify_reply: [false; MAX_VMS],
            gathers: [false; MAX_VMS],
        }
    }
}

/// A scheduling algorithm for one core.
pub trait CoreScheduler {
    /// Sets the VMs of the core and keeps the state of those that stay (by [`Params::id`]). Called when a VM arrives,
    /// leaves, moves or changes a parameter. VMs beyond [`MAX_VMS`] are ignored.
    fn configure(&mut self, now: Nanos, vms: &[Params]);

    /// Decides which VM runs. `activity` has one entry for each configured VM, in the order of
    /// [`CoreScheduler::configure`]. `now` never goes back. Does not allocate.
    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision);
}

impl<M: CoreScheduler + ?Sized> CoreScheduler for Box<M> {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        (**self).configure(now, vms);
    }

    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision) {
        (**self).decide(now, activity, out);
    }
}

/// Activity of VM `i`; none if the driver's list is too short.
pub(crate) fn activity_of(activity: &[Activity], i: usize) -> Activity {
    activity.get(i).copied().unwrap_or_default()
}

/// `slice` scaled by a VM's weight over the mean weight of `vms` VMs whose weights sum up to `total`. At least 50 us,
/// so that a very light VM makes progress in its turn.
fn scaled_slice(slice: Nanos, weight: u32, total: u64, vms: usize) -> Nanos {
    (slice * u64::from(weight.max(1)) * vms as u64 / total.max(1)).max(50 * US)
}

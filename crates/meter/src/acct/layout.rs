// SPDX-License-Identifier: Apache-2.0
//! The structures of bpf/acct.h. Times are nanoseconds of CLOCK_MONOTONIC.

/// Most VMs that are accounted per core.
pub const MAX_VMS: usize = 1024;
/// Most accounts: one per vCPU, and one per VM for its service threads.
pub const MAX_ACCOUNTS: usize = 8192;
/// Most interfaces of VMs whose packets are seen.
pub const MAX_NICS: usize = 4096;
/// Buckets of a histogram; see [`bucket_bounds`].
pub const HIST_BUCKETS: usize = 80;
/// Steps in which a VM's waiting packets are kept; see [`VmDelay`].
pub(crate) const DELAY_STEPS: usize = 32;
/// A thread that belongs to no VM.
pub const NO_VM: u32 = u32::MAX;
/// The core of a VM that no controller manages.
pub(crate) const NO_CPU: u32 = u32::MAX;

/// Bytes of a core's event ring, a power of two.
pub(crate) const RING_BYTES: u32 = 1 << 18;

/// The time account of one vCPU (all its host threads), or of a VM's service threads: gotten and waiting, after XenMon.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Account {
    /// The counters, which are read often.
    pub times: AccountTimes,
    /// The waits that have ended. They are twenty times as large as the counters, so each reading
    /// takes one of the two.
    pub waits: HistCounters,
}

/// Times by length, as the accounting program counts them. All counters wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct HistCounters {
    /// Times by length, see [`bucket_bounds`].
    pub counts: [u32; HIST_BUCKETS],
    /// The sum of the times in each bucket, ns.
    pub sums: [u64; HIST_BUCKETS],
}

impl HistCounters {
    /// All counters zero.
    pub const ZERO: Self = Self {
        counts: [0; HIST_BUCKETS],
        sums: [0; HIST_BUCKETS],
    };
}

/// The counters of an [`Account`], without its histogram.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AccountTimes {
    /// Time on a CPU, up to the last switch, ns.
    pub run: u64,
    /// Time runnable while another thread ran, ns.
    pub wait: u64,
    /// Wake-ups of its threads.
    pub wakes: u64,
    /// Context switches to one of its threads.
    pub switches: u64,
    /// Times it lost the CPU while runnable.
    pub preempted: u64,
    /// Start of the present run, CLOCK_MONOTONIC, ns; 0 while not on a CPU.
    pub on_since: u64,
}

impl AccountTimes {
    /// Time on a CPU up to `at` (ns), also since the last switch.
    pub fn run_until(&self, at: u64) -> u64 {
        match self.on_since {
            0 => self.run,
            since => self.run + at.saturating_sub(since),
        }
    }
}

/// One VM on one core.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct CoreVm {
    /// Time on this core, up to the last context switch, ns.
    pub used: u64,
    /// Start of the present run on this core, CLOCK_MONOTONIC, ns; 0 while not on it.
    pub on_since: u64,
    /// Changes from not runnable to runnable.
    pub wakes: u64,
    /// Changes from runnable to not runnable.
    pub blocks: u32,
    /// Threads that run or wait here.
    pub runnable: i32,
    /// The packet for which one event is sent, as [`NotifyIo`].
    pub notify_io: u32,
    /// Requests that the VM has answered; wraps.
    pub answered: u32,
    /// Connections with an open request: a bit for each of 64 groups of connections.
    pub open: u64,
    /// Bits of `open` that stand for no request. The controller writes them.
    pub ignored: u64,
    /// Time (ns) of the last packet to the VM that may need a reply: any but TCP segments without
    /// data.
    pub request_at: u64,
    /// Time of the VM's last packet that may be a reply, ns.
    pub reply_at: u64,
    /// Moving mean of the gaps between packets to the VM, ns.
    pub gap: u32,
    /// Moving mean of the time from a packet of the VM to the next packet to it, ns.
    pub think: u32,
    /// Wake-ups of its service threads on this core; wraps.
    pub service_wakes: u32,
    /// Unused.
    pub _pad: u32,
}

/// The packet of a VM for which the accounting program sends one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum NotifyIo {
    /// None.
    #[default]
    None = 0,
    /// The next packet to the VM.
    Request = 1,
    /// The VM's packet after which no packet to it is open.
    Reply = 2,
}

/// What events for one VM wait until one of its vCPUs runs; bpf/delay.h explains how packets are kept.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct VmDelay {
    /// Arrival of the oldest packet that waits, CLOCK_MONOTONIC, ns; 0: none waits.
    pub oldest: u64,
    /// Time of a wake-up that still waits for a vCPU to run, CLOCK_MONOTONIC, ns; 0: none.
    pub woken: u64,
    /// vCPU threads that run.
    pub running: i32,
    /// vCPU threads that run or wait.
    pub runnable: i32,
    /// A step is 2^shift ns long.
    pub shift: u32,
    /// Unused.
    pub _pad: u32,
    /// Packets that wait, by arrival after the oldest.
    pub steps: [u32; DELAY_STEPS],
    /// The packets' delays.
    pub packets: HistCounters,
    /// The wake-ups' delays.
    pub wakes: HistCounters,
}

/// The notification flags of one core, set by its controller.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct CoreCtl {
    /// A controller reads the events.
    pub managed: u32,
    /// Send one event when a VM becomes runnable.
    pub notify_wake: u32,
    /// Send an event when the running VM blocks.
    pub notify_block: u32,
    /// Events that did not fit into the ring.
    pub lost: u32,
}

/// The kind of an [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The packet of [`NotifyIo`].
    Io,
    /// A VM became runnable.
    Wake,
    /// The running VM blocked.
    Block,
    /// `tid` is a new thread of the VM.
    Fork,
}

/// A message of the accounting program to a controller.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// Kind.
    pub kind: EventKind,
    /// Index of the VM.
    pub vm: u32,
    /// Account of the thread.
    pub account: u32,
    /// Thread, for [`EventKind::Wake`] and [`EventKind::Fork`].
    pub tid: i32,
    /// Time, CLOCK_MONOTONIC, ns.
    pub now: u64,
}

impl Event {
    /// Bytes of an event in the ring.
    pub(crate) const BYTES: usize = 24;

    /// Parses `struct event`; `None` for an unknown kind.
    pub(crate) fn parse(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word =
            |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let kind = match word(0) {
            1 => EventKind::Io,
            2 => EventKind::Wake,
            3 => EventKind::Block,
            4 => EventKind::Fork,
            _ => return None,
        };
        let mut now = [0; 8];
        now.copy_from_slice(&bytes[16..]);
        Some(Self {
            kind,
            vm: word(4),
            account: word(8),
            tid: word(12) as i32,
            now: u64::from_ne_bytes(now),
        })
    }
}

/// Lower and upper bound (ns) of a bucket of a histogram: four buckets an octave from 1,024 ns on. The first also
/// counts shorter times, the last longer ones.
pub fn bucket_bounds(bucket: usize) -> (u64, u64) {
    let edge = |b: usize| (4 + (b % 4) as u64) << (b / 4 + 8);
    (
        if bucket == 0 { 0 } else { edge(bucket) },
        if bucket + 1 >= HIST_BUCKETS {
            u64::MAX
        } else {
            edge(bucket + 1)
        },
    )
}

/// The bucket of a time (ns).
pub fn bucket_of(ns: u64) -> usize {
    if ns < 1024 {
        return 0;
    }
    let octave = ns.ilog2() as usize;
    let quarter = (ns >> (octave - 2)) & 3;
    ((octave - 10) * 4 + quarter as usize).min(HIST_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_falls_between_the_bounds_of_its_bucket() {
        for shift in 0..64 {
            for ns in [1 << shift, (1_u64 << shift) - 1, (1 << shift) | 12_345] {
                let (low, high) = bucket_bounds(bucket_of(ns));
                assert!(low <= ns && (ns < high || high == u64::MAX), "{ns}");
            }
        }
    }

    #[test]
    fn buckets_are_quarter_octaves_without_gaps() {
        assert_eq!(bucket_bounds(0), (0, 1280));
        assert_eq!(bucket_bounds(4), (2048, 2560));
        for b in 1..HIST_BUCKETS {
            assert_eq!(bucket_bounds(b - 1).1, bucket_bounds(b).0);
        }
        assert_eq!(bucket_bounds(HIST_BUCKETS - 1).1, u64::MAX);
    }

    #[test]
    fn sizes_are_those_of_the_c_structures() {
        assert_eq!(size_of::<HistCounters>(), (4 + 8) * HIST_BUCKETS);
        assert_eq!(size_of::<Account>(), 6 * 8 + (4 + 8) * HIST_BUCKETS);
        let hist = size_of::<HistCounters>();
        assert_eq!(size_of::<VmDelay>(), 32 + 4 * DELAY_STEPS + 2 * hist);
        assert_eq!(size_of::<CoreVm>(), 88);
        assert_eq!(size_of::<CoreCtl>(), 16);
    }

    #[test]
    fn an_event_of_unknown_kind_is_refused() {
        let mut bytes = [0u8; Event::BYTES];
        bytes[0] = 4;
        bytes[12] = 7;
        let event = Event::parse(&bytes).expect("a fork");
        assert_eq!((event.kind, event.tid), (EventKind::Fork, 7));
        bytes[0] = 9;
        assert!(Event::parse(&bytes).is_none());
    }
}

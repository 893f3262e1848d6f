// SPDX-License-Identifier: Apache-2.0
//! Whether a VM has open requests, from what a driver sees of its packets.

use super::{Io, MS, Nanos, US};

/// A packet that a VM has not answered in this run time needs no reply, ns. Time in which the VM waits does not count.
const REPLY_TIMEOUT: Nanos = 5 * MS;
/// Longest run time of a VM between two replies while earlier requests are open, ns.
const MAX_REPLY_GAP: Nanos = 250 * US;
/// [`Packets::open`] starts anew after so long without a packet to the VM, ns.
const OPEN_TIMEOUT: Nanos = 100 * MS;
/// Mean gap between packets to a VM below which it always has a request to answer, ns. To end a piece after each reply
/// would cost more time than the piece itself.
const DENSE_GAP: u32 = 100_000;
/// Longest gap that counts for a mean, ns.
const MAX_GAP: Nanos = 10 * MS;
/// Mean time from an answer to the next request below which the next one is worth waiting for, ns.
const SHORT_THINK: u32 = 200_000;

/// What a driver sees of the packets of one VM. Packets are frames of the NIC; TCP segments without data do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packets {
    /// Time of the last packet to the VM, ns; 0 before the first.
    pub request_at: Nanos,
    /// Time of the VM's last packet, ns; 0 before the first.
    pub reply_at: Nanos,
    /// Connections with an open request: a bit for each of 64 groups of connections. A packet to the VM sets the bit, one of
    /// the VM clears it. All are clear after [`OPEN_TIMEOUT`] without a packet to the VM.
    pub open: u64,
    /// Number of answers: packets of the VM that cleared a bit and do not open a TCP connection. It wraps.
    pub answered: u32,
    /// Moving mean of the gaps between packets to the VM, ns. A new gap counts an eighth; one above
    /// 10 ms counts as 10 ms.
    pub gap: u32,
    /// Moving mean of the time from a packet of the VM to the next packet to it, ns, formed as
    /// `gap`.
    pub think: u32,
}

impl Packets {
    /// Counts a packet to the VM at `now` (ns). `connection`: any number that is the same in both directions. The accounting
    /// program does the same.
    pub fn count_request(&mut self, now: Nanos, connection: u32) {
        let gap = now.saturating_sub(self.request_at);
        if gap > OPEN_TIMEOUT {
            self.open = 0;
        }
        self.gap = moving_mean(self.gap, gap);
        if self.reply_at > self.request_at {
            self.think = moving_mean(self.think, now.saturating_sub(self.reply_at));
        }
        self.request_at = now;
        self.open |= bit(connection);
    }

    /// Counts a packet of the VM at `now` (ns). `is_answer`: it does not open a TCP connection.
    pub fn count_reply(&mut self, now: Nanos, connection: u32, is_answer: bool) {
        self.reply_at = now;
        if is_answer && self.open & bit(connection) != 0 {
            self.answered = self.answered.wrapping_add(1);
        }
        self.open &= !bit(connection);
    }
}

/// The bit of a connection's group.
fn bit(connection: u32) -> u64 {
    1 << (connection % u64::BITS)
}

/// The requests of one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestCounts {
    /// Number of connections with an open request, estimated from [`Packets::open`].
    pub open: u32,
    /// Number of requests answered so far; wraps.
    pub answered: u32,
}

/// The open requests of one VM.
///
/// A request is open until the VM has sent a packet to its connection. A request may need no reply, or get it on another
/// connection; times bound that error.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenRequests {
    last: Packets,
    /// Run time of the VM since its last packet in either direction, ns.
    ran_since: Nanos,
    /// Bits of [`Packets::open`] that stand for no request: the packet needed no reply.
    ignored: u64,
}

impl OpenRequests {
    /// Records what the driver sees now, and what the VM ran since the last call. Call it as often as the VM's run time
    /// is known.
    pub fn observe(&mut self, packets: Packets, used: Nanos) {
        let is_same =
            (packets.request_at, packets.reply_at) == (self.last.request_at, self.last.reply_at);
        self.ran_since = if is_same {
            self.ran_since.saturating_add(used)
        } else {
            0
        };
        self.last = packets;
        self.ignored &= packets.open;
        if self.ran_since >= MAX_REPLY_GAP && !self.waits_for_first_reply() {
            self.ignored = packets.open;
        }
    }

    /// Records that the VM sleeps now, though it has not answered all packets: the others need no reply.
    pub fn rest(&mut self) {
        self.ignored = self.last.open;
    }

    /// Bits of [`Packets::open`] that stand for no request.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Whether the VM has sent nothing since the last packet to it, and has not run for long since.
    fn waits_for_first_reply(&self) -> bool {
        self.last.request_at > self.last.reply_at && self.ran_since < REPLY_TIMEOUT
    }

    fn open(&self) -> u64 {
        self.last.open & !self.ignored
    }

    /// The number of open and of answered requests.
    #[must_use]
    pub fn counts(&self) -> RequestCounts {
        // Linear counting (Whang et al., TODS 1990): n connections in 64 groups leave 64·e^(-n/64) of them empty. A series of
        // two terms: ln(1 - x) = -x - x²/2.
        let groups = self.open().count_ones();
        RequestCounts {
            open: groups + groups * groups / 128,
            answered: self.last.answered,
        }
    }

    /// Time of the last packet to the VM that was observed, ns.
    #[must_use]
    pub fn last_request_at(&self) -> Nanos {
        self.last.request_at
    }

    /// The VM's packets for a decision, where the last decision was at `decided_at`, ns.
    #[must_use]
    pub fn io(&self, decided_at: Nanos) -> Io {
        let Packets {
            request_at,
            reply_at,
            gap,
            think,
            ..
        } = self.last;
        if request_at > 0 && gap < DENSE_GAP && self.ran_since < MAX_REPLY_GAP {
            Io::Flood
        } else if self.waits_for_first_reply() || self.open() != 0 && self.ran_since < MAX_REPLY_GAP
        {
            Io::Pending
        } else if request_at.max(reply_at) > decided_at {
            match think < SHORT_THINK {
                true => Io::Expected,
                false => Io::Answered,
            }
        } else {
            Io::Idle
        }
    }
}

/// The mean with a new value that counts an eighth.
fn moving_mean(mean: u32, new: Nanos) -> u32 {
    mean - mean / 8 + (new.min(MAX_GAP) / 8) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(request_at: Nanos, reply_at: Nanos, open: u64) -> Packets {
        Packets {
            request_at,
            reply_at,
            open,
            answered: 0,
            gap: MS as u32,
            think: MS as u32,
        }
    }

    #[test]
    fn packets_are_counted() {
        let mut packets = Packets::default();
        packets.count_request(MS, 7);
        packets.count_request(2 * MS, 9);
        packets.count_reply(3 * MS, 7, true);
        // The rest of the answer, and one to a connection without a request.
        packets.count_reply(3 * MS, 7, true);
        packets.count_reply(3 * MS, 8, true);
        assert_eq!((packets.request_at, packets.reply_at), (2 * MS, 3 * MS));
        assert_eq!((packets.open, packets.answered), (1 << 9, 1));
        packets.count_request(3 * MS + OPEN_TIMEOUT, 64 + 3);
        assert_eq!(packets.open, 1 << 3);
        packets.count_reply(200 * MS, 3, false);
        assert_eq!((packets.open, packets.answered), (0, 1));
    }

    #[test]
    fn a_flood_always_has_an_open_request() {
        let (mut packets, mut requests) = (Packets::default(), OpenRequests::default());
        for k in 1..100 {
            packets.count_request(k * 40 * US, 0);
            packets.count_reply(k * 40 * US + US, 0, true);
            requests.observe(packets, 40 * US);
        }
        assert_eq!(requests.io(0), Io::Flood, "{packets:?}");
        requests.observe(packets, MAX_REPLY_GAP);
        assert!(!requests.io(0).is_open(), "the flood has ended");
    }

    #[test]
    fn the_next_request_is_expected_where_clients_ask_again_soon() {
        let run = |think: Nanos| {
            let (mut packets, mut requests) = (Packets::default(), OpenRequests::default());
            for k in 1..40 {
                packets.count_request(k * MS, 0);
                // The second packet of a request comes after no answer.
                packets.count_request(k * MS + 10 * US, 0);
                packets.count_reply((k + 1) * MS - think, 0, true);
                packets.count_reply((k + 1) * MS - think, 0, true);
                requests.observe(packets, 40 * US);
            }
            (packets.think as Nanos, requests.io(39 * MS))
        };
        let (think, io) = run(100 * US);
        assert!((80 * US..=100 * US).contains(&think), "{think}");
        assert_eq!(io, Io::Expected);
        assert_eq!(run(600 * US).1, Io::Answered);
    }

    #[test]
    fn a_request_is_open_until_the_vm_sends() {
        let mut requests = OpenRequests::default();
        assert_eq!(requests.io(0), Io::Idle);
        requests.observe(at(2 * MS, MS, 1), 0);
        assert_eq!(requests.io(MS), Io::Pending);
        requests.observe(at(2 * MS, 3 * MS, 0), 100 * US);
        assert_eq!(requests.io(MS), Io::Answered);
        assert_eq!(requests.io(3 * MS), Io::Idle);
    }

    #[test]
    fn a_reply_closes_one_of_several_requests() {
        let mut requests = OpenRequests::default();
        requests.observe(at(2 * MS, 0, 3), 0);
        requests.observe(at(2 * MS, 3 * MS, 2), 100 * US);
        assert!(requests.io(0).is_open());
        requests.observe(at(2 * MS, 3 * MS, 2), MAX_REPLY_GAP - 1);
        assert!(requests.io(0).is_open());
        // The VM ran for long and sent nothing: the other packets needed no reply.
        requests.observe(at(2 * MS, 3 * MS, 2), 1);
        assert!(!requests.io(0).is_open());
    }

    #[test]
    fn a_packet_that_needs_no_reply_is_forgotten_when_the_vm_sleeps_or_runs_on() {
        for sleeps in [false, true] {
            let mut requests = OpenRequests::default();
            requests.observe(at(2 * MS, 3 * MS, 1), 0);
            assert_eq!((requests.io(MS), requests.counts().open), (Io::Pending, 1));
            match sleeps {
                true => requests.rest(),
                false => requests.observe(at(2 * MS, 3 * MS, 1), MAX_REPLY_GAP),
            }
            // A request of another connection, and its answer.
            requests.observe(at(4 * MS, 3 * MS, 3), 10 * US);
            assert_eq!((requests.io(MS), requests.counts().open), (Io::Pending, 1));
            requests.observe(at(4 * MS, 5 * MS, 1), 10 * US);
            assert_eq!((requests.io(MS), requests.counts().open), (Io::Answered, 0));
            // The connection's next request counts once a packet of the VM has cleared its bit.
            requests.observe(at(4 * MS, 6 * MS, 0), 10 * US);
            requests.observe(at(7 * MS, 6 * MS, 1), 10 * US);
            assert_eq!(requests.counts().open, 1);
        }
    }

    #[test]
    fn connections_that_share_a_group_are_estimated() {
        let count = |n: u32| {
            let (mut packets, mut requests) = (Packets::default(), OpenRequests::default());
            // Numbers as a hash would give them.
            (0..n).for_each(|k| packets.count_request(MS, k.wrapping_mul(0x9e37_79b1) >> 26));
            requests.observe(packets, 0);
            requests.counts().open
        };
        for n in [1, 2, 4, 16, 40] {
            assert!(count(n).abs_diff(n) <= n / 4, "{n}: {}", count(n));
        }
    }

    #[test]
    fn a_packet_without_a_reply_is_open_for_5_ms_of_run_time() {
        let mut requests = OpenRequests::default();
        requests.observe(at(2 * MS, MS, 1), 0);
        requests.observe(at(2 * MS, MS, 1), REPLY_TIMEOUT - 1);
        assert!(requests.io(0).is_open());
        requests.observe(at(2 * MS, MS, 1), 1);
        assert!(!requests.io(0).is_open());
        requests.observe(at(9 * MS, MS, 2), MS);
        assert!(requests.io(0).is_open());
    }
}

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
    /// Number of packets to the VM less those of the VM, at least 0. It starts anew after [`OPEN_TIMEOUT`] without a
    /// packet to the VM.
    pub open: u32,
    /// Moving mean of the gaps between packets to the VM, ns. A new gap counts an eighth; one above
    /// 10 ms counts as 10 ms.
    pub gap: u32,
    /// Moving mean of the time from a packet of the VM to the next packet to it, ns, formed as
    /// `gap`.
    pub think: u32,
}

impl Packets {
    /// Counts packets to the VM at `now` (ns). The accounting program does the same.
    pub fn count_requests(&mut self, now: Nanos, packets: u32) {
        let gap = now.saturating_sub(self.request_at);
        if gap > OPEN_TIMEOUT {
            self.open = 0;
        }
        self.gap = moving_mean(self.gap, gap);
        if self.reply_at > self.request_at {
            self.think = moving_mean(self.think, now.saturating_sub(self.reply_at));
        }
        self.request_at = now;
        self.open = self.open.saturating_add(packets);
    }

    /// Counts a packet of the VM at `now` (ns).
    pub fn count_reply(&mut self, now: Nanos) {
        self.reply_at = now;
        self.open = self.open.saturating_sub(1);
    }
}

/// The open requests of one VM.
///
/// A request is open until the VM has sent a packet after it. Where several requests are open, a reply closes one of
/// them. An answer may have more packets than its request, so the count may be too low, and a request may need no reply,
/// so it may be too high; the times bound both errors.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenRequests {
    last: Packets,
    /// Run time of the VM since its last packet in either direction, ns.
    ran_since: Nanos,
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
            open,
            gap,
            think,
        } = self.last;
        if request_at > 0 && gap < DENSE_GAP && self.ran_since < MAX_REPLY_GAP {
            Io::Flood
        } else if request_at > reply_at && self.ran_since < REPLY_TIMEOUT
            || open > 0 && self.ran_since < MAX_REPLY_GAP
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

    fn at(request_at: Nanos, reply_at: Nanos, open: u32) -> Packets {
        Packets {
            request_at,
            reply_at,
            open,
            gap: MS as u32,
            think: MS as u32,
        }
    }

    #[test]
    fn packets_are_counted() {
        let mut packets = Packets::default();
        packets.count_requests(MS, 2);
        packets.count_requests(2 * MS, 1);
        packets.count_reply(3 * MS);
        assert_eq!(
            (packets.request_at, packets.reply_at, packets.open),
            (2 * MS, 3 * MS, 2)
        );
        packets.count_requests(3 * MS + OPEN_TIMEOUT, 1);
        assert_eq!(packets.open, 1);
        (0..3).for_each(|_| packets.count_reply(200 * MS));
        assert_eq!(packets.open, 0);
    }

    #[test]
    fn a_flood_always_has_an_open_request() {
        let (mut packets, mut requests) = (Packets::default(), OpenRequests::default());
        for k in 1..100 {
            packets.count_requests(k * 40 * US, 1);
            packets.count_reply(k * 40 * US + US);
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
                packets.count_requests(k * MS, 1);
                // The second packet of a request comes after no answer.
                packets.count_requests(k * MS + 10 * US, 1);
                packets.count_reply((k + 1) * MS - think);
                packets.count_reply((k + 1) * MS - think);
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

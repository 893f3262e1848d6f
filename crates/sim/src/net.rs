// SPDX-License-Identifier: Apache-2.0
//! Packets: wires, driver domain or host I/O thread, and rings of virtual NICs.

use std::collections::{BTreeMap, VecDeque};

use viola_policy::slices::Nanos;

/// A packet, or several of one flow that travel together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Its workload.
    pub owner: usize,
    /// Number of its connection in the workload.
    pub connection: u32,
    /// Its tag, for the workload.
    pub tag: u64,
    /// Bytes on the wire, headers included.
    pub bytes: u32,
    /// Whether it is a segment of a stream, which may be merged with the next one.
    pub stream: bool,
}

impl Packet {
    /// Number of its connection among all of the host.
    pub fn connection_on_host(&self) -> u32 {
        (self.owner as u32)
            .wrapping_mul(7)
            .wrapping_add(self.connection)
    }
}

/// A first come, first served queue of bounded length: a wire, or a thread that handles packets.
#[derive(Debug, Clone)]
pub struct Server {
    free_at: Nanos,
    /// Maximum backlog, ns; a packet that finds a longer one is dropped.
    max_backlog: Nanos,
    /// Time it was busy, ns.
    pub busy: Nanos,
    /// Packets dropped.
    pub dropped: u64,
}

impl Server {
    /// An empty queue with a maximum backlog of `max_backlog` ns.
    pub fn new(max_backlog: Nanos) -> Self {
        Self {
            free_at: 0,
            max_backlog,
            busy: 0,
            dropped: 0,
        }
    }

    /// Time until it has served its queue, ns.
    pub fn backlog(&self, now: Nanos) -> Nanos {
        self.free_at.saturating_sub(now)
    }

    /// Queues a packet at `at` that takes `cost` ns. Returns when it is served, or `None` if it is dropped. Calls must
    /// be in order of time.
    pub fn serve(&mut self, at: Nanos, cost: Nanos) -> Option<Nanos> {
        if self.free_at.saturating_sub(at) > self.max_backlog {
            self.dropped += 1;
            return None;
        }
        self.free_at = self.free_at.max(at) + cost;
        self.busy += cost;
        Some(self.free_at)
    }
}

/// Transmission time of `bytes`, ns.
pub fn wire_time(bytes: u64, bits_per_second: u64) -> Nanos {
    let ns = u128::from(bytes) * 8_000_000_000 / u128::from(bits_per_second.max(1));
    u64::try_from(ns).unwrap_or(Nanos::MAX)
}

/// Maximum size of a frame on the wire, bytes, with headers, check sum, preamble and gap.
const FRAME: u32 = 1538;
/// Size of a page, bytes; a merged packet takes a slot of the ring for each page.
const PAGE: u32 = 4096;

/// Costs of receiving, and sizes of the NIC's queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicCosts {
    /// Slots of the receive ring.
    pub ring: usize,
    /// Packets that wait in front of a full ring; merged packets count once.
    pub queue: usize,
    /// Guest's time per interrupt, ns.
    pub interrupt: Nanos,
    /// Guest's softirq time per slot of the ring, ns.
    pub packet: Nanos,
    /// Maximum number of packets per softirq (NAPI's budget).
    pub budget: usize,
    /// Host's time per frame on the paravirtual path, ns.
    pub host_packet: Nanos,
    /// Minimum time between two interrupts of the physical NIC, ns; 0: an interrupt per packet.
    pub coalesce: Nanos,
    /// (n, percent): one of n pieces of softirq work takes that percentage of its normal time, because caches are cold
    /// or the host is busy; `None`: all take the normal time.
    pub slow: Option<(u32, u32)>,
    /// Maximum size of the segments of a stream that the host merges per interrupt, bytes (GRO); 0: no merging.
    pub merge: u32,
}

impl NicCosts {
    fn slots(&self, bytes: u32) -> usize {
        bytes
            .div_ceil(if self.merge > 0 { PAGE } else { FRAME })
            .max(1) as usize
    }
}

/// Packets that were merged.
#[derive(Debug, Clone, Copy)]
struct Group {
    owner: usize,
    packets: usize,
    bytes: u32,
    slots: usize,
}

/// The receiving side of a VM's virtual NIC.
#[derive(Debug)]
pub struct Nic {
    /// Costs.
    pub costs: NicCosts,
    /// vCPU that takes its interrupts.
    pub vcpu: usize,
    /// Whether it has a virtual function: its packets then bypass the host's own work.
    pub vf: bool,
    /// Packets it sent.
    pub sent: u64,
    /// Packets that wait, in the ring and in front of it.
    packets: VecDeque<Packet>,
    groups: VecDeque<Group>,
    /// Number of groups in the ring, and the slots they use.
    in_ring: usize,
    used: usize,
    /// Number of groups that the running softirq handles.
    batch: usize,
    /// Number of softirqs started so far.
    starts: u64,
    /// Packets of future interrupts, by time.
    pending: BTreeMap<Nanos, Vec<Packet>>,
    /// Packets that arrived at the ring.
    pub arrived: u64,
    /// Packets dropped at a full ring.
    pub dropped: u64,
    /// Packets delivered to the guest.
    pub delivered: u64,
}

impl Nic {
    /// A NIC without packets.
    pub fn new(costs: NicCosts, vcpu: usize) -> Self {
        Self {
            costs,
            vcpu,
            vf: false,
            sent: 0,
            packets: VecDeque::new(),
            groups: VecDeque::new(),
            in_ring: 0,
            used: 0,
            batch: 0,
            starts: 0,
            pending: BTreeMap::new(),
            arrived: 0,
            dropped: 0,
            delivered: 0,
        }
    }

    /// Adds the packets of one interrupt. Returns the cost of the softirq to start (ns), if one must be started.
    pub fn push(&mut self, packets: impl IntoIterator<Item = Packet>) -> Option<Nanos> {
        let mut open = false;
        for packet in packets {
            self.arrived += 1;
            open = self.accept(packet, open);
        }
        (self.batch == 0 && self.in_ring > 0).then(|| {
            self.starts += 1;
            let cost = self.costs.interrupt + self.start();
            match self.costs.slow {
                // Pseudo-random, and the same in each run.
                Some((of, percent))
                    if crate::random::mixed(self.starts).is_multiple_of(u64::from(of.max(1))) =>
                {
                    cost * Nanos::from(percent) / 100
                }
                _ => cost,
            }
        })
    }

    /// Adds one packet. `open`: the previous one came with the same interrupt. Returns whether the next may be merged
    /// with it.
    fn accept(&mut self, packet: Packet, open: bool) -> bool {
        let queued = self.groups.len() - self.in_ring;
        if let (true, true, Some(last)) = (open, packet.stream, self.groups.back_mut())
            && last.owner == packet.owner
            && last.bytes + packet.bytes <= self.costs.merge
        {
            let slots = self.costs.slots(last.bytes + packet.bytes);
            let more = slots - last.slots;
            if queued > 0 || self.used + more <= self.costs.ring {
                last.bytes += packet.bytes;
                last.packets += 1;
                last.slots = slots;
                self.used += if queued > 0 { 0 } else { more };
                self.packets.push_back(packet);
                return true;
            }
        }
        let slots = self.costs.slots(packet.bytes);
        if queued == 0 && self.used + slots <= self.costs.ring {
            self.in_ring += 1;
            self.used += slots;
        } else if queued >= self.costs.queue {
            self.dropped += 1;
            return false;
        }
        self.groups.push_back(Group {
            owner: packet.owner,
            packets: 1,
            bytes: packet.bytes,
            slots,
        });
        self.packets.push_back(packet);
        packet.stream && self.costs.merge > 0
    }

    fn start(&mut self) -> Nanos {
        self.batch = self.in_ring.min(self.costs.budget.max(1));
        let slots: usize = self.groups.iter().take(self.batch).map(|g| g.slots).sum();
        slots as Nanos * self.costs.packet
    }

    /// Completes the softirq and moves its packets to `out`. Returns the cost of the next softirq, if there are more.
    pub fn done(&mut self, out: &mut Vec<Packet>) -> Option<Nanos> {
        for group in self.groups.drain(..self.batch) {
            self.used -= group.slots;
            self.delivered += group.packets as u64;
            out.extend(self.packets.drain(..group.packets));
        }
        self.in_ring -= self.batch;
        self.batch = 0;
        while let Some(next) = self.groups.get(self.in_ring)
            && (self.used + next.slots <= self.costs.ring || self.in_ring == 0)
        {
            self.used += next.slots;
            self.in_ring += 1;
        }
        (self.in_ring > 0).then(|| self.start())
    }

    /// Host's time for a packet of this size on its present path, ns.
    pub fn host_cost(&self, bytes: u32) -> Nanos {
        if self.vf {
            0
        } else {
            self.costs.host_packet * Nanos::from(bytes.div_ceil(FRAME))
        }
    }

    /// Queues a packet that arrives at `at`. Returns the time of its interrupt, and whether it is the first of that
    /// interrupt.
    pub fn queue_for_interrupt(&mut self, packet: Packet, at: Nanos) -> (Nanos, bool) {
        let at = match self.costs.coalesce {
            0 => at,
            every => at.div_ceil(every) * every,
        };
        let with = self.pending.entry(at).or_default();
        with.push(packet);
        (at, with.len() == 1)
    }

    /// The packets of the interrupt of time `now`.
    pub fn due(&self, now: Nanos) -> &[Packet] {
        self.pending.get(&now).map_or(&[], Vec::as_slice)
    }

    /// Handles the interrupt of time `now`; returns as [`Nic::push`].
    pub fn interrupt(&mut self, now: Nanos) -> Option<Nanos> {
        let packets = self.pending.remove(&now)?;
        self.push(packets)
    }

    /// Number of packets in the ring and in front of it.
    pub fn waiting(&self) -> usize {
        self.packets.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wire_serialises_and_a_full_queue_drops() {
        assert_eq!(wire_time(1500, 1_000_000_000), 12_000);
        let mut wire = Server::new(20_000);
        assert_eq!(wire.serve(0, 12_000), Some(12_000));
        assert_eq!(wire.serve(0, 12_000), Some(24_000));
        assert_eq!(wire.serve(0, 12_000), None);
        assert_eq!(wire.serve(30_000, 12_000), Some(42_000));
        assert_eq!((wire.busy, wire.dropped), (36_000, 1));
    }

    #[test]
    fn a_ring_accounts_for_every_packet() {
        let costs = NicCosts {
            ring: 4,
            queue: 1,
            interrupt: 10,
            packet: 1,
            budget: 3,
            host_packet: 0,
            coalesce: 0,
            slow: None,
            merge: 0,
        };
        let mut nic = Nic::new(costs, 0);
        let packet = Packet {
            owner: 0,
            connection: 0,
            tag: 0,
            bytes: 64,
            stream: true,
        };
        assert_eq!(nic.push([packet]), Some(11));
        for _ in 0..6 {
            assert_eq!(nic.push([packet]), None);
        }
        let mut out = Vec::new();
        assert_eq!(nic.done(&mut out), Some(3));
        assert_eq!(nic.done(&mut out), Some(1));
        assert_eq!(nic.done(&mut out), None);
        assert_eq!(
            (out.len(), nic.arrived, nic.dropped, nic.delivered),
            (5, 7, 2, 5)
        );
    }

    #[test]
    fn a_full_frame_takes_one_slot_and_one_unit_of_host_work() {
        let costs = NicCosts {
            ring: 4,
            host_packet: 10,
            ..crate::setup::HostSetup::default().nic
        };
        let mut nic = Nic::new(costs, 0);
        // A segment of 1,448 bytes with headers, preamble and gap, and a datagram of iperf.
        let packet = |bytes| Packet {
            owner: 0,
            connection: 0,
            tag: 0,
            bytes,
            stream: false,
        };
        nic.push([packet(1538), packet(1516), packet(1538), packet(1516)]);
        assert_eq!((nic.waiting(), nic.dropped), (4, 0));
        assert_eq!(nic.host_cost(1538), 10);
        nic.push([packet(64)]);
        assert_eq!(nic.dropped, 1);
    }

    #[test]
    fn segments_of_one_interrupt_share_pages() {
        let costs = NicCosts {
            ring: 4,
            queue: 0,
            interrupt: 0,
            packet: 1,
            budget: 64,
            host_packet: 10,
            coalesce: 100,
            slow: None,
            merge: 65_535,
        };
        let mut nic = Nic::new(costs, 0);
        let segment = Packet {
            owner: 0,
            connection: 0,
            tag: 0,
            bytes: 1514,
            stream: true,
        };
        assert_eq!(nic.queue_for_interrupt(segment, 110), (200, true));
        for at in 120..130 {
            assert_eq!(nic.queue_for_interrupt(segment, at), (200, false));
        }
        assert_eq!(nic.queue_for_interrupt(segment, 201), (300, true));
        // Ten segments of 15,140 bytes take four pages; the eleventh finds no slot.
        assert_eq!(nic.interrupt(200), Some(4));
        assert_eq!((nic.waiting(), nic.dropped), (10, 1));
        let mut out = Vec::new();
        assert_eq!(nic.done(&mut out), None);
        assert_eq!(
            (nic.interrupt(300), nic.interrupt(300), out.len()),
            (Some(1), None, 10)
        );
        assert_eq!((nic.host_cost(1514), nic.host_cost(65_536)), (10, 430));
    }
}

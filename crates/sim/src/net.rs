// SPDX-License-Identifier: Apache-2.0
//! Packets on their way: wire, driver domain or host I/O thread, ring of the virtual NIC.

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

/// A packet, or several of one flow that travel as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Which workload it is of.
    pub owner: usize,
    /// Its mark there.
    pub tag: u64,
    /// Bytes on the wire, headers included.
    pub bytes: u32,
}

/// First come, first served at a fixed speed, with a bounded queue: a wire, or a thread that handles packets.
#[derive(Debug, Clone)]
pub struct Server {
    free_at: Nanos,
    /// Longest queue, as time that it takes to serve; packets that come when it is longer are dropped.
    most: Nanos,
    /// Time it served.
    pub busy: Nanos,
    /// Packets dropped.
    pub dropped: u64,
}

impl Server {
    /// One whose queue may take `most` ns to serve.
    pub fn new(most: Nanos) -> Self {
        Self {
            free_at: 0,
            most,
            busy: 0,
            dropped: 0,
        }
    }

    /// Takes something at `at` that takes `cost`. When it is served, or `None` if it was dropped. Calls must be in order
    /// of time.
    pub fn serve(&mut self, at: Nanos, cost: Nanos) -> Option<Nanos> {
        if self.free_at.saturating_sub(at) > self.most {
            self.dropped += 1;
            return None;
        }
        self.free_at = self.free_at.max(at) + cost;
        self.busy += cost;
        Some(self.free_at)
    }
}

/// Time that bytes take on a wire.
pub fn wire_time(bytes: u64, bits_per_second: u64) -> Nanos {
    let ns = u128::from(bytes) * 8_000_000_000 / u128::from(bits_per_second.max(1));
    u64::try_from(ns).unwrap_or(Nanos::MAX)
}

/// What receiving costs a guest, and what its NIC holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicCosts {
    /// Slots of the receive ring with the queue before it, packets.
    pub ring: usize,
    /// Guest's time to take an interrupt, ns.
    pub interrupt: Nanos,
    /// Guest's softirq time for each packet, ns.
    pub packet: Nanos,
    /// Most packets handled in one go (NAPI's budget).
    pub budget: usize,
    /// Host's time for each packet of the paravirtual path, ns.
    pub host_packet: Nanos,
    /// Shortest time between two interrupts of the physical NIC, ns; 0: one for each packet.
    pub coalesce: Nanos,
}

/// The receiving side of a VM's virtual NIC.
#[derive(Debug)]
pub struct Nic {
    /// Costs.
    pub costs: NicCosts,
    /// vCPU that takes its interrupts.
    pub vcpu: usize,
    /// It has a virtual function: its packets pass the host's own work by.
    pub vf: bool,
    /// Packets it sent.
    pub sent: u64,
    ring: VecDeque<Packet>,
    /// Packets that the running softirq work is for.
    batch: usize,
    /// Packets that came to the ring.
    pub came: u64,
    /// Packets dropped because it was full.
    pub dropped: u64,
    /// Packets handed to the guest.
    pub handed: u64,
}

impl Nic {
    /// An empty one.
    pub fn new(costs: NicCosts, vcpu: usize) -> Self {
        Self {
            costs,
            vcpu,
            vf: false,
            sent: 0,
            ring: VecDeque::new(),
            batch: 0,
            came: 0,
            dropped: 0,
            handed: 0,
        }
    }

    /// Puts a packet into the ring. The cost of the softirq work to be started, if any must be.
    pub fn push(&mut self, packet: Packet) -> Option<Nanos> {
        self.came += 1;
        if self.ring.len() >= self.costs.ring {
            self.dropped += 1;
            return None;
        }
        self.ring.push_back(packet);
        (self.batch == 0).then(|| self.costs.interrupt + self.start())
    }

    fn start(&mut self) -> Nanos {
        self.batch = self.ring.len().min(self.costs.budget.max(1));
        self.batch as Nanos * self.costs.packet
    }

    /// The softirq work is done: its packets go to `out`. The cost of what comes next, if there is more.
    pub fn done(&mut self, out: &mut Vec<Packet>) -> Option<Nanos> {
        out.extend(self.ring.drain(..self.batch));
        self.handed += self.batch as u64;
        self.batch = 0;
        (!self.ring.is_empty()).then(|| self.start())
    }

    /// Host's time for a packet on the path it has now, ns.
    pub fn host_cost(&self) -> Nanos {
        if self.vf { 0 } else { self.costs.host_packet }
    }

    /// When a packet that came at `at` is told of.
    pub fn told(&self, at: Nanos) -> Nanos {
        match self.costs.coalesce {
            0 => at,
            every => at.div_ceil(every) * every,
        }
    }

    /// Packets in the ring.
    pub fn waiting(&self) -> usize {
        self.ring.len()
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
    fn a_ring_loses_nothing_unaccounted() {
        let costs = NicCosts {
            ring: 4,
            interrupt: 10,
            packet: 1,
            budget: 3,
            host_packet: 0,
            coalesce: 0,
        };
        let mut nic = Nic::new(costs, 0);
        let packet = Packet {
            owner: 0,
            tag: 0,
            bytes: 64,
        };
        assert_eq!(nic.push(packet), Some(11));
        for _ in 0..5 {
            assert_eq!(nic.push(packet), None);
        }
        let mut out = Vec::new();
        assert_eq!(nic.done(&mut out), Some(3));
        assert_eq!(nic.done(&mut out), None);
        assert_eq!((out.len(), nic.came, nic.dropped, nic.handed), (4, 6, 2, 4));
    }
}

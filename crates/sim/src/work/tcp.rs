// SPDX-License-Identifier: Apache-2.0
//! One TCP connection from a peer into a VM: slow start, congestion avoidance, SACK recovery, RTO; delayed
//! acknowledgements, and the backlog while a process owns the socket (vTurbo paper, sections 2 and 3.2). Prequeues are
//! not modelled, because less than 0.1 % of the packets go through one (section 4).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use viola_policy::slices::{MS, Nanos};

use super::GuestCosts;
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// Settings of a connection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TcpConfig {
    /// Payload of a segment, bytes.
    pub segment: u32,
    /// Number of segments; `u64::MAX`: without end.
    pub total: u64,
    /// Receive buffer, bytes.
    pub buffer: u64,
    /// One-way delay, ns.
    pub delay: Nanos,
    /// Maximum bytes per call of recv().
    pub recv: u64,
    /// Whether the turbo vCPU acknowledges segments that go to the backlog (vTurbo's Algorithm 1).
    pub early_ack: bool,
    /// Factor of the congestion window after a loss: 0.7 for CUBIC, 0.5 for Reno.
    pub beta: f64,
    /// Minimum retransmission timeout, ns.
    pub rto_min: Nanos,
    /// Time at which the sender begins, ns.
    pub start: Nanos,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            segment: 1448,
            total: u64::MAX,
            buffer: 4 << 20,
            delay: 50_000,
            recv: 128 << 10,
            early_ack: false,
            beta: 0.7,
            rto_min: 200 * MS,
            start: 0,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Ack {
    next: u64,
    sack: Option<u64>,
    window: u64,
}

#[derive(Debug)]
struct Sender {
    next: u64,
    una: u64,
    window: u64,
    cwnd: f64,
    ssthresh: f64,
    sacked: BTreeSet<u64>,
    lost: BTreeSet<u64>,
    /// Retransmitted segments, each with the next new segment at that time.
    retransmissions: BTreeMap<u64, u64>,
    /// Segments below were checked for loss.
    checked_below: u64,
    recover: Option<u64>,
    srtt: Option<(f64, f64)>,
    backoff: u32,
    timer: u64,
    retransmitted: u64,
    timeouts: u64,
}

impl Sender {
    fn rto(&self, min_rto: Nanos) -> Nanos {
        let base = match self.srtt {
            None => 1_000 * MS,
            Some((srtt, var)) => (srtt + (4.0 * var).max(min_rto as f64)) as Nanos,
        };
        (base << self.backoff.min(6)).min(120_000 * MS)
    }

    fn pipe(&self) -> u64 {
        (self.next - self.una).saturating_sub((self.sacked.len() + self.lost.len()) as u64)
    }

    fn measure(&mut self, rtt: Nanos) {
        let rtt = rtt as f64;
        self.srtt = Some(match self.srtt {
            None => (rtt, rtt / 2.0),
            Some((srtt, var)) => (
                0.875 * srtt + 0.125 * rtt,
                0.75 * var + 0.25 * (srtt - rtt).abs(),
            ),
        });
    }
}

#[derive(Debug, Default)]
struct Receiver {
    next: u64,
    out_of_order: BTreeSet<u64>,
    queued: u64,
    backlog: VecDeque<(u64, Nanos)>,
    /// Next segment that the early acknowledgement expects (bl.nxt), while it is active.
    early_next: Option<u64>,
    /// Segments below were acknowledged early.
    early_acked: u64,
    /// End of the window offered to the sender.
    offered: u64,
    reading: u64,
    read: u64,
    unacked: u32,
    delayed: u64,
    dropped: u64,
}

/// A connection. See the module's text.
#[derive(Debug)]
pub struct Tcp {
    vm: usize,
    config: TcpConfig,
    costs: GuestCosts,
    owner: usize,
    sender: Sender,
    receiver: Receiver,
    acks: VecDeque<Ack>,
    acks_removed: u64,
    sent_at: VecDeque<(u64, Nanos)>,
    finished: Option<Nanos>,
}

/// Tags of timers: the time at which it was set, with its kind in the lowest bit.
const RTO: u64 = 0;
const DELAYED: u64 = 1;
/// The sender begins.
const BEGIN: u64 = u64::MAX;
/// Delay of a delayed acknowledgement.
const DELAYED_ACK_TIMEOUT: Nanos = 40 * MS;

impl Tcp {
    /// An established connection to `vm`.
    pub fn new(vm: usize, config: TcpConfig, costs: GuestCosts) -> Self {
        let window = config.buffer / u64::from(config.segment);
        Self {
            vm,
            config,
            costs,
            owner: 0,
            sender: Sender {
                next: 0,
                una: 0,
                window,
                cwnd: 10.0,
                ssthresh: f64::INFINITY,
                sacked: BTreeSet::new(),
                lost: BTreeSet::new(),
                retransmissions: BTreeMap::new(),
                checked_below: 0,
                recover: None,
                srtt: None,
                backoff: 0,
                timer: 0,
                retransmitted: 0,
                timeouts: 0,
            },
            receiver: Receiver::default(),
            acks: VecDeque::new(),
            acks_removed: 0,
            sent_at: VecDeque::new(),
            finished: None,
        }
    }

    fn transmit(&mut self, world: &mut World, segment: u64) {
        let packet = Packet {
            owner: self.owner,
            connection: 0,
            tag: segment,
            bytes: self.config.segment + 90,
            stream: true,
        };
        world.send_in(self.vm, packet, self.config.delay);
    }

    fn send(&mut self, world: &mut World) {
        while (self.sender.pipe() as f64) < self.sender.cwnd.max(1.0) {
            if world.wires.sender_full(world.now) {
                // The window shrinks as after a loss, but nothing is lost (tcp_enter_cwr); acknowledgements send the
                // rest.
                let s = &mut self.sender;
                if s.recover.is_none() {
                    s.recover = Some(s.next);
                    s.ssthresh = (s.cwnd * self.config.beta).max(2.0);
                    s.cwnd = s.ssthresh;
                }
                break;
            }
            if let Some(segment) = self.sender.lost.pop_first() {
                self.sender.retransmitted += 1;
                self.sender
                    .retransmissions
                    .insert(segment, self.sender.next);
                self.transmit(world, segment);
                continue;
            }
            let s = &mut self.sender;
            if s.next >= self.config.total || s.next >= s.una + s.window {
                break;
            }
            let segment = s.next;
            s.next += 1;
            // One of 16 segments is timed, which is enough for an estimate.
            if segment.is_multiple_of(16) {
                self.sent_at.push_back((segment, world.now));
            }
            self.transmit(world, segment);
        }
        if self.sender.next > self.sender.una && self.sender.timer == 0 {
            self.set_timer(world);
        }
    }

    fn set_timer(&mut self, world: &mut World) {
        self.sender.timer = world.now;
        let rto = self.sender.rto(self.config.rto_min);
        world.set_timer(world.now + rto, self.owner, world.now << 1 | RTO);
    }

    fn acknowledged(&mut self, world: &mut World, ack: Ack) {
        let now = world.now;
        while let Some(&(segment, at)) = self.sent_at.front()
            && segment < ack.next
        {
            self.sent_at.pop_front();
            if self.sender.recover.is_none() && self.sender.backoff == 0 {
                self.sender.measure(now - at);
            }
        }
        let s = &mut self.sender;
        s.window = ack.window;
        let advanced = ack.next.saturating_sub(s.una);
        if advanced > 0 {
            s.una = ack.next;
            s.sacked = s.sacked.split_off(&ack.next);
            s.lost = s.lost.split_off(&ack.next);
            s.retransmissions = s.retransmissions.split_off(&ack.next);
            s.backoff = 0;
            s.timer = 0;
            match s.recover {
                Some(end) if s.una >= end => {
                    s.recover = None;
                    s.cwnd = s.ssthresh;
                }
                Some(_) => {}
                None if s.cwnd < s.ssthresh => s.cwnd += advanced as f64,
                None => s.cwnd += advanced as f64 / s.cwnd,
            }
        }
        if let Some(segment) = ack.sack
            && segment >= s.una
            && s.sacked.insert(segment)
        {
            s.lost.remove(&segment);
            s.retransmissions.remove(&segment);
            // Three later segments arrived: those missing below are lost (RFC 6675).
            let highest = *s.sacked.last().unwrap_or(&segment);
            let below = highest.saturating_sub(2);
            // A retransmission is lost too when a segment that was first sent after it has arrived (Linux's
            // tcp_mark_lost_retrans).
            let retransmissions = s.retransmissions.iter().filter(|&(_, next)| *next < below);
            let gone: Vec<u64> = retransmissions.map(|(segment, _)| *segment).collect();
            for segment in gone {
                s.retransmissions.remove(&segment);
                s.lost.insert(segment);
            }
            let from = s.checked_below.max(s.una);
            if s.sacked.len() >= 3 && from < below {
                let holes = (from..below).filter(|k| !s.sacked.contains(k));
                s.lost.extend(holes);
                s.checked_below = below;
                if s.recover.is_none() && !s.lost.is_empty() {
                    s.recover = Some(s.next);
                    s.ssthresh = (s.cwnd * self.config.beta).max(2.0);
                    s.cwnd = s.ssthresh;
                }
            }
        }
        self.send(world);
    }

    fn time_out(&mut self, world: &mut World) {
        let s = &mut self.sender;
        s.timeouts += 1;
        s.ssthresh = (s.cwnd.min(s.pipe().max(2) as f64) * self.config.beta).max(2.0);
        s.cwnd = 1.0;
        s.recover = None;
        s.backoff += 1;
        s.lost = (s.una..s.next).filter(|k| !s.sacked.contains(k)).collect();
        s.retransmissions.clear();
        s.checked_below = s.next;
        s.timer = 0;
        self.sent_at.clear();
        self.send(world);
    }

    /// Window offered beyond `next`, segments.
    fn window(&self, next: u64) -> u64 {
        let r = &self.receiver;
        let held = r.queued + r.out_of_order.len() as u64 + r.backlog.len() as u64;
        let free = (self.config.buffer / u64::from(self.config.segment)).saturating_sub(held);
        // The right edge of the window never moves back (RFC 1122, section 4.2.2.16).
        free.max(r.offered.saturating_sub(next))
    }

    fn acknowledge(&mut self, world: &mut World, next: u64, sack: Option<u64>) {
        self.receiver.unacked = 0;
        self.receiver.delayed = 0;
        let window = self.window(next);
        self.receiver.offered = self.receiver.offered.max(next + window);
        let ack = Ack { next, sack, window };
        self.acks.push_back(ack);
        let packet = Packet {
            owner: self.owner,
            connection: 0,
            tag: self.acks_removed + self.acks.len() as u64 - 1,
            bytes: 90,
            stream: false,
        };
        world.send_out(self.vm, packet, self.config.delay);
    }

    /// A segment reaches the socket's receive queue.
    fn receive_segment(&mut self, world: &mut World, segment: u64, quiet: bool) {
        let r = &mut self.receiver;
        if segment == r.next {
            r.next += 1;
            r.queued += 1;
            while r.out_of_order.remove(&r.next) {
                r.next += 1;
                r.queued += 1;
            }
            r.unacked += 1;
            let next = r.next;
            if quiet {
                r.unacked = 0;
            } else if r.unacked >= 2 || !r.out_of_order.is_empty() {
                self.acknowledge(world, next, None);
            } else if r.delayed == 0 {
                r.delayed = world.now;
                world.set_timer(
                    world.now + DELAYED_ACK_TIMEOUT,
                    self.owner,
                    world.now << 1 | DELAYED,
                );
            }
        } else {
            let sack = (segment > r.next && r.out_of_order.insert(segment)).then_some(segment);
            let next = r.next;
            self.acknowledge(world, next, sack);
        }
    }

    fn start_read(&mut self, world: &mut World, woken: bool) {
        let r = &mut self.receiver;
        if r.reading == 0 && r.queued > 0 {
            let max_segments = (self.config.recv / u64::from(self.config.segment)).max(1);
            r.reading = r.queued.min(max_segments);
            let bytes = r.reading * u64::from(self.config.segment);
            let wake = if woken { self.costs.wake } else { 0 };
            let cost = wake + self.costs.call_cost(bytes);
            let vcpu = world.vms[self.vm].app;
            world.work(vcpu, Level::App, cost, self.owner, 0);
        }
    }
}

impl Workload for Tcp {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        world.set_timer(self.config.start, owner, BEGIN);
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        let at = tag >> 1;
        if tag == BEGIN {
            self.send(world);
        } else if tag & 1 == DELAYED {
            if self.receiver.delayed == at && self.receiver.unacked > 0 {
                let next = self.receiver.next;
                self.acknowledge(world, next, None);
            }
        } else if self.sender.timer == at && self.sender.next > self.sender.una {
            self.time_out(world);
        }
    }

    fn on_packet(&mut self, world: &mut World, _vm: usize, packet: Packet) {
        let segment = packet.tag;
        let limit = 2 * self.config.buffer / u64::from(self.config.segment);
        let r = &mut self.receiver;
        if r.reading == 0 {
            self.receive_segment(world, segment, false);
        } else if r.queued + r.backlog.len() as u64 >= limit {
            r.dropped += 1;
        } else {
            // The process owns the socket.
            r.backlog.push_back((segment, world.now));
            if self.config.early_ack {
                let expected = match r.early_next {
                    None if r.out_of_order.is_empty() && r.backlog.len() == 1 => r.next,
                    None => u64::MAX,
                    Some(next) => next,
                };
                if expected == segment {
                    // Every segment is acknowledged, as in lines 21 and 22 of the listing.
                    r.early_next = Some(segment + 1);
                    r.early_acked = segment + 1;
                    self.acknowledge(world, segment + 1, None);
                } else {
                    // Out of order: no early acknowledgement until the slow path has handled it.
                    r.early_next = Some(u64::MAX);
                }
            }
        }
        self.start_read(world, true);
    }

    fn on_work_done(&mut self, world: &mut World, _tag: u64) {
        let before = self.window(self.receiver.next);
        let r = &mut self.receiver;
        r.read += r.reading;
        r.queued -= r.reading;
        r.reading = 0;
        // A transfer ends when the process has the data, as iperf's server reports it, not when it is acknowledged.
        if self.finished.is_none() && r.read >= self.config.total {
            self.finished = Some(world.now);
        }
        r.early_next = None;
        let acked = r.early_acked;
        let backlog = std::mem::take(&mut r.backlog);
        for (segment, _) in backlog {
            self.receive_segment(world, segment, segment < acked);
        }
        // A window update when a nearly closed window opens.
        let all = self.config.buffer / u64::from(self.config.segment);
        if before < all / 8 && self.window(self.receiver.next) >= all / 8 {
            let next = self.receiver.next;
            self.acknowledge(world, next, None);
        }
        self.start_read(world, false);
    }

    fn on_peer_packet(&mut self, world: &mut World, packet: Packet) {
        // Skip acknowledgements that were dropped on the way out.
        while self.acks_removed < packet.tag {
            self.acks.pop_front();
            self.acks_removed += 1;
        }
        if let Some(ack) = self.acks.pop_front() {
            self.acks_removed += 1;
            self.acknowledged(world, ack);
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let end = self.finished.unwrap_or(world.now);
        let took = end.saturating_sub(self.config.start).max(1);
        let bits = self.receiver.read as f64 * f64::from(self.config.segment) * 8.0;
        vec![
            ("throughput Mbit/s".into(), bits / 1e6 / (took as f64 / 1e9)),
            ("retransmitted".into(), self.sender.retransmitted as f64),
            ("timeouts".into(), self.sender.timeouts as f64),
            ("backlog drops".into(), self.receiver.dropped as f64),
        ]
    }
}

#[cfg(test)]
mod tests;

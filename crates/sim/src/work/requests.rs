// SPDX-License-Identifier: Apache-2.0
//! A server with requests in a closed loop (each connection sends its next request after the
//! answer) or in an open loop (requests arrive at times that do not depend on the answers).

use viola_policy::slices::Nanos;

use super::{Durations, GuestCosts};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// How requests arrive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// This many connections; each one sends a request as soon as it has the last answer.
    Closed(u32),
    /// Poisson arrivals, requests per second.
    Open(f64),
}

/// A server, and clients that send requests to it.
#[derive(Debug)]
pub struct Requests {
    /// The server.
    pub vm: usize,
    /// How requests arrive.
    pub arrivals: Arrivals,
    /// One-way delay, ns.
    pub delay: Nanos,
    /// Server's time for a request, ns.
    pub process: Nanos,
    /// Costs of the guest.
    pub costs: GuestCosts,
    owner: usize,
    times: Durations,
}

/// Size of a request and of its answer with headers, bytes.
const PACKET_BYTES: u32 = 320;

impl Requests {
    /// A server of `vm`; a request takes `process` ns there.
    pub fn new(
        vm: usize,
        arrivals: Arrivals,
        process: Nanos,
        delay: Nanos,
        costs: GuestCosts,
    ) -> Self {
        Self {
            vm,
            arrivals,
            delay,
            process,
            costs,
            owner: 0,
            times: Durations::default(),
        }
    }

    /// The request of time `sent_at`, or its answer.
    fn packet(&self, sent_at: Nanos) -> Packet {
        Packet {
            owner: self.owner,
            connection: crate::random::mixed(sent_at) as u32,
            tag: sent_at,
            bytes: PACKET_BYTES,
            stream: false,
        }
    }

    fn send(&self, world: &mut World) {
        world.send_in(self.vm, self.packet(world.now), self.delay);
    }

    fn plan_next(&self, world: &mut World, rate: f64) {
        let at = world.now + world.random.exponential(1e9 / rate).max(1);
        world.set_timer(at, self.owner, 0);
    }
}

impl Workload for Requests {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        match self.arrivals {
            Arrivals::Closed(connections) => (0..connections).for_each(|_| self.send(world)),
            Arrivals::Open(rate) => self.plan_next(world, rate),
        }
    }

    fn on_timer(&mut self, world: &mut World, _: u64) {
        if let Arrivals::Open(rate) = self.arrivals {
            self.send(world);
            self.plan_next(world, rate);
        }
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        let cost = self.process + self.costs.call + self.costs.send;
        world.work(world.vms[vm].app, Level::App, cost, self.owner, packet.tag);
    }

    fn on_work_done(&mut self, world: &mut World, sent_at: u64) {
        world.send_out(self.vm, self.packet(sent_at), self.delay);
    }

    fn on_peer_packet(&mut self, world: &mut World, packet: Packet) {
        self.times.push(world.now - packet.tag);
        if let Arrivals::Closed(_) = self.arrivals {
            self.send(world);
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let mut all = self.times.figures("latency");
        for (name, p) in [("latency p90 ms", 0.9), ("latency p99.9 ms", 0.999)] {
            all.push((name.into(), self.times.quantile_ms(p)));
        }
        let seconds = world.now as f64 / 1e9;
        all.push(("requests/s".into(), self.times.count() as f64 / seconds));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::figure;
    use super::*;
    use crate::cpu::CpuLoad;
    use crate::setup::{HostSetup, Policy, VmSetup};
    use viola_policy::slices::{Class, MS, US};

    /// Figures of a server among three busy VMs for 10 s, under stock scheduling and under viola.
    fn beside_three(arrivals: Arrivals, busy: bool) -> [Vec<(String, f64)>; 2] {
        [
            Policy::Eevdf,
            Policy::Interleaved {
                batch_slice: 4 * MS,
            },
        ]
        .map(|policy| {
            let vm = |k| VmSetup {
                class: if k == 0 { Class::Ls } else { Class::Batch },
                microslice: 300 * US,
                load: match k > 0 || busy {
                    true => CpuLoad::Busy,
                    false => CpuLoad::None,
                },
                ..VmSetup::default()
            };
            let setup = HostSetup {
                policy,
                vms: (0..4).map(vm).collect(),
                ..HostSetup::default()
            };
            let server = Requests::new(0, arrivals, 130 * US, 15 * US, setup.costs);
            let mut sim = setup.simulation(vec![Box::new(server)], 1);
            sim.run(10_000 * MS);
            sim.workloads[0].figures(&sim.world)
        })
    }

    fn ratio(of: &[Vec<(String, f64)>; 2], name: &str) -> f64 {
        figure(&of[1], name) / figure(&of[0], name)
    }

    #[test]
    fn a_server_within_its_share_answers_at_least_three_times_as_fast() {
        for busy in [false, true] {
            for rate in [350.0, 900.0] {
                let of = beside_three(Arrivals::Open(rate), busy);
                for name in ["latency p99 ms", "latency p99.9 ms"] {
                    let ratio = ratio(&of, name);
                    assert!(
                        ratio <= 0.34,
                        "{rate}/s, busy {busy}: {name} {ratio}, {of:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_server_beyond_its_share_is_no_worse_off_than_on_a_stock_host() {
        for busy in [false, true] {
            for connections in [4, 16, 64] {
                let of = beside_three(Arrivals::Closed(connections), busy);
                let bounds = [
                    ("latency p50 ms", 1.2),
                    ("latency p90 ms", 1.4),
                    ("latency p99 ms", 1.05),
                    ("latency p99.9 ms", 1.05),
                ];
                for (name, most) in bounds {
                    // Four requests take half of a piece, in step with it: most of them meet its end.
                    if connections == 4 && name == "latency p50 ms" {
                        continue;
                    }
                    let ratio = ratio(&of, name);
                    assert!(ratio <= most, "{connections}: {name} {ratio}, {of:?}");
                }
                let ratio = ratio(&of, "requests/s");
                assert!(ratio >= 0.98, "{connections}: requests/s {ratio}");
            }
        }
    }
}

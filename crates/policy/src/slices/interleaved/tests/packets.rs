// SPDX-License-Identifier: Apache-2.0
//! A busy LSVM that has packets, beside three busy batch VMs.

use super::super::super::{Io, OpenRequests, Packets};
use super::*;

/// One LSVM (index 0) and three batch VMs, all busy, and the LSVM's packets.
struct BusyCore {
    scheduler: Interleaved,
    packets: Packets,
    requests: OpenRequests,
    /// Run times since the last decision.
    used: [Nanos; 4],
    /// Run time of the LSVM, and the part of it while its packets may wait.
    ran: Nanos,
    gathered: Nanos,
    /// Number of its pieces, and of those at whose begin its packets may wait.
    pieces: usize,
    gathered_pieces: usize,
    /// How late it asks for the next decision.
    late: Nanos,
    decided_at: Nanos,
    out: Decision,
}

impl BusyCore {
    fn new() -> Self {
        Self::with_microslice(300 * US)
    }

    fn with_microslice(microslice: Nanos) -> Self {
        let mut scheduler = Interleaved::default();
        let mut params: Vec<Params> = (1..4).map(|id| batch(id, Behaviour::Busy).params).collect();
        params.insert(0, ls(0, microslice, Behaviour::Busy).params);
        scheduler.configure(0, &params);
        Self {
            scheduler,
            packets: Packets::default(),
            requests: OpenRequests::default(),
            used: [0; 4],
            ran: 0,
            gathered: 0,
            pieces: 0,
            gathered_pieces: 0,
            late: 0,
            decided_at: 0,
            out: Decision::default(),
        }
    }

    /// Decides, and returns the VM that runs now.
    fn decide(&mut self, now: Nanos) -> usize {
        self.requests.observe(self.packets, self.used[0]);
        self.ran += self.used[0];
        if self.out.gathers[0] {
            self.gathered += self.used[0];
        }
        let seen: [Activity; 4] = std::array::from_fn(|i| Activity {
            used: self.used[i],
            runnable: true,
            io: match i {
                0 => self.requests.io(self.decided_at),
                _ => Io::Unknown,
            },
            ..Activity::default()
        });
        self.scheduler.decide(now, &seen, &mut self.out);
        let ranks = self.out.ranks;
        let top = (0..4).rev().max_by_key(|&i| ranks[i]).unwrap();
        if top == 0 && self.used[0] == 0 {
            self.pieces += 1;
            self.gathered_pieces += usize::from(self.out.gathers[0]);
        }
        (self.used, self.decided_at) = ([0; 4], now);
        top
    }

    /// When the running VM's time is over unless something happens.
    fn end(&self, now: Nanos, top: usize) -> Nanos {
        self.out.until.min(now + self.out.budgets[top]) + self.late
    }
}

/// One LSVM (index 0) and three batch VMs, all busy, with a packet for the LSVM at each time of `packets`. Returns run
/// times, how often the LSVM got the core, and the wait of each packet.
fn with_packets(time: Nanos, packets: &[Nanos]) -> ([Nanos; 4], usize, Vec<Nanos>) {
    let mut core = BusyCore::new();
    let (mut now, mut next, mut waits, mut starts) = (0, 0, Vec::new(), 0);
    // A packet is answered as soon as the LSVM runs.
    let (mut ran, mut arrived, mut on_core) = ([0; 4], None, false);
    while now < time {
        let top = core.decide(now);
        starts += usize::from(top == 0 && !on_core);
        on_core = top == 0;
        if let Some(at) = arrived.filter(|_| top == 0) {
            waits.push(now - at);
            core.packets.count_reply(now, 0, true);
            arrived = None;
        }
        let mut end = core.end(now, top);
        if let Some(&packet) = packets.get(next)
            && packet <= end
        {
            end = packet.max(now);
            next += 1;
            core.packets.count_request(end, 0);
            match top {
                0 => {
                    waits.push(0);
                    core.packets.count_reply(end, 0, true);
                }
                _ => arrived = arrived.or(Some(end)),
            }
        }
        core.used[top] = end - now;
        ran[top] += end - now;
        now = end;
    }
    (ran, starts, waits)
}

fn quarter(ran: Nanos, of: Nanos) -> bool {
    (ran as f64 / of as f64 - 0.25).abs() < 0.01
}

#[test]
fn a_busy_lsvm_without_packets_runs_in_longer_pieces() {
    let (ran, starts, _) = with_packets(2000 * MS, &[]);
    assert!(ran.iter().all(|&r| quarter(r, 2000 * MS)), "{ran:?}");
    // Pieces of 4 ms in 500 ms, after its reserve has grown by microslices.
    assert!((120..160).contains(&starts), "{starts} pieces");
}

#[test]
fn a_packet_gets_a_busy_lsvm_the_core_at_once() {
    let packets: Vec<Nanos> = (1..180).map(|k| k * 11_013 * US).collect();
    let (ran, _, waits) = with_packets(2000 * MS, &packets);
    assert!(waits.len() > 170);
    // The first ones come before it has a reserve.
    assert!(waits.iter().skip(10).all(|&w| w == 0), "{waits:?}");
    assert!(ran.iter().all(|&r| quarter(r, 2000 * MS)), "{ran:?}");
}

#[test]
fn a_flood_of_packets_buys_no_more_than_the_share_in_microslices() {
    let packets: Vec<Nanos> = (1..80_000).map(|k| k * 25 * US).collect();
    let (ran, starts, waits) = with_packets(2000 * MS, &packets);
    assert!(ran.iter().all(|&r| quarter(r, 2000 * MS)), "{ran:?}");
    assert!(
        (1500..1750).contains(&starts),
        "{starts} microslices of 0.3 ms in 500 ms"
    );
    assert!(waits.iter().all(|&w| w <= 1000 * US), "{waits:?}");
}

/// Once its reserve was spent, an LSVM whose last packet was answered waited until its reserve was whole again: 25 ms.
#[test]
fn a_busy_lsvm_that_has_spent_its_reserve_waits_no_longer_than_its_piece_costs() {
    for gap in [100, 230, 470, 900, 1700, 3100] {
        // Bursts of packets that exceed the share, and pauses in which the reserve returns.
        let packets: Vec<Nanos> = (0..20)
            .flat_map(|burst| (0..40).map(move |k| burst * 95 * MS + k * gap * US))
            .collect();
        let (ran, _, waits) = with_packets(2000 * MS, &packets);
        let longest = waits.iter().max().unwrap();
        assert!(*longest <= 3600 * US, "{gap} us: {longest} ns");
        assert!(ran.iter().all(|&r| quarter(r, 2000 * MS)), "{ran:?}");
    }
}

/// Latencies of a client that asks again `think` ns after each answer. An answer takes a busy LSVM 0.12 ms; three busy
/// batch VMs are beside it.
fn closed_loop(time: Nanos, think: Nanos) -> Vec<Nanos> {
    closed_loop_on(&mut BusyCore::new(), time, think)
}

fn closed_loop_on(core: &mut BusyCore, time: Nanos, think: Nanos) -> Vec<Nanos> {
    const ANSWER: Nanos = 120 * US;
    // When the next request comes, or when the open one came and what its answer still takes. It computes alone at first.
    let (mut now, mut due, mut open, mut latencies) = (0, 100 * MS, None, Vec::new());
    while now < time {
        let top = core.decide(now);
        let end = core.end(now, top);
        let event = match open {
            None => due,
            Some((_, left)) if top == 0 => now + left,
            Some(_) => end,
        };
        let end = end.min(event).max(now);
        core.used[top] = end - now;
        now = end;
        open = match open {
            None if due <= now => {
                core.packets.count_request(now, 0);
                Some((now, ANSWER))
            }
            Some((came, left)) if left == core.used[0] => {
                core.packets.count_reply(now, 0, true);
                latencies.push(now - came);
                due = now + think;
                None
            }
            Some((came, left)) => Some((came, left - core.used[0])),
            None => None,
        };
    }
    latencies
}

/// The piece ended 0.05 ms after each answer, just before the next request: most requests waited for another one.
#[test]
fn a_client_that_asks_again_at_once_finds_a_busy_lsvm_on_the_core() {
    for think in [30, 80, 120] {
        let mut latencies = closed_loop(2000 * MS, think * US);
        latencies.sort_unstable();
        let [p50, p99] = [50, 99].map(|p| latencies[latencies.len() * p / 100]);
        assert!(p50 <= 120 * US, "{think} us: {p50} ns");
        assert!(p99 <= 5 * MS, "{think} us: {p99} ns");
        // A quarter of the core, less what the LSVM does meanwhile.
        let max_requests = 500 * MS / (120 + think) / US;
        let n = latencies.len() as Nanos;
        assert!(
            (max_requests * 9 / 10..=max_requests * 21 / 20).contains(&n),
            "{think} us: {n} answers"
        );
    }
}

/// Requests every 3 ms, one at a time, and microslices of 1 ms: a third of the core, if each cost a microslice.
#[test]
fn requests_within_the_share_of_a_busy_lsvm_do_not_pay_for_whole_microslices() {
    let mut latencies = closed_loop_on(&mut BusyCore::with_microslice(MS), 4000 * MS, 2900 * US);
    latencies.sort_unstable();
    let [p50, p99] = [50, 99].map(|p| latencies[latencies.len() * p / 100]);
    assert!(p50 <= 120 * US && p99 <= 300 * US, "{p50} {p99} ns");
}

#[test]
fn packets_of_an_lsvm_wait_for_others_only_beyond_its_share() {
    for (think, least, most) in [(30, 80, 100), (3000, 0, 2)] {
        let mut core = BusyCore::new();
        core.late = 10 * US;
        closed_loop_on(&mut core, 4000 * MS, think * US);
        let percent = 100 * core.gathered / core.ran;
        assert!(
            (least..=most).contains(&percent),
            "{think} us: {percent} % of its run time"
        );
        // The driver may not ask again before a piece ends.
        let percent = (100 * core.gathered_pieces / core.pieces) as Nanos;
        assert!(
            (least..=most).contains(&percent),
            "{think} us: {percent} % of its pieces"
        );
    }
}

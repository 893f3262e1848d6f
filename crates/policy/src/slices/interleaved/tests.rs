// SPDX-License-Identifier: Apache-2.0
use super::super::simulate::{Behaviour, Core, Driver, Report, SimVm};
use super::super::{DEFAULT_WEIGHT, Io, OpenRequests, Packets};
use super::*;

fn ls(id: u32, microslice: Nanos, behaviour: Behaviour) -> SimVm {
    let params = Params {
        id,
        class: Class::Ls,
        weight: DEFAULT_WEIGHT,
        cap_permille: None,
        microslice,
    };
    SimVm { params, behaviour }
}

fn batch(id: u32, behaviour: Behaviour) -> SimVm {
    let vm = ls(id, MS, behaviour);
    SimVm {
        params: Params {
            class: Class::Batch,
            ..vm.params
        },
        behaviour,
    }
}

fn run(vms: &[SimVm], time: Nanos) -> Report {
    let driver = Driver {
        record: true,
        ..Driver::default()
    };
    Core::new(Interleaved::default(), vms, driver, 1)
        .run_until(time)
        .unwrap()
        .clone()
}

fn near(a: Nanos, b: Nanos) -> bool {
    a.abs_diff(b) <= 10 * US
}

#[test]
fn a_busy_lsvm_among_three_vms_runs_300_us_every_1200_us() {
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy)];
    vms.extend((1..4).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 1000 * MS);
    let own: Vec<_> = report.runs.iter().filter(|s| s.id == 0).collect();
    assert!(own.len() > 800);
    for pair in own.windows(2) {
        assert!(near(pair[0].len, 300 * US), "{pair:?}");
        assert!(
            near(pair[1].at - (pair[0].at + pair[0].len), 900 * US),
            "{pair:?}"
        );
    }
    for id in 0..4 {
        assert!(
            (report.share(id) - 0.25).abs() < 0.005,
            "{id}: {}",
            report.share(id)
        );
    }
    // Two rank changes per microslice, and two per batch slice (4 ms of its own run time).
    let expected = 2 * own.len() as u64 + 2 * (750 / 4) + 10;
    assert!(
        report.rank_changes <= expected,
        "{} rank changes, {expected} expected",
        report.rank_changes
    );
}

#[test]
fn the_microslice_cuts_the_owners_slice_but_not_its_turn() {
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy)];
    vms.extend((1..4).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 100 * MS);
    let others: Vec<_> = report.runs.iter().filter(|s| s.id != 0).collect();
    let mut turn = 0;
    for pair in others.windows(2) {
        turn += pair[0].len;
        if pair[0].id != pair[1].id {
            let margin = super::margin(4 * MS) as Nanos;
            assert!(
                turn.abs_diff(4 * MS) <= margin + 10 * US,
                "turn of {turn} ns"
            );
            turn = 0;
        }
    }
}

#[test]
fn an_lsvm_that_sleeps_most_of_the_time_never_waits() {
    let bursts = Behaviour::Bursts {
        sleep: (2 * MS, 20 * MS),
        run: (50 * US, 400 * US),
    };
    let mut vms = vec![ls(0, 300 * US, bursts)];
    vms.extend((1..5).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 5000 * MS);
    let vm = report.vm(0).unwrap();
    assert!(vm.wake_waits.len() > 300);
    assert_eq!(vm.worst_wait(), 0);
}

#[test]
fn two_lsvms_take_turns_and_keep_their_shares() {
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy), ls(1, MS, Behaviour::Busy)];
    vms.extend((2..4).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 3000 * MS);
    for id in 0..4 {
        assert!(
            (report.share(id) - 0.25).abs() < 0.005,
            "{id}: {}",
            report.share(id)
        );
    }
    assert!(report.vm(0).unwrap().worst_wait() <= 900 * US + MS + 50 * US);
    assert!(report.vm(1).unwrap().worst_wait() <= 3 * MS + 300 * US + 50 * US);
}

#[test]
fn lsvms_alone_share_by_microslices() {
    let vms = [
        ls(0, 300 * US, Behaviour::Busy),
        ls(1, 300 * US, Behaviour::Busy),
    ];
    let report = run(&vms, 1000 * MS);
    assert!((report.share(0) - 0.5).abs() < 0.002);
    assert!(report.runs.iter().all(|s| s.len <= 310 * US));
}

#[test]
fn without_contention_there_are_few_decisions() {
    let wakes = |period| Behaviour::Duty {
        period,
        on: 20 * US,
    };
    let idle = [
        ls(0, 300 * US, wakes(7 * MS)),
        batch(1, wakes(11 * MS)),
        batch(2, wakes(13 * MS)),
    ];
    let one_busy = [
        ls(0, 300 * US, wakes(7 * MS)),
        batch(1, Behaviour::Busy),
        batch(2, wakes(13 * MS)),
    ];
    let busy_ls = [
        ls(0, 300 * US, Behaviour::Busy),
        batch(1, wakes(11 * MS)),
        batch(2, wakes(13 * MS)),
    ];
    for vms in [idle, one_busy, busy_ls] {
        let report = run(&vms, 10_000 * MS);
        assert!(
            report.decisions < 500,
            "{} decisions in 10 s",
            report.decisions
        );
        assert!(
            report.rank_changes < 100,
            "{} rank changes in 10 s",
            report.rank_changes
        );
    }
}

#[test]
fn a_vm_alone_has_no_budget_and_wakes_behind_it_are_notified() {
    let params: Vec<_> = [ls(0, 300 * US, Behaviour::Busy), batch(1, Behaviour::Busy)]
        .map(|vm| vm.params)
        .into();
    let ready = Activity {
        runnable: true,
        ..Activity::default()
    };
    let mut out = Decision::default();
    let mut scheduler = Interleaved::default();
    scheduler.configure(0, &params);
    scheduler.decide(0, &[ready, Activity::default()], &mut out);
    assert_eq!((out.until, out.budgets[0]), (FOREVER, FOREVER));
    assert!(
        out.notify_wake,
        "batch VM 1 would wait behind the LSVM for ever"
    );
    scheduler.decide(
        MS,
        &[
            Activity {
                used: MS,
                ..Activity::default()
            },
            ready,
        ],
        &mut out,
    );
    assert_eq!((out.until, out.budgets[1]), (FOREVER, FOREVER));
    assert!(!out.notify_wake, "the LSVM preempts");
    assert!(out.budgets[0] < FOREVER);
    scheduler.decide(2 * MS, &[ready, ready], &mut out);
    assert!(!out.notify_wake && out.budgets[0] < FOREVER && out.budgets[1] < FOREVER);
    scheduler.decide(
        3 * MS,
        &[Activity::default(), Activity::default()],
        &mut out,
    );
    assert!(!out.notify_wake && out.budgets[0] < FOREVER && out.budgets[1] < FOREVER);
}

#[test]
fn a_busy_lsvm_that_ran_alone_does_not_wait_long_when_the_others_wake() {
    let period = Behaviour::Duty {
        period: 50 * MS,
        on: 10 * MS,
    };
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy)];
    vms.extend((1..4).map(|id| batch(id, period)));
    let report = run(&vms, 2000 * MS);
    let worst = report.vm(0).unwrap().worst_wait();
    assert!(worst <= 1200 * US, "waited {worst} ns");
}

#[test]
fn a_cap_holds_on_an_idle_core_and_is_used_up() {
    for cap in [10, 200, 500, 990] {
        let mut vm = batch(0, Behaviour::Busy);
        vm.params.cap_permille = Some(cap);
        let share = run(&[vm], 1000 * MS).share(0);
        assert!(
            (share - f64::from(cap) / 1000.0).abs() < 0.01,
            "cap {cap}: {share}"
        );
    }
}

#[test]
fn a_cap_is_used_up_though_other_slices_last_longer_than_its_windows() {
    // Beside LSVMs that are due half of the core, the slice of VM 2 lasts for more than a window of VM 0's cap.
    let mut vms = [
        batch(0, Behaviour::Busy),
        ls(1, 1814 * US, Behaviour::Busy),
        batch(2, Behaviour::Busy),
        ls(3, 1656 * US, Behaviour::Busy),
    ];
    for (vm, weight) in vms.iter_mut().zip([1024, 128, 128, 1024]) {
        vm.params.weight = weight;
    }
    vms[0].params.cap_permille = Some(277);
    let share = run(&vms, 10_000 * MS).share(0);
    assert!((share - 0.277).abs() < 0.01, "{share}");
}

#[test]
fn a_stalled_controller_does_not_bar_an_lsvm_for_long() {
    let mut scheduler = Interleaved::default();
    let params = [
        ls(0, 300 * US, Behaviour::Busy).params,
        batch(1, Behaviour::Busy).params,
    ];
    let mut out = Decision::default();
    scheduler.configure(0, &params);
    let ready = Activity {
        runnable: true,
        ..Activity::default()
    };
    scheduler.decide(0, &[ready, ready], &mut out);
    scheduler.decide(
        1000 * MS,
        &[
            Activity {
                used: 1000 * MS,
                ..ready
            },
            ready,
        ],
        &mut out,
    );
    assert_eq!(out.ranks[0], Rank::Background);
    assert!(out.until <= 1017 * MS, "barred until {}", out.until);
}

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
        (self.used, self.decided_at) = ([0; 4], now);
        let ranks = self.out.ranks;
        (0..4).rev().max_by_key(|&i| ranks[i]).unwrap()
    }

    /// When the running VM's time is over unless something happens.
    fn end(&self, now: Nanos, top: usize) -> Nanos {
        self.out.until.min(now + self.out.budgets[top])
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
        closed_loop_on(&mut core, 4000 * MS, think * US);
        let percent = 100 * core.gathered / core.ran;
        assert!(
            (least..=most).contains(&percent),
            "{think} us: {percent} % of its run time"
        );
    }
}

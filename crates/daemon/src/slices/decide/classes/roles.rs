// SPDX-License-Identifier: Apache-2.0
//! Class auto on simulated hosts whose VMs change their roles, compared with stock and with the best classes by hand.
//!
//! A host is one core with three to six VMs. In each of three phases of three minutes every VM gets a role by lot. The same host
//! runs three times: all VMs in class batch; in the classes that auto chooses, without knowing the roles; and in the best ones,
//! which are found for each phase by trying all. `VIOLA_HOSTS` is the number of hosts, and
//! `VIOLA_VERBOSE` shows each of them.

use super::simulated::{Auto, MICROSLICE, S, TICK, WINDOW};
use super::*;
use viola_policy::slices::simulate::{Behaviour, Host, Usage, slowest_mean};

const PHASES: usize = 3;
const PHASE: Nanos = 180 * S;
/// What auto may take to find a server after its role has begun.
const LEARNING: Nanos = 60 * S;

/// Random numbers by SplitMix64.
struct Lots(u64);

impl Lots {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// Half of the VMs compute, two of five are servers that want at most a third of their share, and the others do nothing.
    fn role(&mut self, vms: u64) -> Behaviour {
        match self.below(10) {
            0..5 => Behaviour::Busy,
            5..7 => {
                let period = self.between(2 * MS, 40 * MS);
                let on = period * self.between(10, 330) / 1000 / vms;
                Behaviour::Duty { period, on }
            }
            7..9 => {
                let think = self.between(2 * MS, 30 * MS);
                let run = think * self.between(10, 330) / 1000 / vms;
                Behaviour::Bursts {
                    sleep: (think / 2, think * 3 / 2),
                    run: (run / 2, run * 3 / 2),
                }
            }
            _ => Behaviour::Idle,
        }
    }
}

fn is_server(behaviour: Behaviour) -> bool {
    matches!(behaviour, Behaviour::Duty { .. } | Behaviour::Bursts { .. })
}

/// The roles of the VMs, by phase.
fn roles(host: u64) -> Vec<Vec<Behaviour>> {
    let mut lots = Lots(host);
    let vms = lots.between(3, 6);
    let phase = |_| (0..vms).map(|_| lots.role(vms)).collect();
    (0..PHASES).map(phase).collect()
}

/// What a VM got in a window of ten seconds.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// Mean of the slowest twentieth of its requests' delays, ns; `None` for a VM that is no server.
    delay: Option<f64>,
    /// Run time, ns.
    work: f64,
}

/// The windows of each VM, by phase.
type Windows = Vec<Vec<Vec<Window>>>;

/// Sums up ticks to windows.
fn windows(ticks: &[Vec<Usage>], roles: &[Behaviour]) -> Vec<Vec<Window>> {
    let of_vm = |i: usize| {
        let window = |ticks: &[Vec<Usage>]| {
            let delays: Vec<Nanos> = ticks.iter().flat_map(|t| t[i].wakes.clone()).collect();
            let has_delay = is_server(roles[i]) && !delays.is_empty();
            Window {
                delay: has_delay.then(|| slowest_mean(delays).max(1_024.0)),
                work: ticks.iter().map(|t| t[i].run).sum::<Nanos>() as f64,
            }
        };
        ticks.chunks((WINDOW / TICK) as usize).map(window).collect()
    };
    (0..roles.len()).map(of_vm).collect()
}

/// Runs all phases in the classes that `classes` gives before each tick, from the host and the number of the phase.
fn run(
    roles: &[Vec<Behaviour>],
    seed: u64,
    mut classes: impl FnMut(usize, &[Usage]) -> Vec<bool>,
) -> Windows {
    let mut host = Host::new(&roles[0], MICROSLICE, seed);
    let mut got = vec![Usage::default(); roles[0].len()];
    let mut phase = |(p, roles): (usize, &Vec<Behaviour>)| {
        host.set_behaviours(roles);
        let mut tick = |_| {
            host.set_classes(&classes(p, &got));
            got = host.run(TICK).unwrap();
            got.clone()
        };
        let ticks: Vec<Vec<Usage>> = (0..PHASE / TICK).map(&mut tick).collect();
        windows(&ticks, roles)
    };
    roles.iter().enumerate().map(&mut phase).collect()
}

/// Mean of the delays of a VM's windows, ns.
fn mean_delay(windows: &[Window]) -> Option<f64> {
    let delays: Vec<f64> = windows.iter().filter_map(|w| w.delay).collect();
    (!delays.is_empty()).then(|| delays.iter().sum::<f64>() / delays.len() as f64)
}

/// The mean delay of windows as a multiple of that of others.
fn ratio(windows: &[Window], others: &[Window]) -> Option<f64> {
    Some(mean_delay(windows)? / mean_delay(others)?)
}

/// The best classes of a phase: of all sets of servers in class ls, the one with the shortest delays that takes no VM 2 % of its
/// run time.
fn best_classes(roles: &[Behaviour], seed: u64) -> Vec<bool> {
    let servers: Vec<usize> = (0..roles.len()).filter(|&i| is_server(roles[i])).collect();
    let try_set = |set: u64| {
        let is_ls = |i: usize| {
            let k = servers.iter().position(|&s| s == i);
            k.is_some_and(|k| set >> k & 1 == 1)
        };
        let ls: Vec<bool> = (0..roles.len()).map(is_ls).collect();
        let mut host = Host::new(roles, MICROSLICE, seed);
        host.set_classes(&ls);
        let ticks: Vec<Vec<Usage>> = (0..2 * WINDOW / TICK)
            .map(|_| host.run(TICK).unwrap())
            .collect();
        (ls, windows(&ticks, roles))
    };
    let (none, stock) = try_set(0);
    let score = |got: &[Vec<Window>]| -> Option<f64> {
        let work = |windows: &[Window]| windows.iter().map(|w| w.work).sum::<f64>();
        let mut pairs = got.iter().zip(&stock);
        if pairs.any(|(got, stock)| work(got) < 0.98 * work(stock)) {
            return None;
        }
        let logs = got.iter().zip(&stock).filter_map(|(g, s)| ratio(g, s));
        Some(logs.map(f64::ln).sum())
    };
    let mut best = (0.0, none);
    for set in 1..1_u64 << servers.len() {
        let (ls, got) = try_set(set);
        if let Some(score) = score(&got).filter(|s| *s < best.0) {
            best = (score, ls);
        }
    }
    best.1
}

/// What came of all hosts.
#[derive(Default, Debug)]
struct Total {
    /// Sums of how much shorter than on stock the delays were after the time to learn, by auto and by the best classes, ns.
    gain: (f64, f64),
    /// Windows in all, and those in which a VM got 5 % less or waited 5 % longer than on stock, under auto and on stock itself.
    windows: usize,
    worse: (usize, usize),
    /// Numbers of VMs and roles by how often class ls was tried for them, and by how often it was given or taken back.
    trials: BTreeMap<usize, usize>,
    outcomes: BTreeMap<usize, usize>,
}

impl Total {
    /// Whether a window is worse than those of a phase on stock together.
    fn is_worse(window: &Window, stock: &[Window]) -> bool {
        let mean = stock.iter().map(|w| w.work).sum::<f64>() / stock.len() as f64;
        let delay = ratio(std::slice::from_ref(window), stock);
        window.work < 0.95 * mean || delay.is_some_and(|ratio| ratio > 1.05)
    }
}

#[test]
fn hosts_whose_vms_change_roles_gain_and_nobody_is_worse_off() {
    let hosts = std::env::var("VIOLA_HOSTS").map_or(12, |n| n.parse().unwrap());
    let is_verbose = std::env::var_os("VIOLA_VERBOSE").is_some();
    let mut total = Total::default();
    for host in 0..hosts {
        let roles = roles(host);
        let stock = run(&roles, host, |_, _| vec![false; roles[0].len()]);
        let best: Vec<Vec<bool>> = (roles.iter()).map(|r| best_classes(r, host)).collect();
        let by_hand = run(&roles, host, |p, _| best[p].clone());
        let mut auto = Auto::new(roles[0].len());
        let by_auto = run(&roles, host, |p, got| {
            auto.tick(got, |vm| is_server(roles[p][vm]))
        });
        let before = (total.gain, total.worse);
        for p in 0..PHASES {
            let time = p as u64 * PHASE..(p as u64 + 1) * PHASE;
            for i in 0..roles[p].len() {
                let name = format!("vm{i}: ");
                let lines = auto.changes.iter().filter(|(at, _)| time.contains(at));
                let lines: Vec<_> = lines
                    .filter_map(|(_, line)| line.strip_prefix(&name))
                    .collect();
                let count = |is: fn(&&&str) -> bool| lines.iter().filter(is).count();
                let tried = count(|line| line.starts_with("tries"));
                *total.trials.entry(tried).or_default() += 1;
                let ended = |line: &&&str| line.starts_with("class") && line.contains("(auto):");
                *total.outcomes.entry(count(ended)).or_default() += 1;
                let (stock, hand, auto) = (&stock[p][i], &by_hand[p][i], &by_auto[p][i]);
                total.windows += auto.len();
                total.worse.0 += auto.iter().filter(|w| Total::is_worse(w, stock)).count();
                total.worse.1 += stock.iter().filter(|w| Total::is_worse(w, stock)).count();
                let late = (LEARNING / WINDOW) as usize;
                if best[p][i]
                    && let Some(stock) = mean_delay(stock)
                    && let Some(auto) = mean_delay(&auto[late..])
                    && let Some(hand) = mean_delay(&hand[late..])
                {
                    total.gain.0 += stock - auto;
                    total.gain.1 += stock - hand;
                }
            }
        }
        if is_verbose {
            let gain = (total.gain.0 - before.0.0, total.gain.1 - before.0.1);
            let worse = (total.worse.0 - before.1.0, total.worse.1 - before.1.1);
            println!("host {host}: gain {gain:.0?} worse {worse:?}\n  {roles:?}\n  {best:?}");
            for (at, line) in &auto.changes {
                println!("  {:>6.1} {line}", *at as f64 / S as f64);
            }
        }
    }
    let part = |windows: usize| windows as f64 / total.windows as f64;
    let (gain, worse, by_chance) = (
        total.gain.0 / total.gain.1,
        part(total.worse.0),
        part(total.worse.1),
    );
    println!(
        "{hosts} hosts: {:.1} % of the gain of the best classes; worse than stock in {:.2} % of {} windows, stock itself by \
         chance in {:.2} %; VMs in a role by number of trials: {:?}, of outcomes: {:?}",
        100.0 * gain,
        100.0 * worse,
        total.windows,
        100.0 * by_chance,
        total.trials,
        total.outcomes
    );
    let most = total.outcomes.keys().last();
    assert!(
        gain >= 0.9 && worse <= by_chance.max(0.01) && most <= Some(&2),
        "{total:?}"
    );
}

// SPDX-License-Identifier: Apache-2.0
//! Readings of all rounds, and their rows.

use std::collections::BTreeMap;
use std::time::Duration;

use viola_proto::Events;
use viola_report::stats::{Sorted, figure};

use super::roles::{NAMES, QUANTILES, Reading, Set, WAITING};
use crate::auto::{MINUTE, THREE_MINUTES, WINDOW, WINDOWS, changes};
use crate::harness::row::{Goal, Row};
/// Work that classes by hand must leave to those that compute, as a part of what they have on stock.
const MIN_WORK: f64 = 0.97;
/// The same of files, loaded or read from HDFS.
const MIN_FILES: f64 = 0.95;
/// A role gains by hand if its delay falls at least to this part.
const GAIN: f64 = 0.8;

/// The windows of a phase, with the time of their end.
#[derive(Debug, Default)]
pub struct Phase {
    windows: Vec<(Duration, Reading)>,
    /// Most outcomes of trials of a VM.
    changes: usize,
}

/// Figures of some windows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Figures {
    /// The delay of each waiting role, ms, at its quantile of [`QUANTILES`].
    delay: [f64; WAITING.len()],
    /// The longest one of a window.
    worst: [f64; WAITING.len()],
    /// MiB/s.
    files: f64,
    /// MiB/s.
    hdfs: f64,
    /// units/s.
    work: f64,
}

impl Figures {
    fn of<'a>(windows: impl IntoIterator<Item = &'a Reading>) -> Self {
        let windows: Vec<&Reading> = windows.into_iter().collect();
        let delay = |r: usize, samples: &Sorted| {
            let (quantile, _) = QUANTILES[r];
            samples.quantile(quantile).unwrap_or(f64::NAN)
        };
        let mean = |of: fn(&Reading) -> f64| {
            windows.iter().map(|w| of(w)).sum::<f64>() / windows.len() as f64
        };
        let roles: [usize; WAITING.len()] = std::array::from_fn(|role| role);
        Self {
            delay: roles.map(|r| delay(r, &Sorted::pooled(windows.iter().map(|w| &w.delays[r])))),
            worst: roles.map(|r| {
                let all = windows.iter().map(|w| delay(r, &w.delays[r]));
                all.fold(f64::NAN, f64::max)
            }),
            files: mean(|w| w.files),
            hdfs: mean(|w| w.hdfs),
            work: mean(|w| w.work),
        }
    }
}

impl Phase {
    /// Takes windows with the time of their end.
    pub fn new(windows: Vec<(Duration, Reading)>) -> Self {
        Self {
            windows,
            changes: 0,
        }
    }

    /// Takes the daemon's events since `begin_ms` (ms since 1970). Returns a line for each change of class.
    pub fn take_changes(&mut self, events: &Events, begin_ms: u64) -> Vec<String> {
        let mut by_vm = BTreeMap::<_, usize>::new();
        let mut lines = Vec::new();
        for event in changes(events)
            .into_iter()
            .filter(|event| event.at_ms >= begin_ms)
        {
            if event.what.starts_with("class ") {
                *by_vm.entry(&event.vm).or_default() += 1;
            }
            let seconds = (event.at_ms - begin_ms) / 1000;
            let vm = event.vm.as_deref().unwrap_or_default();
            lines.push(format!("{seconds} s: {vm}: {}", event.what));
        }
        self.changes = by_vm.into_values().max().unwrap_or(0);
        lines
    }

    /// A line of progress.
    pub fn text(&self) -> String {
        let late = self.after(THREE_MINUTES);
        let delays: Vec<String> = (0..WAITING.len())
            .map(|r| {
                format!(
                    "{}, {} {} ms",
                    NAMES[r],
                    QUANTILES[r].1,
                    figure(late.delay[r])
                )
            })
            .collect();
        format!(
            "after 3 min: {}; at most {} outcomes of trials per VM",
            delays.join("; "),
            self.changes
        )
    }

    /// The windows that began after a time.
    fn windows_after(&self, time: Duration) -> impl Iterator<Item = &Reading> {
        let windows = self.windows.iter();
        windows
            .filter(move |(end, _)| *end >= time + WINDOW)
            .map(|(_, reading)| reading)
    }

    fn after(&self, time: Duration) -> Figures {
        Figures::of(self.windows_after(time))
    }

    /// The first window that began after a time.
    fn at(&self, time: Duration) -> Figures {
        Figures::of(self.windows_after(time).take(1))
    }

    fn whole(&self) -> Figures {
        Figures::of(self.windows.iter().map(|(_, reading)| reading))
    }

    /// The worst delay of each so many windows after a time as the other sides have; the median of these.
    fn worst(&self, time: Duration, role: usize) -> f64 {
        let windows: Vec<&Reading> = self.windows_after(time).collect();
        let groups = windows.chunks_exact(WINDOWS);
        let worst = groups.map(|group| Figures::of(group.iter().copied()).worst[role]);
        let worst = Sorted::new(worst.collect());
        worst.median().unwrap_or(f64::NAN)
    }
}

/// The readings of all rounds, one entry for each phase of each round.
#[derive(Debug, Default)]
pub struct Measurements {
    pub stock: Vec<Phase>,
    /// By the guests that have class ls: all sets in the first round, the best one in all rounds.
    pub by_hand: BTreeMap<Set, Vec<Phase>>,
    /// The best set of the first round.
    pub best: Option<Set>,
    pub auto: Vec<Phase>,
}

impl Measurements {
    /// Chooses the set of guests whose class ls gives the shortest delays (by the mean of their logarithms), of those that take nobody
    /// too much. If each set takes somebody too much, chooses the one that takes least from those that compute.
    pub fn choose(&mut self) {
        let mean = |phases: &[Phase], of: &dyn Fn(&Figures) -> f64| {
            let figures = phases.iter().map(|phase| of(&phase.whole()));
            figures.sum::<f64>() / phases.len() as f64
        };
        let part = |phases: &[Phase], of: &dyn Fn(&Figures) -> f64| {
            mean(phases, of) / mean(&self.stock, of)
        };
        let log = |f: &Figures| f.delay.iter().map(|ms| ms.ln()).sum::<f64>();
        let rank = |phases: &[Phase]| {
            let work = part(phases, &|f| f.work);
            let files = part(phases, &|f| f.files);
            let hdfs = part(phases, &|f| f.hdfs);
            let costs = work < MIN_WORK || files < MIN_FILES || hdfs < MIN_FILES;
            match costs {
                true => (costs, -work),
                false => (costs, mean(phases, &log)),
            }
        };
        let ranked = self.by_hand.iter().map(|(set, all)| (*set, rank(all)));
        let best = ranked.min_by(|(_, a), (_, b)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        self.best = best.map(|(set, _)| set);
    }

    /// The phases with the best set.
    fn best_by_hand(&self) -> &[Phase] {
        let phases = self.best.and_then(|set| self.by_hand.get(&set));
        phases.map_or(&[][..], Vec::as_slice)
    }

    /// A row with a figure for each phase of each round.
    fn row(
        &self,
        what: String,
        unit: &'static str,
        fixed: impl Fn(&Phase) -> f64,
        auto: impl Fn(&Phase) -> f64,
    ) -> Row {
        let all = |phases: &[Phase], of: &dyn Fn(&Phase) -> f64| {
            let figures = phases.iter().map(of).filter(|figure| figure.is_finite());
            figures.collect::<Vec<_>>()
        };
        Row::new(what, unit)
            .side("stock", all(&self.stock, &fixed))
            .side("by hand", all(self.best_by_hand(), &fixed))
            .side("auto", all(&self.auto, &auto))
            .against("auto", "stock")
    }

    /// The part of the gain by hand that viola has not reached, percent, in the phases with a gain.
    fn missing(&self, role: usize, auto: impl Fn(&Phase) -> Figures) -> Vec<f64> {
        let phases = self.stock.iter().zip(self.best_by_hand());
        let missing = |((stock, hand), found): ((&Phase, &Phase), &Phase)| {
            let of = |figures: Figures| figures.delay[role];
            let (stock, hand, found) = (of(stock.whole()), of(hand.whole()), of(auto(found)));
            (hand < GAIN * stock && found.is_finite())
                .then(|| 100.0 * (found - hand) / (stock - hand))
        };
        phases.zip(&self.auto).filter_map(missing).collect()
    }

    /// The rows.
    pub fn rows(&self) -> Vec<Row> {
        let only = |what: String, unit, auto: Vec<f64>, most: f64| {
            let row = Row::new(what, unit).side("auto", auto);
            row.goal(Goal::FigureAtMost(most), "auto")
        };
        let mut rows = Vec::new();
        for (role, name) in NAMES.iter().enumerate() {
            let quantile = QUANTILES[role].1;
            let all = |phase: &Phase| phase.whole().delay[role];
            let late = |phase: &Phase| phase.after(THREE_MINUTES).delay[role];
            let row = self.row(format!("{name}, {quantile} after 3 min"), "ms", all, late);
            rows.push(row.goal(Goal::AtMost(1.05), "auto"));
            for (when, most, missing) in [
                ("1 min", 20.0, self.missing(role, |phase| phase.at(MINUTE))),
                (
                    "3 min",
                    10.0,
                    self.missing(role, |phase| phase.after(THREE_MINUTES)),
                ),
            ] {
                let what = format!("{name}, gain of the {quantile} that is missing after {when}");
                rows.push(only(what, "%", missing, most));
            }
            let what =
                format!("{name}, worst {quantile} of four times 10 s after the first minute");
            let fixed = |phase: &Phase| phase.whole().worst[role];
            let row = self.row(what, "ms", fixed, |phase| phase.worst(MINUTE, role));
            rows.push(row.goal(Goal::AtMost(1.05), "auto"));
        }
        let files = |phase: &Phase| phase.whole().files;
        let row = self.row("files of 1 MiB".into(), "MiB/s", files, files);
        rows.push(row.goal(Goal::AtLeast(MIN_FILES), "auto"));
        let hdfs = |phase: &Phase| phase.whole().hdfs;
        let row = self.row("files read from HDFS".into(), "MiB/s", hdfs, hdfs);
        rows.push(row.goal(Goal::AtLeast(MIN_FILES), "auto"));
        let work = |phase: &Phase| phase.whole().work;
        let row = self.row("work of those that compute".into(), "units/s", work, work);
        rows.push(row.goal(Goal::AtLeast(MIN_WORK), "auto"));
        let changes = self.auto.iter().map(|phase| phase.changes as f64);
        rows.push(only(
            "outcomes of trials of a VM in a role, the most".into(),
            "changes",
            changes.collect(),
            2.0,
        ));
        rows.retain(Row::is_measured);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::{Event, EventKind};

    fn phase(windows: u32, ms: impl Fn(u32) -> f64) -> Phase {
        let reading = |i| Reading {
            delays: std::array::from_fn(|role| Sorted::new(vec![ms(i) * (1 + role) as f64; 50])),
            files: 40.0,
            hdfs: f64::NAN,
            work: 900.0,
        };
        Phase::new((1..=windows).map(|i| (i * WINDOW, reading(i))).collect())
    }

    #[test]
    fn gains_are_parts_of_what_is_gained_by_hand() {
        let mut found = Measurements::default();
        found.stock.push(phase(4, |_| 10.0));
        let [pages, all] = [Set::all().next().unwrap(), Set::all().last().unwrap()];
        found.by_hand.insert(pages, vec![phase(2, |_| 2.0)]);
        // These are shorter, and cost the others too much.
        let mut costly = phase(2, |_| 1.0);
        costly.windows.iter_mut().for_each(|(_, w)| w.work = 850.0);
        found.by_hand.insert(all, vec![costly]);
        let mut auto = phase(24, |i| if i < 10 { 10.0 } else { 3.0 });
        let event = |at_ms, vm: &str, what: &str| Event {
            number: at_ms,
            at_ms,
            kind: EventKind::Change,
            vm: Some(vm.into()),
            what: what.into(),
        };
        let events = Events {
            pid: 1,
            events: vec![
                event(900, "uml:web", "class ls (auto): of the phase before"),
                event(1_000, "uml:web", "tries class ls (auto): 400 packets/s"),
                event(61_000, "uml:web", "class ls (auto): its delay is 0.2x"),
                event(95_000, "uml:vm2", "class batch (auto): no gain"),
                event(99_000, "uml:web", "class batch (auto): it is quiet"),
            ],
        };
        let lines = auto.take_changes(&events, 1_000);
        assert_eq!(lines.len(), 4);
        assert_eq!(
            lines[1],
            "60 s: uml:web: class ls (auto): its delay is 0.2x"
        );
        found.auto.push(auto);
        found.choose();
        assert_eq!(found.best, Some(pages));
        let rows = found.rows();
        let of = |name: &str| rows.iter().find(|row| row.name == name).unwrap();
        let missing = of("voice, gain of the p99 that is missing after 1 min");
        assert_eq!(
            (missing.median("auto"), missing.met),
            (Some(100.0), Some(false))
        );
        let missing = of("pages, gain of the p99 that is missing after 3 min");
        assert_eq!(
            (missing.median("auto"), missing.met),
            (Some(12.5), Some(false))
        );
        assert_eq!(of("calendar, p90 after 3 min").ratio, Some(0.3));
        let changes = of("outcomes of trials of a VM in a role, the most");
        assert_eq!(
            (changes.median("auto"), changes.met),
            (Some(2.0), Some(true))
        );
        assert_eq!(of("files of 1 MiB").ratio, Some(1.0));
        assert!(!rows.iter().any(|row| row.name.contains("HDFS")));
    }

    #[test]
    fn where_all_sets_cost_too_much_the_cheapest_one_is_the_best() {
        let mut found = Measurements::default();
        found.stock.push(phase(4, |_| 10.0));
        for (set, work) in Set::all().zip([800.0, 860.0, 850.0]) {
            let mut measured = phase(2, |_| work / 1000.0);
            measured.windows.iter_mut().for_each(|(_, w)| w.work = work);
            found.by_hand.insert(set, vec![measured]);
        }
        found.choose();
        assert_eq!(found.best, Set::all().nth(1));
    }

    #[test]
    fn a_role_without_a_gain_by_hand_has_none_that_is_missing() {
        let mut found = Measurements::default();
        found.stock.push(phase(4, |_| 10.0));
        let set = Set::all().next().unwrap();
        found.by_hand.insert(set, vec![phase(2, |_| 9.0)]);
        found.auto.push(phase(24, |_| 10.0));
        found.choose();
        assert!(!found.rows().iter().any(|row| row.name.contains("missing")));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Readings of all rounds, and their rows.

use std::collections::BTreeMap;
use std::time::Duration;

use viola_proto::Events;
use viola_report::stats::{Sorted, figure};

use super::roles::{NAMES, Reading, Set, WAITING};
use crate::auto::{MINUTE, THREE_MINUTES, WINDOW, WINDOWS, changes};
use crate::harness::row::{Goal, Row};
/// What those that compute, and loaded files, may lose by classes by hand, as parts of what they have on stock.
const LEAST: (f64, f64) = (0.97, 0.95);
/// A role gains by hand if its p99 falls at least to this part.
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
    /// The p99 of each waiting role, ms.
    p99: [f64; WAITING.len()],
    /// The longest p99 of a window.
    worst: [f64; WAITING.len()],
    /// MiB/s.
    files: f64,
    /// units/s.
    work: f64,
}

impl Figures {
    fn of<'a>(windows: impl IntoIterator<Item = &'a Reading>) -> Self {
        let windows: Vec<&Reading> = windows.into_iter().collect();
        let p99 = |samples: &Sorted| samples.quantile(0.99).unwrap_or(f64::NAN);
        let mean = |of: fn(&Reading) -> f64| {
            windows.iter().map(|w| of(w)).sum::<f64>() / windows.len() as f64
        };
        let roles: [usize; WAITING.len()] = std::array::from_fn(|role| role);
        Self {
            p99: roles.map(|r| p99(&Sorted::pooled(windows.iter().map(|w| &w.delays[r])))),
            worst: roles.map(|r| {
                let all = windows.iter().map(|w| p99(&w.delays[r]));
                all.fold(f64::NAN, f64::max)
            }),
            files: mean(|w| w.files),
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
        let p99: Vec<String> = std::iter::zip(NAMES, late.p99)
            .map(|(name, ms)| format!("{name} {} ms", figure(ms)))
            .collect();
        format!(
            "p99 after 3 min: {}; at most {} outcomes of trials per VM",
            p99.join(", "),
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

    /// The worst p99 of each so many windows after a time as the other sides have; the median of these.
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
    /// By the guests that have class ls.
    pub by_hand: BTreeMap<Set, Vec<Phase>>,
    pub auto: Vec<Phase>,
}

impl Measurements {
    /// The classes by hand with the shortest delays (by the mean of their logarithms), of those that take nobody too much.
    fn best(&self) -> Option<(Set, &[Phase])> {
        let mean = |phases: &[Phase], of: &dyn Fn(&Figures) -> f64| {
            let figures = phases.iter().map(|phase| of(&phase.whole()));
            figures.sum::<f64>() / phases.len() as f64
        };
        let log = |f: &Figures| f.p99.iter().map(|ms| ms.ln()).sum::<f64>();
        let allowed = self.by_hand.iter().filter(|(_, phases)| {
            let part = |of: &dyn Fn(&Figures) -> f64| mean(phases, of) / mean(&self.stock, of);
            part(&|f| f.work) >= LEAST.0 && part(&|f| f.files) >= LEAST.1
        });
        let best = allowed.min_by(|a, b| mean(a.1, &log).total_cmp(&mean(b.1, &log)));
        best.map(|(set, phases)| (*set, phases.as_slice()))
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
        let by_hand = self.best().map_or(&[][..], |(_, phases)| phases);
        Row::new(what, unit)
            .side("stock", all(&self.stock, &fixed))
            .side("by hand", all(by_hand, &fixed))
            .side("auto", all(&self.auto, &auto))
            .against("auto", "stock")
    }

    /// The part of the gain by hand that viola has not reached, percent, in the phases with a gain.
    fn missing(&self, role: usize, auto: impl Fn(&Phase) -> Figures) -> Vec<f64> {
        let by_hand = self.best().map_or(&[][..], |(_, phases)| phases);
        let phases = self.stock.iter().zip(by_hand).zip(&self.auto);
        let missing = |((stock, hand), found): ((&Phase, &Phase), &Phase)| {
            let p99 = |figures: Figures| figures.p99[role];
            let (stock, hand, found) = (p99(stock.whole()), p99(hand.whole()), p99(auto(found)));
            (hand < GAIN * stock && found.is_finite())
                .then(|| 100.0 * (found - hand) / (stock - hand))
        };
        phases.filter_map(missing).collect()
    }

    /// The rows.
    pub fn rows(&self) -> Vec<Row> {
        let only = |what: String, unit, auto: Vec<f64>, most: f64| {
            let row = Row::new(what, unit).side("auto", auto);
            row.goal(Goal::FigureAtMost(most), "auto")
        };
        let mut rows = Vec::new();
        for (role, name) in NAMES.iter().enumerate() {
            let p99 = |phase: &Phase| phase.whole().p99[role];
            let late = |phase: &Phase| phase.after(THREE_MINUTES).p99[role];
            let row = self.row(format!("{name}, p99 after 3 min"), "ms", p99, late);
            rows.push(row.goal(Goal::AtMost(1.05), "auto"));
            for (when, most, missing) in [
                ("1 min", 20.0, self.missing(role, |phase| phase.at(MINUTE))),
                (
                    "3 min",
                    10.0,
                    self.missing(role, |phase| phase.after(THREE_MINUTES)),
                ),
            ] {
                let what = format!("{name}, gain of the p99 that is missing after {when}");
                rows.push(only(what, "%", missing, most));
            }
            let what = format!("{name}, worst p99 of four times 10 s after the first minute");
            let fixed = |phase: &Phase| phase.whole().worst[role];
            let row = self.row(what, "ms", fixed, |phase| phase.worst(MINUTE, role));
            rows.push(row.goal(Goal::AtMost(1.05), "auto"));
        }
        let files = |phase: &Phase| phase.whole().files;
        let row = self.row("files of 1 MiB".into(), "MiB/s", files, files);
        rows.push(row.goal(Goal::AtLeast(LEAST.1), "auto"));
        let work = |phase: &Phase| phase.whole().work;
        let row = self.row("work of those that compute".into(), "units/s", work, work);
        rows.push(row.goal(Goal::AtLeast(LEAST.0), "auto"));
        for (set, phases) in &self.by_hand {
            let of = |what: &str, unit, of: &dyn Fn(&Figures) -> f64| {
                let all =
                    |phases: &[Phase]| phases.iter().map(|p| of(&p.whole())).collect::<Vec<_>>();
                Row::new(format!("class ls by hand for {set}: {what}"), unit)
                    .side("stock", all(&self.stock))
                    .side("by hand", all(phases))
                    .against("by hand", "stock")
            };
            rows.push(of("work of those that compute", "units/s", &|f| f.work));
            for (role, name) in NAMES.iter().enumerate() {
                rows.push(of(&format!("{name}, p99"), "ms", &|f| f.p99[role]));
            }
        }
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
        assert_eq!(found.best().unwrap().0, pages);
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
        assert_eq!(of("database, p99 after 3 min").ratio, Some(0.3));
        let changes = of("outcomes of trials of a VM in a role, the most");
        assert_eq!(
            (changes.median("auto"), changes.met),
            (Some(2.0), Some(true))
        );
        assert_eq!(of("files of 1 MiB").ratio, Some(1.0));
    }

    #[test]
    fn a_role_without_a_gain_by_hand_has_none_that_is_missing() {
        let mut found = Measurements::default();
        found.stock.push(phase(4, |_| 10.0));
        let set = Set::all().next().unwrap();
        found.by_hand.insert(set, vec![phase(2, |_| 9.0)]);
        found.auto.push(phase(24, |_| 10.0));
        assert!(!found.rows().iter().any(|row| row.name.contains("missing")));
    }
}

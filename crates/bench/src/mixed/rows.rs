// SPDX-License-Identifier: Apache-2.0
//! Readings of all rounds, and their rows.

use std::collections::BTreeMap;
use std::time::Duration;

use viola_proto::Events;
use viola_report::stats::{Sorted, figure};

use super::roles::{Reading, WAITING};
use super::{WINDOW, WINDOWS};
use crate::auto::{MINUTE, THREE_MINUTES, changes};
use crate::harness::row::{Goal, Row};
use crate::harness::side::Side;

/// Names of the roles that wait for packets, in the order of [`WAITING`].
const NAMES: [&str; WAITING.len()] = ["pages", "database", "voice"];
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

    /// Takes the daemon's events since `begin_ms` (ms since 1970).
    pub fn count_changes(&mut self, events: &Events, begin_ms: u64) {
        let mut by_vm = BTreeMap::<_, usize>::new();
        for event in changes(events) {
            if event.at_ms >= begin_ms && event.what.starts_with("class ") {
                *by_vm.entry(&event.vm).or_default() += 1;
            }
        }
        self.changes = by_vm.into_values().max().unwrap_or(0);
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
    stock: Vec<Phase>,
    by_hand: Vec<Phase>,
    auto: Vec<Phase>,
}

impl Measurements {
    /// Adds the phases of a round.
    pub fn add(&mut self, side: Side, phases: Vec<Phase>) {
        match side {
            Side::Stock => self.stock.extend(phases),
            Side::Auto => self.auto.extend(phases),
            _ => self.by_hand.extend(phases),
        }
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
            .side("by hand", all(&self.by_hand, &fixed))
            .side("auto", all(&self.auto, &auto))
            .against("auto", "stock")
    }

    /// The part of the gain by hand that viola has not reached, percent, in the phases with a gain.
    fn missing(&self, role: usize, auto: impl Fn(&Phase) -> Figures) -> Vec<f64> {
        let phases = self.stock.iter().zip(&self.by_hand).zip(&self.auto);
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
        rows.push(row.goal(Goal::AtLeast(0.95), "auto"));
        let work = |phase: &Phase| phase.whole().work;
        let row = self.row("work of those that compute".into(), "units/s", work, work);
        rows.push(row.goal(Goal::AtLeast(0.97), "auto"));
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
        found.add(Side::Stock, vec![phase(4, |_| 10.0)]);
        found.add(Side::Viola(300), vec![phase(4, |_| 2.0)]);
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
        auto.count_changes(&events, 1_000);
        found.add(Side::Auto, vec![auto]);
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
        found.add(Side::Stock, vec![phase(4, |_| 10.0)]);
        found.add(Side::Viola(300), vec![phase(4, |_| 9.0)]);
        found.add(Side::Auto, vec![phase(24, |_| 10.0)]);
        assert!(!found.rows().iter().any(|row| row.name.contains("missing")));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Readings of all rounds, and their rows.

use std::time::Duration;

use viola_proto::{Event, EventKind, Events};
use viola_report::stats::{Sorted, figure};

use super::SERVERS;
use crate::harness::load::LoadReading;
use crate::harness::row::{Goal, Row};
use crate::harness::side::Side;

/// After this time viola must have most of the gain, and no window may be worse than stock.
pub const MINUTE: Duration = Duration::from_secs(60);
/// After this time it must have nearly all of it.
pub const THREE_MINUTES: Duration = Duration::from_secs(180);

/// Name of a side in the rows.
pub fn name(side: Side) -> &'static str {
    match side {
        Side::Auto => "auto",
        Side::Stock => "stock",
        _ => "by hand",
    }
}

/// The changes of class among the daemon's events, oldest first.
pub fn changes(events: &Events) -> Vec<&Event> {
    let is_change = |event: &&Event| {
        let what = &event.what;
        let words = [
            "tries class",
            "class ls (auto",
            "class batch (auto",
            "ends its trial",
        ];
        event.kind == EventKind::Change && words.iter().any(|w| what.starts_with(w))
    };
    events.events.iter().filter(is_change).collect()
}

/// Latencies of a side in one round, ms, and the work of the others.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Figures {
    p50: f64,
    p99: f64,
    /// The longest p99 of a window.
    worst_p99: f64,
    work: f64,
}

impl Figures {
    /// All windows together.
    fn of<'a>(windows: impl IntoIterator<Item = &'a LoadReading>) -> Self {
        let windows: Vec<&LoadReading> = windows.into_iter().collect();
        let all = Sorted::pooled(windows.iter().map(|window| &window.latency));
        let work: f64 = windows.iter().filter_map(|window| window.batch_per_s).sum();
        let p99 = windows.iter().map(|window| window.latency.quantile(0.99));
        let worst_p99 = p99.flatten().fold(f64::NAN, f64::max);
        Self {
            worst_p99,
            p50: all.median().unwrap_or(f64::NAN),
            p99: all.quantile(0.99).unwrap_or(f64::NAN),
            work: work / windows.len() as f64,
        }
    }
}

/// One round in which viola chose.
#[derive(Debug)]
pub struct AutoReading {
    /// Windows with the time of their end.
    windows: Vec<(Duration, LoadReading)>,
    /// Number of changes that stayed or were taken back.
    outcomes: usize,
    /// When the last server got its class for good, s; `None` if not all did.
    complete_s: Option<f64>,
}

impl AutoReading {
    /// Takes the windows, and the daemon's events since `begin_ms` (ms since 1970).
    pub fn new(windows: Vec<(Duration, LoadReading)>, events: &Events, begin_ms: u64) -> Self {
        let changes = changes(events);
        let kept = changes.iter().filter(|e| e.what.starts_with("class ls"));
        let kept: Vec<f64> = kept
            .map(|e| e.at_ms.saturating_sub(begin_ms) as f64 / 1e3)
            .collect();
        let is_outcome = |e: &&&Event| e.what.starts_with("class ");
        Self {
            windows,
            outcomes: changes.iter().filter(is_outcome).count(),
            complete_s: kept.get(SERVERS - 1).copied(),
        }
    }

    /// A line of progress.
    pub fn text(&self) -> String {
        let complete = match self.complete_s {
            Some(s) => format!("both servers have class ls after {s:.0} s"),
            None => "not both servers got class ls".into(),
        };
        let p99 = match self.after(THREE_MINUTES).p99 {
            p99 if p99.is_finite() => format!("p99 {} ms", figure(p99)),
            _ => "no p99".into(),
        };
        format!("{complete}, {} outcomes, {p99} after 3 min", self.outcomes)
    }

    /// The windows that began after a time.
    fn windows_after(&self, time: Duration) -> impl Iterator<Item = &LoadReading> {
        let is_later = move |(end, _): &&(Duration, LoadReading)| *end >= time + super::WINDOW;
        self.windows
            .iter()
            .filter(is_later)
            .map(|(_, window)| window)
    }

    /// The figures of the windows that began after a time.
    fn after(&self, time: Duration) -> Figures {
        Figures::of(self.windows_after(time))
    }

    /// The figures of the first window that began after a time.
    fn at(&self, time: Duration) -> Figures {
        Figures::of(self.windows_after(time).take(1))
    }

    /// The worst p99 of each so many windows after a time as the other sides have; the median of these.
    fn worst_p99(&self, time: Duration) -> f64 {
        let windows: Vec<&LoadReading> = self.windows_after(time).collect();
        let groups = windows.chunks_exact(super::WINDOWS);
        let worst = groups.map(|group| Figures::of(group.iter().copied()).worst_p99);
        let worst = Sorted::new(worst.filter(|p99| p99.is_finite()).collect());
        worst.median().unwrap_or(f64::NAN)
    }

    fn whole(&self) -> Figures {
        Figures::of(self.windows.iter().map(|(_, window)| window))
    }
}

/// The readings of all rounds.
#[derive(Debug, Default)]
pub struct Measurements {
    stock: Vec<Figures>,
    by_hand: Vec<Figures>,
    /// Rounds in which viola chose.
    pub autos: Vec<AutoReading>,
    /// Changes while all guests computed.
    pub needless: Vec<f64>,
    /// Windows that were left out.
    pub refused: usize,
    /// Windows of the side that is being measured.
    windows: Vec<LoadReading>,
}

impl Measurements {
    /// Adds a window of a side that does not change.
    pub fn add(&mut self, reading: LoadReading) {
        self.windows.push(reading);
    }

    /// The windows of this round of the side are complete.
    pub fn end_round(&mut self, side: Side) {
        let figures = Figures::of(&std::mem::take(&mut self.windows));
        match side {
            Side::Stock => self.stock.push(figures),
            _ => self.by_hand.push(figures),
        }
    }

    /// The part of the gain by hand that viola has not reached, percent, by round.
    fn missing(
        &self,
        auto: impl Fn(&AutoReading) -> Figures,
        of: impl Fn(&Figures) -> f64,
    ) -> Vec<f64> {
        let rounds = self.stock.iter().zip(&self.by_hand).zip(&self.autos);
        let missing = |((stock, hand), found): ((&Figures, &Figures), &AutoReading)| {
            let (stock, hand, found) = (of(stock), of(hand), of(&auto(found)));
            100.0 * (found - hand) / (stock - hand)
        };
        rounds.map(missing).collect()
    }

    /// The rows.
    pub fn rows(&self) -> Vec<Row> {
        let row = |what: &str, unit, of: fn(&Figures) -> f64, auto: Vec<f64>| {
            let measured = |figures: &[Figures]| {
                let figures = figures.iter().map(of).filter(|figure| figure.is_finite());
                figures.collect::<Vec<_>>()
            };
            Row::new(what, unit)
                .side("stock", measured(&self.stock))
                .side("by hand", measured(&self.by_hand))
                .side("auto", auto.into_iter().filter(|figure| figure.is_finite()))
                .against("auto", "stock")
        };
        let autos =
            |of: &dyn Fn(&AutoReading) -> f64| self.autos.iter().map(of).collect::<Vec<_>>();
        let only = |what: &str, unit, auto: Vec<f64>, most: f64| {
            let measured = auto.into_iter().filter(|figure| figure.is_finite());
            let row = Row::new(what, unit).side("auto", measured);
            row.goal(Goal::FigureAtMost(most), "auto")
        };
        let p50 = |f: &Figures| f.p50;
        let p99 = |f: &Figures| f.p99;
        let late = |of: fn(&Figures) -> f64| autos(&|a| of(&a.after(THREE_MINUTES)));
        let complete: Vec<f64> = self.autos.iter().filter_map(|a| a.complete_s).collect();
        let incomplete = self.autos.iter().filter(|a| a.complete_s.is_none()).count();
        let mut rows = vec![
            row("HTTP p50, after 3 min", "ms", p50, late(p50)).goal(Goal::AtMost(0.8), "auto"),
            row("HTTP p99, after 3 min", "ms", p99, late(p99))
                .goal(Goal::AtMost(1.0 / 3.0), "auto"),
        ];
        for (what, of) in [("p50", p50 as fn(&Figures) -> f64), ("p99", p99)] {
            let minute = self.missing(|a| a.at(MINUTE), of);
            let later = self.missing(|a| a.after(THREE_MINUTES), of);
            let name = |when: &str| format!("gain of the {what} that is missing after {when}");
            rows.push(only(&name("1 min"), "%", minute, 20.0));
            rows.push(only(&name("3 min"), "%", later, 10.0));
        }
        let worst = autos(&|a| a.worst_p99(MINUTE));
        let work = autos(&|a| a.whole().work);
        rows.extend([
            row(
                "HTTP p99, the worst of four times 10 s after the first minute",
                "ms",
                |f| f.worst_p99,
                worst,
            )
            .goal(Goal::AtMost(1.05), "auto"),
            row("work of the others", "units/s", |f| f.work, work)
                .goal(Goal::AtLeast(0.97), "auto"),
            only(
                "time until both servers have class ls",
                "s",
                complete,
                180.0,
            ),
            only(
                "rounds in which not both servers got class ls",
                "rounds",
                vec![incomplete as f64],
                0.0,
            ),
            only(
                "outcomes of trials, two servers",
                "changes",
                autos(&|a| a.outcomes as f64),
                2.0 * SERVERS as f64,
            ),
            only(
                "changes in 30 s while all guests compute",
                "changes",
                self.needless.clone(),
                0.0,
            ),
        ]);
        rows.retain(Row::is_measured);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(ms: f64) -> LoadReading {
        LoadReading {
            latency: Sorted::new(vec![ms; 100]),
            batch_per_s: Some(1000.0),
            ..LoadReading::default()
        }
    }

    fn event(at_ms: u64, what: &str) -> Event {
        Event {
            number: at_ms,
            at_ms,
            kind: EventKind::Change,
            vm: Some("uml:web".into()),
            what: what.into(),
        }
    }

    #[test]
    fn gains_are_parts_of_what_is_gained_by_hand() {
        let mut found = Measurements::default();
        for (side, ms) in [(Side::Stock, 10.0), (Side::Viola(300), 2.0)] {
            found.add(window(ms));
            found.end_round(side);
        }
        let windows = (1..=24).map(|i| {
            let ms = if i < 10 { 10.0 } else { 3.0 };
            (Duration::from_secs(10 * i), window(ms))
        });
        let events = Events {
            pid: 1,
            events: vec![
                event(1_000, "tries class ls (auto): 400 packets/s"),
                event(61_000, "class ls (auto): its delay is 0.2x"),
                event(62_000, "core 1: slots on, since web is latency-sensitive"),
                event(95_000, "class ls (auto): its delay is 0.3x"),
            ],
        };
        found
            .autos
            .push(AutoReading::new(windows.collect(), &events, 1_000));
        found.needless.push(0.0);
        let rows = found.rows();
        let of = |name: &str| rows.iter().find(|row| row.name == name).unwrap();
        let missing = of("gain of the p99 that is missing after 1 min");
        assert_eq!(
            (missing.median("auto"), missing.met),
            (Some(100.0), Some(false))
        );
        let missing = of("gain of the p99 that is missing after 3 min");
        assert_eq!(
            (missing.median("auto"), missing.met),
            (Some(12.5), Some(false))
        );
        assert_eq!(of("HTTP p50, after 3 min").ratio, Some(0.3));
        assert_eq!(
            of("HTTP p99, the worst of four times 10 s after the first minute").ratio,
            Some(0.3)
        );
        let time = of("time until both servers have class ls");
        assert_eq!((time.median("auto"), time.met), (Some(94.0), Some(true)));
        assert_eq!(
            of("outcomes of trials, two servers").median("auto"),
            Some(2.0)
        );
        assert_eq!(
            of("changes in 30 s while all guests compute").met,
            Some(true)
        );
        assert_eq!(of("work of the others").ratio, Some(1.0));
    }
}

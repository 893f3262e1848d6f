// SPDX-License-Identifier: Apache-2.0
//! Rows of the groups: every figure, every microslice, and the goals (issues "viola stands up" and 23, Bars). Every
//! latency has a goal, also where stock is expected to win.

use std::collections::BTreeMap;

use super::plan::{Group, MICROSLICES, Plan, State};
use crate::harness::cell::{Reading, fair_shares, points_from};
use crate::harness::row::{Goal, Row};
use crate::harness::side::{Side, slice};
use viola_report::stats::Sorted;

/// Readings by cell and round.
#[derive(Debug, Default)]
pub struct Readings {
    cells: BTreeMap<(Group, State, Side), Vec<Reading>>,
    /// Readings of the guest alone on its core, by number of guests in the lab.
    alone: BTreeMap<usize, Vec<Reading>>,
}

/// Selects a figure of a reading.
type Figure = fn(&Reading) -> Option<f64>;

/// A latency, with its goals: the largest ratio to stock while the LSVM is busy, and while it is
/// idle.
struct Latency {
    name: &'static str,
    figure: Figure,
    busy: f64,
    idle: f64,
    /// Whether it is also compared with the papers' slices and with the guest alone.
    is_compared: bool,
}

const fn latency(name: &'static str, figure: Figure, busy: f64, idle: f64) -> Latency {
    Latency {
        name,
        figure,
        busy,
        idle,
        is_compared: true,
    }
}

/// A closed loop wants more than the guest's share. Stock lets it run ahead of its share and may
/// win a little, so the goal is a ratio of `most`, which may be above 1.
const fn above_share(name: &'static str, figure: Figure, most: f64) -> Latency {
    Latency {
        is_compared: false,
        ..latency(name, figure, most, most)
    }
}

/// The load of the HTTP figures in rows.
const CLOSED_LOOP: &str = "closed loop 1, no keep-alive";
const LATENCIES: [Latency; 7] = [
    latency("ping p50", |r| r.ping.median(), 0.125, 1.1),
    latency(
        "ping p99",
        |r| r.ping.quantile(0.99),
        1.0 / 12.0,
        1.0 / 15.0,
    ),
    latency("TCP_RR p50", |r| r.rr.median(), 0.125, 1.1),
    latency(
        "TCP_RR p99",
        |r| r.rr.quantile(0.99),
        1.0 / 12.0,
        1.0 / 15.0,
    ),
    above_share("HTTP p50", |r| r.http.median(), 1.2),
    above_share("HTTP p90", |r| r.http.quantile(0.9), 1.3),
    above_share("HTTP p99", |r| r.http.quantile(0.99), 0.7),
];

/// Names of the sides in rows.
const STOCK: &str = "stock";
const STOCK_TIMES_4: &str = "stock, 4x weight";
const CREDIT: &str = "30 ms slices";
const VIOLA: &str = "viola";
const ALONE: &str = "alone";

impl Readings {
    /// Adds a reading of a cell.
    pub fn add(&mut self, group: Group, state: State, side: Side, reading: Reading) {
        self.cells
            .entry((group, state, side))
            .or_default()
            .push(reading);
    }

    /// Adds a reading of the guest alone on its core.
    pub fn add_alone(&mut self, vms: usize, reading: Reading) {
        self.alone.entry(vms).or_default().push(reading);
    }

    /// All readings of a cell.
    pub fn readings(&self) -> impl Iterator<Item = &Reading> {
        self.cells.values().flatten()
    }

    /// All rows.
    pub fn rows(&self, plan: &Plan) -> Vec<Row> {
        let mut rows = Vec::new();
        for (group, states) in &plan.groups {
            for state in states {
                for us in MICROSLICES {
                    let sides = group.sides(plan.quick);
                    if sides.contains(&Side::Viola(us)) {
                        let has_credit = sides.contains(&Side::Credit);
                        self.latencies(&mut rows, (*group, *state, us), has_credit);
                        self.costs(&mut rows, *group, *state, us);
                    }
                }
            }
        }
        rows.retain(Row::is_measured);
        rows
    }

    fn of(&self, group: Group, state: State, side: Side) -> &[Reading] {
        self.cells
            .get(&(group, state, side))
            .map_or(&[], Vec::as_slice)
    }

    /// A row with all sides, without ratio and goal.
    fn row(&self, name: &str, unit: &'static str, at: (Group, State, u32), figure: Figure) -> Row {
        let each = |readings: &[Reading]| readings.iter().filter_map(figure).collect();
        self.row_of(name, unit, at, &each)
    }

    /// The same, where the figures of a side come from all its readings together.
    fn row_of(
        &self,
        name: &str,
        unit: &'static str,
        (group, state, us): (Group, State, u32),
        figures: &dyn Fn(&[Reading]) -> Vec<f64>,
    ) -> Row {
        let of = |side: Side| figures(self.of(group, state, side));
        let name = match name.starts_with("HTTP") {
            true => format!("{name}, {CLOSED_LOOP}"),
            false => name.to_owned(),
        };
        let name = format!("{name}, {}, {}, {}", state.name(), group.name(), slice(us));
        let mut row = Row::new(name, unit)
            .side(STOCK, of(Side::Stock))
            .side(STOCK_TIMES_4, of(Side::StockTimes4))
            .side(CREDIT, of(Side::Credit))
            .side(VIOLA, of(Side::Viola(us)));
        if state == State::Idle {
            let alone = self.alone.get(&group.vms).map_or(&[][..], Vec::as_slice);
            row = row.side(ALONE, figures(alone));
        }
        row
    }

    fn latencies(&self, rows: &mut Vec<Row>, at: (Group, State, u32), has_credit: bool) {
        let state = at.1;
        for latency in &LATENCIES {
            let against = |base: &str, suffix: &str, most: f64| {
                let name = format!("{}{suffix}", latency.name);
                let row = self.row(&name, "ms", at, latency.figure);
                row.against(VIOLA, base).goal(Goal::AtMost(most), VIOLA)
            };
            let most = match state {
                State::Busy => latency.busy,
                State::Idle => latency.idle,
            };
            rows.push(against(STOCK, "", most));
            let p50 = latency.name.ends_with("p50");
            if latency.is_compared && has_credit && state == State::Busy && p50 {
                rows.push(against(CREDIT, " against 30 ms slices", 1.0 / 30.0));
            }
            if latency.is_compared && state == State::Idle && !p50 {
                rows.push(against(ALONE, " against alone", 1.5));
            }
        }
        // A round has too few requests for this one.
        let pooled = |readings: &[Reading]| -> Vec<f64> {
            let all = Sorted::pooled(readings.iter().map(|r| &r.http));
            all.quantile(0.999).into_iter().collect()
        };
        let row = self.row_of("HTTP p99.9", "ms", at, &pooled);
        rows.push(row.against(VIOLA, STOCK).goal(Goal::AtMost(0.9), VIOLA));
    }

    fn costs(&self, rows: &mut Vec<Row>, group: Group, state: State, us: u32) {
        let at = (group, state, us);
        let row = |name: &str, unit, figure: Figure| self.row(name, unit, at, figure);
        rows.push(
            row("HTTP requests", "1/s", |r| Some(r.http_per_s))
                .against(VIOLA, STOCK)
                .goal(Goal::AtLeast(0.98), VIOLA),
        );
        let least = match us {
            1000 => 0.98,
            300 => 0.97,
            _ => 0.94,
        };
        rows.push(
            row("batch throughput of the others", "units/s", |r| {
                r.batch_per_s
            })
            .against(VIOLA, STOCK)
            .goal(Goal::AtLeast(least), VIOLA),
        );
        if state == State::Busy {
            rows.push(
                row("largest distance from a fair share", "points", |r| {
                    let equal =
                        fair_shares(&vec![1.0; r.shares.len()], &vec![None; r.shares.len()]);
                    Some(points_from(&equal, &r.shares))
                })
                .goal(Goal::FigureAtMost(1.0), VIOLA),
            );
        }
        let controller = row("controller", "% of the core", |r| {
            Some(r.controller * 100.0)
        })
        .only(&[CREDIT, VIOLA]);
        rows.push(match us {
            300 => controller.goal(Goal::FigureAtMost(2.0), VIOLA),
            _ => controller,
        });
        rows.push(
            row("context switches of the guests", "1/s", |r| {
                Some(r.switches_per_s)
            })
            .against(VIOLA, STOCK),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Group = Group { vms: 4, duty: 100 };

    fn reading(ms: f64, batch: f64) -> Reading {
        Reading {
            ping: Sorted::new(vec![ms; 10]),
            rr: Sorted::new(vec![ms; 10]),
            http: Sorted::new(vec![ms * 2.0; 10]),
            http_per_s: 1000.0 / ms,
            shares: vec![0.25, 0.25, 0.242, 0.25],
            batch_per_s: Some(batch),
            controller: 0.012,
            ..Reading::default()
        }
    }

    fn rows() -> Vec<Row> {
        let mut cells = Readings::default();
        for state in [State::Busy, State::Idle] {
            cells.add(GROUP, state, Side::Stock, reading(4.0, 100.0));
            cells.add(GROUP, state, Side::Credit, reading(30.0, 101.0));
            cells.add(GROUP, state, Side::Viola(300), reading(0.4, 98.0));
        }
        cells.add_alone(4, reading(0.3, 0.0));
        cells.rows(&Plan::new(1, false, Some("4 VMs, others 100 %")))
    }

    fn find<'a>(rows: &'a [Row], name: &str) -> &'a Row {
        rows.iter()
            .find(|r| r.name == name)
            .unwrap_or_else(|| panic!("no row {name}"))
    }

    #[test]
    fn a_busy_lsvm_is_compared_with_stock_and_30_ms_slices() {
        let rows = rows();
        let p50 = find(&rows, "ping p50, LSVM busy, 4 VMs, others 100 %, 0.3 ms");
        assert_eq!(
            (p50.goal.as_deref(), p50.met),
            (Some("<= 0.125"), Some(true))
        );
        let p99 = find(&rows, "TCP_RR p99, LSVM busy, 4 VMs, others 100 %, 0.3 ms");
        assert_eq!(
            (p99.goal.as_deref(), p99.met),
            (Some("<= 0.0833"), Some(false))
        );
        let papers = find(
            &rows,
            "ping p50 against 30 ms slices, LSVM busy, 4 VMs, others 100 %, 0.3 ms",
        );
        assert_eq!(
            (papers.goal.as_deref(), papers.met),
            (Some("<= 0.0333"), Some(true))
        );
    }

    #[test]
    fn an_idle_lsvm_is_compared_with_running_alone() {
        let rows = rows();
        let row = find(
            &rows,
            "ping p99 against alone, LSVM idle, 4 VMs, others 100 %, 0.3 ms",
        );
        assert_eq!((row.goal.as_deref(), row.met), (Some("<= 1.5"), Some(true)));
        assert!(row.median("alone").is_some());
        let busy = find(&rows, "ping p99, LSVM busy, 4 VMs, others 100 %, 0.3 ms");
        assert!(busy.median("alone").is_none());
    }

    #[test]
    fn goals_check_the_others_throughput_and_all_shares() {
        let rows = rows();
        let batch = find(
            &rows,
            "batch throughput of the others, LSVM busy, 4 VMs, others 100 %, 0.3 ms",
        );
        assert_eq!(
            (batch.goal.as_deref(), batch.met),
            (Some(">= 0.97"), Some(true))
        );
        let share = find(
            &rows,
            "largest distance from a fair share, LSVM busy, 4 VMs, others 100 %, 0.3 ms",
        );
        assert_eq!((share.ratio, share.met), (None, Some(true)));
        let http = find(
            &rows,
            "HTTP p99, closed loop 1, no keep-alive, LSVM idle, 4 VMs, others 100 %, 0.3 ms",
        );
        assert_eq!(
            (http.goal.as_deref(), http.met),
            (Some("<= 0.7"), Some(true))
        );
        let controller = find(&rows, "controller, LSVM busy, 4 VMs, others 100 %, 0.3 ms");
        assert_eq!(
            (controller.goal.as_deref(), controller.met),
            (Some("figure <= 2"), Some(true))
        );
        assert!(controller.median("stock").is_none());
    }

    #[test]
    fn every_latency_has_a_goal_with_every_microslice() {
        let mut cells = Readings::default();
        let plan = Plan::new(1, false, Some("pings"));
        for (group, states) in &plan.groups {
            for state in states {
                for side in group.sides(false) {
                    cells.add(*group, *state, *side, reading(1.0, 100.0));
                }
            }
            cells.add_alone(group.vms, reading(0.3, 0.0));
        }
        let rows = cells.rows(&plan);
        assert!(rows.iter().any(|row| row.name.ends_with(", 1 ms")));
        for row in rows.iter().filter(|row| row.unit == "ms") {
            assert!(row.met.is_some(), "{}", row.name);
        }
    }

    #[test]
    fn rows_without_data_have_no_verdict() {
        let row = rows()
            .into_iter()
            .find(|r| r.name.starts_with("ping p50, LSVM busy") && r.name.ends_with("0.1 ms"));
        assert_eq!(row.and_then(|r| r.met), None);
    }
}

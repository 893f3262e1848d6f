// SPDX-License-Identifier: Apache-2.0
//! Rows from readings: every figure, every microslice, and the goals (issue "viola stands up", Bars).

use std::collections::BTreeMap;

use super::plan::{Group, MICROSLICES, Plan, State};
use crate::harness::cell::{Reading, fair_shares, points_from};
use crate::harness::row::{Goal, Row};
use crate::harness::side::{Side, slice};

/// Readings by cell and round.
#[derive(Debug, Default)]
pub struct Readings {
    cells: BTreeMap<(Group, State, Side), Vec<Reading>>,
    /// Readings of the guest alone on its core, by number of guests in the lab.
    alone: BTreeMap<usize, Vec<Reading>>,
}

/// Selects a figure of a reading.
type Figure = fn(&Reading) -> Option<f64>;

/// Latencies and their quantiles.
const LATENCIES: [(&str, Figure, bool); 6] = [
    ("ping p50", |r| r.ping.median(), true),
    ("ping p99", |r| r.ping.quantile(0.99), true),
    ("TCP_RR p50", |r| r.rr.median(), true),
    ("TCP_RR p99", |r| r.rr.quantile(0.99), true),
    ("HTTP p50", |r| r.http.median(), false),
    ("HTTP p99", |r| r.http.quantile(0.99), false),
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
                    self.latencies(&mut rows, *group, *state, us);
                    self.costs(&mut rows, *group, *state, us);
                }
            }
        }
        rows.retain(Row::is_measured);
        rows
    }

    /// A row with all sides, without ratio and goal.
    fn row(&self, name: &str, unit: &'static str, at: (Group, State, u32), figure: Figure) -> Row {
        let (group, state, us) = at;
        let of = |side: Side| {
            let readings = self
                .cells
                .get(&(group, state, side))
                .map_or(&[][..], Vec::as_slice);
            readings.iter().filter_map(figure).collect::<Vec<f64>>()
        };
        let name = format!("{name}, {}, {}, {}", state.name(), group.name(), slice(us));
        let mut row = Row::new(name, unit)
            .side(STOCK, of(Side::Stock))
            .side(STOCK_TIMES_4, of(Side::StockTimes4))
            .side(CREDIT, of(Side::Credit))
            .side(VIOLA, of(Side::Viola(us)));
        if state == State::Idle {
            let alone = self.alone.get(&group.vms).map_or(&[][..], Vec::as_slice);
            row = row.side(ALONE, alone.iter().filter_map(figure));
        }
        row
    }

    fn latencies(&self, rows: &mut Vec<Row>, group: Group, state: State, us: u32) {
        for (name, figure, has_goal) in LATENCIES {
            let at = (group, state, us);
            let against = |base: &str, suffix: &str| {
                self.row(&format!("{name}{suffix}"), "ms", at, figure)
                    .against(VIOLA, base)
            };
            let with = |row: Row, goal: Option<Goal>| match goal {
                Some(goal) => row.goal(goal, VIOLA),
                None => row,
            };
            let p50 = name.ends_with("p50");
            // A microslice of 1 ms trades latency for less overhead, so these goals do not apply.
            let short = us <= 300;
            let stock = match (state, p50) {
                _ if !has_goal => None,
                (State::Busy, true) => short.then_some(Goal::AtMost(0.125)),
                (State::Busy, false) => short.then_some(Goal::AtMost(1.0 / 12.0)),
                (State::Idle, true) => Some(Goal::AtMost(1.1)),
                (State::Idle, false) => Some(Goal::AtMost(1.0 / 15.0)),
            };
            rows.push(with(against(STOCK, ""), stock));
            if has_goal && state == State::Busy && p50 {
                rows.push(with(
                    against(CREDIT, " against 30 ms slices"),
                    short.then_some(Goal::AtMost(1.0 / 30.0)),
                ));
            }
            if has_goal && state == State::Idle && !p50 {
                rows.push(with(
                    against(ALONE, " against alone"),
                    Some(Goal::AtMost(1.5)),
                ));
            }
        }
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
    use viola_report::stats::Sorted;

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
        cells.rows(&Plan::new(1, true, Some("4 VMs, others 100 %")))
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
        let controller = find(&rows, "controller, LSVM busy, 4 VMs, others 100 %, 0.3 ms");
        assert_eq!(
            (controller.goal.as_deref(), controller.met),
            (Some("figure <= 2"), Some(true))
        );
        assert!(controller.median("stock").is_none());
    }

    #[test]
    fn rows_without_data_have_no_verdict() {
        let row = rows()
            .into_iter()
            .find(|r| r.name.starts_with("ping p50, LSVM busy") && r.name.ends_with("0.1 ms"));
        assert_eq!(row.and_then(|r| r.met), None);
    }
}

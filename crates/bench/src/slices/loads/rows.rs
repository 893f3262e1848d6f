// SPDX-License-Identifier: Apache-2.0
//! Rows of the HTTP loads, with the goals of issue 23.

use std::collections::BTreeMap;

use super::cells::{Bed, Cell, Setting, state};
use crate::harness::cell::points_from;
use crate::harness::guests::OwnWork;
use crate::harness::load::{Capacity, Load, LoadReading};
use crate::harness::row::{Goal, Row};
use crate::harness::side::slice;
use viola_report::stats::Sorted;

/// Side of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoadSide {
    /// Stock scheduling.
    Stock,
    /// viola with the default microslice.
    Viola,
    /// Stock scheduling, and the neighbours rest.
    Alone,
}

impl LoadSide {
    /// Name in rows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Viola => "viola",
            Self::Alone => "alone",
        }
    }
}

const STOCK: &str = LoadSide::Stock.name();
const VIOLA: &str = LoadSide::Viola.name();
const SIDES: [LoadSide; 3] = [LoadSide::Stock, LoadSide::Viola, LoadSide::Alone];

/// Readings of all loads.
#[derive(Debug, Default)]
pub struct LoadReadings {
    cells: BTreeMap<(Cell, LoadSide), Vec<LoadReading>>,
    /// What a core serves, once it is measured.
    pub capacity: Option<Capacity>,
    /// What each of these guests serves on stock beside its neighbours in each round so far, requests/s.
    pub served: BTreeMap<(Bed, OwnWork), Vec<f64>>,
    /// Number of loads that were refused because the generator was late.
    pub refused: usize,
}

/// A quantile of the latency with its name and goals: inside the share, and above it.
const QUANTILES: [(&str, f64, f64, f64); 4] = [
    ("p50", 0.5, 0.8, 1.2),
    ("p90", 0.9, 0.8, 1.3),
    ("p99", 0.99, 1.0 / 3.0, 0.7),
    (P999, 0.999, 1.0 / 3.0, 0.9),
];
/// Quantile for which a round has too few requests; the requests of all rounds count together.
const P999: &str = "p99.9";
/// Beside a program in user space, figures up to this many times those of the guest alone are good too.
const NEAR_ALONE: f64 = 1.2;

/// Goal of a closed loop: the smallest ratio of answers per second to stock's. With many
/// connections stock serves them in larger batches.
fn least_answers(load: Load) -> f64 {
    match load {
        Load::Closed {
            connections: 16.., ..
        } => 0.95,
        _ => 0.98,
    }
}

impl LoadReadings {
    /// Adds a reading.
    pub fn add(&mut self, cell: Cell, side: LoadSide, reading: LoadReading) {
        self.cells.entry((cell, side)).or_default().push(reading);
    }

    fn of(&self, cell: Cell, side: LoadSide) -> &[LoadReading] {
        self.cells.get(&(cell, side)).map_or(&[], Vec::as_slice)
    }

    /// Rows of these cells.
    pub fn rows(&self, cells: &[Cell], microslice: u32) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        for cell in cells {
            self.latencies(&mut rows, *cell, microslice);
            self.costs(&mut rows, *cell, microslice);
        }
        rows.retain(Row::is_measured);
        if rows.is_empty() {
            return rows;
        }
        let capacity = self.capacity.map(|capacity| capacity.0);
        let name = "HTTP requests that a core serves, closed loop 1, keep-alive";
        rows.push(Row::new(name, "1/s").side(STOCK, capacity));
        for ((bed, own), served) in &self.served {
            let (state, bed) = (state(*own), bed.name());
            let name = format!("HTTP requests that its share serves, {state}, {bed}");
            rows.push(Row::new(name, "1/s").side(STOCK, served.iter().copied()));
        }
        let late = |side| {
            let of_side = self.cells.iter().filter(move |((_, s), _)| *s == side);
            let late = of_side.flat_map(|(_, readings)| readings.iter().map(|r| r.late_p99));
            late.reduce(f64::max)
        };
        let name = "lateness of the load generator p99, worst open loop";
        let row = SIDES.iter().fold(Row::new(name, "ms"), |row, side| {
            row.side(side.name(), late(*side))
        });
        rows.push(row);
        rows.retain(Row::is_measured);
        rows
    }

    fn row(
        &self,
        what: &str,
        unit: &'static str,
        (cell, microslice): (Cell, u32),
        figures: &dyn Fn(&[LoadReading]) -> Vec<f64>,
    ) -> Row {
        let name = format!("{what}, {}, {}", cell.name(), slice(microslice));
        SIDES.iter().fold(Row::new(name, unit), |row, side| {
            row.side(side.name(), figures(self.of(cell, *side)))
        })
    }

    fn latencies(&self, rows: &mut Vec<Row>, cell: Cell, microslice: u32) {
        for (name, q, inside, above) in QUANTILES {
            let figures = |readings: &[LoadReading]| -> Vec<f64> {
                if name == P999 {
                    let all = Sorted::pooled(readings.iter().map(|r| &r.latency));
                    return all.quantile(q).into_iter().collect();
                }
                readings
                    .iter()
                    .filter_map(|r| r.latency.quantile(q))
                    .collect()
            };
            let row = self.row(&format!("HTTP {name}"), "ms", (cell, microslice), &figures);
            let goal = match cell.load.is_inside() {
                true if cell.is_limited_by_guest() => Goal::AtMostOrNear {
                    ratio: inside,
                    side: LoadSide::Alone.name(),
                    times: NEAR_ALONE,
                },
                true => Goal::AtMost(inside),
                false => Goal::AtMost(above),
            };
            rows.push(row.against(VIOLA, STOCK).goal(goal, VIOLA));
        }
    }

    fn costs(&self, rows: &mut Vec<Row>, cell: Cell, microslice: u32) {
        let at = (cell, microslice);
        let each = |of: &dyn Fn(&LoadReading) -> Option<f64>, readings: &[LoadReading]| {
            readings.iter().filter_map(of).collect::<Vec<f64>>()
        };
        let answers = self.row("HTTP requests", "1/s", at, &|readings| {
            each(&|r| Some(r.answered_per_s), readings)
        });
        let least = Goal::AtLeast(least_answers(cell.load));
        rows.push(answers.against(VIOLA, STOCK).goal(least, VIOLA));
        let has_open = |side| self.of(cell, side).iter().any(|r| r.open > 0);
        if SIDES.into_iter().any(has_open) {
            let name = "HTTP requests without an answer at the end";
            rows.push(self.row(name, "requests", at, &|readings| {
                each(&|r| Some(r.open as f64), readings)
            }));
        }
        let batch = self.row("batch throughput of the others", "units/s", at, &|r| {
            each(&|r| r.batch_per_s, r)
        });
        let batch = batch.against(VIOLA, STOCK);
        rows.push(batch.goal(Goal::AtLeast(0.97), VIOLA));
        if cell.is_saturated() && cell.bed.setting != Setting::TwoCores {
            let fair = cell.bed.fair_shares();
            let name = "largest distance from a fair share";
            let row = self.row(name, "points", at, &|readings| {
                each(&|r| Some(points_from(&fair, &r.shares)), readings)
            });
            let row = row.only(&[STOCK, VIOLA]);
            rows.push(row.goal(Goal::FigureAtMost(1.0), VIOLA));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cells::cells;
    use super::*;

    fn reading(ms: f64, answered_per_s: f64) -> LoadReading {
        LoadReading {
            // one in a hundred is ten times as slow
            latency: Sorted::new(
                (0..1000)
                    .map(|k| if k % 50 == 0 { ms * 10.0 } else { ms })
                    .collect(),
            ),
            answered_per_s,
            late_p99: 0.01,
            shares: vec![0.25; 4],
            batch_per_s: Some(1000.0),
            ..LoadReading::default()
        }
    }

    fn cell(own: OwnWork, load: Load) -> Cell {
        let bed = Bed::equal(4);
        Cell { bed, own, load }
    }

    fn rows(cell: Cell, sides: &[(LoadSide, f64, f64)]) -> Vec<Row> {
        let mut readings = LoadReadings {
            capacity: Some(Capacity(6000.0)),
            ..LoadReadings::default()
        };
        for (side, ms, per_s) in sides {
            readings.add(cell, *side, reading(*ms, *per_s));
        }
        readings.rows(&[cell], 300)
    }

    fn verdicts(rows: &[Row]) -> Vec<(&str, Option<&str>, Option<bool>)> {
        rows.iter()
            .map(|row| {
                let what = row.name.split(", ").next().unwrap_or_default();
                (what, row.goal.as_deref(), row.met)
            })
            .collect()
    }

    #[test]
    fn each_latency_inside_the_share_has_a_goal() {
        let sides = [(LoadSide::Stock, 2.0, 700.0), (LoadSide::Viola, 0.9, 700.0)];
        let rows = rows(cell(OwnWork::Nothing, Load::Open(50)), &sides);
        assert_eq!(
            verdicts(&rows)[..6],
            [
                ("HTTP p50", Some("<= 0.8"), Some(true)),
                ("HTTP p90", Some("<= 0.8"), Some(true)),
                ("HTTP p99", Some("<= 0.3333"), Some(false)),
                ("HTTP p99.9", Some("<= 0.3333"), Some(false)),
                ("HTTP requests", Some(">= 0.98"), Some(true)),
                (
                    "batch throughput of the others",
                    Some(">= 0.97"),
                    Some(true)
                ),
            ]
        );
        assert_eq!(
            rows[0].name,
            "HTTP p50, open loop 50 %, LSVM idle, 4 VMs, others 100 %, 0.3 ms"
        );
        let last: Vec<&str> = rows[6..].iter().map(|row| row.name.as_str()).collect();
        assert_eq!(
            last,
            [
                "HTTP requests that a core serves, closed loop 1, keep-alive",
                "lateness of the load generator p99, worst open loop"
            ]
        );
    }

    #[test]
    fn above_the_share_stock_may_win_a_little() {
        let sides = [
            (LoadSide::Stock, 5.0, 1000.0),
            (LoadSide::Viola, 5.9, 960.0),
        ];
        let of = |connections| {
            let load = Load::Closed {
                connections,
                keep_alive: true,
            };
            rows(cell(OwnWork::Nothing, load), &sides)
        };
        let sixteen = of(16);
        assert_eq!(
            verdicts(&sixteen)[..5],
            [
                ("HTTP p50", Some("<= 1.2"), Some(true)),
                ("HTTP p90", Some("<= 1.3"), Some(true)),
                ("HTTP p99", Some("<= 0.7"), Some(false)),
                ("HTTP p99.9", Some("<= 0.9"), Some(false)),
                ("HTTP requests", Some(">= 0.95"), Some(true)),
            ]
        );
        assert_eq!(
            verdicts(&sixteen)[6],
            (
                "largest distance from a fair share",
                Some("figure <= 1"),
                Some(true)
            )
        );
        let four = of(4);
        assert_eq!(
            verdicts(&four)[4],
            ("HTTP requests", Some(">= 0.98"), Some(false))
        );
        let one = of(1);
        assert!(
            !one.iter().any(|row| row.name.starts_with("largest")),
            "one connection may leave a part of its share"
        );
    }

    #[test]
    fn requests_without_an_answer_are_reported() {
        let cell = cell(OwnWork::Nothing, Load::Open(90));
        let mut readings = LoadReadings::default();
        let open = LoadReading {
            open: 3,
            ..reading(1.0, 100.0)
        };
        readings.add(cell, LoadSide::Stock, open);
        readings.add(cell, LoadSide::Viola, reading(1.0, 100.0));
        let rows = readings.rows(&[cell], 300);
        let row = rows.iter().find(|row| row.name.contains("without"));
        let row = row.unwrap();
        assert_eq!(
            (row.median("stock"), row.median("viola")),
            (Some(3.0), Some(0.0))
        );
    }

    #[test]
    fn beside_a_program_the_guest_alone_is_the_limit() {
        let near = [
            (LoadSide::Stock, 20.0, 700.0),
            (LoadSide::Viola, 10.0, 700.0),
            (LoadSide::Alone, 9.0, 700.0),
        ];
        let own = cell(OwnWork::Program, Load::Open(50));
        let rows_near = rows(own, &near);
        assert_eq!(
            verdicts(&rows_near)[2],
            (
                "HTTP p99",
                Some("<= 0.3333, or 1.2 times alone"),
                Some(true)
            )
        );
        let mut far = near;
        far[2].1 = 3.0;
        assert_eq!(rows(own, &far)[2].met, Some(false));
    }

    #[test]
    fn every_latency_row_of_every_cell_has_a_goal() {
        let cells = cells(false);
        let mut readings = LoadReadings::default();
        for cell in &cells {
            let of = |ms| LoadReading {
                shares: cell.bed.fair_shares(),
                ..reading(ms, 100.0)
            };
            readings.add(*cell, LoadSide::Stock, of(3.0));
            readings.add(*cell, LoadSide::Viola, of(1.0));
            if cell.has_alone() {
                readings.add(*cell, LoadSide::Alone, of(1.0));
            }
        }
        let rows = readings.rows(&cells, 300);
        assert!(rows.len() > cells.len() * 6);
        for row in rows.iter().filter(|row| row.name.starts_with("HTTP p")) {
            assert!(row.met.is_some(), "{}", row.name);
        }
    }
}

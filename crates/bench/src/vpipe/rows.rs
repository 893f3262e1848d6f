// SPDX-License-Identifier: Apache-2.0
//! Readings, and the rows of the result.

use std::collections::BTreeMap;

use super::bed::{MAX_FILE_BYTES, Side};
use super::cell::Cell;
use super::client::Response;
use super::servers::Work;
use super::times::Handovers;
use crate::harness::row::{Goal, Row};
use viola_report::stats::Sorted;

/// Result of one round.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Received by the clients.
    pub received: Response,
    /// Received by the client of small files.
    pub beside: Option<Response>,
    /// Timed hand-overs.
    pub turns: Option<Handovers>,
    /// CPU-seconds of the guest with the web server.
    pub guest: f64,
    /// CPU-seconds of the whole machine, including clients.
    pub host: f64,
}

/// All readings.
#[derive(Debug, Default)]
pub struct Measurements(BTreeMap<Cell, BTreeMap<Side, Vec<Reading>>>);

impl Measurements {
    /// Adds a reading.
    pub fn add(&mut self, cell: Cell, side: Side, reading: Reading) {
        let of_cell = self.0.entry(cell).or_default();
        of_cell.entry(side).or_default().push(reading);
    }

    /// Rows of the result.
    pub fn rows(&self) -> Vec<Row> {
        self.0
            .iter()
            .flat_map(|(cell, sides)| rows(cell, sides))
            .collect()
    }
}

fn rows(cell: &Cell, sides: &BTreeMap<Side, Vec<Reading>>) -> Vec<Row> {
    let row = |what: &str, unit: &'static str, of: &dyn Fn(&Reading) -> Option<f64>| {
        let name = format!("{}{what}", cell.name());
        sides
            .iter()
            .fold(Row::new(name, unit), |row, (side, readings)| {
                row.side(side.name(), readings.iter().filter_map(of))
            })
    };
    let mib = |r: &Reading| r.received.bytes as f64 / f64::from(1 << 20);
    if cell.work == Work::Beside {
        let p99 = |r: &Reading| Sorted::new(r.beside.as_ref()?.times_ms.clone()).quantile(0.99);
        let row = row(", p99, closed loop", "ms", &p99).against("viola", "stock");
        return vec![row.goal(Goal::AtMost(1.0), "viola")];
    }
    if matches!(cell.work, Work::Times | Work::Native) {
        return hand_overs(cell, &row);
    }
    let rate = |r: &Reading| Some(mib(r) / r.received.seconds);
    let throughput = row("", "MiB/s", &rate).against("viola", "stock");
    let mut all = vec![match cell.goal() {
        Some(goal) => throughput.goal(goal, "viola"),
        None => throughput,
    }];
    if cell.work == Work::Nginx && cell.sides().contains(&Side::Host) {
        let limit = row(", of the host's own", "MiB/s", &rate).only(&["viola", "host"]);
        let limit = limit.against("viola", "host");
        all.push(match cell.busy {
            false => limit.goal(Goal::AtLeast(0.9), "viola"),
            true => limit,
        });
    }
    if cell.size == MAX_FILE_BYTES && cell.connections == 1 && cell.work != Work::Curl {
        let guest = |r: &Reading| Some(r.guest * 1024.0 / mib(r));
        let guest = row(", guest's CPU", "s/GiB", &guest).only(&["stock", "viola"]);
        let guest = guest.against("viola", "stock");
        all.push(match cell.work {
            // A guest that writes a file must allocate its blocks on either side, so there is no CPU goal. `Written` is
            // only a comparison.
            Work::Upload | Work::Backup | Work::Written => guest,
            _ => guest.goal(Goal::AtMost(0.05), "viola"),
        });
        if !cell.busy {
            let host = |r: &Reading| Some(r.host * 1024.0 / mib(r));
            let host = row(", CPU of the whole machine", "s/GiB", &host).against("viola", "stock");
            all.push(match cell.work {
                // This side has no guest whose work could be saved.
                Work::NativeWeb => host,
                _ => host.goal(Goal::AtMost(1.0), "viola"),
            });
        }
    }
    all
}

/// A row of a cell: suffix of the name, unit, and figure of a reading.
type RowBuilder<'a> = dyn Fn(&str, &'static str, &dyn Fn(&Reading) -> Option<f64>) -> Row + 'a;

/// Goals of issue 5, for a core that the guest has for itself.
fn hand_overs(cell: &Cell, row: &RowBuilder<'_>) -> Vec<Row> {
    let mut all = Vec::new();
    for (name, q, most) in [("p50", 0.5, 0.5), ("p99", 0.99, 2.0)] {
        let first = |r: &Reading| Sorted::new(r.turns.as_ref()?.first_ms.clone()).quantile(q);
        let call_return =
            |r: &Reading| Sorted::new(r.turns.as_ref()?.return_ms.clone()).quantile(q);
        let first = row(&format!(", call to first byte, {name}"), "ms", &first);
        // Without the library the call returns before the bytes arrive.
        let call_return = row(
            &format!(", last byte to return, {name}"),
            "ms",
            &call_return,
        )
        .only(&["viola"]);
        all.extend([first, call_return].map(|row| match cell.busy {
            false => row.goal(Goal::FigureAtMost(most), "viola"),
            true => row,
        }));
    }
    all.sort_by_key(|row| row.name.contains("return"));
    let clock_error = |r: &Reading| Some(r.turns.as_ref()?.clock_error_ms);
    all.push(row(", uncertainty of these", "ms", &clock_error));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_files_beside_busy_neighbours_have_the_papers_goal() {
        let reading = |mib: u64| Reading {
            received: Response {
                bytes: mib << 20,
                seconds: 1.0,
                times_ms: Vec::new(),
            },
            beside: None,
            turns: None,
            guest: 1.0,
            host: 2.0,
        };
        let mut found = Measurements::default();
        let cell = Cell {
            busy: true,
            work: Work::Nginx,
            size: MAX_FILE_BYTES,
            connections: 32,
        };
        found.add(cell, Side::Stock, reading(10));
        found.add(cell, Side::Viola, reading(40));
        let rows = found.rows();
        assert_eq!((rows[0].ratio, rows[0].met), (Some(4.0), Some(true)));
        assert_eq!(rows[0].goal.as_deref(), Some(">= 3.4"));
    }
    #[test]
    fn hand_overs_have_their_goals_where_the_core_is_free() {
        let reading = |first: f64, call_return: f64| Reading {
            received: Response::default(),
            beside: None,
            turns: Some(Handovers {
                first_ms: vec![first; 99],
                return_ms: vec![call_return; 99],
                clock_error_ms: 0.01,
            }),
            guest: 0.0,
            host: 0.0,
        };
        let mut found = Measurements::default();
        for busy in [false, true] {
            let cell = Cell {
                busy,
                work: Work::Times,
                size: 2 << 20,
                connections: 1,
            };
            found.add(cell, Side::Stock, reading(0.1, -1.0));
            found.add(cell, Side::Viola, reading(0.6, 0.4));
        }
        let rows = found.rows();
        let named_row = |at: usize| {
            let row: &Row = &rows[at];
            (row.name.as_str(), row.median("viola"), row.met)
        };
        let first = "vpipe_file, 2 MiB, call to first byte";
        let call_return = "vpipe_file, 2 MiB, last byte to return";
        assert_eq!(rows.len(), 10);
        assert_eq!(
            named_row(0),
            (&*format!("{first}, p50"), Some(0.6), Some(false))
        );
        assert_eq!(
            named_row(1),
            (&*format!("{first}, p99"), Some(0.6), Some(true))
        );
        assert_eq!(
            named_row(2),
            (&*format!("{call_return}, p50"), Some(0.4), Some(true))
        );
        assert_eq!(rows[2].median("stock"), None);
        assert!(rows[4..].iter().all(|row| row.goal.is_none()));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What is measured, and the rows of the result.

use std::collections::BTreeMap;
use std::time::Duration;

use super::LARGEST;
use super::bed::{SIZES, Side};
use super::client::Got;
use super::servers::Work;
use crate::bench::row::{Goal, Row};
use crate::report::stats::Sorted;

/// One kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// Whether the three neighbours are busy.
    pub busy: bool,
    /// What is done.
    pub work: Work,
    /// Number of the file, in [`SIZES`].
    pub size: usize,
    /// Connections that are kept.
    pub connections: usize,
}

/// What was found in one round.
#[derive(Debug, Clone)]
pub struct Reading {
    /// By the clients.
    pub got: Got,
    /// By the client of small files.
    pub beside: Option<Got>,
    /// CPU-seconds of the guest with the web server.
    pub guest: f64,
    /// Of the whole machine, clients included.
    pub host: f64,
}

impl Cell {
    /// All of them, those with busy neighbours last.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        let nginx =
            (0..SIZES.len()).flat_map(|size| [(Work::Nginx, size, 1), (Work::Nginx, size, 32)]);
        let others = [
            (Work::Beside, LARGEST, 1),
            (Work::Lighttpd, 1, 32),
            (Work::Lighttpd, LARGEST - 1, 1),
            (Work::Lighttpd, LARGEST - 1, 32),
            (Work::Lighttpd, LARGEST, 1),
            (Work::Proxy, 1, 32),
            (Work::Proxy, LARGEST - 1, 1),
            (Work::Proxy, LARGEST, 1),
            (Work::Upload, LARGEST - 2, 1),
            (Work::Upload, LARGEST, 1),
            (Work::Backup, LARGEST - 1, 1),
            (Work::Backup, LARGEST, 1),
        ];
        let cells: Vec<_> = nginx.chain(others).collect();
        for busy in [false, true] {
            all.extend(cells.iter().map(|&(work, size, connections)| Self {
                busy,
                work,
                size,
                connections,
            }));
        }
        all
    }

    /// As it is called in results.
    pub fn name(&self) -> String {
        let size = match SIZES[self.size] {
            size if size < 1 << 20 => format!("{} KiB", size >> 10),
            size => format!("{} MiB", size >> 20),
        };
        let what = match (self.work, self.connections) {
            (Work::Beside, _) => "4 KiB beside 256 MiB".into(),
            (Work::Upload | Work::Backup, _) => size,
            (_, 1) => format!("{size}, 1 connection"),
            (_, n) => format!("{size}, {n} connections"),
        };
        let busy = if self.busy { ", busy neighbours" } else { "" };
        format!("{}, {what}{busy}", self.work.name())
    }

    /// How long it is measured.
    pub fn length(&self, quick: bool) -> Duration {
        let ms = match (self.busy, quick) {
            (false, false) => 1200,
            (true, false) => 3000,
            (false, true) => 500,
            (true, true) => 1500,
        };
        Duration::from_millis(ms)
    }

    /// Whether the file is large enough for the library.
    pub fn is_given_away(&self) -> bool {
        let least = match self.work {
            Work::Proxy => 32 << 20,
            _ => 2 << 20,
        };
        SIZES[self.size] >= least
    }

    /// Who serves.
    pub fn sides(&self) -> Vec<Side> {
        let mut sides = vec![Side::Stock, Side::Viola];
        if self.size == LARGEST && self.connections == 1 && self.work == Work::Nginx {
            sides.push(Side::Host);
        }
        sides
    }

    fn goal(&self) -> Goal {
        if !self.busy || !self.is_given_away() {
            return Goal::AtLeast(0.98);
        }
        Goal::AtLeast(match self.work {
            Work::Nginx | Work::Lighttpd | Work::Beside => 3.4,
            Work::Proxy | Work::Upload => 2.0,
            Work::Backup => 3.0,
        })
    }
}

/// All readings.
#[derive(Debug, Default)]
pub struct Found(BTreeMap<Cell, BTreeMap<Side, Vec<Reading>>>);

impl Found {
    /// One more.
    pub fn add(&mut self, cell: Cell, side: Side, reading: Reading) {
        let of_cell = self.0.entry(cell).or_default();
        of_cell.entry(side).or_default().push(reading);
    }

    /// The rows of the result.
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
    let mib = |r: &Reading| r.got.bytes as f64 / f64::from(1 << 20);
    if cell.work == Work::Beside {
        let p99 = |r: &Reading| Sorted::new(r.beside.as_ref()?.times_ms.clone()).quantile(0.99);
        let row = row(", p99", "ms", &p99).against("viola", "stock");
        return vec![row.goal(Goal::AtMost(1.0), "viola")];
    }
    let rate = |r: &Reading| Some(mib(r) / r.got.seconds);
    let mut all = vec![
        row("", "MiB/s", &rate)
            .against("viola", "stock")
            .goal(cell.goal(), "viola"),
    ];
    if cell.work == Work::Nginx && cell.sides().contains(&Side::Host) {
        let limit = row(", of the host's own", "MiB/s", &rate).only(&["viola", "host"]);
        let limit = limit.against("viola", "host");
        all.push(match cell.busy {
            false => limit.goal(Goal::AtLeast(0.9), "viola"),
            true => limit,
        });
    }
    if cell.size == LARGEST && cell.connections == 1 {
        let guest = |r: &Reading| Some(r.guest * 1024.0 / mib(r));
        let guest = row(", guest's CPU", "s/GiB", &guest).only(&["stock", "viola"]);
        let guest = guest.against("viola", "stock");
        all.push(match cell.work {
            // whoever writes a file has to make room for it
            Work::Upload | Work::Backup => guest,
            _ => guest.goal(Goal::AtMost(0.05), "viola"),
        });
        if !cell.busy {
            let host = |r: &Reading| Some(r.host * 1024.0 / mib(r));
            let host = row(", CPU of the whole machine", "s/GiB", &host).against("viola", "stock");
            all.push(host.goal(Goal::AtMost(1.0), "viola"));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_measured() {
        let all = Cell::all();
        assert_eq!(all.len(), 44);
        assert_eq!(all[0].name(), "nginx, 4 KiB, 1 connection");
        let busy = all
            .iter()
            .filter(|cell| cell.name().ends_with(", busy neighbours"));
        assert_eq!(busy.count(), 22);
    }

    #[test]
    fn large_files_beside_busy_neighbours_have_the_papers_goal() {
        let reading = |mib: u64| Reading {
            got: Got {
                bytes: mib << 20,
                seconds: 1.0,
                times_ms: Vec::new(),
            },
            beside: None,
            guest: 1.0,
            host: 2.0,
        };
        let mut found = Found::default();
        let cell = *Cell::all().last().unwrap();
        let cell = Cell {
            work: Work::Nginx,
            connections: 32,
            ..cell
        };
        found.add(cell, Side::Stock, reading(10));
        found.add(cell, Side::Viola, reading(40));
        let rows = found.rows();
        assert_eq!((rows[0].ratio, rows[0].met), (Some(4.0), Some(true)));
        assert_eq!(rows[0].goal.as_deref(), Some(">= 3.4"));
    }
}

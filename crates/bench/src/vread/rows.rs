// SPDX-License-Identifier: Apache-2.0
//! Readings, and the rows of the result.

use std::collections::BTreeMap;

use viola_lab::hadoop::RequestStats;

use super::usage::Usage;
use super::work::{Side, Work};
use crate::harness::row::{Goal, Row};

/// One measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// Reply of the client.
    pub answer: RequestStats,
    /// CPU use.
    pub usage: Usage,
}

/// All measurements.
#[derive(Debug, Default)]
pub struct Measurements(BTreeMap<(Work, Side), Vec<Reading>>);

/// Selects a figure of a reading.
type Figure = fn(&Reading) -> f64;

impl Measurements {
    /// Adds a measurement.
    pub fn add(&mut self, work: Work, side: Side, reading: Reading) {
        self.0.entry((work, side)).or_default().push(reading);
    }

    fn row(&self, work: Work, what: &str, unit: &'static str, figure: Figure) -> Row {
        let name = match what {
            "" => work.name(),
            what => format!("{}, {what}", work.name()),
        };
        work.sides().iter().fold(Row::new(name, unit), |row, side| {
            let readings = self.0.get(&(work, *side)).into_iter().flatten();
            row.side(side.name(), readings.map(figure))
        })
    }

    /// The rows; rows without figures are left out.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for work in Work::ALL {
            rows.extend(self.read_rows(work));
        }
        rows.retain(|row| !row.sides.is_empty());
        rows
    }

    fn read_rows(&self, work: Work) -> Vec<Row> {
        let (stock, viola) = (Side::Stock.name(), Side::Viola.name());
        let against = |row: Row, goal: Goal| row.against(viola, stock).goal(goal, viola);
        match work {
            Work::Cold | Work::Warm => {
                let least = if work == Work::Warm { 5.0 } else { 2.0 };
                let rate = self.row(work, "", "MiB/s", mib_per_s);
                let mut rows = vec![
                    against(rate.clone(), Goal::AtLeast(least)),
                    of_limit(rate, work),
                ];
                rows.extend(self.costs(work));
                rows
            }
            Work::DeviceCold | Work::DeviceWarm => {
                let least = if work == Work::DeviceWarm { 5.0 } else { 2.0 };
                let rate = self.row(work, "", "MiB/s", mib_per_s);
                vec![against(rate, Goal::AtLeast(least))]
            }
            Work::DeviceRandom => {
                let rate = self.row(work, "", "reads/s", reads_per_s);
                vec![against(rate, Goal::AtLeast(10.0))]
            }
            Work::DfsioCold | Work::Dfsio | Work::Hybrid | Work::HybridNeighbours => {
                let mut rows = vec![self.row(work, "", "MiB/s", mib_per_s).against(viola, stock)];
                rows.extend(self.costs(work));
                rows
            }
            Work::HBase(_) => {
                let rate = self.row(work, "", "rows/s", reads_per_s);
                vec![rate.against(viola, stock)]
            }
            Work::Spark => {
                let time = self.row(work, "", "s", |r| r.answer.wall_s);
                vec![time.against(viola, stock)]
            }
            Work::Random(_) | Work::RandomAgain(_) => {
                let rate = self.row(work, "", "reads/s", reads_per_s);
                let mut rows = vec![
                    against(rate.clone(), Goal::AtLeast(10.0)),
                    of_limit(rate, work),
                    self.row(work, "p50", "us", |r| r.answer.p50_us)
                        .against(viola, stock),
                    self.row(work, "p99", "us", |r| r.answer.p99_us)
                        .against(viola, stock),
                ];
                rows.extend(self.costs(work));
                rows
            }
            Work::Delay(_) => {
                let delay = self.row(work, "", "us", |r| {
                    r.answer.wall_s * 1e6 / r.answer.reads as f64
                });
                vec![delay.against(viola, stock)]
            }
            Work::Neighbours => {
                let delay = self.row(work, "p50", "us", |r| r.answer.p50_us);
                let worst = self.row(work, "p99", "us", |r| r.answer.p99_us);
                vec![
                    against(delay, Goal::AtMost(0.1)),
                    worst.against(viola, stock),
                ]
            }
            Work::Write => {
                let rate = self.row(work, "", "MiB/s", mib_per_s);
                let piece = self.row(work, "p50 of 1 MiB", "us", |r| r.answer.p50_us);
                // The work takes about a second, and one stall of a guest costs a third of it, on either side.
                vec![
                    rate.against(viola, stock),
                    against(piece, Goal::AtMost(1.0 / 0.98)),
                ]
            }
            Work::Append | Work::AppendNamed => {
                let rate = self.row(work, "", "MiB/s", mib_per_s);
                vec![against(rate, Goal::AtLeast(0.98))]
            }
            Work::Delete => {
                let time = self.row(work, "", "ms", |r| {
                    r.answer.wall_s * 1e3 / r.answer.reads.max(1) as f64
                });
                vec![against(time, Goal::AtMost(1.0 / 0.98))]
            }
        }
    }

    /// CPU-seconds per GiB: of client, DataNode, daemon and host.
    fn costs(&self, work: Work) -> Vec<Row> {
        let (stock, viola) = (Side::Stock.name(), Side::Viola.name());
        let each: [(&str, Figure, Option<f64>); 4] = [
            (
                "client's CPU",
                |r| r.usage.per_gib(r.answer.bytes).client,
                Some(1.0 / 3.0),
            ),
            (
                "DataNode's CPU",
                |r| r.usage.per_gib(r.answer.bytes).node,
                Some(0.05),
            ),
            (
                "daemon's CPU",
                |r| r.usage.per_gib(r.answer.bytes).daemon,
                None,
            ),
            (
                "host's CPU",
                |r| r.usage.per_gib(r.answer.bytes).host,
                Some(1.0),
            ),
        ];
        let rows = each.map(|(what, figure, most)| {
            let row = self.row(work, what, "s/GiB", figure);
            match most {
                // Only large reads have a CPU goal; the others inform the reader.
                Some(most) if matches!(work, Work::Cold | Work::Warm) => {
                    row.against(viola, stock).goal(Goal::AtMost(most), viola)
                }
                Some(_) => row.against(viola, stock),
                None => row.only(&[viola, Side::Unverified.name()]),
            }
        });
        rows.into()
    }
}

fn mib_per_s(reading: &Reading) -> f64 {
    reading.answer.bytes as f64 / f64::from(1 << 20) / reading.answer.wall_s
}

fn reads_per_s(reading: &Reading) -> f64 {
    reading.answer.reads as f64 / reading.answer.wall_s
}

/// Rate relative to the client's own virtual disk, both without checksums.
fn of_limit(mut rate: Row, work: Work) -> Row {
    let (ours, limit) = (Side::Unverified.name(), Side::Disk.name());
    rate.name = format!("{}, of the own disk", work.name());
    rate.only(&[ours, limit])
        .against(ours, limit)
        .goal(Goal::AtLeast(0.9), ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(bytes: u64, wall_s: f64, node: f64) -> Reading {
        let answer = RequestStats {
            bytes,
            wall_s,
            reads: 256,
            p50_us: wall_s * 1e3,
            ..RequestStats::default()
        };
        let usage = Usage {
            client: 1.0,
            node,
            daemon: 0.1,
            host: 2.0,
        };
        Reading { answer, usage }
    }

    #[test]
    fn rates_and_costs_are_judged_against_stock() {
        let mut found = Measurements::default();
        found.add(Work::Warm, Side::Stock, reading(1 << 30, 4.0, 2.0));
        found.add(Work::Warm, Side::Viola, reading(1 << 30, 0.5, 0.05));
        found.add(Work::Warm, Side::Unverified, reading(1 << 30, 0.5, 0.05));
        found.add(Work::Warm, Side::Disk, reading(1 << 30, 0.4, 0.05));
        let rows = found.rows();
        let row = |name: &str| rows.iter().find(|r| r.name == name).unwrap();
        let rate = row("sequential 1 MiB, again");
        assert_eq!(
            (rate.median("stock"), rate.ratio, rate.met),
            (Some(256.0), Some(8.0), Some(true))
        );
        let limit = row("sequential 1 MiB, again, of the own disk");
        assert_eq!((limit.ratio, limit.met), (Some(0.8), Some(false)));
        let node = row("sequential 1 MiB, again, DataNode's CPU");
        assert_eq!((node.ratio, node.met), (Some(0.025), Some(true)));
        assert_eq!(row("sequential 1 MiB, again, daemon's CPU").sides.len(), 2);
        assert!(
            !rows.iter().any(|r| r.name.starts_with("write")),
            "what was not measured has no row"
        );
    }
}

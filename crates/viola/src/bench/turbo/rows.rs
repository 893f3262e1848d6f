// SPDX-License-Identifier: Apache-2.0
//! From readings to rows, with the goals (issue "turbo cores", Bars).

use std::collections::BTreeMap;

use super::bed::Reading;
use crate::bench::row::{Goal, Row};
use crate::bench::side::Side;

const STOCK: &str = "stock";
const CREDIT: &str = "30 ms slices";
const TURBO: &str = "turbo";

/// What was read, by side and round.
#[derive(Debug, Default)]
pub struct Found(BTreeMap<&'static str, Vec<Reading>>);

type Figure = fn(&Reading) -> Option<f64>;
/// Name and unit of a figure, the goal against stock and that against 30 ms slices.
type Wanted = (
    &'static str,
    &'static str,
    Figure,
    Option<Goal>,
    Option<Goal>,
);

/// All figures. Of latencies less is better.
const FIGURES: [Wanted; 16] = [
    (
        "ping p50",
        "ms",
        |r| r.ping.median(),
        Some(Goal::AtMost(1.0)),
        None,
    ),
    (
        "ping p99",
        "ms",
        |r| r.ping.quantile(0.99),
        Some(Goal::AtMost(0.2)),
        None,
    ),
    (
        "connect p50",
        "ms",
        |r| r.connect.median(),
        Some(Goal::AtMost(1.0)),
        None,
    ),
    (
        "connect p99",
        "ms",
        |r| r.connect.quantile(0.99),
        Some(Goal::AtMost(0.2)),
        None,
    ),
    (
        "web page p50",
        "ms",
        |r| r.page.median(),
        Some(Goal::AtMost(1.0)),
        None,
    ),
    ("web page p99", "ms", |r| r.page.quantile(0.99), None, None),
    ("TCP_RR p50", "ms", |r| r.rr.median(), None, None),
    ("TCP_RR p99", "ms", |r| r.rr.quantile(0.99), None, None),
    (
        "TCP_RR",
        "1/s",
        |r| r.rr_per_s,
        Some(Goal::AtLeast(1.0)),
        None,
    ),
    (
        "UDP received at 20,000/s",
        "%",
        |r| r.udp[0],
        Some(Goal::AtLeast(2.0)),
        Some(Goal::AtLeast(4.0)),
    ),
    (
        "UDP received at 50,000/s",
        "%",
        |r| r.udp[1],
        Some(Goal::AtLeast(2.0)),
        Some(Goal::AtLeast(4.0)),
    ),
    (
        "TCP receive",
        "MB/s",
        |r| r.tcp,
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(3.0)),
    ),
    (
        "disk write, fsync'd",
        "MB/s",
        |r| r.disk,
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(1.75)),
    ),
    (
        "disk read",
        "MB/s",
        |r| r.read,
        Some(Goal::AtLeast(1.0)),
        None,
    ),
    (
        "CPU of the guest, both cores",
        "%",
        |r| Some(r.io_share),
        None,
        None,
    ),
    (
        "work of the three others",
        "1/s",
        |r| r.others,
        Some(Goal::AtLeast(0.98)),
        None,
    ),
];

impl Found {
    /// Adds a round's reading.
    pub fn add(&mut self, side: Side, reading: Reading) {
        let name = match side {
            Side::Credit => CREDIT,
            Side::Turbo(_) => TURBO,
            _ => STOCK,
        };
        self.0.entry(name).or_default().push(reading);
    }

    /// All rows.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (name, unit, figure, stock, credit) in FIGURES {
            let all = |suffix: &str| {
                [STOCK, CREDIT, TURBO].into_iter().fold(
                    Row::new(format!("{name}{suffix}"), unit),
                    |row, side| {
                        let readings = self.0.get(side).into_iter().flatten();
                        row.side(side, readings.filter_map(figure))
                    },
                )
            };
            let judged = |row: Row, goal: Option<Goal>| match goal {
                Some(goal) => row.goal(goal, TURBO),
                None => row,
            };
            rows.push(judged(all("").against(TURBO, STOCK), stock));
            if credit.is_some() {
                rows.push(judged(
                    all(" against 30 ms slices").against(TURBO, CREDIT),
                    credit,
                ));
            }
        }
        rows.push(
            Row::new("controller, both cores", "%").side(
                TURBO,
                self.0
                    .get(TURBO)
                    .into_iter()
                    .flatten()
                    .map(|r| r.controller * 100.0),
            ),
        );
        rows.retain(Row::is_measured);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::stats::Sorted;

    #[test]
    fn a_row_has_all_sides_and_its_goal() {
        let reading = |ms: f64, udp: f64| Reading {
            ping: Sorted::new(vec![ms; 10]),
            udp: [Some(udp), Some(udp)],
            ..Reading::default()
        };
        let mut found = Found::default();
        found.add(Side::Stock, reading(10.0, 30.0));
        found.add(Side::Credit, reading(40.0, 10.0));
        found.add(Side::Turbo(0), reading(1.0, 90.0));
        let rows = found.rows();
        let row = |name: &str| rows.iter().find(|r| r.name == name).unwrap();
        assert_eq!(
            (row("ping p99").ratio, row("ping p99").met),
            (Some(0.1), Some(true))
        );
        assert_eq!(row("ping p99").sides.len(), 3);
        assert_eq!(row("UDP received at 20,000/s").ratio, Some(3.0));
        let against = row("UDP received at 20,000/s against 30 ms slices");
        assert_eq!((against.ratio, against.met), (Some(9.0), Some(true)));
    }
}

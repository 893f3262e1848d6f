// SPDX-License-Identifier: Apache-2.0
//! Rows from readings, with the goals (issue "turbo cores", Bars).

use std::collections::BTreeMap;

use super::Comparison;
use super::bed::Reading;
use crate::harness::row::{Goal, Row};

const STOCK: &str = Comparison::Stock.name();
const BUFFERS: &str = Comparison::Buffers.name();
const CREDIT: &str = Comparison::Credit.name();
const TURBO: &str = Comparison::Turbo.name();
const ALONE: &str = Comparison::Alone.name();

/// Readings by side and round.
#[derive(Debug, Default)]
pub struct Measurements(BTreeMap<&'static str, Vec<Reading>>);

type Figure = fn(&Reading) -> Option<f64>;
/// A figure: name, unit, goal against stock, and goal against 30 ms slices.
type GoalSpec = (
    &'static str,
    &'static str,
    Figure,
    Option<Goal>,
    Option<Goal>,
);

/// All figures. For latencies lower is better.
const FIGURES: [GoalSpec; 28] = [
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
        "connect p50, closed loop",
        "ms",
        |r| r.connect.median(),
        Some(Goal::AtMost(1.0)),
        None,
    ),
    (
        "connect p99, closed loop",
        "ms",
        |r| r.connect.quantile(0.99),
        Some(Goal::AtMost(0.2)),
        None,
    ),
    (
        "web page p50, closed loop",
        "ms",
        |r| r.page.median(),
        Some(Goal::AtMost(1.0)),
        None,
    ),
    (
        "web page p99, closed loop",
        "ms",
        |r| r.page.quantile(0.99),
        None,
        None,
    ),
    (
        "web page p50, open loop 25/s",
        "ms",
        |r| r.open_page.median(),
        Some(Goal::AtMost(1.0)),
        None,
    ),
    (
        "web page p90, open loop 25/s",
        "ms",
        |r| r.open_page.quantile(0.9),
        Some(Goal::AtMost(1.0)),
        None,
    ),
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
        "UDP received at 5,000/s",
        "%",
        |r| r.udp[0],
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(4.0)),
    ),
    (
        "UDP received at 20,000/s",
        "%",
        |r| r.udp[1],
        Some(Goal::AtLeast(2.0)),
        Some(Goal::AtLeast(4.0)),
    ),
    (
        "UDP received at 50,000/s",
        "%",
        |r| r.udp[2],
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
        "TCP receive: sender waits for the window",
        "%",
        |r| r.tcp_waits.map(|waits| waits.0),
        None,
        None,
    ),
    (
        "TCP receive: packets sent again",
        "1/MB",
        |r| r.tcp_waits.map(|waits| waits.1),
        None,
        None,
    ),
    (
        "TCP receive over 1 Gbit/s",
        "MB/s",
        |r| r.tcp_gigabit,
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
        "scp into the guest",
        "MB/s",
        |r| r.files[0],
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(1.5)),
    ),
    (
        "NFS write",
        "MB/s",
        |r| r.files[1],
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(2.0)),
    ),
    (
        "NFS read",
        "MB/s",
        |r| r.files[2],
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(2.0)),
    ),
    (
        "web and database",
        "1/s",
        |r| r.web.map(|web| web.rate),
        Some(Goal::AtLeast(1.0)),
        Some(Goal::AtLeast(1.376)),
    ),
    (
        "web and database p50, closed loop",
        "ms",
        |r| r.web.map(|web| web.p50),
        None,
        None,
    ),
    (
        "web and database p99, closed loop",
        "ms",
        |r| r.web.map(|web| web.p99),
        None,
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

impl Measurements {
    /// Adds a reading.
    pub fn add(&mut self, setting: Comparison, reading: Reading) {
        self.0.entry(setting.name()).or_default().push(reading);
    }

    /// All rows.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (name, unit, figure, stock, credit) in FIGURES {
            let all = |suffix: &str| {
                Comparison::ALL.map(Comparison::name).into_iter().fold(
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
                let buffers = all(" against stock with such buffers").against(TURBO, BUFFERS);
                rows.extend(buffers.ratio.is_some().then_some(buffers));
                let alone = all(" against a quarter of the core alone").against(TURBO, ALONE);
                let alone = alone.goal(Goal::AtLeast(0.9), TURBO);
                rows.extend(alone.ratio.is_some().then_some(alone));
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
    use viola_report::stats::Sorted;

    #[test]
    fn a_row_has_all_sides_and_its_goal() {
        let reading = |ms: f64, udp: f64| Reading {
            ping: Sorted::new(vec![ms; 10]),
            udp: [Some(udp); 3],
            ..Reading::default()
        };
        let mut found = Measurements::default();
        found.add(Comparison::Stock, reading(10.0, 30.0));
        found.add(Comparison::Credit, reading(40.0, 10.0));
        found.add(Comparison::Turbo, reading(1.0, 90.0));
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

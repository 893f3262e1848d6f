// SPDX-License-Identifier: Apache-2.0
//! Rows and table of the demo.

use super::measured::{LOADS, Measured, SIDES, STATES, VMS};
use crate::harness::cell::Reading;
use crate::harness::guests::names;
use crate::harness::load::LoadReading;
use crate::harness::row::Row;
use crate::harness::side::Side;
use viola_report::stats::{Sorted, figure, ratio};
use viola_report::table::Table;

/// Selects one kind of latency from a reading.
pub type LatencyOf = fn(&Reading) -> &Sorted;

/// Latencies of a reading, by name.
pub const LATENCIES: [(&str, LatencyOf); 2] = [("ping", |r| &r.ping), ("TCP request", |r| &r.rr)];

/// Quantiles in the table.
const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)];

/// Name of the row with the throughput of the other guests.
pub const WORK: &str = "work of the three others";

/// Name of the web server's state.
pub fn state(busy: bool) -> &'static str {
    match busy {
        true => "web busy with work of its own",
        false => "web idle between requests",
    }
}

/// All rows: for each state latencies, requests, shares, and the cost to the other guests.
pub fn rows(measured: &Measured) -> Vec<Row> {
    let mut rows = Vec::new();
    for busy in STATES {
        let row = |name: &str, unit, of: &dyn Fn(&Reading) -> Option<f64>| {
            let row = Row::new(format!("{name}, {}", state(busy)), unit);
            let sides = SIDES
                .iter()
                .map(|side| (side, measured.readings(busy, *side)));
            sides.fold(row, |row, (side, readings)| {
                row.side(side.name(), readings.iter().filter_map(of))
            })
        };
        let against_stock = |row: Row| row.against(&SIDES[2].name(), &SIDES[0].name());
        for (name, latency) in LATENCIES {
            for (label, q) in QUANTILES {
                rows.push(against_stock(row(&format!("{name} {label}"), "ms", &|r| {
                    latency(r).quantile(q)
                })));
            }
        }
        for load in LOADS {
            let row = |what: &str, unit, of: &dyn Fn(&LoadReading) -> Option<f64>| {
                let name = format!("{what}, {}, {}", load.name(), state(busy));
                SIDES.iter().fold(Row::new(name, unit), |row, side| {
                    let readings = measured.load_readings(busy, *side, load);
                    row.side(side.name(), readings.iter().filter_map(of))
                })
            };
            for (label, q) in QUANTILES {
                let latency = row(&format!("HTTP {label}"), "ms", &|r| r.latency.quantile(q));
                rows.push(against_stock(latency));
            }
            if !load.is_inside() {
                let answers = row("HTTP requests", "1/s", &|r| Some(r.answered_per_s));
                rows.push(against_stock(answers));
            }
        }
        for (vm, name) in names(VMS).iter().enumerate() {
            rows.push(row(&format!("share of {name}"), "%", &|r| {
                r.shares.get(vm).map(|s| s * 100.0)
            }));
        }
        // Relative to stock in the same round.
        let stock = measured.readings(busy, Side::Stock);
        let batch = Row::new(format!("{WORK}, {}", state(busy)), "% of stock");
        let batch = SIDES.iter().fold(batch, |row, side| {
            let pairs = measured.readings(busy, *side).iter().zip(stock);
            row.side(
                side.name(),
                pairs.filter_map(|(r, s)| Some(r.batch_per_s? / s.batch_per_s? * 100.0)),
            )
        });
        rows.push(batch);
        rows.push(row("controller", "% of the core", &|r| {
            (r.controller > 0.0).then_some(r.controller * 100.0)
        }));
    }
    rows.retain(Row::is_measured);
    rows
}

/// Table of the rows, grouped by state, with the ratio of viola to stock.
pub fn table(rows: &[Row]) -> Table {
    let names = SIDES.map(Side::name);
    let mut head = vec![String::new()];
    head.extend(names.iter().cloned());
    head.push("viola to stock".into());
    let mut table = Table::new(head);
    for busy in STATES {
        let suffix = format!(", {}", state(busy));
        table.group(state(busy));
        for row in rows {
            let Some(name) = row.name.strip_suffix(&suffix) else {
                continue;
            };
            let mut cells = vec![format!("{name} ({})", row.unit)];
            cells.extend(
                names
                    .iter()
                    .map(|side| row.median(side).map_or("-".into(), figure)),
            );
            cells.push(row.ratio.map_or(String::new(), ratio));
            table.row(cells);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_both_states_and_all_sides() {
        let mut measured = Measured {
            rounds: 1,
            ..Measured::default()
        };
        for busy in STATES {
            for (side, ms) in SIDES.into_iter().zip([4.0, 30.0, 0.4]) {
                measured.add(
                    busy,
                    side,
                    Reading {
                        ping: Sorted::new(vec![ms]),
                        shares: vec![0.25; 4],
                        batch_per_s: Some(1000.0 - ms),
                        controller: if side == Side::Stock { 0.0 } else { 0.01 },
                        ..Reading::default()
                    },
                );
                for load in LOADS {
                    let reading = LoadReading {
                        latency: Sorted::new(vec![ms * 2.0]),
                        answered_per_s: 100.0 / ms,
                        ..LoadReading::default()
                    };
                    measured.add_load(busy, side, load, reading);
                }
            }
        }
        let text = table(&rows(&measured)).text();
        let line = |name: &str| {
            text.lines()
                .find(|l| l.starts_with(name))
                .unwrap_or_default()
                .split_whitespace()
                .skip(3)
                .collect::<Vec<_>>()
        };
        assert_eq!(line("ping p50 (ms)"), ["4.00", "30.0", "0.400", "1/10"]);
        let of_load = |name: &str| {
            let line = text.lines().find(|l| l.starts_with(name));
            let words: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
            words[words.len().saturating_sub(4)..].to_vec()
        };
        for load in [
            "open loop 50 %",
            "open loop 90 %",
            "closed loop 16, keep-alive",
        ] {
            assert_eq!(
                of_load(&format!("HTTP p99, {load} (ms)")),
                ["8.00", "60.0", "0.800", "1/10"]
            );
        }
        assert_eq!(
            of_load("HTTP requests, closed loop 16, keep-alive (1/s)"),
            ["25.0", "3.33", "250", "10.0x"]
        );
        assert!(
            text.contains("controller (% of the core)")
                && text.contains("web idle between requests")
        );
        assert_eq!(text.matches("share of web (%)").count(), 2);
        assert!(
            !text.contains("TCP request"),
            "what was not measured is not there"
        );
    }
}

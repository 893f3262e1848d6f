// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench lanes`: compares throughput and latency when the VFs of a NIC are assigned statically, in rotation,
//! by viola, and by an oracle that knows the load in advance. It also measures the cost of one switch.
//!
//! | module | does |
//! |---|---|
//! | `bed` | an emulated host with a real SR-IOV driver; network namespaces are its guests |
//! | `simulated` | 16 and 63 VMs in the simulator |
//! | `traffic` | packets and streams of the guests in the emulated host |

mod bed;
mod simulated;
mod traffic;

use std::time::Duration;

use crate::Options;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use bed::{Reading, TestBed};
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_sim::lanes::compare::LoadOutcome;

pub use traffic::traffic;

const STATIC: &str = "static";
const TURNS: &str = "round robin";
const POLICY: &str = "viola";
const ORACLE: &str = "oracle";
const SIDES: [&str; 4] = [STATIC, TURNS, POLICY, ORACLE];
/// Sides of the cell that moves one VF back and forth: with switches and without.
const SWITCHES: &str = "switches";
const QUIET: &str = "none";
/// Names of the emulated host's cells.
const SHIFT: &str = "emulated, 10 guests, 7 VFs";
const SWAP: &str = "a switch";
/// Goal for the longest gap in a stream of one packet per millisecond, ms.
const GAP: f64 = 100.0;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let rounds = options.rounds();
    let selected = |cell: &str| {
        options
            .only
            .as_deref()
            .is_none_or(|only| cell.contains(only))
    };
    let simulated: Vec<_> = simulated::CELLS
        .into_iter()
        .filter(|(cell, ..)| selected(cell))
        .collect();
    let in_bed = selected(SHIFT) || selected(SWAP);
    if simulated.is_empty() && !in_bed {
        return Err(Failure::usage(
            "no cell name contains the pattern of --only; try simulated, emulated or a switch",
        ));
    }
    let (phase, turns) = if options.quick { (6, 4) } else { (12, 20) };
    let cell = Duration::from_secs(if options.quick { 40 } else { 70 });
    let swap = Duration::from_secs(if options.quick { 20 } else { 100 });
    let boot = Duration::from_secs(60);
    let of_bed = u32::from(in_bed) * boot
        + (cell * SIDES.len() as u32 * u32::from(selected(SHIFT))
            + swap * u32::from(selected(SWAP)))
            * rounds as u32;
    let of_sim = Duration::from_secs(if options.quick { 2 } else { 6 });
    let total_time = of_bed + of_sim * (simulated.len() * SIDES.len() * rounds) as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("lanes", rounds);

    let mut rows = Vec::new();
    let mut found: Vec<(&str, &'static str, LoadOutcome)> = Vec::new();
    for round in 0..rounds {
        for (cell, vms, heavy) in &simulated {
            for side in SIDES {
                interrupt::check()?;
                progress.step(&format!("round {}: {cell}, {side}", round + 1), of_sim);
                let served = simulated::run(*vms, *heavy, side, round, options.quick);
                found.push((cell, side, served));
            }
        }
    }
    for (cell, ..) in &simulated {
        let of_cell = found.iter().filter(|(c, ..)| c == cell);
        let of_cell: Vec<_> = of_cell.map(|(_, side, served)| (*side, *served)).collect();
        rows.extend(simulated::rows(cell, &of_cell));
    }
    let mut guests = "models in the simulator".to_owned();
    if in_bed {
        progress.step("boot", boot);
        let bed = TestBed::boot(options.core)?;
        guests.push_str(&format!(
            ", and namespaces in a QEMU guest with 2 vCPUs and an igb, Linux {}, {} ns per instruction",
            bed.kernel()?,
            1 << bed::SHIFT
        ));
        let (mut shifts, mut swaps) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            if selected(SHIFT) {
                let mut order = SIDES;
                order.rotate_left(round % SIDES.len());
                for side in order {
                    interrupt::check()?;
                    progress.step(&format!("round {}: {SHIFT}, {side}", round + 1), cell);
                    shifts.push((side, bed.shift(side, phase)?));
                }
            }
            if selected(SWAP) {
                for (side, turns) in [(SWITCHES, turns / 2), (QUIET, 0)] {
                    interrupt::check()?;
                    progress.step(&format!("round {}: {SWAP}, {side}", round + 1), swap / 2);
                    swaps.push((side, bed.swap(turns)?));
                }
            }
        }
        rows.extend(shift_rows(&shifts));
        rows.extend(swap_rows(&swaps));
    }
    rows.retain(Row::is_measured);
    let results = Results::new(rounds, &guests, rows);
    let is_whole = !options.quick && rounds >= 5 && options.only.is_none();
    let path = options.path("lanes", is_whole);
    results.publish("lanes", &path)
}

fn row(
    name: String,
    unit: &'static str,
    found: &[(&'static str, Reading)],
    of: impl Fn(&Reading) -> f64,
) -> Row {
    let mut sides: Vec<&str> = Vec::new();
    for (side, _) in found {
        if !sides.contains(side) {
            sides.push(side);
        }
    }
    sides.into_iter().fold(Row::new(name, unit), |row, side| {
        let of_side = found.iter().filter(|(s, _)| *s == side);
        row.side(side, of_side.map(|(_, reading)| of(reading)))
    })
}

fn shift_rows(found: &[(&'static str, Reading)]) -> Vec<Row> {
    let row = |what: &str, unit, of: &dyn Fn(&Reading) -> f64| {
        row(format!("{SHIFT}, {what}"), unit, found, of)
    };
    vec![
        row("served", "MB", &|r| r.served / 1e6)
            .against(POLICY, ORACLE)
            .goal(Goal::AtLeast(0.95), POLICY),
        row("served of what was to be sent", "%", &|r| {
            100.0 * r.served / r.offered.max(1.0)
        }),
        row("answers, median", "ms", &|r| r.p50_ms),
        row("answers, p99 of the worst guest", "ms", &|r| r.p99_ms),
        row("packets lost", "", &|r| r.lost),
        row("longest gap", "ms", &|r| r.gap_ms),
        row("switches", "", &|r| r.switches),
        row("time of a switch, mean", "ms", &|r| {
            r.switching_ms / r.switches.max(1.0)
        }),
    ]
}

fn swap_rows(found: &[(&'static str, Reading)]) -> Vec<Row> {
    let row = |what: &str, unit, of: &dyn Fn(&Reading) -> f64| {
        row(format!("{SWAP}, {what}"), unit, found, of)
    };
    let gap = |r: &Reading| r.gap_ms;
    vec![
        row("how many", "", &|r| r.switches),
        row("packets lost of a 1 ms stream, each", "", &|r| {
            r.lost / r.switches.max(1.0)
        }),
        row("longest gap of a 1 ms stream", "ms", &gap).goal(Goal::FigureAtMost(GAP), SWITCHES),
        row("longest time that 1 KiB of a stream took", "ms", &|r| {
            r.stall_ms
        }),
        row("time of one, mean", "ms", &|r| {
            r.switching_ms / r.switches.max(1.0)
        })
        .only(&[SWITCHES])
        .goal(Goal::FigureAtMost(300.0), SWITCHES),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn served_bytes_are_compared_with_the_oracle() {
        let reading = |served| Reading {
            served,
            offered: 10e6,
            ..Reading::default()
        };
        let found = [(POLICY, reading(9e6)), (ORACLE, reading(9.2e6))];
        let rows = shift_rows(&found);
        assert_eq!(rows[0].met, Some(true));
        assert_eq!(rows[1].median(POLICY), Some(90.0));
        let found = [(POLICY, reading(8e6)), (ORACLE, reading(9.2e6))];
        assert_eq!(shift_rows(&found)[0].met, Some(false));
    }

    #[test]
    fn a_long_gap_misses_its_goal() {
        let reading = |gap_ms, switches| Reading {
            gap_ms,
            switches,
            lost: 4.0,
            switching_ms: 400.0,
            ..Reading::default()
        };
        let rows = swap_rows(&[(SWITCHES, reading(120.0, 20.0)), (QUIET, reading(3.0, 0.0))]);
        assert_eq!(rows[1].median(SWITCHES), Some(0.2));
        assert_eq!(rows[2].met, Some(false));
        assert_eq!(rows[2].median(QUIET), Some(3.0));
        assert_eq!(
            (rows[4].median(SWITCHES), rows[4].median(QUIET)),
            (Some(20.0), None)
        );
    }
}

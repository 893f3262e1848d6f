// SPDX-License-Identifier: Apache-2.0
//! The simulated cells: 16 and 63 VMs with 8 VFs, with another load each round.

use viola_policy::slices::MS;
use viola_sim::lanes::compare::{Load, LoadOutcome};
use viola_sim::lanes::{LaneSetup, VfAssignment};

use super::{ORACLE, POLICY, SIDES, STATIC, TURNS};
use crate::harness::row::{Goal, Row};

/// Number of VFs.
const VFS: u32 = 8;
/// Interval between two rotations, ns.
const ROTATION_INTERVAL: u64 = 5_000 * MS;

/// Number of VMs, and how many of them have a high rate.
pub const CELLS: [(&str, u32, u32); 2] = [
    ("simulated, 16 VMs, 8 VFs", 16, 9),
    ("simulated, 63 VMs, 8 VFs", 63, 12),
];

fn assignment(side: &str) -> VfAssignment {
    match side {
        STATIC => VfAssignment::Fixed,
        TURNS => VfAssignment::RoundRobin(ROTATION_INTERVAL),
        ORACLE => VfAssignment::Oracle((0, Vec::new())),
        _ => VfAssignment::Policy,
    }
}

/// Runs one cell on one side. The round number seeds the load.
pub fn run(vms: u32, heavy: u32, side: &str, round: usize, quick: bool) -> LoadOutcome {
    let load = Load {
        vms,
        vfs: VFS,
        heavy,
        phases: 3,
        phase: if quick { 5_000 } else { 20_000 } * MS,
    };
    let mut setup = LaneSetup::default();
    setup.config.hold = 2_000 * MS;
    load.run(assignment(side), setup, round as u64 + 1)
}

/// Rows of a cell.
pub fn rows(cell: &str, found: &[(&'static str, LoadOutcome)]) -> Vec<Row> {
    let row = |what: &str, unit, of: &dyn Fn(&LoadOutcome) -> f64| {
        let row = Row::new(format!("{cell}, {what}"), unit);
        SIDES.into_iter().fold(row, |row, side| {
            let of_side = found.iter().filter(|(s, _)| *s == side);
            row.side(side, of_side.map(|(_, served)| of(served)))
        })
    };
    vec![
        row("served", "MB", &|s| s.bytes as f64 / 1e6)
            .against(POLICY, ORACLE)
            .goal(Goal::AtLeast(0.95), POLICY),
        row("served of what was sent", "%", &|s| {
            100.0 * s.bytes as f64 / s.offered.max(1) as f64
        }),
        row("to the guest, median", "ms", &|s| s.p50_ms),
        row("to the guest, p99", "ms", &|s| s.p99_ms),
        row("VFs given", "", &|s| s.switches as f64),
    ]
}

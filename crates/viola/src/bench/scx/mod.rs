// SPDX-License-Identifier: Apache-2.0
//! `viola bench scx`: how long one of four VMs takes to get its core when it is asked something, by sched_ext, slots,
//! EEVDF slices and stock scheduling, and what each of them gets.
//!
//! This needs a kernel with sched_ext, so the host is a QEMU guest, and its VMs are processes ([`stand`]). Its time is
//! counted in instructions of 8 ns, so that nothing else on this machine is measured; a decision of a scheduler costs
//! its instructions.

mod stand;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use viola_lab::qemu::{Image, Machine, Program, Spec};

use super::folder::Folder;
use super::progress::{Progress, clock};
use super::result::{Causes, Results};
use super::row::{Goal, Row};
use super::{Options, interrupt, row};
use crate::error::{Failure, Outcome};
use crate::table;

pub use stand::stand;

const STOCK: &str = "stock";
const EEVDF: &str = "eevdf";
const SLOTS: &str = "slots";
const SCHED_EXT: &str = "sched_ext";
const SIDES: [&str; 4] = [STOCK, EEVDF, SLOTS, SCHED_EXT];

/// The VM that is asked, and its three neighbours.
const CELLS: [(&str, &str); 2] = [
    ("LSVM busy", "ls:busy batch:spin batch:spin batch:spin"),
    ("LSVM idle", "ls:idle batch:spin batch:spin batch:spin"),
];

/// Nanoseconds per instruction, as a power of two.
const SHIFT: u32 = 3;
const BOOT: Duration = Duration::from_secs(30);
/// Longest that a cell may take, however busy this machine is.
const PATIENCE: Duration = Duration::from_secs(900);

/// What one run of a cell gave.
struct Reading {
    p50_us: f64,
    p99_us: f64,
    shares: Vec<f64>,
}

impl Reading {
    fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text.lines().last()?).ok()?;
        let shares = value["shares_percent"].as_array()?;
        // one that has ended measured something else
        if !value["ended"].as_array()?.is_empty() {
            return None;
        }
        Some(Self {
            p50_us: value["answer_p50_us"].as_f64()?,
            p99_us: value["answer_p99_us"].as_f64()?,
            shares: shares.iter().filter_map(Value::as_f64).collect(),
        })
    }
}

type Found = BTreeMap<(&'static str, &'static str), Vec<Reading>>;

/// Runs it, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let rounds = options.rounds();
    let seconds = if options.quick { 2 } else { 6 };
    let wanted = |cell: &str| {
        options
            .only
            .as_deref()
            .is_none_or(|only| cell.contains(only))
    };
    let cells: Vec<_> = CELLS.iter().filter(|(cell, _)| wanted(cell)).collect();
    if cells.is_empty() {
        return Err(Failure::usage(
            "no cell has that in its name; try busy or idle",
        ));
    }
    // A guest's second takes one to two here.
    let each = Duration::from_secs(seconds * 2 + 4);
    let whole = (BOOT + each * (SIDES.len() * cells.len()) as u32) * rounds as u32;
    let mut progress = Progress::new(whole);
    progress.say(&format!("scx: {rounds} rounds, about {}", clock(whole)));
    let (mut found, mut kernel) = (Found::new(), String::new());
    for round in 0..rounds {
        let label = format!("round {} of {rounds}", round + 1);
        progress.step(&format!("{label}: boot"), BOOT);
        let at = std::env::temp_dir().join(format!("viola-scx-{}", std::process::id()));
        let folder = Folder::new(at)?;
        let (host, program) = boot(&folder.0, options.core)?;
        if kernel.is_empty() {
            kernel = host.sh("uname -r").map_err(failed)?.trim().to_owned();
        }
        for (cell, vms) in &cells {
            let mut order = SIDES;
            order.rotate_left(round % SIDES.len());
            for side in order {
                interrupt::check()?;
                progress.step(&format!("{label}: {cell}, {side}"), each);
                let words = format!(
                    "{} internal stand run {side} 1 {seconds} {vms}",
                    program.command()
                );
                let output = host.exec(&words, PATIENCE).map_err(failed)?;
                let reading = Reading::parse(&output.stdout).ok_or_else(|| {
                    Failure::run(format!(
                        "{cell}, {side}: {}{}",
                        output.stdout, output.stderr
                    ))
                })?;
                found.entry((*cell, side)).or_default().push(reading);
            }
        }
    }
    let guests = format!(
        "processes in a QEMU guest with 2 vCPUs, Linux {kernel}, {} ns per instruction",
        1 << SHIFT
    );
    let mut results = Results::new(rounds, &guests, rows(&found));
    results.explain(&Causes::read("bench/why-scx.toml".as_ref())?);
    let is_whole = !options.quick && rounds >= 5 && options.only.is_none();
    let path = options.path("scx", is_whole);
    results.write(&path)?;
    table::print(&row::table(&results.rows).text())?;
    let missed = results.rows.iter().filter(|r| r.met == Some(false));
    let mut text = format!("\n{}\n", path.display());
    for row in missed {
        let why = row
            .why
            .as_deref()
            .unwrap_or("not explained yet (bench/why-scx.toml)");
        text.push_str(&format!("missed: {}: {why}\n", row.name));
    }
    table::print(&text)
}

fn failed(e: viola_lab::Error) -> Failure {
    Failure::run(e.to_string())
}

fn boot(folder: &Path, core: usize) -> Outcome<(Machine, Program)> {
    let here = std::env::current_dir().ok();
    let me = std::env::current_exe().map_err(|e| Failure::run(e.to_string()))?;
    let starts = here.iter().map(|f| f.as_path()).chain([me.as_path()]);
    let image = Image::find_from(starts, "new").map_err(failed)?;
    let program = Program::pack(&me, folder).map_err(failed)?;
    let mut spec = program.disk(Spec::new("scx").cpus(2).memory(768).counted(SHIFT));
    spec.cores = vec![core];
    let host = Machine::start(&spec, &image, folder).map_err(failed)?;
    program.unpack(&host).map_err(failed)?;
    Ok((host, program))
}

fn rows(found: &Found) -> Vec<Row> {
    let mut rows = Vec::new();
    let side = |row: Row, cell: &'static str, of: &dyn Fn(&Reading) -> f64| {
        SIDES.into_iter().fold(row, |row, side| {
            let readings = found.get(&(cell, side)).into_iter().flatten();
            row.side(side, readings.map(of))
        })
    };
    for (cell, _) in CELLS {
        let name = |what: &str| format!("{cell}, {what}");
        let answer = |row: Row, of: &dyn Fn(&Reading) -> f64| {
            side(row, cell, of)
                .against(SCHED_EXT, SLOTS)
                .goal(Goal::AtMost(1.0), SCHED_EXT)
        };
        rows.push(answer(Row::new(name("answer p50"), "us"), &|r| r.p50_us));
        rows.push(answer(Row::new(name("answer p99"), "us"), &|r| r.p99_us));
        let share = Row::new(name("share of the LSVM"), "%");
        rows.push(side(share, cell, &|r| {
            r.shares.first().copied().unwrap_or(0.0)
        }));
        let all = Row::new(name("all four together"), "%");
        rows.push(side(all, cell, &|r| r.shares.iter().sum()));
    }
    rows.retain(Row::is_measured);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_the_last_line_and_one_whose_scheduler_ended_is_none() {
        let text = "pids 1 2\n{\"answer_p50_us\":1.5,\"answer_p99_us\":2.0,\"shares_percent\":[25.0,75.0],\"ended\":[]}\n";
        let reading = Reading::parse(text).unwrap();
        assert_eq!((reading.p50_us, reading.p99_us), (1.5, 2.0));
        assert_eq!(reading.shares, [25.0, 75.0]);
        assert!(Reading::parse(&text.replace("[]", "[\"why\"]")).is_none());
        assert!(Reading::parse("pids 1 2").is_none());
    }

    #[test]
    fn each_cell_has_its_rows_with_sched_ext_against_slots() {
        let mut found = Found::new();
        for (side, p50_us) in [(SLOTS, 4.0), (SCHED_EXT, 3.0)] {
            let reading = Reading {
                p50_us,
                p99_us: 9.0,
                shares: vec![25.0; 4],
            };
            found.insert(("LSVM busy", side), vec![reading]);
        }
        let rows = rows(&found);
        assert_eq!(rows.len(), 4);
        assert_eq!((rows[0].ratio, rows[0].met), (Some(0.75), Some(true)));
        assert_eq!(rows[3].median(SCHED_EXT), Some(100.0));
    }
}

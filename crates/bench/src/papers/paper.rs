// SPDX-License-Identifier: Apache-2.0
//! Figures of the paper, dissertation 000, section 2.5, beside those measured here.
//!
//! The paper shows most figures only as curves. A row's goal is the paper's gain of vSlicer over the credit scheduler
//! if the text or a table gives a number, otherwise the direction that the text states.

use std::path::Path;

use serde_json::Value;

use super::plan::{CREDIT, Cell, Experiment, Setup, VIOLA};
use crate::harness::result::read_rows;
use crate::harness::row::Goal;
use viola_cli::error::Outcome;
use viola_report::stats::{figure, ratio};

/// The paper's claim for a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    /// In the paper's words, from the credit scheduler to vSlicer.
    pub text: &'static str,
    /// The goal for viola against 30 ms slices; `None` where the paper claims no gain.
    pub goal: Option<Goal>,
}

const fn claim(text: &'static str, goal: Goal) -> Claim {
    Claim {
        text,
        goal: Some(goal),
    }
}

const fn no_claim(text: &'static str) -> Claim {
    Claim { text, goal: None }
}

/// Ratio of two figures of the paper.
fn from_to(text: &'static str, credit: f64, vslicer: f64) -> Claim {
    claim(text, Goal::AtMost(vslicer / credit))
}

/// Claim for a figure, by its index in [`Experiment::figures`].
pub fn of(part: Experiment, index: usize, setup: Setup) -> Claim {
    match part {
        Experiment::Ping => ping(index, setup),
        Experiment::JitterSmall | Experiment::JitterLarge => claim(
            "less at all sizes (figure 2.10, no number)",
            Goal::AtMost(1.0),
        ),
        Experiment::TcpLan => claim("no gain (figure 2.11 a)", Goal::AtLeast(1.0)),
        Experiment::TcpWan => claim("up to 3x (figure 2.11 b)", Goal::AtLeast(3.0)),
        Experiment::Apache => match index {
            0 => claim("90 to 180/s sustained (figure 2.14)", Goal::AtLeast(2.0)),
            _ => claim("much shorter (figure 2.14, no number)", Goal::AtMost(1.0)),
        },
        Experiment::ApacheMost => claim("90 to 180/s sustained (figure 2.14)", Goal::AtLeast(2.0)),
        Experiment::Call => match index {
            0 => from_to("26.7 to 10.1 ms (table 2.1)", 26.7, 10.1),
            1 => from_to("25.8 to 14.8 ms (table 2.1)", 25.8, 14.8),
            _ => claim("1.2 % to none (table 2.1)", Goal::AtMost(0.0)),
        },
        Experiment::Lines => match index {
            0 => from_to("36.7 to 13.0 ms (table 2.2)", 36.7, 13.0),
            1 => no_claim("not given"),
            2 => from_to("44.5 to 15.3 % (table 2.2)", 44.5, 15.3),
            _ => from_to("6.0 to 1.5 % (table 2.2)", 6.0, 1.5),
        },
        Experiment::Film => match index {
            0 => from_to("46.2 to 16.6 ms (table 2.3)", 46.2, 16.6),
            1 => from_to("41.2 to 15.8 ms (table 2.3)", 41.2, 15.8),
            2 => no_claim("not given"),
            3 => from_to("110 to 51 ms (table 2.3)", 110.0, 51.0),
            4 => from_to("361 to 176 ms (table 2.3)", 361.0, 176.0),
            5 => from_to("480 to 262 ms (table 2.3)", 480.0, 262.0),
            _ => from_to("509 to 243 ms (table 2.3)", 509.0, 243.0),
        },
        Experiment::Mpi => match index {
            0..=1 => claim("half or less at all sizes (figure 2.15)", Goal::AtMost(0.5)),
            4 => claim(
                "up to 4.5x less at 1024 KB (figure 2.16)",
                Goal::AtMost(1.0 / 4.5),
            ),
            _ => claim(
                "less by more than Alltoall, whose is half or less (figure 2.16, no number)",
                Goal::AtMost(0.5),
            ),
        },
        Experiment::StreamBatch => claim("almost the same (figure 2.13)", Goal::AtLeast(0.97)),
        Experiment::StreamLs => no_claim("less with short microslices (figure 2.13, no number)"),
    }
}

/// Means come from section 2.5.1; the worst cases of the text apply to p99.
fn ping(index: usize, setup: Setup) -> Claim {
    match (index, setup.vms, setup.ls) {
        (0, 4, 1) => from_to("35 to 10 ms (figure 2.9 b)", 35.0, 10.0),
        (0, 4, _) => from_to("35 to about 14 ms (figure 2.9 b)", 35.0, 14.0),
        (0, 5, 1) => claim("about 80 % less (figure 2.9 c)", Goal::AtMost(0.2)),
        (0, 5, _) => claim(
            "about 14 ms, where 1 LSVM's 12 ms are 80 % less (section 2.5.1)",
            Goal::AtMost(0.2 * 14.0 / 12.0),
        ),
        (0, _, _) => claim("less (figure 2.9 a, no number)", Goal::AtMost(1.0)),
        (_, 4, 1) => from_to("worst 90 to 30 ms (section 2.3.1)", 90.0, 30.0),
        (_, 4, _) => from_to("worst 90 to 35 ms (section 2.3.1)", 90.0, 35.0),
        _ => claim("less (figure 2.9, no number)", Goal::AtMost(1.0)),
    }
}

/// Table of a result file, in Markdown.
///
/// # Errors
/// The file is no result of `viola-lab bench papers`.
pub fn table(file: &Path) -> Outcome<String> {
    let rows = read_rows(file, "papers")?;
    let mut table = String::from(
        "| figure | paper: credit to vSlicer | 30 ms | stock | viola | viola to 30 ms | where that is less than the paper's |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for cell in Cell::all() {
        for (index, (name, (_, unit))) in cell.rows().enumerate() {
            let paper = of(cell.part, index, cell.setup).text;
            let here = match rows.iter().find(|row| row["name"] == name.as_str()) {
                Some(row) => here(row, unit),
                None => "not measured | | | |".into(),
            };
            table.push_str(&format!("| {name} | {paper} | {here} |\n"));
        }
    }
    Ok(table)
}

/// All sides, viola's gain, and the cause if it is smaller than the paper's.
fn here(row: &Value, unit: &str) -> String {
    let median = |side: &str| row["sides"][side]["median"].as_f64();
    let cell = |side: &str| match median(side) {
        Some(x) => format!("{} {unit}", figure(x)),
        None => "nothing came".into(),
    };
    let gain = match (row["ratio"].as_f64(), median(CREDIT), median(VIOLA)) {
        (Some(of), ..) if of > 0.0 => ratio(of),
        (_, Some(a), Some(b)) if a == b => "the same".into(),
        (_, Some(_), Some(0.0)) => "none left".into(),
        _ => String::new(),
    };
    let why = match row["met"].as_bool() {
        Some(false) => row["why"].as_str().unwrap_or("not explained yet"),
        _ => "",
    };
    let sides = [CREDIT, "stock", VIOLA].map(cell).join(" | ");
    format!("{sides} | {gain} | {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(rows: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("papers.json");
        std::fs::write(&path, format!("{{\"rows\": [{rows}]}}")).unwrap();
        table(&path).unwrap()
    }

    #[test]
    fn each_row_stands_beside_the_papers_figure() {
        let table = printed(
            r#"{"name": "ping mean, 4 VMs, 1 LSVM, others 100 %", "ratio": 0.0125, "met": true, "why": "no matter",
                "sides": {"30 ms slices": {"median": 40.0}, "stock": {"median": 5.0}, "viola": {"median": 0.5}}},
               {"name": "TCP, 30 ms away, 4 VMs, 1 LSVM, others 100 %", "ratio": 1.5, "met": false,
                "why": "Because.", "sides": {"30 ms slices": {"median": 10.0}, "viola": {"median": 15.0}}}"#,
        );
        let lines = [
            "| ping mean, 4 VMs, 1 LSVM, others 100 % | 35 to 10 ms (figure 2.9 b) | 40.0 ms | 5.00 ms | 0.500 ms | 1/80 |  |",
            "| TCP, 30 ms away, 4 VMs, 1 LSVM, others 100 % | up to 3x (figure 2.11 b) | 10.0 MB/s | nothing came | 15.0 MB/s | 1.50x | Because. |",
            "| ping p99, 3 VMs, 2 LSVMs, others 40 % | less (figure 2.9, no number) | not measured | | | | |",
        ];
        for line in lines {
            assert!(table.contains(line), "{line}\n{table}");
        }
        let rows: usize = Cell::all().iter().map(|cell| cell.rows().count()).sum();
        assert_eq!(table.lines().count(), rows + 2);
    }

    #[test]
    fn a_loss_of_zero_has_no_ratio() {
        let table = printed(
            r#"{"name": "VoIP, 40 lines, downstream loss, 4 VMs, 2 LSVMs, others 100 %", "ratio": 0.0, "met": true,
                "sides": {"30 ms slices": {"median": 10.0}, "stock": {"median": 0.0}, "viola": {"median": 0.0}}}"#,
        );
        assert!(
            table.contains("| 10.0 % | 0.000 % | 0.000 % | none left |"),
            "{table}"
        );
    }

    #[test]
    fn goals_are_the_papers_gains() {
        let setup = Setup {
            vms: 4,
            ls: 1,
            duty: 40,
        };
        // "a 71% reduction"; "16.6ms (62%)"; "29.6ms (64%)"
        for (part, index, less) in [
            (Experiment::Ping, 0, 0.71),
            (Experiment::Call, 0, 0.62),
            (Experiment::Film, 0, 0.64),
            (Experiment::Mpi, 1, 0.5),
            (Experiment::Mpi, 4, 1.0 - 1.0 / 4.5),
        ] {
            let Some(Goal::AtMost(most)) = of(part, index, setup).goal else {
                panic!("{part:?} has no goal");
            };
            assert!((1.0 - most - less).abs() < 0.006, "{part:?}: {most}");
        }
    }

    #[test]
    fn a_file_without_rows_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        assert!(table(&path).is_err());
        std::fs::write(&path, "{}").unwrap();
        assert!(table(&path).is_err());
    }
}

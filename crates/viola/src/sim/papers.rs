// SPDX-License-Identifier: Apache-2.0
//! `viola sim papers`

use std::fs;

use serde::Serialize;
use viola_sim::papers::{self, Claim, Papers, Row, Testbed, Verdict};

use super::show::number;
use super::{Papers as Args, json, page};
use viola_cli::error::{Failure, Outcome};
use viola_cli::table::print;
use viola_report::table::Table;

#[derive(Serialize)]
struct Whole<'a> {
    rows: &'a [Row],
    plots: &'a [papers::Plot],
    testbeds: &'a [Testbed],
}

pub(super) fn run(args: &Args) -> Outcome {
    let (all, beds) = (papers::run(), Testbed::all());
    let whole = Whole {
        rows: &all.rows,
        plots: &all.plots,
        testbeds: &beds,
    };
    let dir = &args.output;
    let put = |name: &str, text: String| {
        let file = dir.join(name);
        fs::write(&file, text).map_err(|e| Failure::run(format!("{}: {e}", file.display())))
    };
    fs::create_dir_all(dir).map_err(|e| Failure::run(format!("{}: {e}", dir.display())))?;
    let (table, summary) = (rows(&all), summary(&all));
    put("papers.html", page::html(&all, &beds, &table, &summary))?;
    put(
        "papers.json",
        serde_json::to_string_pretty(&whole).map_err(Failure::run)?,
    )?;
    if args.json {
        return json(&whole);
    }
    let mut text = table.text();
    text.push_str(&format!("\n{summary}\n"));
    let off: Vec<_> = all
        .rows
        .iter()
        .filter(|r| r.verdict() != Verdict::Agrees)
        .collect();
    if !off.is_empty() {
        text.push_str("\nWhy not:\n");
    }
    for row in off {
        let why = row.why.unwrap_or("cause not examined");
        text.push_str(&format!(
            "- {} {}, {}: {why}\n",
            row.paper, row.place, row.what
        ));
    }
    text.push_str(&format!(
        "\nwritten: {}\n",
        dir.join("papers.html").display()
    ));
    print(&text)
}

/// A sentence with the number of rows that agree, and of those that are not counted.
fn summary(all: &Papers) -> String {
    let text = |(agree, rows): (usize, usize)| format!("{agree} of {rows}");
    let of = |held_out| text(all.score(held_out));
    let missing = all
        .rows
        .iter()
        .filter(|r| r.claim == Claim::Missing)
        .count();
    let unstated = (all.rows.iter())
        .filter(|r| matches!(r.claim, Claim::Unstated(..)))
        .count();
    let contradicted = (all.rows.iter())
        .filter(|r| matches!(r.claim, Claim::Contradicted(_)))
        .count();
    let shapes = all
        .rows
        .iter()
        .filter(|r| matches!(r.claim, Claim::Statement(_)))
        .count();
    format!(
        "Rows that agree: {} of those looked at, {} of those held out, {} of the lab's own. {shapes} rows are judged by shape, as only a figure \
         shows them; {unstated} depend on an input that their paper does not state and {contradicted} contradict their paper's own equation, and these are not counted; {missing} are not modelled.",
        of(false),
        of(true),
        text(all.lab_score())
    )
}

fn verdict(row: &Row) -> &'static str {
    match row.verdict() {
        Verdict::Agrees => "agrees",
        Verdict::Explained => "differs, see why",
        Verdict::Off => "OFF",
        Verdict::Unstated => "input not stated",
        Verdict::Contradicted => "misprint",
        Verdict::Missing => "not modelled",
    }
}

fn paper(claim: Claim) -> String {
    match claim {
        Claim::Value(v) | Claim::Contradicted(v) => number(v),
        Claim::Unstated(low, high) if low == high => number(low),
        Claim::Within(low, high) | Claim::Unstated(low, high) => {
            format!("{} .. {}", number(low), number(high))
        }
        Claim::Statement(_) => "shape".into(),
        Claim::Missing => String::new(),
    }
}

/// The table of all rows.
fn rows(all: &Papers) -> Table {
    let names = [
        ("000", "000: vSlicer (dissertation, chapter 2)"),
        ("001", "001: vRead, a cost model"),
        ("002", "002: vTurbo"),
        ("003", "003: vPipe"),
        ("004", "004: Raccoon"),
        (
            papers::LAB,
            "viola's lab: bench/results/slices.json, vpipe.json and turbo.json (within 25 %)",
        ),
    ];
    let mut table = Table::new([
        "", "where", "unit", "paper", "ours", "ratio", "verdict", "held out",
    ]);
    for (id, name) in names {
        table.group(name);
        for row in all.rows.iter().filter(|r| r.paper == id) {
            let what = match row.claim {
                Claim::Statement(shape) => format!("{}: {shape}", row.what),
                _ => row.what.clone(),
            };
            let ours = match row.claim {
                Claim::Statement(_) if row.ours > 0.5 => "holds".into(),
                Claim::Statement(_) => "does not hold".into(),
                Claim::Missing => String::new(),
                _ => number(row.ours),
            };
            table.row([
                what,
                row.place.to_owned(),
                row.unit.to_owned(),
                paper(row.claim),
                ours,
                row.ratio().map(number).unwrap_or_default(),
                verdict(row).to_owned(),
                if row.held_out {
                    "*".into()
                } else {
                    String::new()
                },
            ]);
        }
    }
    table
}

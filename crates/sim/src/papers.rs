// SPDX-License-Identifier: Apache-2.0
//! The papers' experiments: the figures of their text and tables beside the figures of the model.

mod calibration;
mod lab;
mod lab_turbo;
mod raccoon;
mod vpipe;
mod vread;
mod vslicer;
mod vslicer_apps;
mod vturbo;
mod vturbo_apps;
mod vturbo_host;

use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;
use viola_policy::slices::{MS, Nanos};

use crate::work::figure;

pub use calibration::{Constant, Testbed};

const SECOND: Nanos = 1_000 * MS;

/// What a paper says about a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// A number in its text or tables.
    Value(f64),
    /// A range in its text ("63 % to 200 %", "up to 4x").
    Within(f64, f64),
    /// A picture without numbers: a statement that holds or does not.
    #[serde(rename = "shape")]
    Statement(&'static str),
    /// A number or range in its text or tables that depends on something the paper does not state. The report shows it
    /// beside the model's figure for an assumed value and does not count it. The row says what is missing.
    Unstated(f64, f64),
    /// A number that the paper's own equation does not give for the paper's own inputs: a misprint. The report shows it
    /// and does not count it.
    Contradicted(f64),
    /// The paper has a figure of something that is not modelled.
    Missing,
}

/// One row of the comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Paper: 000 to 004, or [`LAB`].
    pub paper: &'static str,
    /// Figure, table or section.
    pub place: &'static str,
    /// What is measured.
    pub what: String,
    /// Unit.
    pub unit: &'static str,
    /// What the paper says.
    pub claim: Claim,
    /// The model's figure; of a statement 1 if it holds, otherwise 0.
    pub ours: f64,
    /// Whether it is held out: the constants were chosen without it.
    pub held_out: bool,
    /// The reason why it is off.
    pub why: Option<&'static str>,
}

/// Tolerance of the ratio to the paper's number or range, as a part of 1.
pub const TOLERANCE: f64 = 0.15;

/// Value of [`Row::paper`] in rows about the project's own lab.
pub const LAB: &str = "lab";
/// As [`TOLERANCE`], for predictions of the lab's measurements.
pub const LAB_TOLERANCE: f64 = 0.25;

/// Verdict on a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Within 15 % (25 % for the lab), or within the stated range, or the statement holds.
    Agrees,
    /// Off, for a known reason.
    Explained,
    /// Off, without a known reason.
    Off,
    /// The paper does not state an input.
    Unstated,
    /// The paper contradicts itself.
    Contradicted,
    /// Not modelled.
    Missing,
}

impl Row {
    /// The model's figure divided by the paper's number. For a range: divided by the end that it is
    /// beyond, and 1 inside. `None` for other claims, and if the number or that end is 0.
    pub fn ratio(&self) -> Option<f64> {
        match self.claim {
            Claim::Value(paper) if paper != 0.0 => Some(self.ours / paper),
            Claim::Value(_)
            | Claim::Unstated(..)
            | Claim::Contradicted(_)
            | Claim::Statement(_)
            | Claim::Missing => None,
            Claim::Within(low, _) if self.ours < low && low != 0.0 => Some(self.ours / low),
            Claim::Within(_, high) if self.ours > high && high != 0.0 => Some(self.ours / high),
            Claim::Within(low, high) => (self.ours >= low && self.ours <= high).then_some(1.0),
        }
    }

    /// The verdict on this row.
    pub fn verdict(&self) -> Verdict {
        let agrees = match self.claim {
            Claim::Missing => return Verdict::Missing,
            Claim::Unstated(..) => return Verdict::Unstated,
            Claim::Contradicted(_) => return Verdict::Contradicted,
            Claim::Statement(_) => self.ours > 0.5,
            // There is no ratio to 0 %: less than half a percent agrees.
            Claim::Value(0.0) => self.ours.abs() < 0.5,
            Claim::Value(_) | Claim::Within(..) => {
                let tolerance = if self.paper == LAB {
                    LAB_TOLERANCE
                } else {
                    TOLERANCE
                };
                self.ratio().is_some_and(|r| (r - 1.0).abs() <= tolerance)
            }
        };
        match (agrees, self.why) {
            (true, _) => Verdict::Agrees,
            (false, Some(_)) => Verdict::Explained,
            (false, None) => Verdict::Off,
        }
    }
}

/// A curve for the report: name, x and y.
pub type Curve = (String, Vec<(f64, f64)>);

/// A figure of a paper, redrawn by the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plot {
    /// Paper and figure.
    pub title: &'static str,
    /// Labels of the axes.
    pub axes: (&'static str, &'static str),
    /// Curves of the model.
    pub curves: Vec<Curve>,
    /// The paper's numbers: name, x and y.
    pub paper: Vec<(&'static str, f64, f64)>,
}

/// All rows and figures.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Papers {
    /// Rows, by paper.
    pub rows: Vec<Row>,
    /// Figures.
    pub plots: Vec<Plot>,
}

impl Papers {
    fn row(
        &mut self,
        paper: &'static str,
        place: &'static str,
        what: impl Into<String>,
        unit: &'static str,
        claim: Claim,
        ours: f64,
    ) -> &mut Row {
        self.rows.push(Row {
            paper,
            place,
            what: what.into(),
            unit,
            claim,
            ours,
            held_out: false,
            why: None,
        });
        let last = self.rows.len() - 1;
        &mut self.rows[last]
    }

    /// Adds a row whose claim is a number.
    fn value(
        &mut self,
        paper: &'static str,
        place: &'static str,
        what: impl Into<String>,
        unit: &'static str,
        claimed: f64,
        ours: f64,
    ) -> &mut Row {
        self.row(paper, place, what, unit, Claim::Value(claimed), ours)
    }

    /// Adds a row whose claim is a statement, which holds or does not.
    fn statement(
        &mut self,
        paper: &'static str,
        place: &'static str,
        what: impl Into<String>,
        statement: &'static str,
        holds: bool,
    ) -> &mut Row {
        let ours = f64::from(u8::from(holds));
        self.row(paper, place, what, "", Claim::Statement(statement), ours)
    }

    /// Appends the rows of a part.
    fn add(&mut self, part: Self) {
        for mut row in part.rows {
            // Every third row of a paper, whatever it is.
            let before = self.rows.iter().filter(|r| r.paper == row.paper).count();
            row.held_out = before % 3 == 2;
            self.rows.push(row);
        }
        self.plots.extend(part.plots);
    }

    /// Number of rows of the papers that agree, and number of rows that count, among those held out or the others.
    pub fn score(&self, held_out: bool) -> (usize, usize) {
        self.agreeing(|r| r.paper != LAB && r.held_out == held_out)
    }

    /// The same for the lab's rows.
    pub fn lab_score(&self) -> (usize, usize) {
        self.agreeing(|r| r.paper == LAB)
    }

    fn agreeing(&self, which: impl Fn(&Row) -> bool) -> (usize, usize) {
        let of: Vec<_> = self
            .rows
            .iter()
            .filter(|r| which(r) && r.counts())
            .collect();
        let agree = of.iter().filter(|r| r.verdict() == Verdict::Agrees).count();
        (agree, of.len())
    }
}

impl Row {
    /// Whether the row counts: it can agree or not.
    fn counts(&self) -> bool {
        !matches!(
            self.claim,
            Claim::Missing | Claim::Unstated(..) | Claim::Contradicted(_)
        )
    }

    /// Sets the reason why the row is off, which is shown only if it is off.
    fn explain(&mut self, why: &'static str) {
        self.why = Some(why);
    }
}

/// Runs all experiments in parallel. The rows are in the order of the papers.
pub fn run() -> Papers {
    type Part = fn(&mut Papers);
    // The longest ones start first.
    const PARTS: [(usize, Part); 8] = [
        (0, vslicer::run),
        (1, vslicer_apps::run),
        (2, vturbo::run),
        (6, lab::run),
        (7, lab_turbo::run),
        (3, vread::run),
        (4, vpipe::run),
        (5, raccoon::run),
    ];
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(place, part)) = PARTS.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut papers = Papers::default();
            part(&mut papers);
            done.push((place, papers));
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut parts = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads.min(PARTS.len()))
            .map(|_| scope.spawn(work))
            .collect();
        let ended = running.into_iter().flat_map(|one| match one.join() {
            Ok(parts) => parts,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ended.collect::<Vec<_>>()
    });
    parts.sort_by_key(|&(place, _)| place);
    let mut all = Papers::default();
    parts.into_iter().for_each(|(_, part)| all.add(part));
    all
}

// SPDX-License-Identifier: Apache-2.0
//! The papers' experiments: what their text and tables say, and what the model says.

mod calibration;
mod lab;
mod lab_turbo;
mod raccoon;
mod vpipe;
mod vread;
mod vslicer;
mod vslicer_apps;
mod vturbo;

use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

pub use calibration::{Bed, Constant};

/// What a paper says of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Claim {
    /// A number in its text or tables.
    Value(f64),
    /// Between these, by its text ("63 % to 200 %", "up to 4x").
    Within(f64, f64),
    /// Only a picture, which the texts here lack: a sentence that holds or does not.
    Shape(&'static str),
    /// A number, or numbers between these, of its text or tables that hangs on something that the paper does not state, so that
    /// nothing foretells it: it is shown beside what the model gives for an assumed value, and not counted. The row says what is missing.
    Unstated(f64, f64),
    /// A number that is not what the paper's own equation gives for the paper's own inputs: a misprint, which no model can give.
    /// Shown, and not counted.
    Contradicted(f64),
    /// It is in the paper, and not in the model.
    Missing,
}

/// One row of the comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Paper: 000 to 004, or [`LAB`].
    pub paper: &'static str,
    /// Figure, table or section.
    pub place: &'static str,
    /// What was measured.
    pub what: String,
    /// Unit.
    pub unit: &'static str,
    /// What the paper says.
    pub claim: Claim,
    /// What the model says; for a shape 1 if it holds, else 0.
    pub ours: f64,
    /// It was not looked at when constants were chosen.
    pub held_out: bool,
    /// Why it is off, by whoever looked into it.
    pub why: Option<&'static str>,
}

/// How far a number may be off.
pub const TOLERANCE: f64 = 0.15;

/// The "paper" of rows about viola's own lab.
pub const LAB: &str = "lab";
/// How far a prediction of the lab's measurements may be off.
pub const LAB_TOLERANCE: f64 = 0.25;

/// What is said about a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Within 15 %, or in the range that is stated, or the shape holds.
    Agrees,
    /// Off, and it is said why.
    Explained,
    /// Off.
    Off,
    /// The paper does not state what it hangs on.
    Unstated,
    /// The paper contradicts itself.
    Contradicted,
    /// Not modelled.
    Missing,
}

impl Row {
    /// Ours over the paper's; of a range over its nearer end, 1 inside. `None` where there is no number.
    pub fn ratio(&self) -> Option<f64> {
        match self.claim {
            Claim::Value(paper) if paper != 0.0 => Some(self.ours / paper),
            Claim::Value(_)
            | Claim::Unstated(..)
            | Claim::Contradicted(_)
            | Claim::Shape(_)
            | Claim::Missing => None,
            Claim::Within(low, _) if self.ours < low && low != 0.0 => Some(self.ours / low),
            Claim::Within(_, high) if self.ours > high && high != 0.0 => Some(self.ours / high),
            Claim::Within(low, high) => (self.ours >= low && self.ours <= high).then_some(1.0),
        }
    }

    /// Verdict.
    pub fn verdict(&self) -> Verdict {
        let agrees = match self.claim {
            Claim::Missing => return Verdict::Missing,
            Claim::Unstated(..) => return Verdict::Unstated,
            Claim::Contradicted(_) => return Verdict::Contradicted,
            Claim::Shape(_) => self.ours > 0.5,
            // Of a paper's 0 % there is no ratio: half a percent is as good as none.
            Claim::Value(0.0) => self.ours.abs() < 0.5,
            Claim::Value(_) | Claim::Within(..) => {
                let most = if self.paper == LAB {
                    LAB_TOLERANCE
                } else {
                    TOLERANCE
                };
                self.ratio().is_some_and(|r| (r - 1.0).abs() <= most)
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

/// A figure, drawn anew by the model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plot {
    /// Paper and figure.
    pub title: &'static str,
    /// Axes.
    pub axes: (&'static str, &'static str),
    /// Curves of the model.
    pub curves: Vec<Curve>,
    /// Numbers of the paper: name, x and y.
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

    /// Puts parts together.
    fn add(&mut self, part: Self) {
        for mut row in part.rows {
            // Each third row of a paper, whichever it is.
            let before = self.rows.iter().filter(|r| r.paper == row.paper).count();
            row.held_out = before % 3 == 2;
            self.rows.push(row);
        }
        self.plots.extend(part.plots);
    }

    /// Rows of the papers that agree, and rows there are, of those held out or of the others; without those
    /// not modelled, and those whose input is not stated.
    pub fn score(&self, held_out: bool) -> (usize, usize) {
        self.agreeing(|r| r.paper != LAB && r.held_out == held_out)
    }

    /// The same of the lab's rows.
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
    /// Whether it can agree or not.
    fn counts(&self) -> bool {
        !matches!(
            self.claim,
            Claim::Missing | Claim::Unstated(..) | Claim::Contradicted(_)
        )
    }

    /// Says why it is off. It is only shown where it is.
    fn because(&mut self, why: &'static str) {
        self.why = Some(why);
    }
}

/// Runs all experiments, several at a time where there are cores. Those of one paper come after the other.
pub fn run() -> Papers {
    type Part = fn(&mut Papers);
    // Those that take longest begin first.
    const PARTS: [(usize, Part); 7] = [
        (0, vslicer::run),
        (1, vslicer_apps::run),
        (2, vturbo::run),
        (6, lab::run),
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

/// A figure of a workload, by name; NaN if it has none, which no claim agrees with.
fn figure(figures: &[(String, f64)], name: &str) -> f64 {
    figures
        .iter()
        .find(|(n, _)| n == name)
        .map_or(f64::NAN, |&(_, v)| v)
}

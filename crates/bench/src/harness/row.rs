// SPDX-License-Identifier: Apache-2.0
//! A row of a result: one figure on all sides, and whether it reached its goal.

use std::fmt;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use viola_report::stats::{Spread, figure, ratio};
use viola_report::table::Table;

/// Goal of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// The ratio must not exceed this.
    AtMost(f64),
    /// The ratio must not exceed the first number, or the figure must not exceed `times` that of `side`, which is the
    /// limit of what can be reached.
    AtMostOrNear {
        /// Largest ratio that reaches the goal.
        ratio: f64,
        /// The side that is the limit.
        side: &'static str,
        /// Largest ratio to that side that reaches the goal.
        times: f64,
    },
    /// The ratio must reach this.
    AtLeast(f64),
    /// The figure itself must not exceed this.
    FigureAtMost(f64),
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(x) => write!(f, "<= {}", short(*x)),
            Self::AtMostOrNear { ratio, side, times } => {
                write!(f, "<= {}, or {} times {side}", short(*ratio), short(*times))
            }
            Self::AtLeast(x) => write!(f, ">= {}", short(*x)),
            Self::FigureAtMost(x) => write!(f, "figure <= {}", short(*x)),
        }
    }
}

/// Formats a number with at most four decimals.
fn short(x: f64) -> String {
    let text = format!("{x:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// One figure of a benchmark.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What was measured, and on which guests.
    pub name: String,
    /// Unit of the sides' figures.
    pub unit: &'static str,
    /// Median and quartiles over the rounds, by side.
    #[serde(serialize_with = "as_map")]
    pub sides: Vec<(String, Spread)>,
    /// Ratio of one side's median to another's; the row's name or the benchmark says which.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Goal. It applies to the ratio unless it says "figure".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<String>,
    /// Whether the goal was reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub met: Option<bool>,
    /// Cause of a missed goal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

fn as_map<S: Serializer>(sides: &[(String, Spread)], to: S) -> Result<S::Ok, S::Error> {
    let mut map = to.serialize_map(Some(sides.len()))?;
    for (side, spread) in sides {
        map.serialize_entry(side, spread)?;
    }
    map.end()
}

impl Row {
    /// Creates a row without sides.
    pub fn new(name: impl Into<String>, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            unit,
            sides: Vec::new(),
            ratio: None,
            goal: None,
            met: None,
            why: None,
        }
    }

    /// Adds a side with its figures of all rounds. Without figures the side is skipped.
    pub fn side(mut self, name: impl Into<String>, rounds: impl IntoIterator<Item = f64>) -> Self {
        if let Some(spread) = Spread::of(rounds) {
            self.sides.push((name.into(), spread));
        }
        self
    }

    /// The median of a side.
    pub fn median(&self, side: &str) -> Option<f64> {
        self.sides
            .iter()
            .find(|(name, _)| name == side)
            .map(|(_, spread)| spread.median)
    }

    /// Sets the ratio of one side to another.
    pub fn against(mut self, side: &str, base: &str) -> Self {
        if let (Some(ours), Some(theirs)) = (self.median(side), self.median(base)) {
            self.ratio = Some(ours / theirs).filter(|r| r.is_finite());
        }
        self
    }

    /// Sets the goal. `side` names the side whose own figure [`Goal::FigureAtMost`] and [`Goal::AtMostOrNear`] judge.
    pub fn goal(mut self, goal: Goal, side: &str) -> Self {
        let met = match goal {
            Goal::AtMost(x) => self.ratio.map(|r| r <= x),
            Goal::AtMostOrNear {
                ratio,
                side: limit,
                times,
            } => {
                let figures = self.median(side).zip(self.median(limit));
                let is_near = figures.is_some_and(|(ours, limit)| ours <= times * limit);
                self.ratio.map(|r| r <= ratio || is_near)
            }
            Goal::AtLeast(x) => self.ratio.map(|r| r >= x),
            Goal::FigureAtMost(x) => self.median(side).map(|m| m <= x),
        };
        if met.is_some() {
            self.goal = Some(goal.to_string());
            self.met = met;
        }
        self
    }

    /// Keeps only these sides.
    pub fn only(mut self, sides: &[&str]) -> Self {
        self.sides
            .retain(|(name, _)| sides.contains(&name.as_str()));
        self
    }

    /// Whether the row has any figure.
    pub fn is_measured(&self) -> bool {
        !self.sides.is_empty()
    }
}

/// Table of all rows, with a column for each side.
pub fn table(rows: &[Row]) -> Table {
    let mut sides: Vec<&str> = Vec::new();
    for (side, _) in rows.iter().flat_map(|r| &r.sides) {
        if !sides.contains(&side.as_str()) {
            sides.push(side);
        }
    }
    let ends = ["ratio", "goal", "met"];
    let mut table = Table::new(
        ["figure", "unit"]
            .into_iter()
            .chain(sides.iter().copied())
            .chain(ends),
    );
    for row in rows {
        let mut cells = vec![row.name.clone(), row.unit.to_owned()];
        cells.extend(
            sides
                .iter()
                .map(|side| row.median(side).map_or(String::new(), figure)),
        );
        cells.push(row.ratio.map_or(String::new(), ratio));
        cells.push(row.goal.clone().unwrap_or_default());
        cells.push(
            row.met
                .map_or("", |met| if met { "yes" } else { "NO" })
                .to_owned(),
        );
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row::new("ping p50", "ms")
            .side("stock", [4.0, 5.0, 6.0])
            .side("viola", [0.5, 0.5, 0.4])
            .side("none", [])
    }

    #[test]
    fn the_ratio_is_that_of_the_medians() {
        let row = row()
            .against("viola", "stock")
            .goal(Goal::AtMost(0.125), "viola");
        assert_eq!(row.ratio, Some(0.1));
        assert_eq!(
            (row.goal.as_deref(), row.met),
            (Some("<= 0.125"), Some(true))
        );
        assert_eq!(row.sides.len(), 2);
    }

    #[test]
    fn a_goal_can_be_missed() {
        assert_eq!(
            row()
                .against("viola", "stock")
                .goal(Goal::AtLeast(0.98), "viola")
                .met,
            Some(false)
        );
        assert_eq!(
            row().goal(Goal::FigureAtMost(0.4), "viola").met,
            Some(false)
        );
        assert_eq!(
            row().goal(Goal::FigureAtMost(0.5), "viola").goal.as_deref(),
            Some("figure <= 0.5")
        );
    }

    #[test]
    fn a_figure_near_the_limit_is_good_enough() {
        let goal = Goal::AtMostOrNear {
            ratio: 0.05,
            side: "alone",
            times: 1.2,
        };
        let met = |alone: Option<f64>| {
            let row = row().side("alone", alone).against("viola", "stock");
            row.goal(goal, "viola").met
        };
        assert_eq!(met(Some(0.45)), Some(true));
        assert_eq!(met(Some(0.3)), Some(false));
        assert_eq!(met(None), Some(false), "only the ratio is left");
        assert_eq!(goal.to_string(), "<= 0.05, or 1.2 times alone");
    }

    #[test]
    fn without_both_sides_there_is_no_verdict() {
        let row = row()
            .against("viola", "alone")
            .goal(Goal::AtMost(1.5), "viola");
        assert_eq!((row.ratio, row.goal, row.met), (None, None, None));
    }

    #[test]
    fn a_row_is_written_in_the_form_of_all_benchmarks() {
        let mut row = row()
            .against("viola", "stock")
            .goal(Goal::AtMost(0.05), "viola");
        row.why = Some("because".into());
        assert_eq!(
            serde_json::to_string(&row).unwrap(),
            r#"{"name":"ping p50","unit":"ms","sides":{"stock":{"median":5.0,"p25":4.5,"p75":5.5},"viola":{"median":0.5,"p25":0.45,"p75":0.5}},"ratio":0.1,"goal":"<= 0.05","met":false,"why":"because"}"#
        );
    }

    #[test]
    fn the_table_has_a_column_for_each_side() {
        let rows = [
            row().against("viola", "stock"),
            Row::new("shares", "points").side("viola 1 ms", [0.3]),
        ];
        let text = table(&rows).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "figure      unit  stock  viola  viola 1 ms  ratio  goal  met"
        );
        assert_eq!(
            lines[1],
            "ping p50      ms   5.00  0.500               1/10"
        );
        assert_eq!(lines[2], "shares    points                     0.300");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A benchmark's result: a file that is committed, and the causes of missed goals.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::machine;
use super::row::Row;
use viola_cli::error::{Failure, Outcome};

/// A result file, `bench/results/NAME.json`.
#[derive(Debug, Serialize)]
pub struct Results {
    /// Commit that was measured.
    pub git: Option<String>,
    /// When, UTC.
    pub date: String,
    /// On what.
    pub machine: String,
    /// How often each cell was measured.
    pub rounds: usize,
    /// What spoilt the figures, if anything did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disturbed: Option<String>,
    /// The figures.
    pub rows: Vec<Row>,
}

impl Results {
    /// Of this machine, now. `guests` says what the guests were.
    pub fn new(rounds: usize, guests: &str, rows: Vec<Row>) -> Self {
        let machine = format!("{}; guests: {guests}", machine::machine());
        Self {
            git: machine::git(),
            date: viola_cli::date::now(),
            machine,
            rounds,
            disturbed: None,
            rows,
        }
    }

    /// Puts the known causes beside missed goals; rows that have said theirs keep it.
    pub fn explain(&mut self, causes: &Causes) {
        for row in self.rows.iter_mut().filter(|r| r.met == Some(false)) {
            let known = causes.0.get(&row.name).cloned();
            row.why = match (row.why.take(), known) {
                (Some(found), Some(known)) => Some(format!("{known}; {found}")),
                (found, known) => found.or(known),
            };
        }
    }

    /// How many goals are reached, and why others are not: what is printed below the table. `causes` is where a cause
    /// may be written down.
    pub fn verdict(&self, path: &Path, causes: &str) -> String {
        let judged = self.rows.iter().filter(|r| r.met.is_some()).count();
        let missed: Vec<_> = self.rows.iter().filter(|r| r.met == Some(false)).collect();
        let mut text = format!(
            "\n{} of {judged} goals reached; {}\n",
            judged - missed.len(),
            path.display()
        );
        if let Some(disturbed) = &self.disturbed {
            text.push_str(&format!("{disturbed}\n"));
        }
        for row in missed {
            let why = match &row.why {
                Some(why) => why.clone(),
                None => format!("not explained yet (bench/{causes})"),
            };
            text.push_str(&format!("missed: {}: {why}\n", row.name));
        }
        text
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) -> Outcome {
        let failed = |e: &dyn std::fmt::Display| Failure::run(format!("{}: {e}", path.display()));
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| failed(&e))?;
        }
        let json = serde_json::to_string_pretty(self).map_err(|e| failed(&e))?;
        std::fs::write(path, format!("{json}\n")).map_err(|e| failed(&e))
    }
}

/// The rows of a result file of `viola-lab bench NAME`.
///
/// # Errors
/// A sentence that names the file, when it is not one.
pub fn rows_of(file: &Path, name: &str) -> Outcome<Vec<Value>> {
    let failed = |e: &dyn std::fmt::Display| Failure::usage(format!("{}: {e}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| failed(&e))?;
    let mut result: Value = serde_json::from_str(&text).map_err(|e| failed(&e))?;
    match result.get_mut("rows").map(Value::take) {
        Some(Value::Array(rows)) => Ok(rows),
        _ => Err(failed(&format!(
            "there are no rows in it; is it a result of `viola-lab bench {name}`?"
        ))),
    }
}

/// Why goals are missed, by the name of the row: `bench/why-NAME.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(transparent)]
pub struct Causes(BTreeMap<String, String>);

impl Causes {
    /// Reads the file; there need not be one.
    pub fn read(path: &Path) -> Outcome<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text)
                .map_err(|e| Failure::usage(format!("{}: {e}", path.display()))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(Failure::run(format!("{}: {e}", path.display()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::row::Goal;

    fn row(name: &str, most: f64) -> Row {
        Row::new(name, "ms")
            .side("viola", [2.0])
            .goal(Goal::FigureAtMost(most), "viola")
    }

    fn of(rows: Vec<Row>) -> Results {
        Results {
            git: None,
            date: String::new(),
            machine: String::new(),
            rounds: 1,
            disturbed: None,
            rows,
        }
    }

    #[test]
    fn the_verdict_counts_goals_and_names_what_is_missed_with_its_cause() {
        let mut known = row("known", 1.0);
        known.why = Some("too slow".into());
        let no_goal = Row::new("free", "ms").side("viola", [2.0]);
        let mut results = of(vec![row("met", 3.0), known, row("new", 1.0), no_goal]);
        let path = Path::new("x.json");
        let missed = "missed: known: too slow\nmissed: new: not explained yet (bench/why-x.toml)\n";
        assert_eq!(
            results.verdict(path, "why-x.toml"),
            format!("\n1 of 3 goals reached; x.json\n{missed}")
        );
        results.disturbed = Some("another program ran".into());
        assert_eq!(
            results.verdict(path, "why-x.toml"),
            format!("\n1 of 3 goals reached; x.json\nanother program ran\n{missed}")
        );
    }

    #[test]
    fn a_missed_goal_carries_its_cause_and_a_met_one_none() {
        let causes = toml::from_str("\"a, b\" = \"too slow\"\nmet = \"x\"\n").unwrap();
        let mut found = row("a, b", 1.0);
        found.why = Some("kworker ran".into());
        let rows = vec![row("a, b", 1.0), row("met", 3.0), row("other", 1.0), found];
        let mut results = of(rows);
        results.explain(&causes);
        let why: Vec<Option<&str>> = results.rows.iter().map(|r| r.why.as_deref()).collect();
        assert_eq!(
            why,
            [Some("too slow"), None, None, Some("too slow; kworker ran")]
        );
    }

    #[test]
    fn the_file_has_the_keys_that_all_benchmarks_have() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results/x.json");
        Results::new(5, "UML 7.2", vec![row("a", 1.0)])
            .write(&path)
            .unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["rounds"], 5);
        assert_eq!(value["rows"][0]["met"], false);
        for key in ["git", "date", "machine"] {
            assert!(value.get(key).is_some(), "{key}");
        }
        assert!(Causes::read(&dir.path().join("none.toml")).is_ok());
    }
}

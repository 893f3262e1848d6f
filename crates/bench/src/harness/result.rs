// SPDX-License-Identifier: Apache-2.0
//! Result of a benchmark: a committed file, and the causes of missed goals.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::machine;
use super::row::{self, Row};
use viola_cli::error::{Failure, Outcome};
use viola_cli::table;

/// A result file, `bench/results/NAME.json`.
#[derive(Debug, Serialize)]
pub struct Results {
    /// Git revision that was measured.
    pub git: Option<String>,
    /// Date and time, UTC.
    pub date: String,
    /// Host machine and guests.
    pub machine: String,
    /// Number of rounds.
    pub rounds: usize,
    /// Disturbance by other programs, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disturbed: Option<String>,
    /// Rows with the figures.
    pub rows: Vec<Row>,
}

impl Results {
    /// Creates a result of this machine with the current date. `guests` describes the guests.
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

    /// Copies the known causes into rows that missed their goal. A row keeps a cause of its own.
    fn explain(&mut self, causes: &Causes) {
        for row in self.rows.iter_mut().filter(|r| r.met == Some(false)) {
            let known = causes.of(&row.name).cloned();
            row.why = match (row.why.take(), known) {
                (Some(found), Some(known)) => Some(format!("{known}; {found}")),
                (found, known) => found.or(known),
            };
        }
    }

    /// Ends benchmark `name`: adds the known causes of `bench/why-NAME.toml`, writes the file, and prints table and summary.
    ///
    /// # Errors
    /// The causes cannot be read, or the file cannot be written.
    pub fn publish(mut self, name: &str, path: &Path) -> Outcome {
        let causes = format!("why-{name}.toml");
        self.explain(&Causes::read(&Path::new("bench").join(&causes))?);
        self.write(path)?;
        table::print(&row::table(&self.rows).text())?;
        table::print(&self.summary(path, &causes))
    }

    /// Says how many windows were left out, because the load generator was late itself.
    pub fn left_out(&mut self, windows: usize) {
        self.disturbed = (windows > 0).then(|| {
            format!("{windows} windows were left out, because the load generator was late itself")
        });
    }

    /// Summary for the terminal: goals reached, and the cause of each missed goal. `causes` names the file in which
    /// causes are written down.
    fn summary(&self, path: &Path, causes: &str) -> String {
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

    /// Writes the file and creates its folder.
    ///
    /// # Errors
    /// The file or folder cannot be written; the error names the file.
    fn write(&self, path: &Path) -> Outcome {
        let failed = |e: &dyn std::fmt::Display| Failure::run(format!("{}: {e}", path.display()));
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| failed(&e))?;
        }
        let json = serde_json::to_string_pretty(self).map_err(|e| failed(&e))?;
        std::fs::write(path, format!("{json}\n")).map_err(|e| failed(&e))
    }
}

/// Reads the rows of a result file of `viola-lab bench NAME`.
///
/// # Errors
/// The file is not such a result; the error names it.
pub fn read_rows(file: &Path, name: &str) -> Outcome<Vec<Value>> {
    let failed = |e: &dyn std::fmt::Display| Failure::usage(format!("{}: {e}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| failed(&e))?;
    let mut result: Value = serde_json::from_str(&text).map_err(|e| failed(&e))?;
    match result.get_mut("rows").map(Value::take) {
        Some(Value::Array(rows)) => Ok(rows),
        _ => Err(failed(&format!(
            "the file has no rows; is it a result of `viola-lab bench {name}`?"
        ))),
    }
}

/// Causes of missed goals, by the name of the row, from `bench/why-NAME.toml`. `*` in a name stands for any text; a name
/// without it comes first.
#[derive(Debug, Default, Deserialize)]
#[serde(transparent)]
pub struct Causes(BTreeMap<String, String>);

impl Causes {
    /// Reads the file. A missing file gives no causes.
    ///
    /// # Errors
    /// The file is not readable or not valid; the error names it.
    pub fn read(path: &Path) -> Outcome<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text)
                .map_err(|e| Failure::usage(format!("{}: {e}", path.display()))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(Failure::run(format!("{}: {e}", path.display()))),
        }
    }

    fn of(&self, row: &str) -> Option<&String> {
        let found = || self.0.iter().find(|(name, _)| is_like(row, name));
        self.0.get(row).or_else(|| found().map(|(_, cause)| cause))
    }
}

/// Whether `text` is `pattern`, where `*` stands for any text.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return text == pattern;
    };
    let Some(text) = text.strip_prefix(head) else {
        return false;
    };
    (0..=text.len()).any(|at| text.get(at..).is_some_and(|tail| is_like(tail, rest)))
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
    fn the_summary_counts_goals_and_lists_missed_rows_with_causes() {
        let mut known = row("known", 1.0);
        known.why = Some("too slow".into());
        let no_goal = Row::new("free", "ms").side("viola", [2.0]);
        let mut results = of(vec![row("met", 3.0), known, row("new", 1.0), no_goal]);
        let path = Path::new("x.json");
        let missed = "missed: known: too slow\nmissed: new: not explained yet (bench/why-x.toml)\n";
        assert_eq!(
            results.summary(path, "why-x.toml"),
            format!("\n1 of 3 goals reached; x.json\n{missed}")
        );
        results.disturbed = Some("another program ran".into());
        assert_eq!(
            results.summary(path, "why-x.toml"),
            format!("\n1 of 3 goals reached; x.json\nanother program ran\n{missed}")
        );
    }

    #[test]
    fn a_cause_is_for_its_row_or_for_all_rows_like_it() {
        let causes: Causes =
            toml::from_str("\"p9*, * VMs\" = \"many\"\n\"p99, 4 VMs\" = \"one\"\n").unwrap();
        let of = |row| causes.of(row).map(String::as_str);
        assert_eq!(of("p99, 4 VMs"), Some("one"));
        assert_eq!(of("p90, idle, 4 VMs"), Some("many"));
        assert_eq!(of("p5, 4 VMs"), None);
        assert_eq!(of("p90, 4 VMs, weights"), None);
        assert!(is_like("µs", "*s") && is_like("", "*") && !is_like("", "a*"));
    }

    #[test]
    fn only_missed_goals_get_a_cause() {
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

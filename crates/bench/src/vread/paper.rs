// SPDX-License-Identifier: Apache-2.0
//! Figures of the paper beside those measured here: Xu et al., vRead, Middleware 2015.

use std::path::Path;

use serde_json::Value;

use crate::harness::result::read_rows;
use viola_cli::error::Outcome;
use viola_report::stats::figure;

/// A figure of the paper and the corresponding row.
struct PaperRow {
    row: &'static str,
    paper: &'static str,
}

/// Figures of the paper. It shows most only as curves; these are the numbers of its text.
const PAPER_ROWS: [PaperRow; 21] = [
    line(
        "delay of a 64 KiB read",
        "up to 40 % less (figure 9, 2 VMs)",
    ),
    line("delay of a 256 KiB read", "the same"),
    line("delay of a 1 MiB read", "the same"),
    line("delay of a 4 MiB read", "the same"),
    line(
        "1 MiB read, two busy neighbours, p50",
        "up to 50 % less (figure 9, 4 VMs)",
    ),
    line(
        "sequential 1 MiB, again, client's CPU",
        "about 40 % less (figure 6)",
    ),
    line(
        "sequential 1 MiB, again, DataNode's CPU",
        "about 65 % less (figure 6)",
    ),
    line(
        "sequential 1 MiB, cold",
        "up to 60 % more (dissertation, chapter 4)",
    ),
    line(
        "sequential 1 MiB, again",
        "up to 150 % more (dissertation, chapter 4)",
    ),
    line(
        "TestDFSIO read, cold",
        "20 % more at 3.2 GHz, 41 % at 1.6 GHz (figure 11, 2 VMs)",
    ),
    line("TestDFSIO read, again", "the same"),
    line(
        "TestDFSIO read, again, host's CPU",
        "less (figure 12, no number)",
    ),
    line(
        "hybrid read",
        "less than local alone (figure 11, no number)",
    ),
    line(
        "hybrid read, two busy neighbours",
        "up to 65 % more (figure 11, 4 VMs)",
    ),
    line("write", "no cost (figure 13)"),
    line("append", "not measured"),
    line("HBase scan", "6.26 to 7.97 MB/s, 27.3 % more (table 2)"),
    line(
        "HBase sequential read",
        "3.01 to 3.72 MB/s, 23.6 % more (table 2)",
    ),
    line(
        "HBase random read",
        "2.48 to 2.91 MB/s, 17.3 % more (table 2)",
    ),
    line(
        "Spark SQL select",
        "Hive: 17.9 to 14.1 s, 21.3 % less (table 3)",
    ),
    line("Sqoop export", "385 to 343 s, 11.3 % less (table 3)"),
];

const fn line(row: &'static str, paper: &'static str) -> PaperRow {
    PaperRow { row, paper }
}

/// Rows of the paper without a row here, and the reason.
const MISSING_ROWS: [(&str, &str); 1] = [("Sqoop export", "not run: Sqoop is a retired project")];

/// Table of a result file, in Markdown.
///
/// # Errors
/// The file is no result of `viola-lab bench vread`.
pub fn table(file: &Path) -> Outcome<String> {
    let rows = read_rows(file, "vread")?;
    let mut table = String::from(
        "| figure | paper: vRead against HDFS | here: stock | viola | change |\n|---|---|---|---|---|\n",
    );
    for PaperRow { row: name, paper } in PAPER_ROWS {
        let row = rows.iter().find(|row| row["name"] == name);
        let missing = MISSING_ROWS.iter().find(|(row, _)| *row == name);
        let here = match (row.and_then(here), missing) {
            (Some(here), _) => here,
            (None, Some((_, why))) => format!("{why} | |"),
            (None, None) => "not measured | |".into(),
        };
        table.push_str(&format!("| {name} | {paper} | {here} |\n"));
    }
    Ok(table)
}

/// Both sides and the change; empty where a side is missing.
fn here(row: &Value) -> Option<String> {
    let median = |side: &str| row["sides"][side]["median"].as_f64();
    let (stock, viola) = (median("stock")?, median("viola")?);
    let unit = row["unit"].as_str()?;
    let change = match viola / stock {
        ratio if ratio >= 2.0 => format!("{ratio:.1}x"),
        ratio if ratio >= 1.0 => format!("{:.0} % more", (ratio - 1.0) * 100.0),
        ratio => format!("{:.0} % less", (1.0 - ratio) * 100.0),
    };
    Some(format!(
        "{} {unit} | {} {unit} | {change}",
        figure(stock),
        figure(viola)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_figure_of_the_paper_has_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vread.json");
        let text = r#"{"rows": [{"name": "HBase scan", "unit": "rows/s",
            "sides": {"stock": {"median": 1000.0}, "viola": {"median": 1500.0}}}]}"#;
        std::fs::write(&path, text).unwrap();
        let table = table(&path).unwrap();
        assert!(
            table.contains("(table 2) | 1000 rows/s | 1500 rows/s | 50 % more |"),
            "{table}"
        );
        assert!(table.contains("| Sqoop export | 385 to 343 s, 11.3 % less (table 3) | not run"));
        assert_eq!(table.lines().count(), PAPER_ROWS.len() + 2);
    }

    #[test]
    fn a_file_without_rows_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        assert!(table(&path).is_err());
        std::fs::write(&path, "{}").unwrap();
        assert!(table(&path).is_err());
    }

    #[test]
    fn the_rows_of_the_paper_are_rows_of_the_benchmark() {
        use super::super::work::Work;
        for line in PAPER_ROWS {
            let known = Work::ALL.iter().any(|w| line.row.starts_with(&w.name()));
            let missing = MISSING_ROWS.iter().any(|(row, _)| *row == line.row);
            assert!(known || missing, "{}", line.row);
        }
    }
}

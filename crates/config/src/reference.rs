// SPDX-License-Identifier: Apache-2.0
//! The book's page of all keys, made from dist/viola.toml: its comments, keys and defaults.

use std::fs;
use std::path::{Path, PathBuf};

const SAMPLE: &str = include_str!("../../../dist/viola.toml");

const HEAD: &str = "\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Made from dist/viola.toml by WRITE=1 cargo test -p viola-config reference -->
# Configuration keys

`/etc/viola/viola.toml` holds the daemon's configuration. viola refuses unknown keys; `viola check --config FILE` validates
a file; `systemctl reload viola` makes the daemon read it again. Durations need their unit: us, ms, s, m or h. A value in
parentheses is an example of a key that has no default. Former names are read too: `heavy` for `heavy_freq`
and `patience` for `release_timeout` in `[lanes]`, `most` for `max_connections` in `[vm.pipe]`, and `auto = true` in
`[slices]` for `auto = \"on\"` at the top.

## Above all tables

| key | default | meaning |
|---|---|---|
";

/// A comment, and the keys that it describes with their values.
#[derive(Default)]
struct Entry {
    comment: Vec<String>,
    keys: Vec<(String, String)>,
}

/// A line of the sample: `[table]`, `key = value` or a comment, `#` in front of the first two for those without a default.
fn page() -> String {
    let mut page = HEAD.to_owned();
    let mut entry = Entry::default();
    let body = SAMPLE.split_once("\n\n").map_or(SAMPLE, |(_, body)| body);
    for line in body.lines() {
        let is_comment = line.starts_with("# ");
        let bare = line.trim_start_matches('#');
        if line.is_empty() || is_comment {
            if !entry.keys.is_empty() || line.is_empty() {
                page.push_str(&row(&entry));
                entry = Entry::default();
            }
            entry
                .comment
                .extend(line.strip_prefix("# ").map(str::to_owned));
        } else if bare.starts_with('[') {
            let about = std::mem::take(&mut entry.comment).join(" ");
            page.push_str(&row(&std::mem::take(&mut entry)));
            page.push_str(&format!("\n## `{bare}`\n\n"));
            if !about.is_empty() {
                page.push_str(&format!("{about}\n\n"));
            }
            page.push_str("| key | default | meaning |\n|---|---|---|\n");
        } else if let Some((key, value)) = bare.split_once(" = ") {
            let value = match line.starts_with('#') {
                true => format!("(`{value}`)"),
                false => format!("`{value}`"),
            };
            entry.keys.push((key.to_owned(), value));
        }
    }
    page.push_str(&row(&entry));
    page
}

/// A row of a table; nothing for a comment without keys.
fn row(entry: &Entry) -> String {
    let column = |cells: Vec<String>| cells.join(", ");
    let meaning = meaning(&entry.comment);
    match entry.keys.is_empty() {
        true => String::new(),
        false => format!(
            "| {} | {} | {} |\n",
            column(entry.keys.iter().map(|(k, _)| format!("`{k}`")).collect()),
            column(
                entry
                    .keys
                    .iter()
                    .map(|(_, v)| v.replace('|', "\\|"))
                    .collect()
            ),
            meaning.replace('|', "\\|")
        ),
    }
}

/// The comment as running text; its indented lines, which explain values, begin lines of their own.
fn meaning(comment: &[String]) -> String {
    let mut text = String::new();
    for line in comment {
        let value = line
            .strip_prefix("  ")
            .filter(|rest| !rest.starts_with(' '));
        match value.and_then(|v| v.split_once("  ")) {
            Some((value, about)) => {
                text.push_str(&format!("<br>`{}`: {}", value.trim(), about.trim()));
            }
            None if text.is_empty() => text.push_str(line.trim()),
            None => text.push_str(&format!(" {}", line.trim())),
        }
    }
    text
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/configuration.md")
}

#[test]
fn the_books_page_is_that_of_the_sample() {
    let wanted = page();
    if std::env::var_os("WRITE").is_some() {
        fs::write(path(), &wanted).unwrap();
    }
    let there = fs::read_to_string(path()).unwrap_or_default();
    assert!(
        there == wanted,
        "docs/src/configuration.md differs; WRITE=1 writes it"
    );
}

#[test]
fn every_key_has_a_value_and_a_meaning() {
    for line in page().lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").collect();
        assert_eq!(cells.len(), 3, "{line}");
        assert!(cells.iter().all(|c| !c.trim().is_empty()), "{line}");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Whether the reference in the book names everything that there is: commands and their options, keys of the
//! configuration, metrics.

use std::path::Path;

use clap::{Command, CommandFactory};
use viola_proto::vread::{Datanode, Host, Peer, Reader, Vread};

use crate::cli::Cli;
use crate::config::Config;
use crate::daemon::metrics;

fn reference() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/reference.md");
    std::fs::read_to_string(file).unwrap()
}

/// Whether a word stands in the text, and not only as a part of a longer one.
fn has(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part))
}

/// What of all this the reference does not have.
fn missing(words: impl IntoIterator<Item = String>) -> Vec<String> {
    let text = reference();
    words.into_iter().filter(|w| !has(&text, w)).collect()
}

/// The lines of the table of commands that speak of a command: `viola vread` for `viola vread ls` too.
fn about(text: &str, path: &[&str]) -> String {
    let name = format!("viola {}", path[0]);
    text.lines()
        .filter(|line| line.starts_with('|') && has(line, &name))
        .collect::<Vec<_>>()
        .join("\n")
}

fn walk(command: &Command, path: &[&str], text: &str, lacks: &mut Vec<String>) {
    for sub in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        let path = [path, &[sub.get_name()]].concat();
        let lines = about(text, &path);
        let mut see = |word: &str| {
            if !has(&lines, word) {
                lacks.push(format!("{}: {word}", path.join(" ")));
            }
        };
        see(sub.get_name());
        for argument in sub.get_arguments().filter(|a| !a.is_hide_set()) {
            // These are the same everywhere, and stand below the table.
            match argument.get_long() {
                Some("help" | "version" | "json" | "socket") | None => {}
                Some(long) => see(&format!("--{long}")),
            }
        }
        walk(sub, &path, text, lacks);
    }
}

#[test]
fn every_command_and_option_is_in_the_reference() {
    let text = reference();
    let mut lacks = Vec::new();
    walk(&Cli::command(), &[], &text, &mut lacks);
    assert!(lacks.is_empty(), "docs/src/reference.md lacks {lacks:#?}");
    let everywhere = ["--json", "--socket", "--help", "--version"];
    assert!(missing(everywhere.map(String::from)).is_empty());
}

/// The keys of a table, from what the parser says about one that is none.
fn keys(above: &str, table: &str) -> Vec<String> {
    let text = format!("{above}{table}\nno_such_key = 1\n");
    let said = Config::parse(Path::new("x"), &text)
        .unwrap_err()
        .to_string();
    let names = said
        .split_once("; allowed ")
        .unwrap_or_else(|| panic!("{table}: {said}"))
        .1;
    let words = names.split([' ', ',']).filter(|w| !w.is_empty());
    // as it stands in the table
    let names: Vec<String> = words
        .filter(|w| !matches!(*w, "are" | "is" | "and" | "or"))
        .map(|w| format!("`{w}`"))
        .collect();
    assert!(!names.is_empty(), "{table}: {said}");
    names
}

#[test]
fn every_key_of_the_configuration_is_in_the_reference() {
    let vm = "[[vm]]\nname = \"a\"\n";
    let tables = [
        ("", "[daemon]"),
        ("", "[slices]"),
        ("", "[turbo]"),
        ("", "[vread]"),
        ("", "[[vread.allow]]"),
        ("", "[[vread.peer]]"),
        ("", vm),
        (vm, "[vm.vread]"),
        (vm, "[[vm.vread.image]]"),
        (
            "[[vm]]\nname = \"a\"\n[[vm.vread.image]]\ndevice = \"a\"\npath = \"/a\"\nformat = \"raw\"\n",
            "[[vm.vread.image.backing]]",
        ),
    ];
    let text = reference();
    for table in keys("", "") {
        let table = table.trim_matches('`');
        let stands = [format!("`[{table}]`"), format!("`[[{table}]]`")];
        assert!(stands.iter().any(|s| text.contains(s)), "{table}");
    }
    let all = tables.iter().flat_map(|(above, table)| keys(above, table));
    let lacks = missing(all);
    assert!(lacks.is_empty(), "docs/src/reference.md lacks {lacks:?}");
}

#[test]
fn every_metric_is_in_the_reference() {
    let shown = Vread {
        datanodes: vec![Datanode::default()],
        readers: vec![Reader::default()],
        host: Some(Host::default()),
        peers: vec![Peer::default()],
        ..Vread::default()
    };
    let text = metrics::text(&shown);
    let names = text.lines().filter_map(|l| l.strip_prefix("# TYPE "));
    let names: Vec<String> = names
        .filter_map(|l| Some(l.split_once(' ')?.0.to_owned()))
        .collect();
    assert!(names.len() > 20, "{names:?}");
    let lacks = missing(names);
    assert!(lacks.is_empty(), "docs/src/reference.md lacks {lacks:?}");
}

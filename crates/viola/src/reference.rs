// SPDX-License-Identifier: Apache-2.0
//! Whether the book names everything that there is: commands and their options, keys of the configuration, metrics; and whether
//! what is made for other programs, dashboard and schema, agrees with it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use serde_json::Value;

use crate::args::Viola;
use viola_config::Config;
use viola_daemon::api::metrics;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of the project.
fn file(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn reference() -> String {
    file("docs/src/reference.md")
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
    walk(&Viola::command(), &[], &text, &mut lacks);
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
fn every_key_of_the_configuration_is_in_its_page() {
    let vm = "[[vm]]\nname = \"a\"\n";
    let tables = [
        ("", "[daemon]"),
        ("", "[slices]"),
        ("", "[turbo]"),
        ("", "[vread]"),
        ("", "[[vread.allow]]"),
        ("", "[[vread.peer]]"),
        ("", "[lanes]"),
        ("", "[[lanes.pool]]"),
        ("", "[[lanes.guest]]"),
        ("", vm),
        (vm, "[vm.vread]"),
        (vm, "[vm.lane]"),
        (vm, "[[vm.vread.image]]"),
        (
            "[[vm]]\nname = \"a\"\n[[vm.vread.image]]\ndevice = \"a\"\npath = \"/a\"\nformat = \"raw\"\n",
            "[[vm.vread.image.backing]]",
        ),
    ];
    let text = file("docs/src/configuration.md");
    for table in keys("", "") {
        let table = table.trim_matches('`');
        let is_table = [format!("## `[{table}]`"), format!("## `[[{table}]]`")];
        let is_there = |s: &String| text.contains(s);
        assert!(
            is_table.iter().any(is_there) || has(&text, &format!("`{table}`")),
            "{table}"
        );
    }
    let all = tables.iter().flat_map(|(above, table)| keys(above, table));
    // A key has a row, a table of its own, or stands in the example of an inline table.
    let stands = |key: &String| {
        let bare = key.trim_matches('`');
        has(&text, key)
            || [format!(".{bare}]"), format!("{bare} = ")]
                .iter()
                .any(|s| text.contains(s))
    };
    let lacks: Vec<String> = all.filter(|key| !stands(key)).collect();
    assert!(
        lacks.is_empty(),
        "docs/src/configuration.md lacks {lacks:?}"
    );
}

/// Words of a text that are names of metrics.
fn metric_names(text: &str) -> BTreeSet<String> {
    let part = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let known = ["viola_", "libvirt_", "process_"];
    text.split(part)
        .filter(|w| known.iter().any(|k| w.starts_with(k) && w.len() > k.len()))
        // Expressions name the buckets of a histogram.
        .map(|w| w.strip_suffix("_bucket").unwrap_or(w).to_owned())
        .collect()
}

#[test]
fn every_metric_is_in_the_book_and_the_book_has_no_other() {
    let text = file("docs/src/metrics.md");
    let names: BTreeSet<String> = metrics::names().into_iter().map(|(n, _)| n).collect();
    assert!(names.len() > 60, "{names:?}");
    assert_eq!(
        metric_names(&text),
        names,
        "docs/src/metrics.md against what is exposed"
    );
}

#[test]
fn every_expression_of_the_dashboard_names_metrics_that_there_are() {
    let names: BTreeSet<String> = metrics::names().into_iter().map(|(n, _)| n).collect();
    let dashboard: Value = serde_json::from_str(&file("dist/grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|p| p["targets"].as_array().unwrap());
    let mut expressions: Vec<&str> = targets.map(|t| t["expr"].as_str().unwrap()).collect();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    expressions.extend(variables.iter().filter_map(|v| v["query"].as_str()));
    assert!(expressions.len() > 20);
    for expression in expressions {
        let used = metric_names(expression);
        assert!(used.is_subset(&names), "{expression}");
        assert!(
            !used.is_empty() || expression == "prometheus",
            "{expression}"
        );
        for name in used.iter().filter(|n| n.ends_with("_total")) {
            assert!(
                expression.contains("rate(") || expression.contains("increase("),
                "{name} only grows: {expression}"
            );
        }
        let count = |c| expression.matches(c).count();
        for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
            assert_eq!(count(open), count(close), "{expression}");
        }
    }
    let mut ids: Vec<&Value> = panels.iter().map(|p| &p["id"]).collect();
    ids.dedup();
    assert_eq!(ids.len(), panels.len());
}

/// The schema of `viola vms --json`, as dist/vms.schema.json has it.
fn vms_schema() -> Value {
    let schema = schemars::schema_for!(viola_proto::VmList);
    let mut schema = serde_json::to_value(schema).unwrap();
    let whole = schema.as_object_mut().unwrap();
    whole.insert(
        "$comment".into(),
        concat!("SPDX-", "License-Identifier: Apache-2.0").into(),
    );
    whole.insert(
        "title".into(),
        "Answer to viola vms --json and GET /v1/vms".into(),
    );
    schema
}

#[test]
fn the_schema_is_that_of_the_messages() {
    let wanted = format!("{:#}\n", vms_schema());
    let path = root().join("dist/vms.schema.json");
    if std::env::var_os("WRITE").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == wanted,
        "dist/vms.schema.json is another one; WRITE=1 writes it"
    );
}

#[test]
fn what_vms_prints_is_valid_by_the_schema_and_what_lacks_a_field_is_not() {
    let schema: Value = serde_json::from_str(&file("dist/vms.schema.json")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let mut list = viola_daemon::testing::view(&["a", "b"]).vms;
    list.vms[0].cap_permille = Some(500);
    list.vms[0].by_vcpu[0].waits = vec![(1000, 1189, 7)];
    list.vms[0].packet_delay.as_mut().unwrap().buckets = vec![(0, 1280, 7)];
    list.vms[1].packet_delay = None;
    list.vms[1].packet_delay_absent = Some("the VM has no NIC on the host".into());
    let mut value = serde_json::to_value(&list).unwrap();
    let errors: Vec<String> = validator
        .iter_errors(&value)
        .map(|e| e.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    value["vms"][0].as_object_mut().unwrap().remove("share");
    assert!(!validator.is_valid(&value));
    assert!(validator.is_valid(&serde_json::to_value(viola_proto::VmList::default()).unwrap()));
}

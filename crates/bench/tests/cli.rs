// SPDX-License-Identifier: Apache-2.0
//! The command line of viola-lab, as a user sees it.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

fn viola_lab(args: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_viola-lab"));
    program.args(args).output().unwrap()
}

/// The one sentence on standard error of a command that ends with status 2.
fn refusal(args: &[&str]) -> String {
    let output = viola_lab(args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    assert!(text.starts_with("viola-lab: "), "{args:?}: {text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{args:?}: {text}");
    text
}

#[test]
fn zero_rounds_are_refused() {
    for args in [
        &["bench", "slices", "--rounds", "0"][..],
        &["bench", "vpipe", "--rounds", "0"],
        &["demo", "--rounds", "0"],
    ] {
        let text = refusal(args);
        assert!(
            text.contains("--rounds") && text.contains("from 1 on"),
            "{text}"
        );
    }
}

#[test]
fn wrong_usage_is_one_sentence() {
    assert!(refusal(&["bench", "slices", "--onyl", "x"]).contains("--onyl"));
    assert!(refusal(&["bench", "nothing"]).contains("nothing"));
}

#[test]
fn help_names_the_commands_and_hides_internal_ones() {
    let output = viola_lab(&["--help"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for command in ["up", "sh", "down", "demo", "bench"] {
        assert!(text.contains(&format!("  {command} ")), "{command}: {text}");
    }
    assert!(
        !text.contains("internal") && !text.contains("supervise"),
        "{text}"
    );
}

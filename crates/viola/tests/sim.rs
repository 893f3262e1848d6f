// SPDX-License-Identifier: Apache-2.0
//! `viola sim` as its users run it: without a daemon, root or a VM.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn sim(args: &[&str]) -> Output {
    let mut viola = Command::new(env!("CARGO_BIN_EXE_viola"));
    viola.arg("sim").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn scenario(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../sim/scenarios")
        .join(name)
}

#[test]
fn an_invalid_scenario_ends_with_status_2_and_one_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.toml");
    let name = file.to_str().unwrap();
    let cases = [
        (
            "seconds = 1.0\n[host]\nscheduler = \"eevdf\"\n[[vm]]\nwieght = 3\n",
            ":5: unknown key wieght",
        ),
        (
            "seconds = 1.0\n[host]\nscheduler = \"eevdf\"\n[[vm]]\nweight = -3\n",
            ":5: weight: ",
        ),
        (
            "seconds = 1.0\n[host]\nscheduler = \"eevdf\"\n[[vm]]\ncap_percent = 101\n",
            ":5: cap_percent: 101 is more",
        ),
        (
            "seconds = 1.0\n[host]\nscheduler = \"eevdf\"\n[host.lanes]\nvfs = 0\n[[vm]]\n",
            ":5: vfs: 0 is out of range",
        ),
    ];
    for (contents, said) in cases {
        std::fs::write(&file, contents).unwrap();
        for command in ["check", "run", "host"] {
            let out = sim(&[command, name]);
            let error = text(&out.stderr);
            assert_eq!(out.status.code(), Some(2), "{error}");
            assert!(
                error.starts_with(&format!("viola: {name}{said}")),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
            assert!(out.stdout.is_empty());
        }
    }
    let out = sim(&["check", "/no/such.toml"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("/no/such.toml: No such file"));
}

#[test]
fn the_same_file_and_seed_give_the_same_bytes() {
    let file = scenario("four.toml");
    let file = file.to_str().unwrap();
    let run = |seed| sim(&["run", file, "--json", "--seed", seed]);
    let (a, b) = (run("7"), run("7"));
    assert!(a.status.success() && a.stdout == b.stdout && !a.stdout.is_empty());
    assert_ne!(a.stdout, run("8").stdout);
    let value: serde_json::Value = serde_json::from_slice(&a.stdout).unwrap();
    assert_eq!(value["vms"].as_array().unwrap().len(), 4);
}

#[test]
fn advice_for_a_host_and_the_error_of_a_fleet_are_printed() {
    let file = scenario("four.toml");
    let out = sim(&["host", file.to_str().unwrap(), "--seeds", "2"]);
    let said = text(&out.stdout);
    assert!(
        said.contains("web: class ls with microslices of 300 us"),
        "{said}"
    );
    assert!(said.contains("busy0: class batch"), "{said}");
    let out = sim(&[
        "fleet",
        "--hosts",
        "2",
        "--minutes",
        "1",
        "--compare",
        "2",
        "--json",
    ]);
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(value["vms"], 128);
    assert!(
        value["error"]["share_error"].as_f64().unwrap() < 0.1,
        "{value}"
    );
    assert_eq!(sim(&["fleet", "--hosts", "0"]).status.code(), Some(2));
}

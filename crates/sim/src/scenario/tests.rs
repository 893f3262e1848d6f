// SPDX-License-Identifier: Apache-2.0
use super::*;

const GOOD: &str = r#"name = "four"
seconds = 2.0

[host]
scheduler = "viola"

[[vm]]
name = "web"
class = "ls"
microslice_us = 300
weight = 256
load_percent = 100
[[vm.work]]
kind = "ping"

[[vm]]
name = "busy"
count = 3
load_percent = 100
"#;

fn refused(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    Scenario::parse("x.toml", &GOOD.replacen(from, to, 1))
        .err()
        .unwrap_or_else(|| panic!("{to} is taken"))
        .to_string()
}

#[test]
fn a_scenario_runs_and_gives_the_same_twice() {
    let scenario = Scenario::parse("x.toml", GOOD).unwrap();
    let (a, b) = (scenario.run(3), scenario.run(3));
    assert_eq!(a, b);
    assert_ne!(a, scenario.run(4));
    assert_eq!(a.vms.len(), 4);
    assert_eq!(a.vms[3].name, "busy2");
    for vm in &a.vms {
        assert!((vm.ran - 0.25).abs() < 0.01, "{vm:?}");
    }
    assert!(!a.vms[0].figures.is_empty() && a.events > 1000);
}

#[test]
fn bad_input_is_named_in_one_sentence_with_file_line_and_key() {
    let cases = [
        ("weight = 256", "weight = -1", "x.toml:11: weight: "),
        (
            "weight = 256",
            "weight = 0",
            "x.toml:11: weight: 0 is out of range",
        ),
        (
            "weight = 256",
            "wieght = 256",
            "x.toml:11: unknown key wieght; allowed are",
        ),
        (
            "weight = 256",
            "cap_percent = 150",
            "x.toml:11: cap_percent: 150 is more than the one vCPU",
        ),
        (
            "seconds = 2.0",
            "seconds = -2.0",
            "x.toml:2: seconds: -2 is out of range",
        ),
        (
            "scheduler = \"viola\"",
            "scheduler = \"fifo\"",
            "x.toml:5: scheduler: fifo is not allowed; write one of credit",
        ),
        (
            "scheduler = \"viola\"",
            "scheduler = \"viola\"\nturbo_cores = 1",
            "x.toml:6: turbo_cores: only the scheduler",
        ),
        (
            "scheduler = \"viola\"",
            "scheduler = \"viola\"\n[host.lanes]\nvfs = 0",
            "x.toml:7: vfs: 0 is out of range: write a value from 1",
        ),
        (
            "count = 3",
            "core = 1",
            "x.toml:18: core: 1 is out of range: write a value from 0 to 0",
        ),
        (
            "count = 3",
            "count = 70",
            "core: 71 VMs are on core 0, but a core takes 64",
        ),
        (
            "kind = \"ping\"",
            "kind = \"pong\"",
            "pong is not allowed; write one of ping",
        ),
        (
            "kind = \"ping\"",
            "kind = \"udp\"\nmbit = 0.0",
            "mbit: 0 is out of range: write a value above 0",
        ),
        (
            "kind = \"ping\"",
            "kind = \"requests\"\nconnections = 4\nrate = 10.0",
            "requests: write either connections (closed loop) or rate (open loop)",
        ),
        (
            "kind = \"ping\"",
            "kind = \"requests\"\nconnections = 0",
            "connections: 0 is out of range: write a value above 0",
        ),
        (
            "kind = \"ping\"",
            "kind = \"blocks\"\nfrom = \"web\"",
            "from: there is no other VM named web",
        ),
        (
            "kind = \"ping\"",
            "kind = \"files\"\nkb = 0",
            "kb: 0 is out of range: write a value above 0",
        ),
        ("[host]", "[hots]", "x.toml:"),
    ];
    for (from, to, said) in cases {
        let text = refused(from, to);
        assert!(text.contains(said) && !text.contains('\n'), "{to}: {text}");
    }
    let missing = Scenario::read(Path::new("/no/such/file.toml"));
    assert!(
        missing
            .err()
            .unwrap()
            .to_string()
            .starts_with("cannot read scenario /no/such/file.toml: ")
    );
}

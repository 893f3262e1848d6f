// SPDX-License-Identifier: Apache-2.0
//! Results of other hosts: `scripts/check-result.py` takes a good one, and says what is wrong with another.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// Exit status, standard output and standard error of the script.
fn check(files: &[&Path]) -> (i32, String, String) {
    let script: PathBuf = [
        env!("CARGO_MANIFEST_DIR"),
        "..",
        "..",
        "scripts/check-result.py",
    ]
    .iter()
    .collect();
    let done = Command::new("python3")
        .arg(script)
        .args(files)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        done.status.code().unwrap(),
        text(&done.stdout),
        text(&done.stderr),
    )
}

fn good() -> Value {
    let spread = |median: f64| json!({"median": median, "p25": median - 0.5, "p75": median + 1.0});
    json!({
        "git": "41593817fb",
        "date": "2026-11-25T16:02:31Z",
        "machine": "AMD EPYC 9354, cores 0-31, 128 GiB, Linux 6.12.43+deb13; guests: KVM, Linux 6.12.43+deb13",
        "rounds": 5,
        "rows": [{
            "name": "ping p99, LSVM busy, 4 VMs", "unit": "ms",
            "sides": {"stock": spread(8.0), "viola": spread(2.0)},
            "ratio": 0.25, "goal": "<= 0.7", "met": true
        }]
    })
}

#[test]
fn the_results_of_kvm_hosts_are_good() {
    let (status, said, why) = check(&[]);
    assert_eq!(status, 0, "{why}");
    assert!(said.contains("results of KVM hosts"), "{said}");
}

#[test]
fn a_good_result_is_told_its_name_and_another_its_faults() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("slices-kvm.json");
    let check_value = |value: &Value| {
        std::fs::write(&file, value.to_string()).unwrap();
        check(&[&file])
    };
    let (status, said, why) = check_value(&good());
    assert_eq!(status, 0, "{why}");
    let name = "bench/results/kvm/slices-41593817fb-AMD_EPYC_9354-6.12.43_deb13.json";
    assert!(said.trim_end().ends_with(name), "{said}");

    for (at, value, fault) in [
        ("/git", json!("41593817fb-dirty"), "commit or undo"),
        ("/rounds", json!(4), "4 rounds, 5 are the least"),
        (
            "/machine",
            json!("X, cores 0-1, 1 GiB, Linux 6; guests: User Mode Linux 7.2"),
            "not KVM's",
        ),
        ("/rows/0/ratio", json!(0.2), "no two of its medians"),
        ("/rows/0/met", json!(false), "`met` says False"),
        (
            "/rows/0/sides/viola/p75",
            json!(1.0),
            "not between its quartiles",
        ),
        (
            "/rows/0/sides",
            json!({}),
            "no row has stock and another side",
        ),
        ("/rows", json!(3), "it is no result of viola-lab bench"),
    ] {
        let mut bad = good();
        *bad.pointer_mut(at).unwrap() = value;
        let (status, said, why) = check_value(&bad);
        assert!(status == 1 && why.contains(fault), "{at}: {said}{why}");
    }
    let mut disturbed = good();
    disturbed["disturbed"] = json!("other programs used 4.0 % of the guests' core");
    assert_eq!(check_value(&disturbed).0, 1);
    std::fs::write(&file, "{").unwrap();
    assert_eq!(check(&[&file]).0, 2);
}

// SPDX-License-Identifier: Apache-2.0
//! The papers' experiments reproduce their golden results, and enough rows agree with the papers.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use viola_sim::papers::{Claim, Verdict, run};

/// Maximum change of a figure, as a part of it.
const MOVED: f64 = 0.03;

/// `crates/sim/tests/golden/papers.tsv`: paper, place, what, ours. VIOLA_SIM_GOLDEN=write rewrites it.
#[test]
fn the_experiments_give_their_golden_results() {
    let all = run();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/papers.tsv");
    let lines: Vec<String> = all
        .rows
        .iter()
        .map(|r| format!("{}\t{}\t{}\t{:.6}", r.paper, r.place, r.what, r.ours))
        .collect();
    if std::env::var_os("VIOLA_SIM_GOLDEN").is_some_and(|v| v == "write") {
        let head = "# SPDX-License-Identifier: Apache-2.0\n";
        std::fs::write(file, format!("{head}{}\n", lines.join("\n"))).unwrap();
    }
    let golden = std::fs::read_to_string(file).unwrap();
    let split = |line: &str| {
        let (name, value) = line.rsplit_once('\t').unwrap();
        (name.to_owned(), value.parse::<f64>().unwrap())
    };
    let golden: BTreeMap<_, _> = golden.lines().skip(1).map(split).collect();
    let now: BTreeMap<_, _> = lines.iter().map(|l| split(l)).collect();
    assert_eq!(golden.len(), all.rows.len());
    for (name, &was) in &golden {
        let is = *now
            .get(name)
            .unwrap_or_else(|| panic!("{name} is no longer there"));
        let same = (is.is_nan() && was.is_nan()) || (is - was).abs() <= MOVED * was.abs().max(0.1);
        assert!(same, "{name}: {is}, was {was}");
    }
    // Every row that is off has a reason.
    for row in &all.rows {
        assert_ne!(
            row.verdict(),
            Verdict::Off,
            "{} {}: {}",
            row.place,
            row.what,
            row.ours
        );
        assert!(
            row.claim != Claim::Missing || row.why.is_some(),
            "{}",
            row.what
        );
    }
    for held_out in [false, true] {
        let (agree, of) = all.score(held_out);
        assert!(
            of > 35 && agree * 100 >= of * 85,
            "{agree} of {of}, held out: {held_out}"
        );
    }
    let (agree, of) = all.lab_score();
    assert!(agree * 3 >= of * 2, "{agree} of {of} of the lab's");
}

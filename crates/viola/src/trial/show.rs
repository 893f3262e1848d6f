// SPDX-License-Identifier: Apache-2.0
//! Table and verdict of a trial.

use super::samples::{Compared, Report, VmResult};
use viola_cli::quantities::{percent, rounded};
use viola_report::table::Table;

/// A neighbour is harmed when the whole interval of its work lies below `MIN_WORK`, or that of its p99 delay or answer time above `MAX_DELAY`,
/// each as a multiple of class batch. [`text`] names both bounds.
const MIN_WORK: f64 = 0.98;
const MAX_DELAY: f64 = 1.05;

/// One figure of a VM, with its name and how a value is shown.
pub struct Shown {
    /// What it is.
    pub what: &'static str,
    /// Both sides.
    pub compared: Compared,
    show: fn(f64) -> String,
}

/// The figures of a VM that were measured.
pub fn figures(vm: &VmResult) -> Vec<Shown> {
    let ns: fn(f64) -> String = |v| rounded(v as u64);
    let all = [
        ("delay p50", vm.p50_ns, ns),
        ("delay p99", vm.p99_ns, ns),
        ("answer p50", vm.answer_p50_ns, ns),
        ("answer p99", vm.answer_p99_ns, ns),
        ("connect p50", vm.connect_p50_ns, ns),
        ("connect p99", vm.connect_p99_ns, ns),
        ("CPU time", vm.used, percent),
    ];
    let shown = |(what, compared, show): (&'static str, Option<Compared>, _)| {
        let compared = compared?;
        Some(Shown {
            what,
            compared,
            show,
        })
    };
    all.into_iter().filter_map(shown).collect()
}

/// A VM and its part in the trial.
pub fn heading(vm: &VmResult) -> String {
    match vm.tried {
        true => format!("{}, tried", vm.name),
        false => format!("{}, beside", vm.name),
    }
}

/// The table of all figures of all VMs.
pub fn table(report: &Report) -> Table {
    let mut table = Table::new(["", "batch", &report.class, "ratio", "interval"]);
    for vm in &report.vms {
        table.group(&heading(vm));
        for shown in figures(vm) {
            let c = shown.compared;
            table.row([
                shown.what.to_owned(),
                (shown.show)(c.without),
                (shown.show)(c.with),
                format!("{:.2}x", c.ratio),
                format!("{:.2}x to {:.2}x", c.low, c.high),
            ]);
        }
    }
    table
}

/// A sentence for each VM that was tried or harmed, and one about the intervals.
pub fn sentences(report: &Report) -> Vec<String> {
    let tried = report.vms.iter().filter(|vm| vm.tried);
    let mut all: Vec<String> = tried
        .map(|vm| format!("{}: {}", vm.name, verdict(vm, &report.class)))
        .collect();
    let neighbours: Vec<&VmResult> = report.vms.iter().filter(|vm| !vm.tried).collect();
    let harmed: Vec<String> = neighbours.iter().filter_map(|vm| harm(vm)).collect();
    if !neighbours.is_empty() && harmed.is_empty() {
        let none = "no other VM lost 2 % of its work or waited 5 % longer, beyond chance";
        all.push(none.into());
    }
    all.extend(harmed);
    all.push(format!(
        "{} pairs of windows; an interval misses the true ratio in at most 1 of 100 trials. Every VM gets back the class that it \
         had before.",
        report.pairs
    ));
    all
}

/// Table and sentences for the terminal.
pub fn text(report: &Report) -> String {
    format!(
        "{}\n{}\n",
        table(report).text(),
        sentences(report).join("\n")
    )
}

fn interval(c: &Compared) -> String {
    format!("{:.2}x ({:.2}x to {:.2}x)", c.ratio, c.low, c.high)
}

/// What the class did for a VM that was tried.
fn verdict(vm: &VmResult, class: &str) -> String {
    let (Some(p50), Some(p99)) = (&vm.p50_ns, &vm.p99_ns) else {
        return format!(
            "too few of its packets and wake-ups were measured to say what class {class} does for it"
        );
    };
    let change = |what: &str, c: &Compared| {
        let said = interval(c);
        if c.high < 1.0 {
            format!("class {class} shortens its {what} to {said}")
        } else if c.low > 1.0 {
            format!("class {class} lengthens its {what} to {said}")
        } else {
            format!("no difference is seen in its {what}: {said}")
        }
    };
    let mut said = vec![change("p50 delay", p50), change("p99 delay", p99)];
    let answers = [
        ("p99 answer time", vm.answer_p99_ns),
        ("p99 time to connect", vm.connect_p99_ns),
    ];
    said.extend(
        answers
            .iter()
            .filter_map(|(what, c)| Some(change(what, c.as_ref()?))),
    );
    said.join("; ")
}

/// What a neighbour lost, beyond chance.
fn harm(vm: &VmResult) -> Option<String> {
    let work = vm.used.filter(|c| c.high < MIN_WORK);
    let longer = |what: &str, c: Option<Compared>| {
        let c = c.filter(|c| c.low > MAX_DELAY)?;
        Some(format!("its {what} rose: {}", interval(&c)))
    };
    let lost: Vec<String> = [
        work.map(|c| format!("it got less of its cores: {}", interval(&c))),
        longer("p99 delay", vm.p99_ns),
        longer("p99 answer time", vm.answer_p99_ns),
    ]
    .into_iter()
    .flatten()
    .collect();
    (!lost.is_empty()).then(|| format!("{}: {}", vm.name, lost.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::samples::tests::samples;

    #[test]
    fn the_verdict_says_what_the_vm_gains_and_who_pays() {
        let said = text(&samples().report("ls"));
        assert!(
            said.contains(
                "; class ls shortens its p99 delay to 0.24x (0.23x to 0.25x); class ls shortens its p99 answer time to 0.24x"
            ),
            "{said}"
        );
        assert!(said.contains("beside"), "{said}");
        let rows: Vec<Vec<&str>> = said
            .lines()
            .map(|l| l.split_whitespace().collect())
            .collect();
        assert_eq!(rows[0], ["batch", "ls", "ratio", "interval"], "{said}");
        let answers = rows.iter().find(|r| r.starts_with(&["answer", "p99"]));
        assert_eq!(answers.unwrap()[6], "0.24x", "{said}");
        assert!(said.contains("10 pairs of windows"), "{said}");
    }

    #[test]
    fn chance_is_no_difference_and_a_loss_is_named() {
        let compared = |low, ratio, high| {
            Some(Compared {
                without: 1e6,
                with: 1e6 * ratio,
                ratio,
                low,
                high,
            })
        };
        let mut vm = samples().report("ls").vms.remove(0);
        vm.p50_ns = compared(0.3, 0.4, 0.5);
        vm.p99_ns = compared(0.8, 0.9, 1.1);
        vm.answer_p99_ns = None;
        assert!(verdict(&vm, "ls").starts_with("class ls shortens its p50 delay to 0.40x"));
        assert!(verdict(&vm, "ls").contains("no difference"));
        vm.p99_ns = compared(1.2, 1.5, 1.9);
        assert!(verdict(&vm, "ls").contains("lengthens"));
        assert_eq!(
            harm(&vm).unwrap(),
            "web: its p99 delay rose: 1.50x (1.20x to 1.90x)"
        );
        vm.p99_ns = None;
        assert!(verdict(&vm, "ls").contains("too few"));
        vm.used = compared(0.9, 0.95, 0.97);
        assert!(harm(&vm).unwrap().contains("less of its cores"));
        vm.used = compared(0.97, 0.98, 0.99);
        assert_eq!(harm(&vm), None);
    }
}

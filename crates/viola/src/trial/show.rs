// SPDX-License-Identifier: Apache-2.0
//! Table and verdict of a trial.

use super::samples::{Compared, Report, VmResult};
use viola_cli::quantities::{percent, rounded};
use viola_cli::table::align;

/// A neighbour is harmed when the whole interval of its work lies below `MIN_WORK`, or that of its p99 delay above `MAX_DELAY`,
/// each as a multiple of class batch. [`text`] names both bounds.
const MIN_WORK: f64 = 0.98;
const MAX_DELAY: f64 = 1.05;

/// The table of all VMs, and a sentence for each VM that was tried or harmed.
pub fn text(report: &Report) -> String {
    let head = ["VM", "", "P50 DELAY", "P99 DELAY", "USED"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(report.vms.iter().map(row));
    let mut text = align(&rows);
    text.push('\n');
    for vm in report.vms.iter().filter(|vm| vm.tried) {
        text.push_str(&format!("{}: {}\n", vm.name, verdict(vm, &report.class)));
    }
    let neighbours: Vec<&VmResult> = report.vms.iter().filter(|vm| !vm.tried).collect();
    let harmed: Vec<String> = neighbours.iter().filter_map(|vm| harm(vm)).collect();
    match (neighbours.is_empty(), harmed.is_empty()) {
        (true, _) => {}
        (false, true) => {
            text.push_str("no other VM lost 2 % of its work or waited 5 % longer, beyond chance\n")
        }
        (false, false) => harmed.iter().for_each(|line| {
            text.push_str(line);
            text.push('\n');
        }),
    }
    text.push_str(&format!(
        "{} pairs of windows; an interval misses the true ratio in at most 1 of 100 trials. Every VM gets back the class that \
         it had before.\n",
        report.pairs
    ));
    text
}

fn row(vm: &VmResult) -> Vec<String> {
    let ns = |v: f64| rounded(v as u64);
    vec![
        vm.name.clone(),
        if vm.tried { "tried" } else { "beside" }.into(),
        cell(vm.p50_ns, ns),
        cell(vm.p99_ns, ns),
        cell(vm.used, percent),
    ]
}

fn cell(compared: Option<Compared>, show: impl Fn(f64) -> String) -> String {
    compared.map_or_else(
        || "-".into(),
        |c| {
            let (without, with) = (show(c.without), show(c.with));
            format!("{without} -> {with}, {:.2}x", c.ratio)
        },
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
            format!("class {class} shortens its {what} delay to {said}")
        } else if c.low > 1.0 {
            format!("class {class} lengthens its {what} delay to {said}")
        } else {
            format!("no difference is seen in its {what} delay: {said}")
        }
    };
    format!("{}; {}", change("p50", p50), change("p99", p99))
}

/// What a neighbour lost, beyond chance.
fn harm(vm: &VmResult) -> Option<String> {
    let work = vm.used.filter(|c| c.high < MIN_WORK);
    let delay = vm.p99_ns.filter(|c| c.low > MAX_DELAY);
    let lost: Vec<String> = [
        work.map(|c| format!("it got less of its cores: {}", interval(&c))),
        delay.map(|c| format!("its p99 delay rose: {}", interval(&c))),
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
            said.contains("; class ls shortens its p99 delay to 0.24x (0.23x to 0.25x)\n"),
            "{said}"
        );
        assert!(said.contains("beside"), "{said}");
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

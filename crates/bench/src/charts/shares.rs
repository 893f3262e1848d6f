// SPDX-License-Identifier: Apache-2.0
//! Charts of core shares: one bar per side, divided by VM.

use viola_report::svg::{Anchor, Svg};

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 14.0;
const BAR: f64 = 26.0;
const PITCH: f64 = 38.0;
const TOP: f64 = 24.0;

/// One bar.
#[derive(Debug, Clone)]
pub struct Bar<'a> {
    /// Name of the side.
    pub name: &'a str,
    /// Share of the core that each VM got, 0..=1, in the order of the VM names.
    pub shares: Vec<f64>,
}

/// Draws the chart. `fair` holds each VM's fair share (0..=1); dashed lines mark its borders. `classes` are the VMs'
/// CSS classes.
pub fn chart(
    id: &str,
    title: &str,
    vms: &[&str],
    fair: &[f64],
    bars: &[Bar<'_>],
    classes: &[&str],
) -> String {
    let height = TOP + PITCH * bars.len() as f64 + 26.0;
    let x = |part: f64| LEFT + part.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT);
    let mut svg = Svg::new(WIDTH, height, title, &describe(vms, bars));
    let bottom = TOP + PITCH * bars.len() as f64;
    for (row, bar) in bars.iter().enumerate() {
        let y = TOP + PITCH * row as f64;
        svg.text(
            "label",
            (LEFT - 12.0, y + BAR * 0.68),
            Anchor::End,
            bar.name,
        );
        svg.rect(
            "rest",
            (x(0.0), y),
            (x(1.0) - x(0.0), BAR),
            Some("idle, host and controller"),
        );
        let mut from = 0.0;
        for (vm, share) in bar.shares.iter().enumerate() {
            let class = classes.get(vm).copied().unwrap_or("vm");
            let name = vms.get(vm).copied().unwrap_or("?");
            let width = x(from + share) - x(from);
            let text = format!("{:.1} %", share * 100.0);
            svg.rect(
                class,
                (x(from), y),
                (width - 1.5, BAR),
                Some(&format!("{name}: {text}")),
            );
            if width > 50.0 {
                let at = (x(from) + width / 2.0, y + BAR * 0.67);
                svg.text(&format!("on-{class}"), at, Anchor::Middle, &text);
            }
            from += share;
        }
    }
    let mut border = 0.0;
    for (vm, part) in fair.iter().enumerate() {
        let middle = x(border + part / 2.0);
        svg.text(
            "tick",
            (middle, TOP - 9.0),
            Anchor::Middle,
            vms.get(vm).copied().unwrap_or(""),
        );
        border += part;
        svg.line(
            "fair",
            (x(border), TOP - 6.0),
            (x(border), bottom - PITCH + BAR + 6.0),
        );
    }
    svg.text(
        "axis",
        (x(0.5), height - 6.0),
        Anchor::Middle,
        "part of the core; dashed: fair",
    );
    svg.finish(id)
}

fn describe(vms: &[&str], bars: &[Bar<'_>]) -> String {
    let each = bars.iter().map(|bar| {
        let shares = vms
            .iter()
            .zip(&bar.shares)
            .map(|(vm, s)| format!("{vm} {:.1} %", s * 100.0));
        format!("{}: {}", bar.name, shares.collect::<Vec<_>>().join(", "))
    });
    each.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_has_its_part_of_the_bar() {
        let bar = Bar {
            name: "viola",
            shares: vec![0.25, 0.5],
        };
        let chart = chart(
            "c",
            "Shares",
            &["web", "db"],
            &[0.5, 0.5],
            &[bar],
            &["vm0", "vm1"],
        );
        assert!(
            chart.contains("<desc id=\"c-d\">viola: web 25.0 %, db 50.0 %</desc>"),
            "{chart}"
        );
        assert!(
            chart.contains("class=\"vm0\" x=\"190\" y=\"24\" width=\"217.5\""),
            "{chart}"
        );
        assert!(
            chart.contains("class=\"vm1\" x=\"409\" y=\"24\" width=\"436.5\""),
            "{chart}"
        );
        assert_eq!(chart.matches("class=\"fair\"").count(), 2);
    }
}

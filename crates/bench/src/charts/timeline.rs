// SPDX-License-Identifier: Apache-2.0
//! Timelines of a core: one row per VM that shows when it had the core.

use viola_report::svg::{Anchor, Svg};

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 14.0;
const LANE: f64 = 17.0;
const PITCH: f64 = 22.0;

/// A stretch of time in which one VM had the core.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Stretch {
    /// Index of the VM; the number of VMs stands for everything else on the core.
    pub vm: usize,
    /// Start, milliseconds.
    pub from_ms: f64,
    /// Length, milliseconds.
    pub ms: f64,
}

/// Draws the rows for the first `span_ms`. `classes` are the VMs' CSS classes, and one for the rest.
pub fn chart(
    id: &str,
    title: &str,
    vms: &[&str],
    stretches: &[Stretch],
    span_ms: f64,
    classes: &[&str],
) -> String {
    let lanes = vms.len();
    let height = PITCH * lanes as f64 + 32.0;
    let x = |ms: f64| LEFT + (ms / span_ms).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT);
    let mut svg = Svg::new(WIDTH, height, title, &describe(vms, stretches, span_ms));
    let bottom = PITCH * lanes as f64;
    let step = step(span_ms);
    for i in 0..=(span_ms / step).floor() as usize {
        let at = x(i as f64 * step);
        svg.line("grid", (at, 0.0), (at, bottom + 4.0));
        svg.text(
            "tick",
            (at, bottom + 18.0),
            Anchor::Middle,
            &format!("{}", i as f64 * step),
        );
    }
    svg.text("axis", (LEFT - 12.0, bottom + 18.0), Anchor::End, "ms");
    for (lane, name) in vms.iter().enumerate() {
        let y = PITCH * lane as f64 + 2.0;
        svg.text("label", (LEFT - 12.0, y + LANE * 0.76), Anchor::End, name);
        let mine = stretches
            .iter()
            .filter(|s| s.vm == lane && s.from_ms < span_ms);
        // A narrower stretch than a third of a pixel would disappear.
        let spans = mine.map(|s| (x(s.from_ms), (x(s.from_ms + s.ms) - x(s.from_ms)).max(0.35)));
        svg.strip(classes.get(lane).copied().unwrap_or("vm"), y, LANE, spans);
    }
    svg.finish(id)
}

/// Distance between ticks: 1, 2 or 5 times a power of ten, for about ten ticks.
fn step(span: f64) -> f64 {
    let raw = (span / 10.0).max(1e-3);
    let base = 10f64.powf(raw.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|t| t * base >= raw * 0.999);
    times.unwrap_or(10.0) * base
}

fn describe(vms: &[&str], stretches: &[Stretch], span_ms: f64) -> String {
    let each = vms.iter().enumerate().map(|(vm, name)| {
        let mine = || {
            stretches
                .iter()
                .filter(|s| s.vm == vm && s.from_ms < span_ms)
        };
        let longest = longest_wait(stretches, vm, span_ms);
        let longest = longest.map_or("did not run".into(), |ms| {
            format!("waited {ms:.1} ms at most")
        });
        format!("{name} ran {} times and {longest}", mine().count())
    });
    each.collect::<Vec<_>>().join("; ")
}

/// Longest time between two stretches of a VM; `None` if it never ran.
pub fn longest_wait(stretches: &[Stretch], vm: usize, span_ms: f64) -> Option<f64> {
    let mut longest: Option<f64> = None;
    let mut since = 0.0;
    for s in stretches
        .iter()
        .filter(|s| s.vm == vm && s.from_ms < span_ms)
    {
        longest = Some(longest.unwrap_or(0.0).max(s.from_ms - since));
        since = s.from_ms + s.ms;
    }
    longest.map(|l| l.max(span_ms - since))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(vm: usize, from_ms: f64, ms: f64) -> Stretch {
        Stretch { vm, from_ms, ms }
    }

    #[test]
    fn each_vm_has_a_lane() {
        let chart = chart(
            "t",
            "Who ran",
            &["a", "b"],
            &[at(0, 0.0, 10.0), at(1, 10.0, 10.0)],
            20.0,
            &["vm0", "vm1"],
        );
        assert!(
            chart.contains(r#"<path class="vm0" d="M90 2h488v17h-488z"/>"#),
            "{chart}"
        );
        assert!(
            chart.contains(r#"<path class="vm1" d="M578 24h488v17h-488z"/>"#),
            "{chart}"
        );
        assert!(
            chart.contains("a ran 1 times and waited 10.0 ms at most"),
            "{chart}"
        );
    }

    #[test]
    fn the_longest_wait_counts_both_ends() {
        let stretches = [at(0, 3.0, 1.0), at(0, 6.0, 1.0), at(1, 0.0, 3.0)];
        assert_eq!(longest_wait(&stretches, 0, 8.0), Some(3.0));
        assert_eq!(longest_wait(&stretches, 0, 20.0), Some(13.0));
        assert_eq!(longest_wait(&stretches, 2, 8.0), None);
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(step(125.0), 20.0);
        assert_eq!(step(100.0), 10.0);
        assert_eq!(step(8.0), 1.0);
        assert_eq!(step(0.0), 0.001);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The HTML page of a trial: the intervals of all figures as a picture, the verdict, and the table.

use viola_report::html::{self, escape};
use viola_report::svg::{Anchor, Svg};

use super::samples::Report;
use super::show::{figures, heading, sentences, table};

const WIDTH: f64 = 760.0;
/// Height of a line of the picture.
const LINE: f64 = 22.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 40.0;
/// The ratios at both ends of the axis, whose scale is logarithmic.
const ENDS: (f64, f64) = (0.01, 10.0);
/// Ratios with a line of the grid.
const TICKS: [f64; 4] = [0.01, 0.1, 1.0, 10.0];

/// Makes the page.
pub fn html(report: &Report) -> String {
    let mut body = format!("<h1>Class {} on this host</h1>\n", escape(&report.class));
    for sentence in sentences(report) {
        body.push_str(&format!("<p class=\"lead\">{}</p>\n", escape(&sentence)));
    }
    body.push_str("<h2>Ratios</h2>\n<figure>");
    body.push_str(&intervals(report));
    body.push_str(
        "<figcaption>Left of 1 is shorter, or less, than with class batch.</figcaption></figure>\n",
    );
    body.push_str("<h2>All figures</h2>\n<div class=\"scroll\">");
    let caption = "Medians of the windows; the ratio is that of the pairs.";
    body.push_str(&table(report).html(caption));
    body.push_str("</div>\n");
    html::page("viola: a trial", &body)
}

/// Where a ratio is on the axis.
fn x(ratio: f64) -> f64 {
    let (low, high) = (ENDS.0.ln(), ENDS.1.ln());
    let at = (ratio.clamp(ENDS.0, ENDS.1).ln() - low) / (high - low);
    LEFT + at * (WIDTH - LEFT - RIGHT)
}

/// A bar from the lower to the upper bound of each ratio, with a mark at the ratio.
fn intervals(report: &Report) -> String {
    let lines: usize = report.vms.iter().map(|vm| 1 + figures(vm).len()).sum();
    let bottom = LINE * lines as f64;
    let title = format!("Ratios with class {}", report.class);
    let about = "A bar for each figure of each VM: the interval of its ratio to class batch.";
    let mut svg = Svg::new(WIDTH, bottom + BOTTOM, &title, about);
    for tick in TICKS {
        let class = if tick == 1.0 { "fair" } else { "grid" };
        svg.line(class, (x(tick), 0.0), (x(tick), bottom));
        svg.text(
            "tick",
            (x(tick), bottom + 18.0),
            Anchor::Middle,
            &format!("{tick}x"),
        );
    }
    let mut y = 0.0;
    for vm in &report.vms {
        svg.text("", (LEFT - 10.0, y + 16.0), Anchor::End, &heading(vm));
        y += LINE;
        for shown in figures(vm) {
            let c = shown.compared;
            svg.text("tick", (LEFT - 10.0, y + 15.0), Anchor::End, shown.what);
            let (from, to) = (x(c.low), x(c.high));
            let tip = format!(
                "{}: {:.2}x ({:.2}x to {:.2}x)",
                shown.what, c.ratio, c.low, c.high
            );
            svg.rect(
                "mark s0",
                (from, y + 7.0),
                ((to - from).max(2.0), 8.0),
                Some(&tip),
            );
            svg.rect(
                "mark s2",
                (x(c.ratio) - 3.0, y + 4.0),
                (6.0, 14.0),
                Some(&tip),
            );
            y += LINE;
        }
    }
    svg.finish("intervals")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::samples::tests::samples;

    #[test]
    fn the_page_has_verdict_picture_and_table() {
        let page = html(&samples().report("ls"));
        for part in [
            "class ls shortens its p99 delay to 0.24x",
            "<svg",
            "web, tried",
            "answer p99",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn ratios_are_on_the_axis_in_their_order() {
        assert!(x(0.001) == x(0.01) && x(0.01) < x(0.1) && x(0.1) < x(1.0) && x(99.0) == x(10.0));
        assert_eq!(x(0.01), LEFT);
    }
}

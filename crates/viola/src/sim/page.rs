// SPDX-License-Identifier: Apache-2.0
//! The HTML page of `viola sim papers`.

use viola_sim::papers::{Papers, Plot, Testbed, Verdict};

use super::show::number;
use viola_report::html::{self, escape, legend};
use viola_report::svg::{Anchor, Svg};
use viola_report::table::Table;

const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 270.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;
/// CSS classes of curves; a fourth curve has the first class again.
const CLASSES: [&str; 3] = ["s0", "s1", "s2"];

/// Makes the page: `rows` is the table of all rows, `summary` a sentence about them.
pub fn html(all: &Papers, beds: &[Testbed], rows: &Table, summary: &str) -> String {
    let mut body = String::from("<h1>The papers, and the model</h1>\n");
    body.push_str(&format!("<p class=\"lead\">{}</p>\n", escape(summary)));
    body.push_str("<h2>Figures of the model</h2>\n<div class=\"pair\">\n");
    for (k, plot) in all.plots.iter().enumerate() {
        body.push_str(&format!("<figure><h3>{}</h3>\n", escape(plot.title)));
        body.push_str(&chart(plot, &format!("f{k}")));
        let names = plot.curves.iter().enumerate();
        body.push_str(&legend(
            names.map(|(k, (name, _))| (CLASSES[k % 3], name.as_str())),
        ));
        let said: Vec<String> = plot
            .paper
            .iter()
            .map(|(name, x, y)| format!("{name} at {}: {}", number(*x), number(*y)))
            .collect();
        let said = if said.is_empty() {
            "The paper gives no numbers for it in its text.".to_owned()
        } else {
            format!("Squares are the paper's: {}.", said.join("; "))
        };
        body.push_str(&format!(
            "<figcaption>{}</figcaption></figure>\n",
            escape(&said)
        ));
    }
    body.push_str("</div>\n<h2>All rows</h2>\n<div class=\"scroll\">");
    body.push_str(
        &rows.html(
            "A row agrees within 15 %, inside the range that is stated, or if its shape holds.",
        ),
    );
    body.push_str("</div>\n<h2>Why not</h2>\n<ul>\n");
    for row in all.rows.iter().filter(|r| r.verdict() != Verdict::Agrees) {
        let why = row.why.unwrap_or("cause not examined");
        body.push_str(&format!(
            "<li>{} {}, {}: {}.</li>\n",
            row.paper,
            escape(row.place),
            escape(&row.what),
            escape(why)
        ));
    }
    body.push_str("</ul>\n<h2>Constants</h2>\n");
    for bed in beds {
        let mut table = Table::new(["", "value", "source"]);
        for (name, constant) in &bed.constants {
            table.row([
                name.clone(),
                number(constant.value),
                constant.source.clone(),
            ]);
        }
        body.push_str("<div class=\"scroll\">");
        body.push_str(&table.html(&format!("Testbed {}", bed.name)));
        body.push_str("</div>\n");
    }
    html::page("viola: the papers, and the model", &body)
}

/// Minimum and maximum of some values, widened when they are equal.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| {
            (l.min(v), h.max(v))
        });
    match (low, high) {
        (l, h) if l > h => (0.0, 1.0),
        (l, h) if h - l < 1e-9 => (l - 0.5, h + 0.5),
        range => range,
    }
}

fn chart(plot: &Plot, id: &str) -> String {
    let points = || {
        plot.curves
            .iter()
            .flat_map(|(_, points)| points.iter().copied())
    };
    let paper = || plot.paper.iter().map(|&(_, x, y)| (x, y));
    let (x0, x1) = range(points().chain(paper()).map(|p| p.0));
    let (_, y1) = range(points().chain(paper()).map(|p| p.1).chain([0.0]));
    let x = |v: f64| LEFT + (v - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
    let y = |v: f64| TOP + (1.0 - v / y1.max(1e-9)) * (HEIGHT - TOP - BOTTOM);
    let said: Vec<String> = plot
        .curves
        .iter()
        .map(|(name, of)| {
            let last = of.last().map_or(f64::NAN, |p| p.1);
            format!("{name} ends at {}", number(last))
        })
        .collect();
    let mut svg = Svg::new(WIDTH, HEIGHT, plot.title, &said.join("; "));
    for k in 0..=4 {
        let (at, of) = (y1 * f64::from(k) / 4.0, x0 + (x1 - x0) * f64::from(k) / 4.0);
        svg.line("grid", (LEFT, y(at)), (WIDTH - RIGHT, y(at)));
        svg.text("tick", (LEFT - 7.0, y(at) + 4.0), Anchor::End, &number(at));
        svg.text("tick", (x(of), HEIGHT - 20.0), Anchor::Middle, &number(of));
    }
    let axes = format!("{} → {}", plot.axes.0, plot.axes.1);
    svg.text(
        "axis",
        ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 4.0),
        Anchor::Middle,
        &axes,
    );
    for (k, (_, of)) in plot.curves.iter().enumerate() {
        let class = format!("curve {}", CLASSES[k % 3]);
        svg.curve(&class, of.iter().map(|&(a, b)| (x(a), y(b))));
    }
    for &(name, a, b) in &plot.paper {
        svg.rect(
            "mark other",
            (x(a) - 4.0, y(b) - 4.0),
            (8.0, 8.0),
            Some(name),
        );
    }
    svg.finish(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_every_figure_and_loads_nothing() {
        let mut all = Papers::default();
        all.plots.push(Plot {
            title: "fig <1>",
            axes: ("a", "b"),
            curves: vec![("c".into(), vec![(1.0, 2.0)]), ("empty".into(), vec![])],
            paper: vec![("p", 1.0, f64::NAN)],
        });
        let page = html(&all, &Testbed::all(), &Table::new([""]), "sum");
        assert!(page.contains("fig &lt;1&gt;") && page.contains("<svg"));
        assert!(page.contains("Testbed xen-3.4") && !page.contains("http"));
        assert!(
            page.contains("section 2.1"),
            "constants are there with their sources"
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Charts of cumulative latency distributions on a logarithmic axis.

use viola_report::stats::{Sorted, figure};
use viola_report::svg::{Anchor, Svg};

const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 270.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 40.0;

/// One distribution.
#[derive(Debug, Clone, Copy)]
pub struct Curve<'a> {
    /// Name in the description.
    pub name: &'a str,
    /// CSS class of the line.
    pub class: &'a str,
    /// Latencies in milliseconds.
    pub samples: &'a Sorted,
}

/// Decades of an axis that several charts share, from the 0.5 % to the 99.5 % quantile of all samples. The chart clamps
/// samples beyond to its border.
pub fn decades<'a>(all: impl IntoIterator<Item = &'a Sorted>) -> (i32, i32) {
    let mut range: Option<(f64, f64)> = None;
    for samples in all {
        if let (Some(low), Some(high)) = (samples.quantile(0.005), samples.quantile(0.995)) {
            let (l, h) = range.unwrap_or((low, high));
            range = Some((l.min(low), h.max(high)));
        }
    }
    let (low, high) = range.unwrap_or((1.0, 1.0));
    let decade = |x: f64| x.clamp(1e-4, 1e6).log10();
    let from = (decade(low) + 1e-9).floor() as i32;
    (from, ((decade(high) - 1e-9).ceil() as i32).max(from + 1))
}

/// Draws the chart. Squares mark p50 and p99 of each curve.
pub fn chart(id: &str, title: &str, decades: (i32, i32), curves: &[Curve<'_>]) -> String {
    let x = |ms: f64| {
        let at = (ms.max(1e-6).log10() - f64::from(decades.0)) / f64::from(decades.1 - decades.0);
        LEFT + at.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    };
    let y = |q: f64| TOP + (1.0 - q) * (HEIGHT - TOP - BOTTOM);
    let mut svg = Svg::new(WIDTH, HEIGHT, title, &describe(curves));
    for q in [0.0, 0.25, 0.5, 0.75, 1.0] {
        svg.line("grid", (LEFT, y(q)), (WIDTH - RIGHT, y(q)));
        svg.text(
            "tick",
            (LEFT - 7.0, y(q) + 4.0),
            Anchor::End,
            &format!("{:.0} %", q * 100.0),
        );
    }
    for decade in decades.0..=decades.1 {
        let base = 10f64.powi(decade);
        svg.line("grid", (x(base), y(1.0)), (x(base), y(0.0) + 5.0));
        svg.text(
            "tick",
            (x(base), HEIGHT - 20.0),
            Anchor::Middle,
            &plain(base),
        );
        if decade < decades.1 {
            for step in 2..10 {
                let at = x(base * f64::from(step));
                svg.line("minor", (at, y(0.0)), (at, y(0.0) + 3.0));
            }
        }
    }
    svg.text(
        "axis",
        ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 4.0),
        Anchor::Middle,
        "ms, logarithmic",
    );
    for curve in curves {
        let points = quantiles().filter_map(|q| Some((x(curve.samples.quantile(q)?), y(q))));
        svg.curve(&format!("curve {}", curve.class), points);
    }
    for curve in curves {
        for q in [0.5, 0.99] {
            if let Some(ms) = curve.samples.quantile(q) {
                let hint = format!(
                    "{}: {:.0} % within {} ms",
                    curve.name,
                    q * 100.0,
                    figure(ms)
                );
                svg.rect(
                    &format!("mark {}", curve.class),
                    (x(ms) - 3.5, y(q) - 3.5),
                    (7.0, 7.0),
                    Some(&hint),
                );
            }
        }
    }
    svg.finish(id)
}

fn describe(curves: &[Curve<'_>]) -> String {
    let each = curves.iter().filter_map(|c| {
        let (half, most) = (c.samples.median()?, c.samples.quantile(0.99)?);
        Some(format!(
            "{}: half within {} ms, 99 % within {} ms",
            c.name,
            figure(half),
            figure(most)
        ))
    });
    each.collect::<Vec<_>>().join("; ")
}

/// Quantiles at which a curve has points; they are denser in the flat tail.
fn quantiles() -> impl Iterator<Item = f64> {
    let body = (0..=190).map(|i| f64::from(i) / 200.0);
    let tail = (1..=98).map(|i| 0.95 + f64::from(i) / 2000.0);
    body.chain(tail).chain([0.9995, 1.0])
}

fn plain(x: f64) -> String {
    let text = format!("{x:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decades_hold_all_samples() {
        let a = Sorted::new(vec![0.05, 0.2]);
        let b = Sorted::new(vec![4.0, 90.0]);
        assert_eq!(decades([&a, &b]), (-2, 2));
        assert_eq!(decades([&Sorted::new(vec![1.0])]), (0, 1));
        assert_eq!(decades([&Sorted::new(vec![])]), (0, 1));
        assert_eq!(decades([&Sorted::new(vec![0.0])]).0, -4);
    }

    #[test]
    fn a_chart_says_in_words_what_it_shows() {
        let samples = Sorted::new((1..=100).map(f64::from).collect());
        let chart = chart(
            "c",
            "RTT",
            (0, 2),
            &[Curve {
                name: "stock",
                class: "s0",
                samples: &samples,
            }],
        );
        assert!(
            chart.contains("stock: half within 50.5 ms, 99 % within 99.0 ms"),
            "{chart}"
        );
        assert!(chart.contains("class=\"curve s0\""));
        assert_eq!(chart.matches("class=\"mark s0\"").count(), 2);
    }

    #[test]
    fn a_curve_rises_from_left_to_right() {
        let qs: Vec<f64> = quantiles().collect();
        assert!(qs.windows(2).all(|w| w[0] < w[1]));
        assert_eq!((qs[0], qs[qs.len() - 1]), (0.0, 1.0));
    }

    #[test]
    fn a_side_that_was_not_measured_draws_nothing() {
        let none = Sorted::default();
        let chart = chart(
            "c",
            "RTT",
            (0, 1),
            &[Curve {
                name: "x",
                class: "s1",
                samples: &none,
            }],
        );
        assert!(!chart.contains("s1"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The demo's report as one HTML page.

use super::measured::{LOADS, Measured, SIDES, STATES, VMS};
use super::{Report, rows};
use crate::charts::{cdf, shares, timeline};
use crate::harness::guests::names;
use crate::harness::progress::clock;
use crate::harness::side::Side;
use viola_report::html::{self, escape, legend};
use viola_report::stats::{Sorted, figure, ratio};

/// Span of the timelines, ms: one full turn of four 30 ms slices.
const TIMELINE_MS: f64 = 125.0;
/// Span of the close-up, ms.
const CLOSE_UP_MS: f64 = 10.0;
const SIDE_CLASSES: [&str; 3] = ["s0", "s1", "s2"];
const VM_CLASSES: [&str; 5] = ["vm0", "vm1", "vm2", "vm3", "vm4"];

/// Renders the page.
pub fn html(measured: &Measured, report: &Report) -> String {
    let mut body = String::from(
        "<h1>Four guests, one core</h1>\n<p class=\"lead\">A web server shares a core with three guests that are \
         always busy. Guests, core and requests are the same on every side; only the scheduler changes.</p>\n",
    );
    if let Some(disturbed) = &report.disturbed {
        body.push_str(&format!(
            "<p class=\"warning\">Careful: {}.</p>\n",
            escape(disturbed)
        ));
    }
    body.push_str(&tiles(report));
    body.push_str(&latency_section(measured));
    body.push_str(&timelines_section(measured));
    body.push_str(&shares_section(measured));
    body.push_str("<h2>All figures</h2>\n<div class=\"scroll\">");
    let caption = format!(
        "Medians of {} rounds; the sides took turns within each round.",
        report.rounds
    );
    body.push_str(&rows::table(&report.rows).html(&caption));
    body.push_str("</div>\n");
    body.push_str(&method_section(measured, report));
    html::page("viola: four guests, one core", &body)
}

/// A figure in a large tile.
struct HeadlineFigure {
    value: String,
    what: &'static str,
    detail: String,
    good: bool,
}

/// Tiles with the most important figures of the table.
fn tiles(report: &Report) -> String {
    let (stock, viola) = (SIDES[0].name(), SIDES[2].name());
    let pair = |figure: &str, busy: bool| {
        let name = format!("{figure}, {}", rows::state(busy));
        let row = report.rows.iter().find(|r| r.name == name)?;
        Some((row.median(&stock)?, row.median(&viola)?))
    };
    let beside = |busy| if busy { "web busy" } else { "web idle" };
    let latency = |name: &str, busy, what| {
        let (before, after) = pair(name, busy)?;
        Some(HeadlineFigure {
            value: ratio(after / before),
            what,
            detail: format!(
                "{}: {} → {} ms",
                beside(busy),
                figure(before),
                figure(after)
            ),
            good: after < before,
        })
    };
    let rate = |busy| {
        let (before, after) = pair(&format!("HTTP requests, {}", LOADS[2].name()), busy)?;
        Some(HeadlineFigure {
            value: format!("{}x", figure(after / before)),
            what: "as many web pages a second, above the share",
            detail: format!(
                "{}: {} → {} a second",
                beside(busy),
                figure(before),
                figure(after)
            ),
            good: after > before,
        })
    };
    let work = || {
        let (_, part) = pair(rows::WORK, true)?;
        Some(HeadlineFigure {
            value: format!("{part:.1} %"),
            what: "of their work done by the others",
            detail: "web busy; shares are unchanged".into(),
            good: part > 97.0,
        })
    };
    let tiles = [
        latency("ping p50", true, "of stock's ping time, median"),
        latency("ping p99", true, "of stock's ping time, 99th percentile"),
        latency(
            &format!("HTTP p99, {}", LOADS[0].name()),
            false,
            "of stock's time for a web page at half its share, 99th percentile",
        ),
        rate(false),
        work(),
    ];
    let mut html = String::from("<div class=\"tiles\">\n");
    for tile in tiles.into_iter().flatten() {
        html.push_str(&format!(
            "<div class=\"tile{}\"><b>{}</b><span>{}</span><span class=\"soft\">{}</span></div>\n",
            if tile.good { " good" } else { "" },
            escape(&tile.value),
            escape(tile.what),
            escape(&tile.detail)
        ));
    }
    html.push_str("</div>\n");
    html
}

fn side_legend() -> String {
    let names = SIDES.map(Side::name);
    legend(
        SIDE_CLASSES
            .into_iter()
            .zip(names.iter().map(String::as_str)),
    )
}

fn latency_section(measured: &Measured) -> String {
    let names = SIDES.map(Side::name);
    let [(_, ping), _] = rows::LATENCIES;
    let mut charts: Vec<(String, String, [Sorted; 3])> = Vec::new();
    for busy in STATES {
        let (id, state) = match busy {
            true => ("busy", "web server busy"),
            false => ("idle", "web server idle between requests"),
        };
        charts.push((
            format!("ping-{id}"),
            format!("Ping, {state}"),
            SIDES.map(|side| measured.pooled(busy, side, ping)),
        ));
        for (number, load) in LOADS.into_iter().enumerate() {
            charts.push((
                format!("http-{id}-{number}"),
                format!("Web page of 5 KiB, {}, {state}", load.name()),
                SIDES.map(|side| measured.pooled_load(busy, side, load)),
            ));
        }
    }
    let decades = cdf::decades(charts.iter().flat_map(|(.., samples)| samples));
    let mut html = format!(
        "<h2>Response times</h2>\n<p>Share of the replies that arrived within a given time. Further left is faster; \
         each step of the axis is a factor of ten. Squares mark the median and the 99th percentile.</p>\n<p \
         class=\"soft\">{}.</p>\n{}<div class=\"pair\">\n",
        escape(&measured.rates()),
        side_legend()
    );
    for (id, title, samples) in &charts {
        let curves: Vec<cdf::Curve<'_>> = (0..SIDES.len())
            .map(|i| cdf::Curve {
                name: &names[i],
                class: SIDE_CLASSES[i],
                samples: &samples[i],
            })
            .collect();
        html.push_str(&format!(
            "<figure><h3>{}</h3>{}</figure>\n",
            escape(title),
            cdf::chart(id, title, decades, &curves)
        ));
    }
    html.push_str("</div>\n");
    html
}

fn timelines_section(measured: &Measured) -> String {
    if measured.timelines.iter().all(Vec::is_empty) {
        return String::new();
    }
    let names = names(VMS);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut html = String::from(
        "<h2>Timeline of the core</h2>\n<p>One eighth of a second with all four guests busy, from the kernel's context \
         switches. Each guest gets a quarter of the core on every side. The sides differ in how long a guest \
         waits.</p>\n",
    );
    for (number, stretches) in measured.timelines.iter().enumerate() {
        let waited = timeline::longest_wait(stretches, 0, TIMELINE_MS)
            .map(|ms| format!(": web waited {} ms at most", figure(ms)))
            .unwrap_or_default();
        let title = format!("{}{waited}", SIDES[number].name());
        let chart = timeline::chart(
            &format!("turns-{number}"),
            &title,
            &names,
            stretches,
            TIMELINE_MS,
            &VM_CLASSES,
        );
        html.push_str(&format!(
            "<figure><h3>{}</h3>{chart}</figure>\n",
            escape(&title)
        ));
    }
    if let Some(stretches) = measured.timelines.last().filter(|s| !s.is_empty()) {
        let title = format!("{}, the first {CLOSE_UP_MS} ms of it", SIDES[2].name());
        let chart = timeline::chart(
            "turns-close",
            &title,
            &names,
            stretches,
            CLOSE_UP_MS,
            &VM_CLASSES,
        );
        html.push_str(&format!(
            "<figure><h3>{}</h3>{chart}</figure>\n",
            escape(&title)
        ));
    }
    html
}

fn shares_section(measured: &Measured) -> String {
    let vms = names(VMS);
    let vms: Vec<&str> = vms.iter().map(String::as_str).collect();
    let sides = SIDES.map(Side::name);
    let bars: Vec<shares::Bar<'_>> = (0..SIDES.len())
        .map(|i| shares::Bar {
            name: &sides[i],
            shares: measured.shares(true, SIDES[i]),
        })
        .collect();
    let fair = vec![1.0 / VMS as f64; VMS];
    format!(
        "<h2>Shares of the core</h2>\n<p>Shorter slices do not mean a larger share. All four guests are busy; the bars cover all \
         measurements.</p>\n<figure>{}</figure>\n",
        shares::chart(
            "shares",
            "Share of the core by guest",
            &vms,
            &fair,
            &bars,
            &VM_CLASSES
        )
    )
}

fn method_section(measured: &Measured, report: &Report) -> String {
    let git = report.git.as_deref().unwrap_or("unknown");
    format!(
        "<h2>How it was measured</h2>\n<p>The guests are {}: real kernels that run as processes of this machine. \
         Its scheduler treats them like other virtual machines. System calls and packets are slower than with \
         hardware virtualisation, on every side. The load generator runs on another core. <i>Stock</i> is the \
         kernel's own scheduler (EEVDF). <i>30 ms slices</i> are the papers' baseline, Xen's credit scheduler with \
         BOOST for guests that wake. <i>viola</i> gives the web server shorter slices of 0.3 ms, more often.</p>\n\
         <p class=\"soft\">{}; commit {}; {}; {} rounds in {}.</p>\n",
        escape(&report.guests),
        escape(&report.machine),
        escape(git),
        escape(&report.date),
        report.rounds,
        clock(measured.took)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::charts::timeline::Stretch;
    use crate::harness::cell::Reading;
    use crate::harness::load::LoadReading;

    #[test]
    fn the_page_stands_alone_and_shows_every_side() {
        let mut measured = Measured {
            rounds: 1,
            kernel: "UML <7>".into(),
            ..Measured::default()
        };
        for busy in [true, false] {
            for (side, ms) in SIDES.into_iter().zip([4.0, 30.0, 0.4]) {
                measured.add(
                    busy,
                    side,
                    Reading {
                        ping: Sorted::new(vec![ms; 20]),
                        rr: Sorted::new(vec![ms; 20]),
                        shares: vec![0.25; 4],
                        batch_per_s: Some(1000.0),
                        ..Reading::default()
                    },
                );
                for load in LOADS {
                    let reading = LoadReading {
                        latency: Sorted::new(vec![ms * 3.0; 20]),
                        answered_per_s: 100.0 / ms,
                        ..LoadReading::default()
                    };
                    measured.add_load(busy, side, load, reading);
                }
            }
        }
        measured.share_per_s = 1380.0;
        measured.timelines = vec![
            vec![Stretch {
                vm: 0,
                from_ms: 0.0,
                ms: 4.0
            }];
            3
        ];
        let page = html(&measured, &super::super::report(&measured));
        for side in SIDES.map(Side::name) {
            assert!(page.contains(&side), "{side}");
        }
        assert!(page.contains("UML &lt;7&gt;"));
        assert!(page.contains("<b>1/10</b>"));
        assert_eq!(page.matches("<svg").count(), 8 + 4 + 1);
        for load in LOADS {
            assert!(page.contains(&load.name()), "{load:?}");
        }
        assert!(page.contains("(1380/s here)"));
        for word in ["http:", "https:", "src=", "href="] {
            assert!(!page.contains(word), "{word}");
        }
    }
}

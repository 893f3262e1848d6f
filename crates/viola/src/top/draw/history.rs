// SPDX-License-Identifier: Apache-2.0
//! The page of one VM: its figures over time.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Sparkline};
use viola_proto::{Source, VmReport};

use super::{Looks, event_line};
use crate::top::app::{App, class_text, packet_delay_p99};
use viola_cli::error::one_line;
use viola_cli::quantities::{byte_rate, cap_text, exact, percent, rounded};

/// Columns left of a curve.
const LABEL: u16 = 19;

struct Curve {
    name: &'static str,
    /// The figure as an integer, for the sparkline; `None` while it is unknown.
    value: fn(&VmReport) -> Option<u64>,
    text: fn(u64) -> String,
    /// Fixed top of the scale, if any.
    top: Option<u64>,
    looks: fn(Looks) -> Style,
}

const CURVES: [Curve; 5] = [
    Curve {
        name: "WAIT",
        value: |vm| Some((vm.waiting? * 1000.0) as u64),
        text: |v| percent(v as f64 / 1000.0),
        top: Some(1000),
        looks: Looks::bad,
    },
    Curve {
        name: "P99 DELAY",
        value: packet_delay_p99,
        text: rounded,
        top: None,
        looks: Looks::bad,
    },
    Curve {
        name: "RESIDUAL",
        value: |vm| Some(vm.residual_wait?.p99_ns),
        text: rounded,
        top: None,
        looks: Looks::bad,
    },
    Curve {
        name: "USED",
        value: |vm| Some((vm.used * 1000.0) as u64),
        text: |v| percent(v as f64 / 1000.0),
        top: None,
        looks: Looks::good,
    },
    Curve {
        name: "PKT/S",
        value: |vm| Some(vm.net_packets_per_s as u64),
        text: |v| v.to_string(),
        top: None,
        looks: Looks::good,
    },
];

pub fn draw(frame: &mut Frame<'_>, area: Rect, app: &App, looks: Looks) {
    let Some(id) = app.subject() else {
        frame.render_widget(Paragraph::new("no VM on this host"), area);
        return;
    };
    let last = app
        .past
        .iter()
        .rev()
        .find_map(|m| m.vms.vms.iter().find(|vm| vm.id == id));
    let Some(vm) = last else {
        frame.render_widget(Paragraph::new(format!("{} is gone", one_line(&id))), area);
        return;
    };
    let gone = app
        .now()
        .is_some_and(|m| m.vms.vms.iter().all(|vm| vm.id != id));
    let facts = facts(vm, gone, looks);
    let each = match area.height {
        h if h >= 26 => 3,
        h if h >= 16 => 2,
        _ => 1,
    };
    let [top, curves, below] = Layout::vertical([
        Constraint::Length(facts.len() as u16),
        Constraint::Length(each * CURVES.len() as u16),
        Constraint::Min(0),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(facts), top);
    let places = Layout::vertical([Constraint::Length(each); CURVES.len()]).split(curves);
    for (curve, place) in CURVES.iter().zip(places.iter()) {
        draw_curve(frame, *place, curve, &id, app, looks);
    }
    if below.height < 2 {
        return;
    }
    let events = app.events(Some(&id));
    let first = events.len().saturating_sub(below.height as usize - 1);
    let head = match events.is_empty() {
        true => "no change by viola",
        false => "What viola did with it",
    };
    let mut lines = vec![Line::styled(head, Looks::head())];
    lines.extend(events[first..].iter().map(|e| event_line(e, looks)));
    frame.render_widget(Paragraph::new(lines), below);
}

fn facts(vm: &VmReport, gone: bool, looks: Looks) -> Vec<Line<'static>> {
    let cores: viola_host::CpuSet = vm.cores.iter().copied().collect();
    let vcpus = match vm.vcpus {
        1 => "1 vCPU".to_owned(),
        n => format!("{n} vCPUs"),
    };
    let mut lines = vec![
        Line::styled(
            format!(
                "{} ({}){}",
                one_line(&vm.name),
                one_line(&vm.id),
                if gone { ", gone" } else { "" }
            ),
            Looks::head(),
        ),
        Line::raw(format!(
            "class {} ({}), microslice {}, weight {}, cap {}",
            class_text(vm),
            source(vm.class_source),
            exact(vm.microslice_ns),
            vm.weight,
            cap_text(vm.cap_permille),
        )),
        Line::raw(format!(
            "{vcpus} on {} by {}, share {}; net {}, disk {}, {:.0} wakes/s",
            match cores.len() {
                1 => format!("core {cores}"),
                _ => format!("cores {cores}"),
            },
            one_line(&vm.scheduled_by),
            percent(vm.share),
            byte_rate(vm.net_bytes_per_s),
            byte_rate(vm.disk_bytes_per_s),
            vm.wakes_per_s
        )),
    ];
    let notes = vm.remarks.iter().chain(&vm.advice).take(2);
    lines.extend(notes.map(|n| Line::styled(one_line(n), looks.doubtful())));
    lines
}

fn source(source: Source) -> &'static str {
    match source {
        Source::Set => "viola set",
        Source::Kept => "viola set --keep",
        Source::Config => "configuration",
        Source::Cgroup => "its control group",
        Source::Default => "default",
    }
}

fn draw_curve(frame: &mut Frame<'_>, area: Rect, curve: &Curve, id: &str, app: &App, looks: Looks) {
    let [label, chart] =
        Layout::horizontal([Constraint::Length(LABEL), Constraint::Min(1)]).areas(area);
    let width = chart.width as usize;
    let skip = app.past.len().saturating_sub(width);
    let values: Vec<Option<u64>> = app
        .past
        .iter()
        .skip(skip)
        .map(|m| {
            m.vms
                .vms
                .iter()
                .find(|vm| vm.id == id)
                .and_then(curve.value)
        })
        .collect();
    let most = values.iter().flatten().copied().max().unwrap_or(0);
    let now = values.last().copied().flatten();
    let mut lines = vec![Line::from(format!(
        "{:<10}{:>7}",
        curve.name,
        now.map_or_else(|| "-".to_owned(), curve.text)
    ))];
    if area.height > 1 {
        let text = format!("{:<10}{:>7}", " most", (curve.text)(most));
        lines.push(Line::styled(text, looks.quiet()));
    }
    frame.render_widget(Paragraph::new(lines), label);
    let chart_of = Sparkline::default()
        .data(values)
        .max(curve.top.unwrap_or(most).max(1))
        .style((curve.looks)(looks));
    frame.render_widget(chart_of, chart);
}

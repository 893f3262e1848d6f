// SPDX-License-Identifier: Apache-2.0
//! The page of all VMs: the table, and the last events below it.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use viola_proto::{Class, VmReport};

use super::{Looks, age, event_line};
use crate::top::app::{App, class_text, packet_delay_p99};
use viola_cli::error::one_line;
use viola_cli::quantities::{byte_rate, percent, rounded};

/// Parts of the time, 0 to 1, from which WAIT is shown as bad and as doubtful.
const WAITS: (f64, f64) = (0.3, 0.1);
/// Delays from which they are shown as bad and as doubtful, ns.
const DELAYS: (u64, u64) = (10_000_000, 3_000_000);
/// Height of the area, in lines, from which events are shown below the table.
const WITH_EVENTS: u16 = 10;

struct Column {
    head: &'static str,
    width: u16,
    /// Width of the screen, in characters, from which the column is shown.
    from: u16,
    right: bool,
}

const COLUMNS: [Column; 12] = [
    column("NAME", 0, 0, false),
    column("CLASS", 6, 0, false),
    column("SHARE", 5, 60, true),
    column("USED", 5, 50, true),
    column("WAIT", 5, 0, true),
    column("P50 DELAY", 9, 100, true),
    column("P99 DELAY", 9, 40, true),
    column("PKT/S", 7, 60, true),
    column("NET", 9, 100, true),
    column("DISK", 9, 100, true),
    column("BY", 9, 60, false),
    column("CHANGED", 7, 70, true),
];

const fn column(head: &'static str, width: u16, from: u16, right: bool) -> Column {
    Column {
        head,
        width,
        from,
        right,
    }
}

pub fn draw(frame: &mut Frame<'_>, area: Rect, app: &App, looks: Looks) {
    let events = app.events(None);
    let room = match area.height {
        h if h < WITH_EVENTS || events.is_empty() => 0,
        h => (h / 3).min(events.len() as u16 + 1),
    };
    let [area, below] =
        Layout::vertical([Constraint::Min(2), Constraint::Length(room)]).areas(area);
    if room > 0 {
        let first = events.len().saturating_sub(room as usize - 1);
        let mut lines = vec![Line::styled("What viola did last", Looks::head())];
        lines.extend(events[first..].iter().map(|e| event_line(e, looks)));
        frame.render_widget(Paragraph::new(lines), below);
    }
    let rows = app.rows();
    if rows.is_empty() {
        let nobody = match app.now() {
            None => "",
            Some(m) if m.vms.vms.is_empty() => "no VM on this host",
            Some(_) => "no VM matches the filter; Esc shows all",
        };
        frame.render_widget(Paragraph::new(nobody), area);
        return;
    }
    let columns: Vec<&Column> = COLUMNS.iter().filter(|c| area.width >= c.from).collect();
    let widths = columns.iter().map(|c| match c.width {
        0 => Constraint::Fill(1),
        n => Constraint::Length(n),
    });
    let head = columns.iter().map(|c| {
        let sorted = c.head == app.sort.column();
        let style = match sorted {
            true => Style::new().add_modifier(Modifier::UNDERLINED),
            false => Style::new(),
        };
        cell(c, c.head.to_owned(), style)
    });
    let head = Row::new(head.collect::<Vec<_>>()).style(Looks::head());
    let now = app.now().map_or(0, |m| m.at_ms);
    let lines = rows.iter().map(|vm| {
        let cells = columns.iter().map(|c| {
            let (text, style) = content(c.head, vm, app, now, looks);
            cell(c, text, style)
        });
        Row::new(cells.collect::<Vec<_>>())
    });
    let table = Table::new(lines.collect::<Vec<_>>(), widths)
        .header(head)
        .column_spacing(1)
        .highlight_symbol("> ")
        .row_highlight_style(Style::new().add_modifier(Modifier::BOLD));
    let mut state = TableState::new().with_selected(Some(app.place(&rows)));
    frame.render_stateful_widget(table, area, &mut state);
}

fn cell(column: &Column, text: String, style: Style) -> Cell<'static> {
    let text = Text::styled(text, style);
    Cell::new(match column.right {
        true => text.alignment(Alignment::Right),
        false => text,
    })
}

fn content(head: &str, vm: &VmReport, app: &App, now: u64, looks: Looks) -> (String, Style) {
    let plain = Style::new();
    match head {
        "NAME" => (unique_name(vm, app), plain),
        "CLASS" => {
            let style = match vm.class {
                Class::Batch => plain,
                Class::Ls | Class::Turbo => looks.good(),
            };
            (class_text(vm).to_owned(), style)
        }
        "SHARE" => (percent(vm.share), plain),
        "USED" => (percent(vm.used), plain),
        "WAIT" => {
            let style = match vm.waiting {
                Some(w) if w >= WAITS.0 => looks.bad(),
                Some(w) if w >= WAITS.1 => looks.doubtful(),
                _ => plain,
            };
            (vm.waiting.map_or_else(|| "-".to_owned(), percent), style)
        }
        "P50 DELAY" => delay(vm.packet_delay.as_ref().and_then(|d| d.p50_ns), looks),
        "P99 DELAY" => delay(packet_delay_p99(vm), looks),
        "PKT/S" => (format!("{:.0}", vm.net_packets_per_s), plain),
        "NET" => (byte_rate(vm.net_bytes_per_s), plain),
        "DISK" => (byte_rate(vm.disk_bytes_per_s), plain),
        "BY" => {
            let style = match vm.scheduled_by.as_str() {
                "stock" => looks.quiet(),
                _ => looks.good(),
            };
            (one_line(&vm.scheduled_by), style)
        }
        _ => match app.last_change(&vm.id) {
            Some(event) => (age(now, event.at_ms), plain),
            None => ("-".into(), looks.quiet()),
        },
    }
}

fn delay(ns: Option<u64>, looks: Looks) -> (String, Style) {
    let plain = Style::new();
    match ns {
        None => ("-".into(), plain),
        Some(ns) if ns >= DELAYS.0 => (rounded(ns), looks.bad()),
        Some(ns) if ns >= DELAYS.1 => (rounded(ns), looks.doubtful()),
        Some(ns) => (rounded(ns), plain),
    }
}

/// VMs of the same name are shown by their identities.
fn unique_name(vm: &VmReport, app: &App) -> String {
    let all = app.now().map_or(&[][..], |m| &m.vms.vms);
    let same = all.iter().filter(|o| o.name == vm.name).count();
    one_line(if same == 1 { &vm.name } else { &vm.id })
}

// SPDX-License-Identifier: Apache-2.0
//! Draws the state on a screen. It reads nothing else, so tests see what a terminal shows.

mod history;
mod table;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use viola_proto::{Event, EventKind, Stage};

use super::app::{App, Link, Page};
use viola_cli::date::utc;
use viola_cli::error::one_line;

/// Styles of figures; without colours only bold and dim are used.
#[derive(Debug, Clone, Copy)]
pub struct Looks {
    /// Whether colours are allowed (NO_COLOR).
    pub colour: bool,
}

impl Looks {
    fn of(self, colour: Color) -> Style {
        match self.colour {
            true => Style::new().fg(colour),
            false => Style::new(),
        }
    }

    fn good(self) -> Style {
        self.of(Color::Green)
    }

    fn bad(self) -> Style {
        self.of(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn doubtful(self) -> Style {
        self.of(Color::Yellow)
    }

    fn quiet(self) -> Style {
        match self.colour {
            true => Style::new().fg(Color::DarkGray),
            false => Style::new().add_modifier(Modifier::DIM),
        }
    }

    fn head() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }
}

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, app: &App, looks: Looks) {
    let [top, status, body, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    title(frame, top, app);
    frame.render_widget(state(app, looks), status);
    match app.page {
        Page::Table => table::draw(frame, body, app, looks),
        Page::History => history::draw(frame, body, app, looks),
        Page::Events => all_events(frame, body, app, looks),
        Page::Help => frame.render_widget(Paragraph::new(HELP), body),
    }
    frame.render_widget(hints(app, looks), keys);
}

fn title(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let vms = app.now().map_or(0, |m| m.vms.vms.len());
    let vms = match vms {
        1 => "1 VM".to_owned(),
        n => format!("{n} VMs"),
    };
    let place = match &app.link {
        Link::Live(_) if app.still => "  held still".to_owned(),
        Link::Live(_) => String::new(),
        Link::Replay { at, of, speed, .. } => {
            let how = match app.still {
                true => "paused".to_owned(),
                false => format!("x{speed}"),
            };
            format!("  {}/{of} {how}", at + 1)
        }
    };
    let left = format!("viola top  {}  {vms}{place}", one_line(&app.origin));
    let right = app.now().map(|m| match app.link {
        Link::Live(_) => format!(" {} UTC", clock(m.at_ms)),
        Link::Replay { .. } => format!(" {} {} UTC", day(m.at_ms), clock(m.at_ms)),
    });
    let right = right.unwrap_or_default();
    let [l, r] = Layout::horizontal([Constraint::Min(0), Constraint::Length(right.len() as u16)])
        .areas(area);
    frame.render_widget(Paragraph::new(left).style(Looks::head()), l);
    frame.render_widget(Paragraph::new(right), r);
}

/// Stage of the daemon, or the reason why it does not answer.
fn state(app: &App, looks: Looks) -> Line<'static> {
    let trouble = match &app.link {
        Link::Live(Some(why)) => Some(format!("retrying: {why}")),
        Link::Replay { trouble, .. } => trouble.clone(),
        Link::Live(None) => None,
    };
    if let Some(why) = trouble {
        return Line::styled(one_line(&why), looks.bad());
    }
    let Some(moment) = app.now() else {
        return Line::raw("waiting for the daemon");
    };
    let (word, style) = match moment.stage {
        Stage::Running => ("running", looks.good()),
        Stage::Idle => ("idle", Style::new()),
        Stage::Waiting => ("waiting", looks.bad()),
        Stage::Off => ("off", looks.doubtful()),
        Stage::Stopped => ("stopped", looks.bad()),
        Stage::Advising => ("advising", looks.doubtful()),
    };
    let mechanism = moment.mechanism.as_deref().unwrap_or("slices");
    Line::from(vec![
        Span::raw(format!("{}: ", one_line(mechanism))),
        Span::styled(word, style),
        Span::raw(format!(", {}", one_line(&moment.why))),
    ])
}

fn hints(app: &App, looks: Looks) -> Line<'static> {
    if let Some(text) = &app.typing {
        return Line::from(vec![
            Span::styled("only VMs with: ", Looks::head()),
            Span::raw(format!("{}_", one_line(text))),
            Span::styled("   Enter keeps it, Esc gives it up", looks.quiet()),
        ]);
    }
    let mut text = match app.page {
        Page::Table => "arrows Enter history  s r sort  / filter  e events  space pause",
        Page::History => "Esc back  arrows other VM  e events  space pause",
        Page::Events => "Esc back  arrows older, newer",
        Page::Help => "Esc back",
    }
    .to_owned();
    if let Link::Replay { .. } = app.link {
        text = text.replace("e events  space pause", "e events  < > time");
    }
    Line::styled(format!("{text}  ? help  q quit"), looks.quiet())
}

fn all_events(frame: &mut Frame<'_>, area: Rect, app: &App, looks: Looks) {
    let events = app.events(None);
    let end = events.len().saturating_sub(app.scroll);
    let end = end.max(events.len().min(area.height as usize));
    let begin = end.saturating_sub(area.height as usize);
    let lines: Vec<Line<'_>> = events[begin..end]
        .iter()
        .map(|e| event_line(e, looks))
        .collect();
    match lines.is_empty() {
        true => frame.render_widget(Paragraph::new("no events yet"), area),
        false => frame.render_widget(Paragraph::new(lines), area),
    }
}

fn event_line(event: &Event, looks: Looks) -> Line<'static> {
    let style = match event.kind {
        EventKind::Error => looks.bad(),
        EventKind::Warning => looks.doubtful(),
        EventKind::Change => Style::new(),
        EventKind::Info => looks.quiet(),
    };
    let vm = event.vm.as_ref().map(|vm| format!("{}: ", one_line(vm)));
    Line::from(vec![
        Span::raw(format!("{}  ", clock(event.at_ms))),
        Span::styled(
            format!("{}{}", vm.unwrap_or_default(), one_line(&event.what)),
            style,
        ),
    ])
}

/// Time of day, UTC.
fn clock(at_ms: u64) -> String {
    utc(at_ms / 1000)[11..19].to_owned()
}

fn day(at_ms: u64) -> String {
    let date = utc(at_ms / 1000);
    date.split('T').next().unwrap_or_default().to_owned()
}

/// An age in one unit.
fn age(now_ms: u64, at_ms: u64) -> String {
    let s = now_ms.saturating_sub(at_ms) / 1000;
    match s {
        0..100 => format!("{s} s"),
        100..6000 => format!("{} min", s / 60),
        6000..172_800 => format!("{} h", s / 3600),
        _ => format!("{} d", s / 86_400),
    }
}

const HELP: &str = "\
\x20CLASS      ls, batch or turbo; a * when the meter chose it
 SHARE      part of its cores that its weight stands for when all are busy
 USED       part that it got in the last second
 WAIT       part of the last second that it waited for a core
 P99 DELAY  99 of 100 packets of the last 10 s waited no longer for a vCPU
 RESIDUAL   how long it still waits at a random moment: no longer at 99 of 100
 PKT/S      packets a second, both directions
 BY         what schedules it: slots, sched_ext, eevdf, or stock (the kernel)
 CHANGED    how long ago viola last changed it; Enter shows what and why

 up down           choose a VM        Enter   its history, and back
 s                 sort by the next   n w p u k   by name, wait, delay,
 r                 turn it round                  packets
 /                 only some VMs      Esc     all VMs; back
 e                 all events         space   hold still, go on
 left right        one moment of a recording; PgUp PgDn 60; Home End
 + -               faster, slower
 Ctrl-L            draw anew          q, Ctrl-C   end";

#[cfg(test)]
mod tests;

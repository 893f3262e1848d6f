// SPDX-License-Identifier: Apache-2.0
//! State of `viola top`, and what each key does to it. It uses no terminal, clock or file, so tests see what a terminal
//! shows.

use std::cmp::Ordering;
use std::collections::VecDeque;

use viola_proto::{Class, ClassSetting, Event, EventKind, VmReport};

use crate::record::Moment;

/// Moments kept for histories.
pub const KEPT: usize = 300;
/// Events kept of a running daemon.
const EVENTS: usize = 2000;
/// Longest filter, characters.
const FILTER: usize = 40;

/// Sort key of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// Name, ascending.
    Name,
    /// Part of the time that a vCPU waited for a core.
    Wait,
    /// 99th percentile of the packet delay.
    P99,
    /// CPU time used.
    Used,
    /// Packets per second.
    Packets,
}

impl Sort {
    /// All, in the order of the key `s`.
    const ALL: [Self; 5] = [Self::Name, Self::Wait, Self::P99, Self::Used, Self::Packets];

    /// Head of the column by which it sorts.
    pub fn column(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::Wait => "WAIT",
            Self::P99 => "P99 DELAY",
            Self::Used => "USED",
            Self::Packets => "PKT/S",
        }
    }
}

/// What is on the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Page {
    /// All VMs.
    Table,
    /// One VM over time.
    History,
    /// All events.
    Events,
    /// Help on the keys.
    Help,
}

/// Source of the moments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// A daemon; the reason when it does not answer.
    Live(Option<String>),
    /// A recording.
    Replay {
        /// Index of the moment shown, 0..of.
        at: usize,
        /// Number of moments.
        of: usize,
        /// Speed of playing, moments per second.
        speed: u32,
        /// Error of the recording, if any.
        trouble: Option<String>,
    },
}

/// A key that `top` handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
}

/// What the caller does after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Redraw.
    Draw,
    /// End.
    Quit,
    /// Show another moment of the recording.
    Go(usize),
}

/// The state.
#[derive(Debug)]
pub struct App {
    /// Host and, for a recording, its file.
    pub origin: String,
    /// The last moments, newest last.
    pub past: VecDeque<Moment>,
    events: VecDeque<Event>,
    /// Their source.
    pub link: Link,
    /// Whether the display is paused.
    pub still: bool,
    /// What is on the screen.
    pub page: Page,
    behind: Page,
    /// Sort key of the table.
    pub sort: Sort,
    /// Whether the order is reversed: small values first, names from z to a.
    pub reverse: bool,
    /// Text that name, identity or class of a VM has to contain.
    pub filter: String,
    /// The filter while it is typed.
    pub typing: Option<String>,
    /// Identity of the chosen VM.
    pub chosen: Option<String>,
    /// Lines by which the list of events is scrolled back.
    pub scroll: usize,
}

impl App {
    /// The state before the first moment.
    pub fn new(origin: String, link: Link) -> Self {
        Self {
            origin,
            past: VecDeque::new(),
            events: VecDeque::new(),
            still: matches!(link, Link::Replay { .. }),
            link,
            page: Page::Table,
            behind: Page::Table,
            sort: Sort::Wait,
            reverse: false,
            filter: String::new(),
            typing: None,
            chosen: None,
            scroll: 0,
        }
    }

    /// The moment shown.
    pub fn now(&self) -> Option<&Moment> {
        self.past.back()
    }

    /// Takes a reply of the daemon.
    pub fn heard(&mut self, moment: Moment, events: Vec<Event>) {
        self.link = Link::Live(None);
        self.events.extend(events);
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
        if !self.still {
            self.push(moment);
        }
    }

    /// Notes that the daemon does not answer.
    pub fn lost(&mut self, why: String) {
        self.link = Link::Live(Some(why));
    }

    /// Sets all events of a recording.
    pub fn know(&mut self, events: Vec<Event>) {
        self.events = events.into();
    }

    /// Adds a moment.
    pub fn push(&mut self, moment: Moment) {
        if self.past.len() == KEPT {
            self.past.pop_front();
        }
        self.past.push_back(moment);
    }

    /// Events up to the moment shown, oldest first; of one VM, or of all.
    pub fn events(&self, vm: Option<&str>) -> Vec<&Event> {
        let is_replay = matches!(self.link, Link::Replay { .. });
        let now = self.now().map_or(0, |m| m.at_ms);
        let seen = |e: &&Event| !is_replay || e.at_ms <= now;
        let of = |e: &&Event| vm.is_none() || e.vm.as_deref() == vm;
        self.events.iter().filter(seen).filter(of).collect()
    }

    /// The last change of a VM.
    pub fn last_change(&self, vm: &str) -> Option<&Event> {
        let is_replay = matches!(self.link, Link::Replay { .. });
        let now = self.now().map_or(0, |m| m.at_ms);
        self.events.iter().rfind(|e| {
            (!is_replay || e.at_ms <= now)
                && e.kind == EventKind::Change
                && e.vm.as_deref() == Some(vm)
        })
    }

    /// The VMs in the order of the table.
    pub fn rows(&self) -> Vec<&VmReport> {
        let all = self.now().map_or(&[][..], |m| &m.vms.vms);
        let filter = self.typing.as_ref().unwrap_or(&self.filter).to_lowercase();
        let mut rows: Vec<&VmReport> = all
            .iter()
            .filter(|vm| {
                [vm.name.as_str(), &vm.id, class_text(vm)]
                    .iter()
                    .any(|text| text.to_lowercase().contains(&filter))
            })
            .collect();
        let by = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
        rows.sort_by(|a, b| {
            let order = match self.sort {
                Sort::Name => Ordering::Equal,
                Sort::Wait => by(a.waiting.unwrap_or(0.0), b.waiting.unwrap_or(0.0)),
                Sort::P99 => packet_delay_p99(b).cmp(&packet_delay_p99(a)),
                Sort::Used => by(a.used, b.used),
                Sort::Packets => by(a.net_packets_per_s, b.net_packets_per_s),
            };
            let order = order.then_with(|| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
            if self.reverse { order.reverse() } else { order }
        });
        rows
    }

    /// Row of the chosen VM; the first row when none is chosen or the VM is gone.
    pub fn place(&self, rows: &[&VmReport]) -> usize {
        let chosen = self.chosen.as_deref();
        rows.iter()
            .position(|vm| Some(vm.id.as_str()) == chosen)
            .unwrap_or(0)
    }

    /// Identity of the VM whose history is shown.
    pub fn subject(&self) -> Option<String> {
        self.chosen
            .clone()
            .or_else(|| self.rows().first().map(|vm| vm.id.clone()))
    }

    /// Handles a key; `height` is the height of the screen in lines.
    pub fn key(&mut self, key: Key, height: usize) -> Then {
        if self.typing.is_some() {
            self.type_filter(key);
            return Then::Draw;
        }
        if let Some(to) = self.travel(key) {
            return Then::Go(to);
        }
        let screen = height.saturating_sub(6).max(1) as isize;
        match key {
            Key::Char('q') => return Then::Quit,
            Key::Char('?' | 'h') if self.page != Page::Help => {
                self.behind = self.page;
                self.page = Page::Help;
            }
            Key::Escape if self.page == Page::Table => self.filter.clear(),
            Key::Escape | Key::Backspace | Key::Char('?' | 'h') => {
                self.page = match self.page {
                    Page::Help => self.behind,
                    _ => Page::Table,
                };
                self.scroll = 0;
            }
            Key::Char('e') => {
                self.page = match self.page {
                    Page::Events => Page::Table,
                    _ => Page::Events,
                };
                self.scroll = 0;
            }
            Key::Char(' ') => self.still = !self.still,
            Key::Char('+') | Key::Char('-') => self.hurry(key),
            Key::Char('s') => {
                let at = Sort::ALL.iter().position(|s| *s == self.sort).unwrap_or(0);
                self.sort = Sort::ALL[(at + 1) % Sort::ALL.len()];
            }
            Key::Char('n') => self.sort = Sort::Name,
            Key::Char('w') => self.sort = Sort::Wait,
            Key::Char('p') => self.sort = Sort::P99,
            Key::Char('u') => self.sort = Sort::Used,
            Key::Char('k') => self.sort = Sort::Packets,
            Key::Char('r') => self.reverse = !self.reverse,
            Key::Char('/') if self.page == Page::Table => self.typing = Some(self.filter.clone()),
            Key::Enter if self.page == Page::Table => {
                self.chosen = self
                    .rows()
                    .get(self.place(&self.rows()))
                    .map(|v| v.id.clone());
                if self.chosen.is_some() {
                    self.page = Page::History;
                }
            }
            Key::Enter if self.page == Page::History => self.page = Page::Table,
            Key::Up => self.step(-1),
            Key::Down => self.step(1),
            Key::PageUp => self.step(-screen),
            Key::PageDown => self.step(screen),
            Key::Home => self.step(isize::MIN / 2),
            Key::End => self.step(isize::MAX / 2),
            _ => {}
        }
        Then::Draw
    }

    fn type_filter(&mut self, key: Key) {
        let Some(text) = &mut self.typing else {
            return;
        };
        match key {
            Key::Char(c) if text.chars().count() < FILTER && !c.is_control() => text.push(c),
            Key::Backspace => drop(text.pop()),
            Key::Enter => self.filter = self.typing.take().unwrap_or_default(),
            Key::Escape => self.typing = None,
            _ => {}
        }
    }

    /// The moment of a recording to which a key leads.
    fn travel(&mut self, key: Key) -> Option<usize> {
        let Link::Replay { at, of, .. } = self.link else {
            return None;
        };
        let to = match key {
            Key::Left => at.saturating_sub(1),
            Key::Right => at + 1,
            Key::PageUp => at.saturating_sub(60),
            Key::PageDown => at + 60,
            Key::Home => 0,
            Key::End => of,
            _ => return None,
        };
        Some(to.min(of.saturating_sub(1)))
    }

    fn hurry(&mut self, key: Key) {
        if let Link::Replay { speed, .. } = &mut self.link {
            *speed = match key {
                Key::Char('+') => (*speed * 2).min(64),
                _ => (*speed / 2).max(1),
            };
        }
    }

    /// Moves the choice, or scrolls the list of events.
    fn step(&mut self, by: isize) {
        if self.page == Page::Events {
            let most = self.events(None).len().saturating_sub(1) as isize;
            // Upwards is back in time.
            self.scroll = (self.scroll as isize).saturating_sub(by).clamp(0, most) as usize;
            return;
        }
        let rows = self.rows();
        if rows.is_empty() {
            return;
        }
        let to = (self.place(&rows) as isize).saturating_add(by);
        let to = to.clamp(0, rows.len() as isize - 1) as usize;
        self.chosen = Some(rows[to].id.clone());
    }
}

/// The delay that 99 of 100 packets did not exceed, ns.
pub fn packet_delay_p99(vm: &VmReport) -> Option<u64> {
    vm.packet_delay.as_ref()?.p99_ns
}

/// A VM's class; with a star when the classifier chose it.
pub fn class_text(vm: &VmReport) -> &'static str {
    match (vm.class, vm.class_setting == ClassSetting::Auto) {
        (Class::Ls, false) => "ls",
        (Class::Ls, true) => "ls*",
        (Class::Batch, false) => "batch",
        (Class::Batch, true) => "batch*",
        (Class::Turbo, false) => "turbo",
        (Class::Turbo, true) => "turbo*",
    }
}

#[cfg(test)]
mod tests;

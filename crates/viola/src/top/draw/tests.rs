// SPDX-License-Identifier: Apache-2.0
//! Whole screens of 80 x 24, as they are to look.

use super::*;
use crate::testing::{event, moment};
use crate::top::app::Key;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use viola_proto::{Class, ClassSetting, Source};

const PLAIN: Looks = Looks { colour: false };
/// 2026-11-22 20:31:07
const T: u64 = 1_795_379_467_000;

fn screen(app: &App, width: u16, height: u16, looks: Looks) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, app, looks)).unwrap();
    terminal
}

/// The screen without blanks at the ends of lines.
fn text(app: &App, width: u16, height: u16) -> String {
    let terminal = screen(app, width, height, PLAIN);
    let cells = terminal.backend().buffer().content();
    let lines = cells.chunks(width as usize).map(|line| {
        let line: String = line.iter().map(|c| c.symbol()).collect();
        line.trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn four() -> App {
    let mut app = App::new("host1".into(), Link::Live(None));
    for i in 0..90 {
        let mut m = moment(
            T - 89_000 + i * 1000,
            &["db01", "web02", "batch-of-the-night", "ci"],
        );
        m.stage = Stage::Running;
        m.mechanism = Some("slots".into());
        m.why = "db01 is latency-sensitive".into();
        let db = &mut m.vms.vms[0];
        db.waiting = Some(if i < 60 { 0.38 } else { 0.02 });
        let delay = db.packet_delay.as_mut().unwrap();
        delay.p50_ns = Some(if i < 60 { 4_000_000 } else { 1280 });
        delay.p99_ns = Some(if i < 60 { 17_000_000 } else { 310_000 });
        db.residual_wait.as_mut().unwrap().p99_ns = if i < 60 { 9_000_000 } else { 0 };
        db.net_packets_per_s = 1000.0 + 20.0 * i as f64;
        if i >= 60 {
            db.class = Class::Ls;
            db.class_setting = ClassSetting::Ls;
            db.class_source = Source::Set;
            db.scheduled_by = "slots".into();
        }
        m.vms.vms[1].waiting = Some(0.12);
        m.vms.vms[2].packet_delay = None;
        m.vms.vms[3].class_setting = ClassSetting::Auto;
        let events = match i {
            0 => vec![Event {
                kind: EventKind::Info,
                ..event(T - 89_000, Some("uml:ci"), "found: 1 vCPU, cores 1")
            }],
            60 => vec![
                event(
                    T - 29_000,
                    Some("uml:db01"),
                    "class ls (was batch): viola set by root",
                ),
                event(
                    T - 28_900,
                    None,
                    "core 1: slots on, since db01 is latency-sensitive",
                ),
            ],
            _ => vec![],
        };
        app.heard(m, events);
    }
    app
}

/// Compares with a section of `golden.txt`. GOLDEN=FILE collects what is shown, for when the screens are to change.
fn assert_golden(name: &str, app: &App, width: u16, height: u16) {
    let all = include_str!("golden.txt");
    let begin = format!("\n== {name} {width}x{height}\n");
    let wanted = all.split_once(&begin).map_or("", |(_, rest)| rest);
    let wanted = wanted.split("\n== ").next().unwrap();
    let shown = text(app, width, height);
    if let Some(file) = std::env::var_os("GOLDEN") {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(file)
            .unwrap();
        std::io::Write::write_all(&mut file, format!("{begin}{shown}\n").as_bytes()).unwrap();
        return;
    }
    assert!(
        wanted.trim_end() == shown.trim_end(),
        "{name} is another screen:{begin}{shown}"
    );
}

fn press(app: &mut App, keys: &[Key]) {
    for key in keys {
        app.key(*key, 24);
    }
}

#[test]
fn the_table() {
    let mut app = four();
    assert_golden("table", &app, 80, 24);
    assert_golden("table", &app, 120, 12);
    assert_golden("table", &app, 40, 10);
    press(&mut app, &[Key::Char('/'), Key::Char('b'), Key::Char('0')]);
    assert_golden("filter", &app, 80, 24);
}

#[test]
fn the_history_of_a_vm() {
    let mut app = four();
    press(
        &mut app,
        &[Key::Char('n'), Key::Down, Key::Down, Key::Enter],
    );
    assert_golden("history", &app, 80, 24);
}

#[test]
fn help_and_events() {
    let mut app = four();
    press(&mut app, &[Key::Char('?')]);
    assert_golden("help", &app, 80, 24);
    press(&mut app, &[Key::Escape, Key::Char('e')]);
    assert_golden("events", &app, 80, 24);
}

#[test]
fn without_a_daemon_it_says_so_and_shows_what_was() {
    let mut app = App::new("host1".into(), Link::Live(None));
    assert_golden("first", &app, 80, 24);
    app.lost("no daemon on /run/viola/viola.sock".into());
    assert_golden("nobody", &app, 80, 24);
    let mut app = four();
    app.lost("no daemon on /run/viola/viola.sock".into());
    assert_golden("gone", &app, 80, 24);
}

#[test]
fn a_recording_says_which_day_it_was_and_which_moment_this_is() {
    let link = Link::Replay {
        at: 41,
        of: 3600,
        speed: 4,
        trouble: None,
    };
    let mut app = App::new("host1 r.jsonl".into(), link);
    app.push(moment(T, &["a"]));
    assert_golden("replay", &app, 80, 24);
}

#[test]
fn hundreds_of_vms_are_scrolled_through_with_the_choice_in_sight() {
    let names: Vec<String> = (0..300).map(|i| format!("vm{i:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut app = App::new("host1".into(), Link::Live(None));
    app.heard(moment(T, &names), vec![]);
    press(&mut app, &[Key::Char('n'), Key::End]);
    let shown = text(&app, 80, 24);
    assert!(shown.contains("> vm299"), "{shown}");
    press(&mut app, &[Key::PageUp]);
    assert!(text(&app, 80, 24).contains("> vm281"));
}

#[test]
fn no_size_and_no_name_make_it_panic() {
    let mut app = four();
    let mut m = moment(T, &["\u{1b}[31mred\nbell\u{7}", "日本語のサーバー", ""]);
    m.vms.vms[0].waiting = Some(f64::NAN);
    m.vms.vms[1].waiting = Some(f64::INFINITY);
    m.vms.vms[1].net_packets_per_s = -1.0;
    m.vms.vms[2].cores = Vec::new();
    app.heard(m, vec![event(T, Some("uml:x"), "a\x1b[2Jb")]);
    for page in [Page::Table, Page::History, Page::Events, Page::Help] {
        app.page = page;
        for (width, height) in [
            (1, 1),
            (2, 3),
            (5, 2),
            (10, 4),
            (20, 50),
            (79, 7),
            (300, 90),
        ] {
            let shown = text(&app, width, height);
            assert!(!shown.contains('\u{1b}') && !shown.contains('\u{7}'));
        }
    }
}

#[test]
fn colours_mean_something_and_without_them_there_are_none() {
    let app = four();
    let of = |looks| {
        let terminal = screen(&app, 80, 24, looks);
        let cells = terminal.backend().buffer().content();
        let mut colours: Vec<Color> = cells.iter().map(|c| c.fg).collect();
        colours.extend(cells.iter().map(|c| c.bg));
        colours.sort_by_key(|c| format!("{c}"));
        colours.dedup();
        colours
    };
    assert_eq!(of(PLAIN), [Color::Reset]);
    let with = of(Looks { colour: true });
    for colour in [Color::Red, Color::Green, Color::Yellow] {
        assert!(with.contains(&colour), "{with:?}");
    }
}

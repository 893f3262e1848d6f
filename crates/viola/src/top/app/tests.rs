// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::testing::{event, moment};

fn live(names: &[&str]) -> App {
    let mut app = App::new("h".into(), Link::Live(None));
    let mut m = moment(1000, names);
    for (i, vm) in m.vms.vms.iter_mut().enumerate() {
        vm.waiting = Some(i as f64 / 10.0);
        vm.packet_delay.as_mut().unwrap().p99_ns = Some(1000 - i as u64);
    }
    app.heard(m, vec![]);
    app
}

fn names(app: &App) -> Vec<&str> {
    app.rows().iter().map(|vm| vm.name.as_str()).collect()
}

fn press(app: &mut App, keys: &str) {
    for c in keys.chars() {
        let key = match c {
            '\n' => Key::Enter,
            '\x1b' => Key::Escape,
            '\x08' => Key::Backspace,
            'v' => Key::Down,
            '^' => Key::Up,
            c => Key::Char(c),
        };
        app.key(key, 24);
    }
}

#[test]
fn the_table_is_sorted_by_what_was_asked_for() {
    let mut app = live(&["b", "a", "c"]);
    assert_eq!(
        names(&app),
        ["c", "a", "b"],
        "who waits longest comes first"
    );
    press(&mut app, "p");
    assert_eq!(names(&app), ["b", "a", "c"]);
    press(&mut app, "n");
    assert_eq!(names(&app), ["a", "b", "c"]);
    press(&mut app, "r");
    assert_eq!(names(&app), ["c", "b", "a"]);
    press(&mut app, "rsssss");
    assert_eq!(app.sort, Sort::Name, "s goes round");
}

#[test]
fn the_choice_stays_with_its_vm_when_the_order_changes() {
    let mut app = live(&["b", "a", "c"]);
    press(&mut app, "nv");
    assert_eq!(app.chosen.as_deref(), Some("uml:b"));
    press(&mut app, "w");
    assert_eq!(app.place(&app.rows()), 2);
    press(&mut app, "vvvvv");
    assert_eq!(app.chosen.as_deref(), Some("uml:b"), "there is no further");
    press(&mut app, "\n");
    assert_eq!(
        (app.page, app.subject().as_deref()),
        (Page::History, Some("uml:b"))
    );
    press(&mut app, "\x1b");
    assert_eq!(app.page, Page::Table);
}

#[test]
fn a_filter_holds_when_entered_and_not_when_given_up() {
    let mut app = live(&["web1", "web2", "db01"]);
    press(&mut app, "/WEB");
    assert_eq!(names(&app).len(), 2, "while it is typed");
    press(&mut app, "2\n");
    assert_eq!(names(&app), ["web2"]);
    press(&mut app, "/\x08\x08\x08\x08db\x1b");
    assert_eq!(names(&app), ["web2"]);
    press(&mut app, "\x1b");
    assert_eq!(names(&app).len(), 3);
    press(&mut app, "/q\n");
    assert_eq!(
        names(&app).len(),
        0,
        "q is a letter while a filter is typed"
    );
    press(&mut app, "v\n");
    assert_eq!(app.page, Page::Table, "there is no VM to look at");
}

#[test]
fn held_still_it_shows_the_same_and_hears_what_happens() {
    let mut app = live(&["a"]);
    press(&mut app, " ");
    app.heard(
        moment(2000, &["a", "b"]),
        vec![event(1500, Some("uml:a"), "x")],
    );
    assert_eq!(names(&app), ["a"]);
    assert_eq!(app.events(None).len(), 1);
    press(&mut app, " ");
    app.heard(moment(3000, &["a", "b"]), vec![]);
    assert_eq!(names(&app).len(), 2);
}

#[test]
fn a_recording_is_walked_through_and_knows_no_future() {
    let link = Link::Replay {
        at: 5,
        of: 100,
        speed: 1,
        trouble: None,
    };
    let mut app = App::new("h".into(), link);
    app.know(vec![
        event(10, Some("uml:a"), "early"),
        event(9000, Some("uml:a"), "late"),
    ]);
    app.push(moment(1000, &["a"]));
    assert_eq!(app.events(Some("uml:a")).len(), 1);
    assert_eq!(app.last_change("uml:a").unwrap().what, "early");
    assert_eq!(app.key(Key::Left, 24), Then::Go(4));
    assert_eq!(app.key(Key::PageUp, 24), Then::Go(0));
    assert_eq!(app.key(Key::End, 24), Then::Go(99));
    press(&mut app, "++++++++++");
    assert!(matches!(app.link, Link::Replay { speed: 64, .. }));
    assert_eq!(app.key(Key::Char('q'), 24), Then::Quit);
}

#[test]
fn what_is_kept_has_an_end() {
    let mut app = live(&["a"]);
    for i in 0..KEPT as u64 + 50 {
        let events = (0..100).map(|n| event(i * 100 + n, None, "x")).collect();
        app.heard(moment(i, &["a"]), events);
    }
    assert_eq!((app.past.len(), app.events(None).len()), (KEPT, EVENTS));
}

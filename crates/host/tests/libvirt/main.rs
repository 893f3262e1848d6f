// SPDX-License-Identifier: Apache-2.0
//! The event stream of libvirt, with a small fake of its library that is loaded as the real one is.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use viola_host::libvirt::{DomainState, Message, stream_events};

/// Environment of a process of [`ask`]: its output file and its URI.
const ASKS: [&str; 2] = ["VIOLA_TEST_LIBVIRT_OUT", "VIOLA_TEST_LIBVIRT_URI"];

/// Runs in a process of its own: the loader reads LD_LIBRARY_PATH at the start of a process.
#[test]
fn streams_to_the_file_of_its_environment() {
    let [Ok(out), Ok(uri)] = ASKS.map(std::env::var) else {
        return; // not one of those processes
    };
    stream_events(&uri, &mut std::fs::File::create(out).unwrap());
}

/// Builds the fake library.
fn library(folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libvirt/fake.c");
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .arg(folder.join("libvirt.so.0"))
        .arg(source)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
}

fn ask(folder: &Path, uri: &str) -> Vec<Message> {
    let out = folder.join("out");
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "streams_to_the_file_of_its_environment"])
        .env("LD_LIBRARY_PATH", folder)
        .envs(ASKS.into_iter().zip([out.to_str().unwrap(), uri]))
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let text = std::fs::read_to_string(out).unwrap();
    let messages = text.lines().map(|l| serde_json::from_str(l).unwrap());
    messages.collect()
}

#[test]
fn events_are_streamed_until_the_connection_ends() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path());
    let messages = ask(folder.path(), "qemu:///system");
    let Message::Connected { domains } = &messages[0] else {
        panic!("{messages:?}")
    };
    assert_eq!(domains.len(), 1);
    assert_eq!(domains[0].name, "db01");
    assert_eq!(domains[0].uuid, "6b5a8a52-0a5b-4b52-9d5c-000000000001");
    let event = |message: &Message| match message {
        Message::Event { domain, what } => (domain.name.clone(), what.clone(), domain.state),
        other => panic!("{other:?}"),
    };
    let events: Vec<_> = messages[1..messages.len() - 1].iter().map(event).collect();
    // a name cannot end a line
    let web = "we\u{fffd}b".to_owned();
    assert_eq!(
        events,
        [
            (web.clone(), "started".into(), DomainState::Running),
            ("db01".into(), "tunable".into(), DomainState::Running),
            ("db01".into(), "suspended".into(), DomainState::Paused),
            (web, "stopped".into(), DomainState::Off),
        ]
    );
    let gone = Message::Disconnected {
        why: "libvirt's daemon has ended".into(),
        no_library: false,
    };
    assert_eq!(messages.last(), Some(&gone));
}

#[test]
fn a_failed_connection_gives_libvirts_error() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path());
    let messages = ask(folder.path(), "qemu:///elsewhere");
    let gone = Message::Disconnected {
        why: "no daemon answers here".into(),
        no_library: false,
    };
    assert_eq!(messages, [gone]);
}

#[test]
fn a_host_without_the_library_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libvirt.so.0"), "no library").unwrap();
    let messages = ask(folder.path(), "qemu:///system");
    assert!(
        matches!(&messages[..], [Message::Disconnected { no_library: true, why }] if why.contains("cannot load")),
        "{messages:?}"
    );
}

// SPDX-License-Identifier: Apache-2.0
//! What libvirt's library says is told, by a library that says a few sentences; it is loaded as the real one is.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use viola_host::libvirt::{DomainState, Message, stream_events};

/// Where a process of [`ask`]'s writes to, and whom it asks.
const ASKS: [&str; 2] = ["VIOLA_TEST_LIBVIRT_OUT", "VIOLA_TEST_LIBVIRT_URI"];

/// In a process of its own, since the library is found by the environment that a process begins with.
#[test]
fn asks_where_it_is_told_to() {
    let [Ok(out), Ok(uri)] = ASKS.map(std::env::var) else {
        return; // not one of those processes
    };
    stream_events(&uri, &mut std::fs::File::create(out).unwrap());
}

/// The library, made by the C compiler that the BPF programs' tests need as well.
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
        .args(["--exact", "asks_where_it_is_told_to"])
        .env("LD_LIBRARY_PATH", folder)
        .envs(ASKS.into_iter().zip([out.to_str().unwrap(), uri]))
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let text = std::fs::read_to_string(out).unwrap();
    let words = text.lines().map(|l| serde_json::from_str(l).unwrap());
    words.collect()
}

#[test]
fn what_happens_to_domains_is_told_until_the_connection_ends() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path());
    let words = ask(folder.path(), "qemu:///system");
    let Message::Connected { domains } = &words[0] else {
        panic!("{words:?}")
    };
    assert_eq!(domains.len(), 1);
    assert_eq!(domains[0].name, "db01");
    assert_eq!(domains[0].uuid, "6b5a8a52-0a5b-4b52-9d5c-000000000001");
    let event = |word: &Message| match word {
        Message::Event { domain, what } => (domain.name.clone(), what.clone(), domain.state),
        other => panic!("{other:?}"),
    };
    let events: Vec<_> = words[1..words.len() - 1].iter().map(event).collect();
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
    assert_eq!(words.last(), Some(&gone));
}

#[test]
fn no_connection_is_said_in_libvirts_own_words() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path());
    let words = ask(folder.path(), "qemu:///elsewhere");
    let gone = Message::Disconnected {
        why: "nobody answers here".into(),
        no_library: false,
    };
    assert_eq!(words, [gone]);
}

#[test]
fn a_host_without_the_library_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libvirt.so.0"), "no library").unwrap();
    let words = ask(folder.path(), "qemu:///system");
    assert!(
        matches!(&words[..], [Message::Disconnected { no_library: true, why }] if why.contains("is not here")),
        "{words:?}"
    );
}

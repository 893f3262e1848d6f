// SPDX-License-Identifier: Apache-2.0
//! What the daemon makes of the lines of a process that an emulator may have taken over.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use serde_json::json;

use super::*;
use crate::qemu::disk_watch::BackingChain;
use crate::qemu::message::{MAX_ITEMS, QmpFailure};
use crate::qemu::state::QemuState;

#[test]
fn an_answer_survives_the_way_to_the_daemon() {
    let state = QemuState {
        name: Some("web".into()),
        status: "running".into(),
        vcpus: vec![(0, 7)],
        ..QemuState::default()
    };
    let sent = serde_json::to_value(Ok::<_, QmpFailure>(&state)).unwrap();
    assert_eq!(decode::<QemuState>(sent).unwrap().unwrap(), state);
    for failure in [
        QmpFailure::Busy,
        QmpFailure::Timeout(Duration::from_millis(500)),
        QmpFailure::Malformed("x".into()),
        QmpFailure::Refused {
            command: "device_del".into(),
            reason: "in the process of unplug".into(),
        },
        QmpFailure::Io(std::io::Error::other("broken pipe")),
    ] {
        let said = failure.to_string();
        let sent = serde_json::to_value(Err::<(), _>(failure)).unwrap();
        let got = decode::<()>(sent).unwrap().unwrap_err();
        assert_eq!(got.to_string(), said);
    }
}

#[test]
fn control_characters_long_lists_and_other_shapes_are_no_answer() {
    let named = |text: &str| json!({"Ok": [{"device": text, "layers": []}]});
    let chains = decode::<Vec<BackingChain>>(named("a\u{1b}[2Jb"));
    assert_eq!(chains.unwrap().unwrap()[0].device, "a\u{fffd}[2Jb");
    let refused = |answer: Value| decode::<Vec<BackingChain>>(answer).unwrap_err();
    let long = json!({"Ok": vec![json!({"device": "d", "layers": []}); MAX_ITEMS + 1]});
    assert!(refused(long).to_string().contains("too long"));
    assert!(
        refused(json!({"Ok": {"\u{1b}": 1}}))
            .to_string()
            .contains("a key")
    );
    for other in [
        json!(null),
        json!({"Ok": 5}),
        json!([]),
        json!({"Maybe": []}),
    ] {
        assert!(refused(other).to_string().contains("another shape"));
    }
}

#[test]
fn requests_that_do_not_fit_end_the_process() {
    for requests in ["nonsense\n", "\"State\"\n", "{\"Page\":\"Other\"}\n"] {
        let (emulator, _qemu) = UnixStream::pair().unwrap();
        let (mut daemon, theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve(emulator, theirs));
        daemon.write_all(requests.as_bytes()).unwrap();
        assert!(server.join().unwrap().is_err(), "{requests}");
    }
}

#[test]
fn the_daemons_end_ends_the_process_and_the_emulators_end_is_told() {
    let (emulator, _qemu) = UnixStream::pair().unwrap();
    let (daemon, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || serve(emulator, theirs));
    drop(daemon);
    assert!(server.join().unwrap().is_ok());

    let (emulator, mut qemu) = UnixStream::pair().unwrap();
    let (mut daemon, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || serve(emulator, theirs));
    qemu.write_all(b"{\"QMP\": {}}\n{\"return\": {}, \"id\": 1}\n{\"return\": [], \"id\": 2}\n")
        .unwrap();
    let ask = |request: &Request, to: &mut UnixStream| {
        let line = serde_json::to_string(request).unwrap();
        writeln!(to, "{line}").unwrap();
    };
    let mut lines = BufReader::new(daemon.try_clone().unwrap()).lines();
    ask(&Request::Open(Duration::from_secs(5)), &mut daemon);
    assert_eq!(lines.next().unwrap().unwrap(), r#"{"Answer":{"Ok":null}}"#);
    ask(&Request::Chains, &mut daemon);
    assert_eq!(lines.next().unwrap().unwrap(), r#"{"Answer":{"Ok":[]}}"#);
    qemu.write_all(b"{\"event\": \"RTC_CHANGE\"}\n{\"event\": \"RESET\"}\n")
        .unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), r#"{"Event":"RESET"}"#);
    drop(qemu);
    assert!(lines.next().unwrap().unwrap().starts_with(r#"{"Lost":"#));
    server.join().unwrap().unwrap();
}

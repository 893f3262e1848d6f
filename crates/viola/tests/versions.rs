// SPDX-License-Identifier: Apache-2.0
//! After an upgrade: commands and a daemon of different versions, a daemon with files of another version, and renamed VMs.
//! These tests do not change how the host schedules.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{Daemon, Vm, refusal, stderr, stdout, viola};
use serde_json::{Value, json};
use viola_proto::VmList;

const SLICES_OFF: &str = "[slices]\nenabled = false\n";

/// Adds an unknown field to each object of an answer, as a later version might.
fn of_a_later_version(value: &mut Value) {
    match value {
        Value::Object(object) => {
            object.values_mut().for_each(of_a_later_version);
            object.insert(
                "of_a_later_version".into(),
                json!({ "x": [1, "two", null] }),
            );
        }
        Value::Array(values) => values.iter_mut().for_each(of_a_later_version),
        _ => {}
    }
}

/// A proxy between commands and a daemon that changes the daemon's answers.
struct Proxy {
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Proxy {
    fn start(daemon: PathBuf, change: fn(&mut Value)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("v.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                pass_on(client.unwrap(), &daemon, change);
            }
        });
        Self { socket, _dir: dir }
    }

    fn ask(&self, args: &[&str]) -> Output {
        let mut command = viola();
        command.args(args).arg("--socket").arg(&self.socket);
        command.output().unwrap()
    }
}

fn pass_on(mut client: UnixStream, daemon: &Path, change: fn(&mut Value)) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if client.read(&mut byte).unwrap_or(0) == 0 {
            return;
        }
        request.push(byte[0]);
    }
    let answer = String::from_utf8(common::raw(daemon, &request)).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut value: Value = serde_json::from_str(body).unwrap();
    change(&mut value);
    let body = value.to_string();
    let status = head.lines().next().unwrap();
    let length = body.len();
    let _ = write!(client, "{status}\r\ncontent-length: {length}\r\n\r\n{body}");
}

fn weight_of(d: &Daemon, name: &str) -> Option<u32> {
    let list: VmList = d.json(&["vms"]);
    let vm = list.vms.into_iter().find(|vm| vm.name == name);
    vm.map(|vm| vm.weight)
}

#[test]
fn commands_ignore_unknown_fields_of_a_daemons_answer() {
    let dir = tempfile::tempdir().unwrap();
    let _vm = Vm::start(dir.path(), "version-vm");
    let mut d = Daemon::start(SLICES_OFF);
    d.wait("VM", |d| weight_of(d, "version-vm").is_some());
    let between = Proxy::start(d.socket(), of_a_later_version);
    for args in [
        &["vms"][..],
        &["status"],
        &["check"],
        &["vread", "stat"],
        &["lanes"],
    ] {
        let o = between.ask(args);
        assert!(o.status.success(), "{args:?}: {}", stderr(&o));
        assert_eq!(stdout(&o), stdout(&between.ask(args)), "{args:?}");
    }
    let vms = stdout(&between.ask(&["vms"]));
    assert!(vms.contains("version-vm"), "{vms}");
    let list: VmList = serde_json::from_str(&stdout(&between.ask(&["vms", "--json"]))).unwrap();
    assert!(list.vms.iter().any(|vm| vm.name == "version-vm"));
}

#[test]
fn a_daemon_with_missing_fields_is_reported_as_another_version() {
    let d = Daemon::start(SLICES_OFF);
    let less = |value: &mut Value| *value = json!({ "pid": 1 });
    let between = Proxy::start(d.socket(), less);
    for args in [&["status"][..], &["vms"]] {
        let said = refusal(&between.ask(args), 1);
        assert!(
            said.contains("not a viola daemon of this version"),
            "{said}"
        );
        assert!(said.contains("missing field"), "{said}");
    }
}

#[test]
fn settings_of_a_later_version_are_set_aside_and_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    common::write_config(dir.path(), SLICES_OFF);
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let kept = r#"{"vms":{"qemu:db01":{"weight":512,"of_a_later_version":true}}}"#;
    std::fs::write(state.join("settings.json"), kept).unwrap();
    let d = Daemon::in_folder(dir, &[]);
    let aside = std::fs::read_to_string(d.dir.path().join("state/settings.damaged")).unwrap();
    assert_eq!(aside, kept);
    assert!(d.log().contains("of_a_later_version"), "{}", d.log());
}

#[test]
fn a_renamed_vm_is_another_vm_and_the_old_name_keeps_its_settings() {
    let dir = tempfile::tempdir().unwrap();
    let mut d = Daemon::start(SLICES_OFF);
    let vm = Vm::start(dir.path(), "renamed-1");
    d.wait("VM", |d| weight_of(d, "renamed-1").is_some());
    let o = d.ask(&["set", "renamed-1", "--weight", "512", "--keep"]);
    assert!(o.status.success(), "{}", stderr(&o));
    drop(vm);
    let vm = Vm::start(dir.path(), "renamed-2");
    d.wait("the new name", |d| {
        weight_of(d, "renamed-2").is_some() && weight_of(d, "renamed-1").is_none()
    });
    assert_eq!(weight_of(&d, "renamed-2"), Some(256));
    let said = refusal(&d.ask(&["set", "renamed-1", "--weight", "100"]), 2);
    assert!(
        said.contains("renamed-2"),
        "the nearest name is not suggested: {said}"
    );
    let o = d.ask(&["set", "renamed-2", "--weight", "100"]);
    assert!(o.status.success(), "{}", stderr(&o));
    drop(vm);
    let _vm = Vm::start(dir.path(), "renamed-1");
    d.wait("the old name", |d| weight_of(d, "renamed-1") == Some(512));
}

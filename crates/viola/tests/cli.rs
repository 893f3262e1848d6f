// SPDX-License-Identifier: Apache-2.0
//! The command line as an operator uses it.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{Daemon, as_nobody, output, refusal, stderr, stdout, viola, write_config};
use viola_proto::lanes::Lanes;
use viola_proto::{Check, Status, VmList};

/// A daemon that only measures.
const SLICES_OFF: &str = "[slices]\nenabled = false\n";

/// Runs `viola run` with an invalid configuration and returns its message.
fn refused_config(rest: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = write_config(dir.path(), rest);
    let run = viola().args(["run", "-c"]).arg(&file).output().unwrap();
    let check = viola()
        .args(["check", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    let said = refusal(&run, 2);
    assert_eq!(
        refusal(&check, 2),
        said,
        "run and check print the same message"
    );
    assert!(
        !dir.path().join("run").exists(),
        "the command changed nothing"
    );
    said.strip_prefix(file.to_str().unwrap())
        .unwrap_or_else(|| panic!("the file is not named: {said}"))
        .to_owned()
}

#[test]
fn an_unknown_key_is_refused_with_its_line() {
    let said = refused_config("[slices]\ncore = \"1\"\n");
    assert!(
        said.starts_with(":7: unknown key core; allowed are enabled, mechanism, cores"),
        "{said}"
    );
}

#[test]
fn a_wrong_unit_is_refused_with_the_right_ones() {
    let said = refused_config("[[vm]]\nname = \"a\"\nmicroslice = \"300\"\n");
    assert_eq!(
        said,
        ":8: microslice: \"300\" has no unit; the units are us, ms, s, m and h, for example 300us"
    );
    let said = refused_config("[slices]\nbatch_slice = \"4 minutes\"\n");
    assert_eq!(
        said,
        ":7: batch_slice: \"4 minutes\" has the wrong unit; the units are us, ms, s, m and h"
    );
}

#[test]
fn a_negative_weight_is_refused_in_the_file_and_by_set() {
    let said = refused_config("[[vm]]\nname = \"a\"\nweight = -5\n");
    assert_eq!(
        said,
        ":8: weight: -5 is not a weight; 1 to 65535 is allowed"
    );
    let d = Daemon::start(SLICES_OFF);
    // The daemon checks the range after it has found the VM, so that check needs a VM. The command itself refuses a text that
    // is not a number.
    let said = refusal(&d.ask(&["set", "a", "--weight", "much"]), 2);
    assert_eq!(
        said,
        "weight: \"much\" is not a number; 1 to 65535 is allowed"
    );
}

#[test]
fn a_cap_over_the_cores_is_refused() {
    let said = refused_config("[slices]\ncores = \"1\"\n[[vm]]\nname = \"a\"\ncap = \"150%\"\n");
    assert_eq!(
        said,
        ":10: cap 150% is over the 1 core of [slices]; at most 100%"
    );
}

#[test]
fn a_core_that_does_not_exist_is_refused() {
    let said = refused_config("[slices]\ncores = \"4000\"\n");
    assert!(
        said.starts_with(":7: cores: CPU 4000 is not online; this host has 0"),
        "{said}"
    );
}

#[test]
fn a_missing_file_is_named() {
    let said = refusal(&output(&["run", "-c", "/nonexistent/viola.toml"]), 2);
    assert!(
        said.starts_with("/nonexistent/viola.toml: No such file"),
        "{said}"
    );
}

#[test]
fn a_vm_that_does_not_exist_is_reported() {
    let d = Daemon::start(SLICES_OFF);
    let said = refusal(&d.ask(&["set", "no-such-vm-here", "--class", "ls"]), 2);
    assert!(
        said.starts_with("there is no VM \"no-such-vm-here\" on this host"),
        "{said}"
    );
    let said = refusal(&d.ask(&["set", "a/../b\x1b[31m", "--class", "ls"]), 2);
    assert!(
        said.starts_with("there is no VM \"a/../b\\u{1b}[31m\""),
        "{said}"
    );
}

#[test]
fn wrong_usage_is_one_sentence_and_help_is_not_an_error() {
    assert!(refusal(&output(&["set", "a"]), 2).contains("--class"));
    assert!(refusal(&output(&["stop"]), 2).contains("--all"));
    assert!(refusal(&output(&["frobnicate"]), 2).contains("frobnicate"));
    assert!(
        refusal(&output(&["set", "a", "--class", "fast"]), 2).contains("ls, batch, turbo or auto")
    );
    let help = output(&["set", "--help"]);
    assert!(help.status.success() && stdout(&help).contains("--microslice"));
    assert_eq!(output(&[]).status.code(), Some(2));
    assert!(!stdout(&output(&["--help"])).contains("internal"));
}

#[test]
fn a_second_daemon_names_the_first_one() {
    let d = Daemon::start(SLICES_OFF);
    let second = viola()
        .args(["run", "-c"])
        .arg(d.config())
        .output()
        .unwrap();
    let said = refusal(&second, 2);
    assert!(said.contains(&format!("(process {})", d.pid())), "{said}");
    // A daemon with another run_dir may not take over the socket, either.
    let other = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(d.config()).unwrap();
    let text = text.replace(
        &format!("{}/run", d.dir.path().display()),
        &format!("{}/run", other.path().display()),
    );
    let file = other.path().join("viola.toml");
    fs::write(&file, text).unwrap();
    let said = refusal(&viola().args(["run", "-c"]).arg(&file).output().unwrap(), 2);
    assert!(said.contains("another daemon answers"), "{said}");
    assert_eq!(
        d.json::<Status>(&["status"]).pid,
        d.pid(),
        "the first daemon continues"
    );
}

#[test]
fn without_privilege_run_says_what_it_needs_and_check_and_vms_work() {
    let dir = tempfile::tempdir().unwrap();
    let file = write_config(dir.path(), "[slices]\ncores = \"1\"\nforce = true\n");
    for path in [dir.path(), &file] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let said = refusal(
        &as_nobody(viola().args(["run", "-c"]).arg(&file))
            .output()
            .unwrap(),
        1,
    );
    assert!(said.contains("needs root"), "{said}");
    let check = as_nobody(viola().args(["check", "--json", "--config"]).arg(&file))
        .output()
        .unwrap();
    let check: Check = serde_json::from_slice(&check.stdout).unwrap();
    let slots = check
        .rows
        .iter()
        .find(|r| r.name == "slices: slots")
        .unwrap();
    assert_eq!(
        (slots.value.as_str(), slots.change.as_deref()),
        ("no", Some("run as root, or with CAP_SYS_NICE"))
    );
    let accounting = check
        .rows
        .iter()
        .find(|r| r.name == "accounting (BPF)")
        .unwrap();
    assert_eq!(accounting.value, "no");
    let socket = dir.path().join("none.sock");
    let vms = as_nobody(viola().args(["vms", "--json", "--socket"]).arg(&socket))
        .output()
        .unwrap();
    assert!(vms.status.success(), "{}", stderr(&vms));
    serde_json::from_slice::<VmList>(&vms.stdout).unwrap();
    let said = refusal(&as_nobody(&mut viola()).arg("restore").output().unwrap(), 1);
    assert!(said.contains("needs root"), "{said}");
}

#[test]
fn the_control_socket_is_closed_to_others() {
    let d = Daemon::start(SLICES_OFF);
    // Its folder is closed, too; this test is about the socket.
    fs::set_permissions(d.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let set = as_nobody(
        viola()
            .args(["set", "a", "--class", "ls", "--socket"])
            .arg(d.socket()),
    )
    .output()
    .unwrap();
    let said = refusal(&set, 1);
    assert!(said.starts_with("no permission to use"), "{said}");
}

/// A socket with a mode, on which a thread answers each request with the same reply.
fn canned(socket: &Path, mode: u32, reply: String) {
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    fs::set_permissions(socket, PermissionsExt::from_mode(mode)).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let _ = client.read(&mut [0; 4096]);
            let head = format!("HTTP/1.0 200 OK\r\ncontent-length: {}\r\n\r\n", reply.len());
            let _ = client.write_all((head + &reply).as_bytes());
        }
    });
}

#[test]
fn a_user_who_may_only_look_gets_the_read_sockets_answer() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let (control, read) = (dir.path().join("v.sock"), dir.path().join("v-read.sock"));
    let nobody = |args: &[&str]| {
        as_nobody(viola().args(args).arg("--socket").arg(&control))
            .output()
            .unwrap()
    };
    canned(&control, 0o600, "{}".into());
    // Without a read socket the message is about the control socket.
    let said = refusal(&nobody(&["lanes"]), 1);
    assert!(
        said.contains("v.sock") && said.contains("viola-read may only look"),
        "{said}"
    );
    let answer = Lanes {
        why: "asked for reading".into(),
        ..Lanes::default()
    };
    canned(&read, 0o666, serde_json::to_string(&answer).unwrap());
    let lanes = nobody(&["lanes"]);
    assert!(lanes.status.success(), "{}", stderr(&lanes));
    assert!(stdout(&lanes).contains("asked for reading"), "{lanes:?}");
    // A change is for the control socket alone.
    let said = refusal(&nobody(&["set", "a", "--class", "ls"]), 1);
    assert!(said.starts_with("no permission to use"), "{said}");
    fs::set_permissions(&read, PermissionsExt::from_mode(0o600)).unwrap();
    let said = refusal(&nobody(&["lanes"]), 1);
    assert!(
        said.contains("v.sock") && !said.contains("v-read.sock"),
        "{said}"
    );
}

#[test]
fn without_a_daemon_its_commands_say_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    for args in [
        &["stop", "--all"][..],
        &["start"],
        &["status"],
        &["set", "a", "--class", "ls"],
    ] {
        let said = refusal(
            &viola()
                .args(args)
                .arg("--socket")
                .arg(&socket)
                .output()
                .unwrap(),
            1,
        );
        assert!(
            said.contains("none.sock") && said.contains("viola run"),
            "{said}"
        );
        let by_environment = viola()
            .args(args)
            .env("VIOLA_SOCKET", &socket)
            .output()
            .unwrap();
        assert_eq!(refusal(&by_environment, 1), said);
    }
    let vms = viola()
        .args(["vms", "--socket"])
        .arg(&socket)
        .output()
        .unwrap();
    assert!(vms.status.success());
    assert!(
        stderr(&vms).contains("none.sock; measuring for 1 s"),
        "{}",
        stderr(&vms)
    );
}

/// The exit status of a command whose standard output and standard error are pipes without a reader.
fn status_with_closed_pipe(args: &[&str]) -> Option<i32> {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = viola()
        .args(args)
        .env("VIOLA_SOCKET", "/nonexistent/viola.sock")
        .stdout(writer.try_clone().unwrap())
        .stderr(writer)
        .spawn()
        .unwrap();
    drop(reader);
    child.wait().unwrap().code()
}

#[test]
fn a_closed_pipe_ends_commands_quietly() {
    for args in [
        &["--help"][..],
        &["vms"],
        &["check"],
        &["status"],
        &["vread", "ls"],
    ] {
        let status = status_with_closed_pipe(args);
        assert!(matches!(status, Some(0..=2)), "{args:?}: {status:?}");
    }
}

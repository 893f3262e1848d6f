// SPDX-License-Identifier: Apache-2.0
//! The program as its users meet it: what they do wrong, and what it says then. Nothing here changes how anything on
//! this host is scheduled.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;

use common::{Daemon, as_nobody, output, raw, refusal, stderr, stdout, viola, write_config};
use rustix::process::Signal;
use viola_proto::{Check, Stage, Status, VmList};

/// A daemon that only measures.
const OFF: &str = "[slices]\nenabled = false\n";

/// Runs `viola run` with a configuration that is refused, and answers what it said.
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
    assert_eq!(refusal(&check, 2), said, "run and check say the same");
    assert!(!dir.path().join("run").exists(), "nothing was done");
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
        ":8: microslice: \"300\" has no unit; the units are us, ms and s, for example 300us"
    );
    let said = refused_config("[slices]\nbatch_slice = \"4 minutes\"\n");
    assert_eq!(
        said,
        ":7: batch_slice: \"4 minutes\" has the wrong unit; the units are us, ms and s"
    );
}

#[test]
fn a_negative_weight_is_refused_in_the_file_and_by_set() {
    let said = refused_config("[[vm]]\nname = \"a\"\nweight = -5\n");
    assert_eq!(
        said,
        ":8: weight: -5 is not a weight; 1 to 65535 is allowed"
    );
    let d = Daemon::start(OFF);
    // The daemon checks the range after the name, which needs a VM; the command itself refuses a text that is not a number.
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
fn a_core_that_is_not_there_is_refused() {
    let said = refused_config("[slices]\ncores = \"4000\"\n");
    assert!(
        said.starts_with(":7: cores: CPU 4000 is not online; this host has 0"),
        "{said}"
    );
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let said = refusal(&output(&["run", "-c", "/nonexistent/viola.toml"]), 2);
    assert!(
        said.starts_with("/nonexistent/viola.toml: No such file"),
        "{said}"
    );
}

#[test]
fn a_vm_that_does_not_exist_is_said_so() {
    let d = Daemon::start(OFF);
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
fn a_second_daemon_is_told_who_is_the_first() {
    let d = Daemon::start(OFF);
    let second = viola()
        .args(["run", "-c"])
        .arg(d.config())
        .output()
        .unwrap();
    let said = refusal(&second, 2);
    assert!(said.contains(&format!("(process {})", d.pid())), "{said}");
    // Nor may it take over the socket from another run_dir.
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
        "the first one goes on"
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
    let d = Daemon::start(OFF);
    // Its folder is, too, and that is not what is to be shown.
    fs::set_permissions(
        d.dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
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

#[test]
fn garbage_on_the_control_socket_does_not_disturb_the_daemon() {
    let d = Daemon::start(OFF);
    // Bytes as random as they need be, and the same each time.
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    for length in [1, 16, 4096, 1 << 20] {
        let bytes: Vec<u8> = (0..length).map(|_| random()).collect();
        let answer = raw(&d.socket(), &bytes);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{}",
            String::from_utf8_lossy(&answer)
        );
    }
    let long = format!(
        "GET /v1/status HTTP/1.1\r\nx: {}\r\n\r\n",
        "y".repeat(1 << 20)
    );
    assert!(raw(&d.socket(), long.as_bytes()).starts_with(b"HTTP/1.1 4"));
    let many = format!(
        "GET /v1/status HTTP/1.1\r\n{}\r\n",
        "a: b\r\n".repeat(10_000)
    );
    assert!(raw(&d.socket(), many.as_bytes()).starts_with(b"HTTP/1.1 4"));
    // More half requests than are served at a time; they are ended after some seconds.
    let halves: Vec<UnixStream> = (0..80)
        .map(|_| {
            let mut s = UnixStream::connect(d.socket()).unwrap();
            s.write_all(b"PATCH /v1/vms/a HTTP/1.1\r\ncontent-le")
                .unwrap();
            s
        })
        .collect();
    assert_eq!(d.json::<Status>(&["status"]).pid, d.pid());
    drop(halves);
    assert!(!d.log().contains("panic"), "{}", d.log());
}

#[test]
fn json_is_what_the_socket_says() {
    let mut d = Daemon::start(OFF);
    let status: Status = d.json(&["status"]);
    assert_eq!(
        (status.pid, status.stage, status.interval_ns),
        (d.pid(), Stage::Off, 100_000_000)
    );
    assert!(status.why.contains("switched off"), "{}", status.why);
    d.wait("measurement", |d| {
        d.json::<VmList>(&["vms"]).measured_ns >= 1_000_000_000
    });
    let check: Check = d.json(&["check"]);
    assert!(
        check
            .rows
            .iter()
            .any(|r| r.name == "slices: slots" && !r.why.is_empty())
    );
    let text = d.ask(&["check"]);
    assert!(stdout(&text).contains("slices: slots"), "{}", stdout(&text));
    assert!(!stdout(&text).contains('\x1b'));
}

#[test]
fn stop_lasts_until_start() {
    let d = Daemon::start(OFF);
    assert!(stdout(&d.ask(&["stop", "--all"])).contains("viola start"));
    assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Stopped);
    assert!(d.ask(&["start"]).status.success());
    assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Off);
    assert!(
        d.log()
            .contains("viola: stopped: viola stop --all by root\n"),
        "{}",
        d.log()
    );
}

#[test]
fn sighup_takes_a_right_configuration_and_leaves_a_wrong_one() {
    let mut d = Daemon::start(OFF);
    let rest = "interval = \"250ms\"\n[slices]\nenabled = false\n";
    write_config(d.dir.path(), rest);
    d.signal(Signal::HUP);
    d.wait("new interval", |d| {
        d.json::<Status>(&["status"]).interval_ns == 250_000_000
    });
    write_config(d.dir.path(), "[slices]\nenabeld = true\n");
    d.signal(Signal::HUP);
    d.wait("refusal", |d| d.log().contains("unknown key enabeld"));
    assert!(d.log().contains("the old configuration holds"));
    assert_eq!(d.json::<Status>(&["status"]).interval_ns, 250_000_000);
}

#[test]
fn sigterm_and_sigint_end_it_with_0_and_its_socket_is_gone() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut d = Daemon::start(OFF);
        d.signal(signal);
        assert_eq!(d.ended().code(), Some(0), "{}", d.log());
        assert!(!d.socket().exists());
        // The lock is free again.
        let again = Daemon::in_folder(
            std::mem::replace(&mut d.dir, tempfile::tempdir().unwrap()),
            &[],
        );
        assert_eq!(again.json::<Status>(&["status"]).pid, again.pid());
    }
}

#[test]
fn a_daemon_that_was_killed_leaves_nothing_that_keeps_the_next_one_from_starting() {
    let mut d = Daemon::start(OFF);
    d.signal(Signal::KILL);
    assert_eq!(d.ended().code(), None);
    assert!(d.socket().exists());
    let folder = std::mem::replace(&mut d.dir, tempfile::tempdir().unwrap());
    let again = Daemon::in_folder(folder, &[]);
    assert_eq!(again.json::<Status>(&["status"]).pid, again.pid());
}

#[test]
fn a_dry_run_says_so_and_keeps_nothing() {
    let d = Daemon::start_with("[slices]\ncores = \"1\"\nforce = true\n", &["--dry-run"]);
    let status: Status = d.json(&["status"]);
    assert_eq!(status.stage, Stage::Advising);
    assert!(d.log().contains("changing nothing (--dry-run)"));
    let files: Vec<_> = fs::read_dir(d.run_dir())
        .unwrap()
        .map(|f| f.unwrap().file_name())
        .collect();
    assert_eq!(files, ["viola.lock"]);
}

#[test]
fn restore_without_anything_left_behind_says_so_twice() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let o = viola()
            .arg("restore")
            .arg("--run-dir")
            .arg(dir.path())
            .output()
            .unwrap();
        assert!(o.status.success(), "{}", stderr(&o));
        assert_eq!(stdout(&o), "nothing was left behind\n");
    }
    fs::write(dir.path().join("slots.json"), "no json").unwrap();
    let o = viola()
        .arg("restore")
        .arg("--run-dir")
        .arg(dir.path())
        .output()
        .unwrap();
    let said = refusal(&o, 1);
    assert!(
        said.contains("slots.json") && said.contains("chrt"),
        "{said}"
    );
}

#[test]
fn restore_beside_a_daemon_stops_it_first() {
    let d = Daemon::start(OFF);
    let o = viola()
        .arg("restore")
        .arg("--run-dir")
        .arg(d.run_dir())
        .arg("--socket")
        .arg(d.socket())
        .output()
        .unwrap();
    assert!(
        stdout(&o).contains(&format!(
            "the daemon (process {}) runs and was told to stop",
            d.pid()
        )),
        "{}",
        stdout(&o)
    );
    assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Stopped);
}

#[test]
fn settings_that_were_damaged_are_set_aside_and_said_so() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), OFF);
    fs::create_dir(dir.path().join("state")).unwrap();
    fs::write(dir.path().join("state/settings.json"), "{").unwrap();
    let d = Daemon::in_folder(dir, &[]);
    assert!(d.log().contains("settings.damaged"), "{}", d.log());
}

#[test]
fn the_journal_gets_levels_where_stderr_is_the_journal() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let file = write_config(dir.path(), OFF);
    let log = dir.path().join("journal");
    let stream = fs::File::create(&log).unwrap();
    let m = stream.metadata().unwrap();
    let mut child = viola()
        .args(["run", "-c"])
        .arg(&file)
        .env("JOURNAL_STREAM", format!("{}:{}", m.dev(), m.ino()))
        .stderr(stream)
        .spawn()
        .unwrap();
    let deadline = std::time::Instant::now() + common::PATIENCE;
    while !fs::read_to_string(&log)
        .unwrap()
        .contains("\n<4>slices are off: ")
        && std::time::Instant::now() < deadline
    {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let text = fs::read_to_string(&log).unwrap();
    assert!(
        text.starts_with("<6>viola ") && text.contains("\n<4>slices are off: "),
        "{text}"
    );
}

#[test]
fn the_processes_of_the_slot_mechanism_are_not_for_people() {
    for name in ["slots-watchdog", "slots-controller"] {
        assert!(refusal(&output(&["internal", name, "{}"]), 2).contains("only the daemon"));
    }
}

#[test]
fn a_reader_who_has_seen_enough_is_no_failure() {
    let mut child = viola()
        .arg("--help")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().code().is_some_and(|c| c != 101));
}

#[test]
fn without_the_accounting_program_there_are_no_slots_and_it_says_why() {
    // As on a kernel that does not have it: this one refuses it to whoever lacks these capabilities.
    let dir = tempfile::tempdir().unwrap();
    let file = write_config(
        dir.path(),
        "[slices]\ncores = \"1\"\nforce = true\nmechanism = \"slots\"\n",
    );
    let mut d = Daemon::spawn(
        dir,
        std::process::Command::new("setpriv")
            .arg("--bounding-set=-bpf,-perfmon,-sys_admin")
            .arg(env!("CARGO_BIN_EXE_viola"))
            .args(["run", "-c"])
            .arg(&file),
    );
    let status: Status = d.json(&["status"]);
    assert_eq!((status.stage, status.mechanism), (Stage::Off, None));
    assert!(
        status.accounting.starts_with("sampled ("),
        "{}",
        status.accounting
    );
    assert!(
        status.why.starts_with("it needs the accounting program: "),
        "{}",
        status.why
    );
    let check: Check = d.json(&["check"]);
    let value = |name: &str| {
        check
            .rows
            .iter()
            .find(|r| r.name == name)
            .unwrap()
            .value
            .as_str()
    };
    assert_eq!(
        (
            value("accounting (BPF)"),
            value("slices: slots"),
            value("slices: eevdf")
        ),
        ("no", "no", "yes")
    );
    // What can be had without it is had when the file leaves the choice.
    write_config(d.dir.path(), "[slices]\ncores = \"1\"\nforce = true\n");
    d.signal(Signal::HUP);
    d.wait("eevdf", |d| {
        d.json::<Status>(&["status"]).mechanism.as_deref() == Some("eevdf")
    });
    assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Idle);
}

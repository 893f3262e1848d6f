// SPDX-License-Identifier: Apache-2.0
//! The daemon's life cycle without VMs: signals, restarts, its control socket, `viola restore`.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;

use common::{Daemon, output, raw, refusal, stderr, stdout, viola, write_config};
use rustix::process::Signal;
use viola_proto::{Check, Stage, Status, VmList};

/// A daemon that only measures.
const SLICES_OFF: &str = "[slices]\nenabled = false\n";

#[test]
fn garbage_on_the_control_socket_does_not_disturb_the_daemon() {
    let d = Daemon::start(SLICES_OFF);
    // Pseudo-random bytes, the same in each run.
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
    // More incomplete requests than the daemon serves at a time. They time out after some seconds.
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
fn json_output_equals_the_sockets_answer() {
    let mut d = Daemon::start(SLICES_OFF);
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
    let d = Daemon::start(SLICES_OFF);
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
fn sighup_applies_a_valid_configuration_and_ignores_an_invalid_one() {
    let mut d = Daemon::start(SLICES_OFF);
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
fn sigterm_and_sigint_end_the_daemon_with_0_and_remove_its_sockets() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut d = Daemon::start(SLICES_OFF);
        let read = d.dir.path().join("viola-read.sock");
        let answer = raw(&read, b"POST /v1/stop HTTP/1.0\r\n\r\n");
        assert!(answer.starts_with(b"HTTP/1.0 403"), "{answer:?}");
        let answer = raw(&read, b"GET /v1/status HTTP/1.0\r\n\r\n");
        assert!(answer.starts_with(b"HTTP/1.0 200"), "{answer:?}");
        assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Off);
        d.signal(signal);
        assert_eq!(d.ended().code(), Some(0), "{}", d.log());
        assert!(!d.socket().exists() && !read.exists());
        // The daemon has released the lock.
        let again = Daemon::in_folder(
            std::mem::replace(&mut d.dir, tempfile::tempdir().unwrap()),
            &[],
        );
        assert_eq!(again.json::<Status>(&["status"]).pid, again.pid());
    }
}

#[test]
fn the_next_daemon_starts_after_a_kill() {
    let mut d = Daemon::start(SLICES_OFF);
    d.signal(Signal::KILL);
    assert_eq!(d.ended().code(), None);
    assert!(d.socket().exists());
    let folder = std::mem::replace(&mut d.dir, tempfile::tempdir().unwrap());
    let again = Daemon::in_folder(folder, &[]);
    assert_eq!(again.json::<Status>(&["status"]).pid, again.pid());
}

#[test]
fn a_dry_run_is_reported_and_keeps_no_setting() {
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
fn restore_with_nothing_to_restore_reports_that_each_time() {
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
    let d = Daemon::start(SLICES_OFF);
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
            "the daemon (process {}) was told to stop",
            d.pid()
        )),
        "{}",
        stdout(&o)
    );
    assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Stopped);
}

#[test]
fn damaged_settings_are_set_aside_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), SLICES_OFF);
    fs::create_dir(dir.path().join("state")).unwrap();
    fs::write(dir.path().join("state/settings.json"), "{").unwrap();
    let d = Daemon::in_folder(dir, &[]);
    assert!(d.log().contains("settings.damaged"), "{}", d.log());
}

#[test]
fn log_lines_have_levels_when_stderr_is_the_journal() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let file = write_config(dir.path(), SLICES_OFF);
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
    let deadline = std::time::Instant::now() + common::WAIT_TIMEOUT;
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
        text.contains("<6>viola ") && text.contains("\n<4>slices are off: "),
        "{text}"
    );
    assert!(text.lines().all(|line| line.starts_with('<')), "{text}");
}

#[test]
fn operators_cannot_start_the_slot_processes() {
    for name in ["slots-watchdog", "slots-controller"] {
        assert!(refusal(&output(&["internal", name, "{}"]), 2).contains("only the daemon"));
    }
}

#[test]
fn without_the_accounting_program_slots_are_off_and_status_gives_the_reason() {
    // Without these capabilities the kernel refuses the accounting program, as a kernel without it would.
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
    // A configuration that leaves the choice to the daemon gets what works without the program.
    write_config(d.dir.path(), "[slices]\ncores = \"1\"\nforce = true\n");
    d.signal(Signal::HUP);
    d.wait("eevdf", |d| {
        d.json::<Status>(&["status"]).mechanism.as_deref() == Some("eevdf")
    });
    assert_eq!(d.json::<Status>(&["status"]).stage, Stage::Idle);
}

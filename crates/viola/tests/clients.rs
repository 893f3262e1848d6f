// SPDX-License-Identifier: Apache-2.0
//! Many clients, slow clients, scrapes while the daemon restarts, and a full disk. These tests do not change how the host
//! schedules.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Daemon, Vm, refusal, stderr, viola, write_config};
use viola_host::proc;
use viola_proto::{Status, VmList};

const SLICES_OFF: &str = "[slices]\nenabled = false\n";

/// Sends a request and returns how long the answer took.
fn response_time(d: &Daemon) -> Duration {
    let begun = Instant::now();
    assert_eq!(d.json::<Status>(&["status"]).pid, d.pid());
    begun.elapsed()
}

#[test]
fn a_thousand_silent_clients_do_not_block_others() {
    let d = Daemon::start(SLICES_OFF);
    let silent: Vec<UnixStream> = (0..1000)
        .map(|_| UnixStream::connect(d.socket()).unwrap())
        .collect();
    for _ in 0..5 {
        let took = response_time(&d);
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
    drop(silent);
    let took = response_time(&d);
    assert!(took < Duration::from_secs(2), "{took:?}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", d.pid())).unwrap();
    let open = open.count();
    assert!(open < 200, "{open} descriptors are open");
}

#[test]
fn without_listen_no_packet_reaches_viola() {
    let own = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let found = common::network_sockets(std::process::id());
    assert_eq!(found.len(), 1, "{found:?}");
    drop(own);
    let allow = "[vread]\nallow = [{ reader = \"rd\", datanode = \"qemu:dn\" }]\n";
    let mut d = Daemon::start(&format!("{SLICES_OFF}{allow}"));
    // Its worker runs for the reader.
    d.wait("the reader's worker", |d| {
        !proc::children(d.pid()).unwrap().is_empty()
    });
    let workers = proc::children(d.pid()).unwrap();
    for pid in workers.into_iter().chain([d.pid()]) {
        assert_eq!(common::network_sockets(pid), [""; 0], "process {pid}");
    }
}

#[test]
fn a_thousand_clients_that_ask_at_once_are_all_answered() {
    let d = Daemon::start(SLICES_OFF);
    let answered: usize = std::thread::scope(|scope| {
        let ask = || {
            let asked = (0..20).map(|_| {
                let answer = common::raw(&d.socket(), b"GET /v1/status HTTP/1.0\r\n\r\n");
                usize::from(answer.starts_with(b"HTTP/1.0 200") && answer.ends_with(b"}"))
            });
            asked.sum::<usize>()
        };
        let threads: Vec<_> = (0..50).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    assert_eq!(answered, 1000);
}

#[test]
fn clients_that_do_not_read_do_not_delay_others() {
    let d = Daemon::start(SLICES_OFF);
    let ask = b"GET /metrics HTTP/1.1\r\nhost: v\r\n\r\n".repeat(500);
    let slow: Vec<UnixStream> = (0..60)
        .map(|_| {
            let mut client = UnixStream::connect(d.socket()).unwrap();
            client.set_nonblocking(true).unwrap();
            // Sends as many requests as the socket takes.
            let _ = client.write(&ask);
            client
        })
        .collect();
    for _ in 0..5 {
        let took = response_time(&d);
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
    drop(slow);
}

/// One scrape: the complete answer or None.
fn scrape(socket: &Path) -> Option<String> {
    let mut s = UnixStream::connect(socket).ok()?;
    s.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    s.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
    let mut answer = String::new();
    s.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let length = head
        .lines()
        .find_map(|l| l.strip_prefix("content-length: "))?;
    // A killed daemon may have sent a part of the answer. Prometheus detects it by the length.
    (length.trim().parse() == Ok(body.len())).then(|| body.to_owned())
}

#[test]
fn scrapes_during_restarts_are_whole_or_fail_and_counters_restart() {
    let mut d = Daemon::start(SLICES_OFF);
    let (socket, end) = (d.socket(), Arc::new(AtomicBool::new(false)));
    let until = end.clone();
    let scraper = std::thread::spawn(move || {
        let (mut whole, mut failed) = (0, 0);
        while !until.load(Ordering::Relaxed) {
            match scrape(&socket) {
                Some(text) => {
                    whole += 1;
                    assert!(
                        text.starts_with("# HELP ") && text.ends_with('\n'),
                        "{text}"
                    );
                    assert!(text.contains("\nviola_build_info{"), "{text}");
                }
                None => failed += 1,
            }
        }
        (whole, failed)
    });
    for i in 0..4 {
        std::thread::sleep(Duration::from_millis(300));
        match i % 2 {
            0 => d.kill(),
            _ => assert!(d.stop().success()),
        }
        std::thread::sleep(Duration::from_millis(100));
        d.restart();
        let text = scrape(&d.socket()).unwrap();
        let uptime = text
            .lines()
            .find_map(|l| l.strip_prefix("viola_uptime_seconds "));
        assert!(uptime.unwrap().parse::<f64>().unwrap() < 5.0);
    }
    end.store(true, Ordering::Relaxed);
    let (whole, failed) = scraper.join().unwrap();
    assert!(whole > 10 && failed > 10, "{whole} whole, {failed} failed");
}

#[test]
fn on_a_full_disk_a_kept_setting_is_refused_and_everything_else_continues() {
    let dir = tempfile::tempdir().unwrap();
    let (state, vm) = (
        dir.path().join("state"),
        Vm::start(dir.path(), "full-disk-vm"),
    );
    std::fs::create_dir(&state).unwrap();
    write_config(dir.path(), SLICES_OFF);
    // A full disk of its own, mounted in a private namespace.
    let script = r#"mount -t tmpfs -o size=64k none "$1" && cat /dev/zero >"$1/full" 2>/dev/null
        exec "$2" run -c "$3""#;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(&state)
        .arg(env!("CARGO_BIN_EXE_viola"))
        .arg(dir.path().join("viola.toml"));
    let mut d = Daemon::spawn(dir, &mut command);
    let there = |d: &Daemon| {
        let list: VmList = d.json(&["vms"]);
        list.vms.into_iter().find(|vm| vm.name == "full-disk-vm")
    };
    d.wait("VM", |d| there(d).is_some());
    let said = refusal(
        &d.ask(&["set", "full-disk-vm", "--weight", "512", "--keep"]),
        2,
    );
    assert!(said.contains("nothing was changed"), "{said}");
    assert!(said.contains("No space left"), "{said}");
    assert_eq!(there(&d).unwrap().weight, 256);
    let o = d.ask(&["set", "full-disk-vm", "--weight", "512"]);
    assert!(o.status.success(), "{}", stderr(&o));
    assert_eq!(there(&d).unwrap().weight, 512);
    drop(vm);
    d.wait("end of the VM", |d| there(d).is_none());
    assert!(d.stop().success());
}

#[test]
fn a_recording_on_a_full_disk_ends_with_an_error_and_has_no_half_lines() {
    let d = Daemon::start(SLICES_OFF);
    let dir = tempfile::tempdir().unwrap();
    let script = r#"mount -t tmpfs -o size=16k none "$1" &&
        "$2" record --interval 100ms --for 60s --socket "$3" "$1/r" ; echo "ended $?" >&2
        cat "$1/r""#;
    let o = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(env!("CARGO_BIN_EXE_viola"))
        .arg(d.socket())
        .output()
        .unwrap();
    let said = stderr(&o);
    assert!(
        said.contains("No space left") && said.ends_with("ended 1\n"),
        "{said}"
    );
    let text = common::stdout(&o);
    assert!(text.ends_with("}\n"), "{text}");
    for line in text.lines() {
        assert!(
            serde_json::from_str::<serde_json::Value>(line).is_ok(),
            "{line}"
        );
    }
}

#[test]
fn a_configuration_of_0_1_0_stays_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let mut files = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap().path();
        let o = viola()
            .args(["check", "--socket", "/nonexistent", "--config"])
            .arg(&file)
            .output()
            .unwrap();
        assert!(o.status.success(), "{}: {}", file.display(), stderr(&o));
        files += 1;
    }
    assert!(files > 0);
}

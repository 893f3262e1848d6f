// SPDX-License-Identifier: Apache-2.0
//! `viola top` on a real pseudo-terminal, `viola record`, and both when the daemon or the terminal ends.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use common::{Daemon, WAIT_TIMEOUT, output, refusal, stderr, viola};
use rustix::process::Signal;
use rustix::termios::{LocalModes, tcgetattr};

const SLICES_OFF: &str = "[slices]\nenabled = false\n";
/// The sequences that leave the alternate screen and show the cursor again.
const RESTORE_SEQUENCES: [&str; 2] = ["\x1b[?1049l", "\x1b[?25h"];

/// A program on a terminal of 80 x 24 characters.
struct OnTerminal {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    seen: String,
    /// The program's end of the terminal. It stays open so that the test can read its settings after the program's end.
    end: OwnedFd,
}

impl OnTerminal {
    fn start(command: &mut Command) -> Self {
        let size = libc::winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let (mut here, mut there) = (0, 0);
        // SAFETY: the kernel writes both numbers, no name or settings are requested, and `size` outlives the call.
        let done = unsafe {
            libc::openpty(
                &raw mut here,
                &raw mut there,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(done, 0);
        // SAFETY: openpty has opened both, and no other code owns them.
        let (here, there) = unsafe { (OwnedFd::from_raw_fd(here), OwnedFd::from_raw_fd(there)) };
        let side = || Stdio::from(there.try_clone().unwrap());
        let child = command
            .env("TERM", "xterm-256color")
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        let keyboard = File::from(here.try_clone().unwrap());
        let (tell, screen) = mpsc::channel();
        let mut from = File::from(here);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                if tell.send(bytes[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            keyboard,
            screen,
            seen: String::new(),
            end: there,
        }
    }

    /// Waits for a word on a screen that is drawn completely anew: otherwise only changes are drawn, and words arrive in
    /// pieces.
    fn wait_redrawn(&mut self, word: &str) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.seen.contains(word) {
            assert!(Instant::now() < deadline, "no {word:?} in {:?}", self.seen);
            self.seen.clear();
            self.press("\x0c");
            while let Ok(more) = self.screen.recv_timeout(Duration::from_millis(300)) {
                self.seen.push_str(&String::from_utf8_lossy(&more));
            }
        }
        self.seen.clear();
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    fn is_raw(&self) -> bool {
        let settings = tcgetattr(&self.end).unwrap();
        !settings.local_modes.contains(LocalModes::ICANON)
    }

    /// Waits for the program's end and asserts that the terminal has its previous settings.
    fn ended(mut self) -> i32 {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "the program does not end: {:?}",
                self.seen
            );
            std::thread::sleep(Duration::from_millis(10));
        };
        for text in RESTORE_SEQUENCES {
            while !self.seen.contains(text) {
                let more = self.screen.recv_timeout(WAIT_TIMEOUT).unwrap();
                self.seen.push_str(&String::from_utf8_lossy(&more));
            }
        }
        assert!(!self.is_raw(), "the terminal is still raw");
        status.code().unwrap_or(-1)
    }
}

fn top(d: &Daemon) -> OnTerminal {
    OnTerminal::start(viola().args(["top", "--socket"]).arg(d.socket()))
}

#[test]
fn top_survives_a_daemon_restart_and_q_restores_the_terminal() {
    let mut d = Daemon::start(SLICES_OFF);
    let mut top = top(&d);
    top.wait_redrawn("switched");
    assert!(top.is_raw());
    top.press("?");
    top.wait_redrawn("PgUp");
    top.press("\x1b");
    d.kill();
    top.wait_redrawn("trying");
    d.restart();
    top.wait_redrawn("switched");
    top.press("q");
    assert_eq!(top.ended(), 0);
}

#[test]
fn signals_and_ctrl_c_end_top_and_restore_the_terminal() {
    let d = Daemon::start(SLICES_OFF);
    for signal in [Some(Signal::TERM), Some(Signal::HUP), None] {
        let mut top = top(&d);
        top.wait_redrawn("switched");
        match signal {
            Some(signal) => {
                let pid = rustix::process::Pid::from_child(&top.child);
                rustix::process::kill_process(pid, signal).unwrap();
            }
            None => top.press("\x03"),
        }
        assert_eq!(top.ended(), 0, "{signal:?}");
    }
}

#[test]
fn keys_work_while_the_daemon_is_stopped() {
    let d = Daemon::start(SLICES_OFF);
    let mut top = top(&d);
    top.wait_redrawn("switched");
    d.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(1500));
    let begun = Instant::now();
    top.press("?");
    top.wait_redrawn("PgUp");
    top.press("q");
    assert_eq!(top.ended(), 0);
    let took = begun.elapsed();
    d.signal(Signal::CONT);
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn a_recording_spans_a_daemon_restart_and_can_be_replayed() {
    let mut d = Daemon::start(SLICES_OFF);
    let file = d.dir.path().join("r.jsonl");
    let mut recorder = viola()
        .args(["record", "--interval", "100ms", "--socket"])
        .arg(d.socket())
        .arg(&file)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let text = || std::fs::read_to_string(&file).unwrap_or_default();
    d.wait("moments", |_| text().matches("{\"moment\":").count() > 3);
    d.kill();
    d.wait("gap", |_| text().contains("{\"gap\":"));
    d.restart();
    d.wait("more", |_| {
        let text = text();
        let gap = text.find("{\"gap\":").unwrap();
        text[gap..].contains("{\"moment\":") && text[gap..].contains("{\"event\":")
    });
    let pid = rustix::process::Pid::from_child(&recorder);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert!(recorder.wait().unwrap().success());
    let mut said = String::new();
    recorder
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert!(
        said.contains("retrying") && said.contains("answers again"),
        "{said}"
    );
    drop(d);
    let copy = tempfile::NamedTempFile::new().unwrap();
    let mut recorded = std::fs::OpenOptions::new()
        .write(true)
        .open(copy.path())
        .unwrap();
    // The recording ends in the middle of a line, as after a kill.
    let whole = viola_recording();
    recorded.write_all(&whole[..whole.len() - 7]).unwrap();
    let mut replay = OnTerminal::start(viola().args(["top", "--replay"]).arg(copy.path()));
    replay.wait_redrawn("1/2");
    replay.wait_redrawn("cannot");
    replay.press("\x1b[C");
    replay.wait_redrawn("2/2");
    replay.press("q");
    assert_eq!(replay.ended(), 0);
}

/// Three moments in the format that `docs/src/top.md` describes.
fn viola_recording() -> Vec<u8> {
    let moment = |at: u64| {
        format!(
            "{{\"moment\":{{\"at_ms\":{at},\"stage\":\"idle\",\"why\":\"nobody asks\",\
             \"vms\":{{\"vms\":[],\"measured_ns\":1000000000}}}}}}\n"
        )
    };
    let begin = "{\"begin\":{\"format\":1,\"viola\":\"0.1.0\",\"host\":\"h\",\"at_ms\":0}}\n";
    [begin.to_owned(), moment(1000), moment(2000), moment(3000)]
        .concat()
        .into_bytes()
}

#[test]
fn without_a_terminal_or_a_recording_top_prints_one_sentence() {
    let said = refusal(&output(&["top"]), 2);
    assert!(said.contains("needs a terminal"), "{said}");
    let said = refusal(&output(&["top", "--replay", "/nonexistent"]), 2);
    assert!(said.contains("/nonexistent"), "{said}");
    let said = refusal(&output(&["top", "--replay", "/etc/hostname"]), 2);
    assert!(said.contains("not a recording"), "{said}");
    let said = refusal(&output(&["record", "/etc/hostname"]), 1);
    assert!(said.contains("/etc/hostname: the file exists"), "{said}");
    let said = refusal(&output(&["record", "/tmp/x", "--interval", "5"]), 2);
    assert!(said.contains("interval: \"5\" has no unit"), "{said}");
}

#[test]
fn a_recording_on_a_full_disk_ends_with_an_error_and_stays_whole() {
    let o = output(&["record", "/dev/full", "--for", "1s"]);
    assert!(refusal(&o, 1).contains("/dev/full"), "{}", stderr(&o));
}

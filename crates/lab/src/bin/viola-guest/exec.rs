// SPDX-License-Identifier: Apache-2.0
//! Runs a program for the lab, with a time limit and bounded output.

use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use viola_lab::wire::{MAX_OUTPUT_BYTES, Output};

/// Time to wait for the output of remaining children after the program has ended.
const OUTPUT_GRACE: Duration = Duration::from_millis(100);

pub fn exec(argv: &[String], timeout_ms: u64, stdin: String) -> Result<Output, String> {
    let (program, arguments) = argv.split_first().ok_or("exec: `argv` is empty")?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(if stdin.is_empty() {
            Stdio::null()
        } else {
            Stdio::piped()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|e| format!("exec {program}: {e}"))?;
    if let Some(mut pipe) = child.stdin.take() {
        std::thread::spawn(move || pipe.write_all(stdin.as_bytes()));
    }
    let (closed, closings) = mpsc::channel();
    let out = collect(child.stdout.take(), closed.clone());
    let err = collect(child.stderr.take(), closed);
    let pid = child.id();
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || ended.send(child.wait()));
    let (status, timed_out) = match end.recv_timeout(Duration::from_millis(timeout_ms)) {
        Ok(status) => (status, false),
        Err(_) => {
            if let Some(group) = rustix::process::Pid::from_raw(pid.cast_signed()) {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            (end.recv().map_err(|_| "exec: the program was lost")?, true)
        }
    };
    let status = status.map_err(|e| format!("exec {program}: {e}"))?;
    for _ in 0..2 {
        let _ = closings.recv_timeout(OUTPUT_GRACE);
    }
    let (stdout, cut_out) = text(&out);
    let (stderr, cut_err) = text(&err);
    Ok(Output {
        status: code(status),
        stdout,
        stderr,
        timed_out,
        truncated: cut_out || cut_err,
    })
}

fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The bytes kept, and the number of all.
type Kept = Arc<Mutex<(Vec<u8>, usize)>>;

fn collect(mut pipe: Option<impl Read + Send + 'static>, closed: mpsc::Sender<()>) -> Kept {
    let kept = Kept::default();
    let shared = Arc::clone(&kept);
    std::thread::spawn(move || {
        let mut chunk = vec![0_u8; 16 << 10];
        while let Some(count) = pipe
            .as_mut()
            .and_then(|p| p.read(&mut chunk).ok())
            .filter(|n| *n > 0)
        {
            if let Ok(mut kept) = shared.lock() {
                let room = MAX_OUTPUT_BYTES.saturating_sub(kept.0.len()).min(count);
                kept.0.extend_from_slice(&chunk[..room]);
                kept.1 += count;
            }
        }
        let _ = closed.send(());
    });
    kept
}

fn text(kept: &Kept) -> (String, bool) {
    match kept.lock() {
        Ok(kept) => (
            String::from_utf8_lossy(&kept.0).into_owned(),
            kept.1 > kept.0.len(),
        ),
        Err(_) => (String::new(), true),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The socket that answers questions about the agent, and takes `pause` and `resume`.
//!
//! A client sends one line and gets one JSON object. Each is served by a thread, so that a client that
//! says nothing keeps nobody waiting.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use viola_proto::agent::Stats;

use crate::lane::report::Report as LaneReport;
use crate::turbo::report::Report as TurboReport;

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// How it is.
    Status,
    /// Withdraw everything and name nothing, as before a freeze; answered when no read is in flight.
    Pause,
    /// Go on.
    Resume,
}

/// A wish, and where its answer goes.
#[derive(Debug)]
pub struct Question {
    /// The wish.
    pub wish: Wish,
    /// For the answer.
    pub answer: Sender<Report>,
}

/// How the agent is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The program's version.
    pub version: String,
    /// The host, as far as it is there.
    pub host: String,
    /// Whether it was told to pause.
    pub paused: bool,
    /// Why the DataNode's blocks may not be named; empty when they may.
    pub closed: String,
    /// Leases and pipes by which the host may still read.
    pub outstanding: u64,
    /// The blocks.
    pub stats: Stats,
    /// The file systems.
    pub volumes: Vec<VolumeReport>,
    /// Data directories that cannot be used, with the reason.
    pub missing: Vec<String>,
    /// The mount of other VMs' blocks, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mount: Option<MountReport>,
    /// What the host moves for programs, where they may ask for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipe: Option<PipeReport>,
    /// The turbo vCPU, where there is to be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turbo: Option<TurboReport>,
    /// The bond with a VF, where there is to be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneReport>,
}

/// What the host moves for this VM's programs. Counts are since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeReport {
    /// Where programs ask.
    pub socket: String,
    /// Pipes that are asked for or under way.
    pub now: u64,
    /// Pipes that are over.
    pub pipes: u64,
    /// Bytes that were moved, by whatever kind of pipe.
    pub bytes: u64,
    /// Pipes over which connections were lost.
    pub lost: u64,
    /// What was not moved by the host, by reason; the program does it by itself.
    pub refused: BTreeMap<String, u64>,
    /// The last reason in detail, where there is more to it.
    pub refusal: Option<String>,
}

impl std::fmt::Display for PipeReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "pipes at {}: {} now; so far {} with {} MiB, {} connections lost",
            self.socket,
            self.now,
            self.pipes,
            self.bytes >> 20,
            self.lost
        )?;
        for (why, count) in &self.refused {
            writeln!(f, "  {count} left to the program: {why}")?;
        }
        match &self.refusal {
            Some(why) => writeln!(f, "  the last in detail: {why}"),
            None => Ok(()),
        }
    }
}

/// How the mount of other VMs' blocks is. Counts are since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountReport {
    /// Where it is.
    pub path: String,
    /// Way to the host.
    pub port: String,
    /// One sentence.
    pub state: String,
    /// Requests of the kernel.
    pub requests: u64,
    /// Bytes of replies.
    pub bytes: u64,
    /// Requests that failed because the host was not there.
    pub failed: u64,
    /// How often the host has begun to serve it.
    pub sessions: u64,
}

impl std::fmt::Display for MountReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} by {}: {}", self.path, self.port, self.state)?;
        writeln!(
            f,
            "  {} requests, {} MiB, {} failed without the host, {} sessions",
            self.requests,
            self.bytes >> 20,
            self.failed,
            self.sessions
        )
    }
}

/// How a file system is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeReport {
    /// Where it is mounted.
    pub mount: String,
    /// `ext4` or `xfs`.
    pub kind: String,
    /// One sentence.
    pub state: String,
    /// Why the last block that was not named was not.
    pub refusal: Option<String>,
}

/// Longest time that a client may take for its line, or the agent for its answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves the socket; questions come out of the queue, and the descriptor is readable when there are some.
pub fn serve(path: &Path) -> std::io::Result<(Receiver<Question>, Arc<OwnedFd>)> {
    if UnixStream::connect(path).is_ok() {
        return Err(std::io::Error::other("another viola-agent is running"));
    }
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (questions, queue) = channel();
    let wake_there = Arc::clone(&wake);
    std::thread::Builder::new()
        .name("viola-status".into())
        .spawn(move || {
            for client in listener.incoming().flatten() {
                let (questions, wake) = (questions.clone(), Arc::clone(&wake_there));
                let _ = std::thread::Builder::new()
                    .name("viola-client".into())
                    .spawn(move || client_thread(&client, &questions, &wake));
            }
        })?;
    Ok((queue, wake))
}

fn client_thread(client: &UnixStream, questions: &Sender<Question>, wake: &OwnedFd) {
    let _ = client.set_read_timeout(Some(PATIENCE));
    let _ = client.set_write_timeout(Some(PATIENCE));
    let mut line = String::new();
    if BufReader::new(client.take(64))
        .read_line(&mut line)
        .is_err()
    {
        return;
    }
    let wish = match line.trim() {
        "status" => Wish::Status,
        "pause" => Wish::Pause,
        "resume" => Wish::Resume,
        _ => return,
    };
    let (answer, answers) = channel();
    if questions.send(Question { wish, answer }).is_err() {
        return;
    }
    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
    if let Ok(report) = answers.recv_timeout(PATIENCE)
        && let Ok(text) = serde_json::to_string(&report)
    {
        let mut client = client;
        let _ = client.write_all(text.as_bytes());
    }
}

/// Asks a running agent.
pub fn ask(path: &Path, wish: &str) -> std::io::Result<Report> {
    let mut client = UnixStream::connect(path)?;
    client.set_read_timeout(Some(2 * PATIENCE))?;
    client.write_all(format!("{wish}\n").as_bytes())?;
    let mut text = String::new();
    client.read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(|_| std::io::Error::other("it does not answer"))
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let s = &self.stats;
        let alone = match (&self.mount, &self.turbo, &self.lane) {
            (Some(_), ..) => Some("reads only"),
            (None, Some(_), _) => Some("turbo only"),
            (None, None, Some(_)) => Some("lane only"),
            (None, None, None) => None,
        };
        if let Some(what) = alone.filter(|_| self.host.is_empty()) {
            writeln!(f, "viola-agent {}, {what}", self.version)?;
            if let Some(mount) = &self.mount {
                mount.fmt(f)?;
            }
            return self.put_last(f);
        }
        writeln!(f, "viola-agent {}, {}", self.version, self.host)?;
        if self.paused {
            writeln!(f, "paused: nothing is named until `viola-agent resume`")?;
        }
        if !self.closed.is_empty() {
            writeln!(f, "no block is named: {}", self.closed)?;
        }
        writeln!(
            f,
            "blocks   {} named, {} waiting, {} being withdrawn, {} not nameable",
            s.named, s.waiting, s.withdrawing, s.refused
        )?;
        writeln!(
            f,
            "held     {} of at most {} MiB of deleted blocks{}",
            s.held_bytes >> 20,
            s.held_limit >> 20,
            if s.full { ": naming has stopped" } else { "" }
        )?;
        writeln!(
            f,
            "so far   {} names, {} withdrawals, {} scans, {} overflows of the kernel's queue",
            s.names, s.withdrawals, s.scans, s.overflows
        )?;
        for v in &self.volumes {
            writeln!(f, "{} ({}): {}", v.mount, v.kind, v.state)?;
            if let Some(why) = &v.refusal {
                writeln!(f, "  a block was not named: {why}")?;
            }
        }
        for sentence in &self.missing {
            writeln!(f, "{sentence}")?;
        }
        if let Some(pipe) = &self.pipe {
            pipe.fmt(f)?;
        }
        if let Some(mount) = &self.mount {
            mount.fmt(f)?;
        }
        self.put_last(f)
    }
}

impl Report {
    /// What may be there alone.
    fn put_last(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(turbo) = &self.turbo {
            write!(f, "{turbo}")?;
        }
        self.lane
            .as_ref()
            .map_or(Ok(()), |lane| write!(f, "{lane}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turbo::knob::Part;
    use crate::turbo::report::{Change, Left};

    #[test]
    fn a_question_is_answered_and_a_second_agent_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (questions, _wake) = serve(&path).unwrap();
        let asked = {
            let path = path.clone();
            std::thread::spawn(move || ask(&path, "pause"))
        };
        let question = questions.recv_timeout(PATIENCE).unwrap();
        assert_eq!(question.wish, Wish::Pause);
        let report = Report {
            host: "there".into(),
            ..Report::default()
        };
        question.answer.send(report.clone()).unwrap();
        assert_eq!(asked.join().unwrap().unwrap(), report);
        assert!(serve(&path).is_err());
    }

    #[test]
    fn a_full_agent_says_so() {
        let mut report = Report::default();
        report.stats.full = true;
        assert!(report.to_string().contains("naming has stopped"));
        assert!(!report.to_string().contains("paused"));
    }

    #[test]
    fn a_turbo_vcpu_is_told_with_what_was_left() {
        let turbo = TurboReport {
            cpu: 1,
            active: true,
            state: "in force".into(),
            changes: vec![Change {
                part: Part::Interrupts,
                what: "interrupt 24 (virtio0-input.0)".into(),
                from: "0-1".into(),
                to: "1".into(),
            }],
            left: vec![Left {
                part: Part::Buffers,
                why: "a reason".into(),
            }],
            ..TurboReport::default()
        };
        let shown = "turbo vCPU 1: in force\n  interrupts: 1 changed (interrupt 24 (virtio0-input.0): 0-1 -> 1)\n  \
                     buffers, left: a reason\n";
        for host in ["", "there"] {
            let report = Report {
                version: "1".into(),
                host: host.into(),
                turbo: Some(turbo.clone()),
                ..Report::default()
            };
            let text = report.to_string();
            assert!(text.ends_with(shown), "{text}");
            assert_eq!(text.contains("turbo only"), host.is_empty(), "{text}");
        }
    }

    #[test]
    fn pipes_are_told_with_what_was_left_to_the_program() {
        let mut report = Report::default();
        assert!(!report.to_string().contains("pipes"));
        report.pipe = Some(PipeReport {
            socket: "/run/p".into(),
            bytes: 7 << 20,
            refused: BTreeMap::from([("a reason".to_owned(), 3)]),
            ..PipeReport::default()
        });
        let text = report.to_string();
        assert!(
            text.contains("pipes at /run/p: 0 now; so far 0 with 7 MiB"),
            "{text}"
        );
        assert!(text.contains("  3 left to the program: a reason"), "{text}");
    }
}

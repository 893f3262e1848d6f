// SPDX-License-Identifier: Apache-2.0
//! The socket of `viola-agent status`, `pause` and `resume`.
//!
//! A client sends one line and gets one JSON object. Each client has a thread, so that a silent client delays no other.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use viola_proto::agent::Stats;

use crate::io::queue;
use crate::lane::report::Report as LaneReport;
use crate::pipe::report::PipeReport;
use crate::relay::report::MountReport;
use crate::turbo::report::Report as TurboReport;

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Report the status.
    Status,
    /// Withdraw all blocks and name none, as before a freeze; answered when no read is in flight.
    Pause,
    /// Resume naming.
    Resume,
}

/// A command of a client.
#[derive(Debug)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// Where the report goes.
    pub reply: Sender<Report>,
}

/// The agent's status, as JSON and as text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The program's version.
    pub version: String,
    /// State of the session with the host, one sentence.
    pub host: String,
    /// Whether the operator has paused the agent.
    pub paused: bool,
    /// Why the DataNode's blocks may not be named; empty when they may.
    pub closed: String,
    /// Number of leases and pipes by which the host may still read or write.
    pub outstanding: u64,
    /// Counts of blocks.
    pub stats: Stats,
    /// The file systems.
    pub volumes: Vec<VolumeReport>,
    /// Configured directories that cannot be used, each with the reason.
    pub missing: Vec<String>,
    /// The mount of other VMs' blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mount: Option<MountReport>,
    /// The pipes of this VM's programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipe: Option<PipeReport>,
    /// The turbo vCPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turbo: Option<TurboReport>,
    /// The bond with a VF.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneReport>,
}

/// Status of one file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeReport {
    /// Mount point.
    pub mount: String,
    /// `ext4` or `xfs`.
    pub kind: String,
    /// State as one sentence.
    pub state: String,
    /// Why the last refused block was refused.
    pub refusal: Option<String>,
}

/// Time limit for a client's line and for the agent's answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves the socket at `path`. Returns the queue of its requests.
///
/// # Errors
/// When another agent answers at the socket, or the kernel's.
pub fn serve(path: &Path) -> std::io::Result<queue::Receiver<Request>> {
    if UnixStream::connect(path).is_ok() {
        return Err(std::io::Error::other("another viola-agent is running"));
    }
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))?;
    let (requests, receiver) = queue::queue()?;
    std::thread::Builder::new()
        .name("viola-status".into())
        .spawn(move || {
            for client in listener.incoming().flatten() {
                let requests = requests.clone();
                let _ = std::thread::Builder::new()
                    .name("viola-client".into())
                    .spawn(move || serve_client(&client, &requests));
            }
        })?;
    Ok(receiver)
}

fn serve_client(client: &UnixStream, requests: &queue::Sender<Request>) {
    let _ = client.set_read_timeout(Some(CLIENT_TIMEOUT));
    let _ = client.set_write_timeout(Some(CLIENT_TIMEOUT));
    let mut line = String::new();
    if BufReader::new(client.take(64))
        .read_line(&mut line)
        .is_err()
    {
        return;
    }
    let command = match line.trim() {
        "status" => Command::Status,
        "pause" => Command::Pause,
        "resume" => Command::Resume,
        _ => return,
    };
    let (reply, replies) = channel();
    if !requests.send(Request { command, reply }) {
        return;
    }
    if let Ok(report) = replies.recv_timeout(CLIENT_TIMEOUT)
        && let Ok(text) = serde_json::to_string(&report)
    {
        let mut client = client;
        let _ = client.write_all(text.as_bytes());
    }
}

/// Sends a command to a running agent.
///
/// # Errors
/// When no agent listens, or it does not answer in time.
pub fn request(path: &Path, command: &str) -> std::io::Result<Report> {
    let mut client = UnixStream::connect(path)?;
    client.set_read_timeout(Some(2 * CLIENT_TIMEOUT))?;
    client.write_all(
        format!(
            "{command}
"
        )
        .as_bytes(),
    )?;
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
            return self.fmt_guest_services(f);
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
        self.fmt_guest_services(f)
    }
}

impl Report {
    /// The services that an agent may have alone.
    fn fmt_guest_services(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    use std::collections::BTreeMap;

    use super::*;
    use crate::turbo::knob::Part;
    use crate::turbo::report::{Change, Left};

    #[test]
    fn a_question_is_answered_and_a_second_agent_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let requests = serve(&path).unwrap();
        let asked = {
            let path = path.clone();
            std::thread::spawn(move || request(&path, "pause"))
        };
        let request = requests.recv_timeout(CLIENT_TIMEOUT).unwrap();
        assert_eq!(request.command, Command::Pause);
        let report = Report {
            host: "there".into(),
            ..Report::default()
        };
        request.reply.send(report.clone()).unwrap();
        assert_eq!(asked.join().unwrap().unwrap(), report);
        assert!(serve(&path).is_err());
    }

    #[test]
    fn a_full_ledger_is_reported() {
        let mut report = Report::default();
        report.stats.full = true;
        assert!(report.to_string().contains("naming has stopped"));
        assert!(!report.to_string().contains("paused"));
    }

    #[test]
    fn a_turbo_vcpu_is_reported_with_the_settings_left_alone() {
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
    fn pipes_are_reported_with_their_refusals() {
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

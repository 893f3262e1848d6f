// SPDX-License-Identifier: Apache-2.0
//! Messages of the command channel between the lab and a guest's init.
//!
//! One JSON object per line on a serial line of the guest. The lab sends `{"id": 7, "cmd":
//! "ping"}`, the guest answers `{"id": 7, "ok": ...}` or `{"id": 7, "error": "..."}`. Answers may
//! come in another order than requests. When its init is ready (after boot and after each reboot)
//! the guest sends `{"event": "up"}`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longest line of either side in bytes.
pub const MAX_LINE_BYTES: usize = 4 << 20;

/// Bytes of standard output, and of standard error, that [`Command::Exec`] returns at most.
pub const MAX_OUTPUT_BYTES: usize = 256 << 10;

/// A request to the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the sender, repeated in the answer.
    pub id: u64,
    /// What to do.
    #[serde(flatten)]
    pub command: Command,
}

/// What a guest's init can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "lowercase")]
pub enum Command {
    /// Answers `null`.
    Ping,
    /// Runs a program to its end; answers [`Output`].
    Exec {
        /// Program and arguments; looked up in the guest's PATH.
        argv: Vec<String>,
        /// Killed with its process group after this many milliseconds.
        timeout_ms: u64,
        /// Text for its standard input.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        stdin: String,
    },
    /// Starts a workload under an unused name; answers when it is ready.
    Start {
        /// Name for [`Command::Stop`] and [`Command::Stat`].
        name: String,
        /// What to run.
        workload: Workload,
    },
    /// Stops a workload; answers its last [`Stat`].
    Stop {
        /// The workload's name.
        name: String,
    },
    /// Answers the [`Stat`] of a workload.
    Stat {
        /// The workload's name.
        name: String,
    },
    /// Answers the names of the running workloads.
    List,
    /// Sets the size of the shell's terminal.
    Winsize {
        /// Rows, in characters.
        rows: u16,
        /// Columns, in characters.
        cols: u16,
    },
    /// Unmounts disks and powers off; answers `null` before it does.
    Shutdown,
    /// Unmounts disks and restarts the guest's kernel; answers `null` before it does.
    Reboot,
}

/// A line from the guest.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Reply {
    /// The request's id; 0 in events.
    #[serde(default)]
    pub id: u64,
    /// The result, if the request succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<Value>,
    /// The error, if the request failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// An event without a request: `"up"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<String>,
}

/// Result of [`Command::Exec`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Exit status; 128 + signal number for a program that a signal ended.
    pub status: i32,
    /// Standard output (invalid UTF-8 replaced), at most [`MAX_OUTPUT_BYTES`] bytes.
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
    /// Whether it was killed after its time limit.
    #[serde(default)]
    pub timed_out: bool,
    /// Whether the output was longer than returned.
    #[serde(default)]
    pub truncated: bool,
}

/// State of a workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stat {
    /// Kind of the workload: `hog`, `echo`...
    pub kind: String,
    /// Work units since the start: hog passes, answered requests, forked children, packets.
    pub units: u64,
    /// Bytes moved since the start, as the workload counts them (hog: touched memory; copy, scale,
    /// add and triad as STREAM does).
    pub bytes: u64,
    /// CPU time of its processes by the guest's accounting, in milliseconds. The guest does not see
    /// when the host takes its core away; compare with the host's accounting.
    pub cpu_ms: u64,
    /// Time since its start by the guest's clock, in milliseconds.
    pub up_ms: u64,
    /// Number of living processes.
    pub alive: u32,
}

/// Memory access pattern of a hog.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Registers only: a unit is 16,384 dependent multiply-adds.
    #[default]
    Alu,
    /// A unit changes every cache line of the footprint once.
    Touch,
    /// A unit copies one half of the footprint to the other (STREAM copy).
    Copy,
    /// A unit is `b = s * c` over halves of the footprint (STREAM scale).
    Scale,
    /// A unit is `c = a + b` over thirds of the footprint (STREAM add).
    Add,
    /// A unit is `a = b + s * c` over thirds of the footprint (STREAM triad).
    Triad,
}

/// A workload: a program inside `viola-guest`, or one of the image, that keeps a guest busy or
/// serves requests.
///
/// Servers have real-time priority in their guest. A lab shows what the host's scheduler does with
/// a packet; the guest's scheduler would sometimes leave a woken server waiting up to its next
/// tick, 10 ms, behind work of the lowest weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Workload {
    /// Burns CPU time and counts work units.
    Hog {
        /// Memory access of a unit.
        #[serde(default)]
        pattern: Pattern,
        /// Memory that a unit covers, in KiB (unused by `alu`).
        #[serde(default = "defaults::footprint_kib")]
        footprint_kib: u32,
        /// Number of processes.
        #[serde(default = "defaults::one")]
        procs: u32,
        /// Share of each period that the work takes on an idle core, in percent, 1 to 100.
        #[serde(default = "defaults::duty")]
        duty: u32,
        /// Length of a period in milliseconds, if `duty` is below 100.
        #[serde(default = "defaults::period_ms")]
        period_ms: u32,
        /// Nice value in the guest, -20 to 19.
        #[serde(default)]
        nice: i32,
    },
    /// Echoes TCP streams and UDP packets, in one process.
    Echo {
        /// TCP and UDP port.
        #[serde(default = "defaults::echo_port")]
        port: u16,
    },
    /// Discards TCP streams and UDP packets, in one process.
    Sink {
        /// TCP and UDP port.
        #[serde(default = "defaults::sink_port")]
        port: u16,
    },
    /// Debian's nginx with one worker and files in memory: `/pageNk` has N KiB.
    Nginx {
        /// TCP port.
        #[serde(default = "defaults::http_port")]
        port: u16,
        /// Sizes of its files in KiB.
        #[serde(default = "defaults::sizes_kib")]
        sizes_kib: Vec<u32>,
    },
    /// Debian's Apache with its event module, and files in memory: `/pageNk` has N KiB. It counts no units.
    Apache {
        /// TCP port.
        #[serde(default = "defaults::apache_port")]
        port: u16,
        /// Sizes of its files in KiB.
        #[serde(default = "defaults::sizes_kib")]
        sizes_kib: Vec<u32>,
    },
    /// Sends streams of voice and video and records the arrival of streams sent to it
    /// ([`crate::media`]). Units are packets.
    Media {
        /// TCP port of RTSP and UDP port of RTP.
        #[serde(default = "defaults::media_port")]
        port: u16,
    },
    /// Forks children that exit at once.
    Forker {
        /// Children per second; 0: as many as possible.
        #[serde(default)]
        rate: u32,
    },
    /// `viola-agent`, on the guest's third serial line. Units are blocks that it has named.
    Agent {
        /// Its configuration, as in `dist/agent.toml`, without the channel.
        config: String,
    },
}

impl Workload {
    /// Whether it serves requests.
    pub fn is_server(&self) -> bool {
        matches!(
            self,
            Self::Echo { .. }
                | Self::Sink { .. }
                | Self::Nginx { .. }
                | Self::Apache { .. }
                | Self::Media { .. }
        )
    }

    /// Name of the kind, as in `kind = "..."`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Hog { .. } => "hog",
            Self::Echo { .. } => "echo",
            Self::Sink { .. } => "sink",
            Self::Nginx { .. } => "nginx",
            Self::Apache { .. } => "apache",
            Self::Media { .. } => "media",
            Self::Forker { .. } => "forker",
            Self::Agent { .. } => "agent",
        }
    }

    /// A hog that never sleeps and uses next to no memory.
    pub fn hog() -> Self {
        Self::Hog {
            pattern: Pattern::Alu,
            footprint_kib: defaults::footprint_kib(),
            procs: 1,
            duty: 100,
            period_ms: defaults::period_ms(),
            nice: 0,
        }
    }

    /// A hog that works `duty` percent of every `period_ms` milliseconds.
    pub fn hog_duty(duty: u32, period_ms: u32) -> Self {
        Self::Hog {
            pattern: Pattern::Alu,
            footprint_kib: defaults::footprint_kib(),
            procs: 1,
            duty,
            period_ms,
            nice: 0,
        }
    }

    /// The echo server on port 7.
    pub fn echo() -> Self {
        Self::Echo {
            port: defaults::echo_port(),
        }
    }

    /// The sink on port 9.
    pub fn sink() -> Self {
        Self::Sink {
            port: defaults::sink_port(),
        }
    }

    /// nginx on port 80 with `/page5k` and `/page1024k`.
    pub fn nginx() -> Self {
        Self::Nginx {
            port: defaults::http_port(),
            sizes_kib: defaults::sizes_kib(),
        }
    }

    /// Apache on port 8080 with `/page5k` and `/page1024k`.
    pub fn apache() -> Self {
        Self::Apache {
            port: defaults::apache_port(),
            sizes_kib: defaults::sizes_kib(),
        }
    }

    /// The media server on port 554.
    pub fn media() -> Self {
        Self::Media {
            port: defaults::media_port(),
        }
    }

    /// A forker of `rate` children per second; 0: as many as possible.
    pub fn forker(rate: u32) -> Self {
        Self::Forker { rate }
    }

    /// The guest agent with this configuration. The guest adds `datanode = "none"` if that key is
    /// missing, so that the agent asks no DataNode.
    pub fn agent(config: &str) -> Self {
        Self::Agent {
            config: config.into(),
        }
    }

    /// Checks that the numbers are in range.
    ///
    /// # Errors
    /// A sentence that names the number out of range.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::Hog {
                pattern,
                footprint_kib,
                procs,
                duty,
                period_ms,
                nice,
            } => {
                range("procs", (*procs).into(), 1, 64)?;
                range("duty", (*duty).into(), 1, 100)?;
                range("period_ms", (*period_ms).into(), 1, 60_000)?;
                range("nice", (*nice).into(), -20, 19)?;
                if *pattern != Pattern::Alu {
                    range("footprint_kib", (*footprint_kib).into(), 1, 1 << 20)?;
                }
                Ok(())
            }
            Self::Echo { port } | Self::Sink { port } | Self::Media { port } => {
                range("port", (*port).into(), 1, 65_535)
            }
            Self::Nginx { port, sizes_kib } | Self::Apache { port, sizes_kib } => {
                range("port", (*port).into(), 1, 65_535)?;
                sizes_kib
                    .iter()
                    .try_for_each(|k| range("sizes_kib", (*k).into(), 1, 1 << 20))
            }
            Self::Forker { rate } => range("rate", (*rate).into(), 0, 100_000),
            // the agent checks its configuration itself
            Self::Agent { .. } => Ok(()),
        }
    }
}

fn range(key: &str, value: i64, low: i64, high: i64) -> Result<(), String> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(format!("`{key}` is {value}; it must be {low} to {high}"))
}

mod defaults {
    pub fn one() -> u32 {
        1
    }
    pub fn duty() -> u32 {
        100
    }
    pub fn period_ms() -> u32 {
        20
    }
    pub fn footprint_kib() -> u32 {
        256
    }
    pub fn echo_port() -> u16 {
        7
    }
    pub fn sink_port() -> u16 {
        9
    }
    pub fn http_port() -> u16 {
        80
    }
    pub fn apache_port() -> u16 {
        8080
    }
    pub fn media_port() -> u16 {
        crate::media::PORT
    }
    pub fn sizes_kib() -> Vec<u32> {
        vec![5, 1024]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_one_flat_object() {
        let line = r#"{"id":3,"cmd":"exec","argv":["true"],"timeout_ms":5}"#;
        let request: Request = serde_json::from_str(line).unwrap();
        assert_eq!(
            request.command,
            Command::Exec {
                argv: vec!["true".into()],
                timeout_ms: 5,
                stdin: String::new()
            }
        );
        assert_eq!(serde_json::to_string(&request).unwrap(), line);
    }

    #[test]
    fn a_workload_has_defaults_and_refuses_unknown_keys() {
        let hog: Workload = serde_json::from_str(r#"{"kind":"hog"}"#).unwrap();
        assert_eq!(hog, Workload::hog());
        let wrong = serde_json::from_str::<Workload>(r#"{"kind":"hog","dutty":3}"#).unwrap_err();
        assert!(wrong.to_string().contains("dutty"), "{wrong}");
    }

    #[test]
    fn a_number_out_of_range_is_named() {
        assert_eq!(
            Workload::hog_duty(101, 20).check().unwrap_err(),
            "`duty` is 101; it must be 1 to 100"
        );
        assert!(Workload::hog_duty(100, 20).check().is_ok());
    }
}

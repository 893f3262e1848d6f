// SPDX-License-Identifier: Apache-2.0
//! The benchmark client: one Java process in a guest that does what it is told on a socket.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::root::{checked, log};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;

/// Longest start of the client.
const START: Duration = Duration::from_secs(90);
/// Longest single request.
const ANSWER: Duration = Duration::from_secs(600);

/// What a request came to. What does not belong to it is zero.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RequestStats {
    /// Bytes read or written.
    pub bytes: u64,
    /// Read calls.
    pub reads: u64,
    /// Bytes that came past the DataNode, as HDFS itself counts them.
    pub local: u64,
    /// Seconds of wall time.
    pub wall_s: f64,
    /// Seconds of CPU time of the client's process, as its guest counts them.
    pub cpu_s: f64,
    /// CRC-32C of all bytes in their order.
    pub crc32c: Option<u64>,
    /// Median of a single positioned read, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the same.
    pub p99_us: f64,
}

/// A connection to a benchmark client.
pub struct Client {
    guest: String,
    lines: BufReader<TcpStream>,
}

impl Client {
    pub(super) const CLASS: &str = "org.viola.hdfs.Bench";
    pub(super) const PORT: u16 = 7070;

    pub(super) fn start(lab: &Lab, guest: &Guest, words: &[String], port: u16) -> Result<Self> {
        let address = guest
            .address()
            .ok_or_else(|| Error::guest(guest.name(), "a client needs a network"))?;
        let command: Vec<String> = words.iter().map(|w| format!("'{w}'")).collect();
        let script = format!(
            "setsid {} </dev/null >/run/bench{port}.log 2>&1 & echo $! >/run/bench{port}.pid",
            command.join(" ")
        );
        checked(
            guest,
            "starting its client",
            guest.exec(&["sh", "-ec", &script])?,
        )?;
        let end = Instant::now() + START;
        let stream = loop {
            match lab.in_netns(|| TcpStream::connect((address, port)))? {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(200)),
                Err(error) => {
                    let log = log(guest, &format!("bench{port}"));
                    return Err(Error::guest(
                        guest.name(),
                        format!("its client does not listen ({error}): {log}"),
                    ));
                }
            }
        };
        Self::over(guest.name(), stream)
    }

    /// A client that listens already; `name` is where it runs.
    pub(super) fn over(name: &str, stream: TcpStream) -> Result<Self> {
        let failed = |e: std::io::Error| Error::guest(name, e.to_string());
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_read_timeout(Some(ANSWER)).map_err(failed)?;
        Ok(Self {
            guest: name.into(),
            lines: BufReader::new(stream),
        })
    }

    /// Sends one request, a line of words, and waits for its answer. The requests are those of the
    /// Java class `Bench` in `hdfs/`: `open SIDE KEY=VALUE...`, `SIDE read PATH BUFFER` and so on.
    pub fn ask(&mut self, request: &str) -> Result<RequestStats> {
        self.ask_for(request)
    }

    /// As [`Client::ask`], for requests with an answer of another shape.
    pub fn ask_for<T: DeserializeOwned>(&mut self, request: &str) -> Result<T> {
        let failed = |what: String| Error::guest(&self.guest, format!("`{request}`: {what}"));
        let mut line = String::new();
        let io = self
            .lines
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .and_then(|()| self.lines.read_line(&mut line));
        io.map_err(|e| failed(e.to_string()))?;
        let odd = |e: serde_json::Error| failed(format!("an odd answer: {e}"));
        let answer: serde_json::Value = serde_json::from_str(&line).map_err(odd)?;
        match answer.get("error") {
            Some(error) => Err(failed(error.as_str().unwrap_or_default().into())),
            None => serde_json::from_value(answer).map_err(odd),
        }
    }
}

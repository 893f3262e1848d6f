// SPDX-License-Identifier: Apache-2.0
//! The benchmark client: a Java process in a guest that executes requests from a socket.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::root;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;

/// Time limit for the client to start.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// Time limit of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(600);

/// Figures of a request. Those that do not apply are zero.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RequestStats {
    /// Bytes read or written.
    pub bytes: u64,
    /// Read calls.
    pub reads: u64,
    /// Bytes that bypassed the DataNode, by HDFS's own counters.
    pub local: u64,
    /// Wall time in seconds.
    pub wall_s: f64,
    /// CPU time of the client's process in seconds, by its guest's accounting.
    pub cpu_s: f64,
    /// CRC-32C of all bytes in order.
    pub crc32c: Option<u64>,
    /// Median latency of a positioned read in microseconds.
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
        let name = format!("bench{port}");
        root::start(guest, &name, words)?;
        let end = Instant::now() + START_TIMEOUT;
        let stream = loop {
            match lab.in_netns(|| TcpStream::connect((address, port)))? {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(200)),
                Err(error) => {
                    let log = root::log(guest, &name);
                    return Err(Error::guest(
                        guest.name(),
                        format!("its client does not listen ({error}): {log}"),
                    ));
                }
            }
        };
        Self::over(guest.name(), stream)
    }

    /// Uses a client that listens already; `name` is where it runs.
    pub(super) fn over(name: &str, stream: TcpStream) -> Result<Self> {
        let failed = |e: std::io::Error| Error::guest(name, e.to_string());
        stream.set_nodelay(true).map_err(failed)?;
        stream
            .set_read_timeout(Some(REQUEST_TIMEOUT))
            .map_err(failed)?;
        Ok(Self {
            guest: name.into(),
            lines: BufReader::new(stream),
        })
    }

    /// Sends one request, a line of words, and waits for its answer. The Java class `Bench` in
    /// `hdfs/` defines the requests: `open SIDE KEY=VALUE...`, `SIDE read PATH BUFFER` and so on.
    ///
    /// # Errors
    /// [`Error::Guest`] with the client's error.
    pub fn ask(&mut self, request: &str) -> Result<RequestStats> {
        self.ask_for(request)
    }

    /// As [`Client::ask`], for requests whose answer has another shape.
    ///
    /// # Errors
    /// [`Error::Guest`] with the client's error.
    pub fn ask_for<T: DeserializeOwned>(&mut self, request: &str) -> Result<T> {
        let failed = |what: String| Error::guest(&self.guest, format!("`{request}`: {what}"));
        let mut line = String::new();
        let io = self
            .lines
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .and_then(|()| self.lines.read_line(&mut line));
        io.map_err(|e| failed(e.to_string()))?;
        let invalid = |e: serde_json::Error| failed(format!("its answer is not valid: {e}"));
        let answer: serde_json::Value = serde_json::from_str(&line).map_err(invalid)?;
        match answer.get("error") {
            Some(error) => Err(failed(error.as_str().unwrap_or_default().into())),
            None => serde_json::from_value(answer).map_err(invalid),
        }
    }
}

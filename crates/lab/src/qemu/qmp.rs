// SPDX-License-Identifier: Apache-2.0
//! A QMP connection to a VM (QEMU docs/interop/qmp-spec).

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Time limit for an answer: `savevm` of an emulated VM takes seconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(super) struct Qmp {
    stream: BufReader<UnixStream>,
    /// Start of a line whose end has not arrived.
    part: Vec<u8>,
    /// Events that no [`Qmp::wait`] has returned yet.
    events: Vec<Value>,
}

impl Qmp {
    /// Connects. Retries while QEMU has made the socket but does not listen yet.
    pub(super) fn connect(socket: &Path) -> Result<Self, String> {
        let end = Instant::now() + REPLY_TIMEOUT;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(e) if e.kind() != ErrorKind::ConnectionRefused || Instant::now() > end => {
                    return Err(format!("{}: {e}", socket.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut qmp = Self {
            stream: BufReader::new(stream),
            part: Vec::new(),
            events: Vec::new(),
        };
        qmp.line(Instant::now() + REPLY_TIMEOUT)?
            .ok_or("no greeting")?;
        qmp.execute("qmp_capabilities", None)?;
        Ok(qmp)
    }

    pub(super) fn execute(
        &mut self,
        command: &str,
        arguments: Option<Value>,
    ) -> Result<Value, String> {
        let mut request = json!({ "execute": command });
        if let Some(arguments) = arguments {
            request["arguments"] = arguments;
        }
        let failed = |what: &str| format!("QMP {command}: {what}");
        self.stream
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .map_err(|e| failed(&e.to_string()))?;
        let end = Instant::now() + REPLY_TIMEOUT;
        loop {
            let mut answer = self
                .line(end)
                .map_err(|e| failed(&e))?
                .ok_or_else(|| failed("no answer"))?;
            if answer.get("event").is_some() {
                self.events.push(answer);
            } else if let Some(error) = answer.get("error") {
                return Err(failed(error["desc"].as_str().unwrap_or("refused")));
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// The next event of this name whose data fulfils `wanted`, also an earlier one that was not
    /// returned yet; `None` after `limit`.
    pub(super) fn wait(
        &mut self,
        event: &str,
        wanted: &dyn Fn(&Value) -> bool,
        limit: Duration,
    ) -> Result<Option<Value>, String> {
        let end = Instant::now() + limit;
        let is_it = |e: &Value| e["event"] == event && wanted(&e["data"]);
        if let Some(at) = self.events.iter().position(is_it) {
            return Ok(Some(self.events.remove(at)));
        }
        while let Some(line) = self.line(end)? {
            if is_it(&line) {
                return Ok(Some(line));
            }
            self.events.push(line);
        }
        Ok(None)
    }

    /// Drops earlier events.
    pub(super) fn clear(&mut self) {
        while let Ok(Some(_)) = self.line(Instant::now()) {}
        self.events.clear();
    }

    /// Reads one line; `None` if none arrives in time.
    fn line(&mut self, end: Instant) -> Result<Option<Value>, String> {
        loop {
            let left = end
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1));
            self.stream
                .get_ref()
                .set_read_timeout(Some(left))
                .map_err(|e| e.to_string())?;
            match self.stream.read_until(b'\n', &mut self.part) {
                Ok(0) => return Err("QEMU has ended".into()),
                Ok(_) if self.part.ends_with(b"\n") => {
                    let line = std::mem::take(&mut self.part);
                    return serde_json::from_slice(&line)
                        .map(Some)
                        .map_err(|e| format!("QEMU's answer is not valid: {e}"));
                }
                Ok(_) => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(e) => return Err(e.to_string()),
            }
        }
    }
}

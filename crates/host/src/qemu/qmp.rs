// SPDX-License-Identifier: Apache-2.0
//! A client for the QEMU Machine Protocol that asks what the inventory needs, and hangs up.
//!
//! Own code rather than the `qapi` crate: five queries without arguments are all there is, and `qapi`
//! brings generated types for the whole schema, whose strictness makes answers of other QEMU versions
//! errors, and leaves limits on line length and time to the caller. Here what is not needed is ignored.
//!
//! QEMU serves one client per socket at a time, so the conversation is kept to a few milliseconds.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::thread::Tid;
use crate::vm::{Disk, printable};

/// Longest line accepted.
pub const MAX_LINE: usize = 1 << 20;
/// Longest wait for one answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest whole conversation.
const TALK_TIMEOUT: Duration = Duration::from_secs(2);
/// vCPUs, disks or iothreads beyond this number are not believed.
const MAX_ITEMS: usize = 4096;

/// Why a QMP socket gave no answer. The text names the VM and the socket.
#[derive(Debug, thiserror::Error)]
#[error("{vm}: QMP socket {}: {cause}", socket.display())]
pub struct QmpError {
    /// The VM's name.
    pub vm: String,
    /// The socket as QEMU names it.
    pub socket: PathBuf,
    /// What went wrong.
    pub cause: QmpFailure,
}

/// What went wrong on a QMP socket.
#[derive(Debug, thiserror::Error)]
pub enum QmpFailure {
    /// Another client holds the socket.
    #[error("another client is using it")]
    Busy,
    /// No complete line within this time.
    #[error("no answer within {} ms; QEMU is stopped or serves another client", .0.as_millis())]
    Timeout(Duration),
    /// The answer is not QMP.
    #[error("it does not speak QMP: {0}")]
    Garbage(String),
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's words.
        reason: String,
    },
    /// The socket cannot be reached or broke.
    #[error("{0}")]
    Io(io::Error),
}

/// What QEMU said about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// `-name guest=`, when it has one.
    pub name: Option<String>,
    /// Run state: `running`, `paused`, `prelaunch`...
    pub status: String,
    /// vCPU number and thread number as QEMU sees it.
    pub vcpus: Vec<(u32, Tid)>,
    /// Thread numbers of iothreads as QEMU sees them.
    pub iothreads: Vec<Tid>,
    /// Disks with a medium in them.
    pub disks: Vec<Disk>,
}

/// Asks the QMP server at `reach`, a path this program can open, for all of [`Answer`]. `socket` and `vm`
/// are names for the error.
///
/// # Errors
/// [`QmpError`] after at most two seconds.
pub fn ask(vm: &str, socket: &Path, reach: &Path) -> Result<Answer, QmpError> {
    talk(reach).map_err(|cause| QmpError {
        vm: vm.to_owned(),
        socket: socket.to_owned(),
        cause,
    })
}

fn talk(reach: &Path) -> Result<Answer, QmpFailure> {
    questions(&mut Connection::open(reach)?)
}

pub(super) fn questions(connection: &mut Connection) -> Result<Answer, QmpFailure> {
    let name = connection.command("query-name")?;
    let status = connection.command("query-status")?;
    let cpus = connection.command("query-cpus-fast")?;
    let iothreads = connection.command("query-iothreads")?;
    let blocks = connection.command("query-block")?;
    Ok(Answer {
        name: name["name"].as_str().map(printable),
        status: text(&status, "status")?,
        vcpus: list("query-cpus-fast", &cpus)?
            .iter()
            .map(|cpu| Ok((number(cpu, "cpu-index")?, number(cpu, "thread-id")?)))
            .collect::<Result<_, QmpFailure>>()?,
        iothreads: list("query-iothreads", &iothreads)?
            .iter()
            .map(|thread| number(thread, "thread-id"))
            .collect::<Result<_, QmpFailure>>()?,
        disks: list("query-block", &blocks)?
            .iter()
            .filter_map(disk)
            .collect(),
    })
}

fn connect_to(reach: &Path) -> Result<UnixStream, QmpFailure> {
    let stream = crate::unix_connect::connect(reach).map_err(|e| match e.kind() {
        // A full queue of other clients.
        io::ErrorKind::WouldBlock => QmpFailure::Busy,
        _ => QmpFailure::Io(e),
    })?;
    stream
        .set_write_timeout(Some(ANSWER_TIMEOUT))
        .map_err(QmpFailure::Io)?;
    Ok(stream)
}

pub(super) struct Connection {
    stream: UnixStream,
    lines: Lines,
    end: Instant,
    /// Longest wait for one answer.
    patience: Duration,
    asked: u64,
    /// Names of events that came between answers, for who wants them; bounded.
    events: Vec<String>,
}

impl Connection {
    /// Connects, and says hello.
    pub(super) fn open(reach: &Path) -> Result<Self, QmpFailure> {
        Self::over(connect_to(reach)?)
    }

    /// The same with another longest wait for an answer.
    pub(super) fn open_patiently(reach: &Path, patience: Duration) -> Result<Self, QmpFailure> {
        Self::greeted(connect_to(reach)?, patience)
    }

    /// Says hello on a stream.
    pub(super) fn over(stream: UnixStream) -> Result<Self, QmpFailure> {
        Self::greeted(stream, ANSWER_TIMEOUT)
    }

    fn greeted(stream: UnixStream, patience: Duration) -> Result<Self, QmpFailure> {
        let mut connection = Self {
            stream,
            lines: Lines::default(),
            end: Instant::now() + TALK_TIMEOUT.max(patience),
            patience,
            asked: 0,
            events: Vec::new(),
        };
        connection.greet()?;
        Ok(connection)
    }

    /// Begins a new conversation on the same connection.
    pub(super) fn go_on(&mut self) {
        self.end = Instant::now() + TALK_TIMEOUT;
    }

    /// Names of the events that have come, without waiting for more.
    pub(super) fn events(&mut self) -> Result<Vec<String>, QmpFailure> {
        self.go_on();
        let mut chunk = [0; 16 * 1024];
        self.stream.set_nonblocking(true).map_err(QmpFailure::Io)?;
        let read = loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break Err(QmpFailure::Garbage("it hung up".to_owned())),
                Ok(n) => {
                    if let Err(e) = self.lines.push(&chunk[..n]) {
                        break Err(e);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(e) => break Err(QmpFailure::Io(e)),
            }
        };
        self.stream.set_nonblocking(false).map_err(QmpFailure::Io)?;
        read?;
        while let Some(line) = self.lines.next() {
            if let Message::Event(name) = parse_message(&line)? {
                self.note(name);
            }
        }
        Ok(std::mem::take(&mut self.events))
    }

    fn note(&mut self, event: String) {
        if self.events.len() < MAX_ITEMS {
            self.events.push(event);
        }
    }

    fn greet(&mut self) -> Result<(), QmpFailure> {
        match self.message()? {
            Message::Greeting => {}
            _ => {
                return Err(QmpFailure::Garbage(
                    "the first line is no greeting".to_owned(),
                ));
            }
        }
        self.command("qmp_capabilities").map(|_| ())
    }

    pub(super) fn command(&mut self, command: &'static str) -> Result<Value, QmpFailure> {
        self.command_with(command, None, self.patience)
    }

    /// With arguments, and another longest wait for the answer.
    pub(super) fn command_with(
        &mut self,
        command: &'static str,
        arguments: Option<Value>,
        limit: Duration,
    ) -> Result<Value, QmpFailure> {
        self.asked += 1;
        let mut line = json!({"execute": command, "id": self.asked});
        if let Some(arguments) = arguments {
            line["arguments"] = arguments;
        }
        let line = format!("{line}\n");
        self.stream
            .write_all(line.as_bytes())
            .map_err(|e| timeout_or_io(e, ANSWER_TIMEOUT))?;
        let until = Instant::now() + limit;
        self.end = self.end.max(until);
        loop {
            match self.message_before(until, limit)? {
                Message::Event(name) => self.note(name),
                Message::Return { id, value } if id == self.asked => return Ok(value),
                Message::Error { id, reason } if id == self.asked => {
                    return Err(QmpFailure::Refused { command, reason });
                }
                _ => {
                    return Err(QmpFailure::Garbage(format!(
                        "an answer that is not that to {command}"
                    )));
                }
            }
        }
    }

    fn message(&mut self) -> Result<Message, QmpFailure> {
        self.message_before(Instant::now() + self.patience, self.patience)
    }

    /// The next message before a moment, which is so long after the question.
    fn message_before(&mut self, until: Instant, limit: Duration) -> Result<Message, QmpFailure> {
        let until = until.min(self.end);
        let mut chunk = [0; 16 * 1024];
        loop {
            if let Some(line) = self.lines.next() {
                return parse_message(&line);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(QmpFailure::Timeout(limit));
            }
            self.stream
                .set_read_timeout(Some(left))
                .map_err(QmpFailure::Io)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(QmpFailure::Garbage("it hung up".to_owned())),
                Ok(n) => self.lines.push(&chunk[..n])?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(timeout_or_io(e, limit)),
            }
        }
    }
}

fn timeout_or_io(error: io::Error, limit: Duration) -> QmpFailure {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpFailure::Timeout(limit),
        _ => QmpFailure::Io(error),
    }
}

/// Bytes cut into lines of bounded length.
#[derive(Default)]
struct Lines {
    bytes: Vec<u8>,
    /// No line ends before this byte.
    searched: usize,
    /// Bytes of the line that has not ended.
    unfinished: usize,
}

impl Lines {
    fn push(&mut self, more: &[u8]) -> Result<(), QmpFailure> {
        self.bytes.extend_from_slice(more);
        // only what is new is looked at: a long line comes in many pieces
        self.unfinished = match more.iter().rposition(|&b| b == b'\n') {
            Some(last) => more.len() - last - 1,
            None => self.unfinished + more.len(),
        };
        if self.unfinished > MAX_LINE {
            return Err(QmpFailure::Garbage(format!(
                "a line of more than {MAX_LINE} bytes"
            )));
        }
        Ok(())
    }

    /// The next complete line that is not blank.
    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let Some(length) = self.bytes[self.searched..].iter().position(|&b| b == b'\n') else {
                self.searched = self.bytes.len();
                return None;
            };
            let rest = self.bytes.split_off(self.searched + length + 1);
            let line = std::mem::replace(&mut self.bytes, rest);
            self.searched = 0;
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(line);
            }
        }
    }
}

#[derive(Debug, PartialEq)]
enum Message {
    Greeting,
    Return { id: u64, value: Value },
    Error { id: u64, reason: String },
    Event(String),
}

fn parse_message(line: &[u8]) -> Result<Message, QmpFailure> {
    let shown = || printable(&String::from_utf8_lossy(&line[..line.len().min(80)]));
    let mut message: Value = serde_json::from_slice(line)
        .map_err(|_| QmpFailure::Garbage(format!("{:?}", shown().trim_end())))?;
    // Only answers to what was never understood carry no number; none of ours is such.
    let id = message["id"].as_u64().unwrap_or(0);
    if message["QMP"].is_object() {
        Ok(Message::Greeting)
    } else if let Some(value) = message.get_mut("return") {
        Ok(Message::Return {
            id,
            value: value.take(),
        })
    } else if let Some(error) = message.get("error") {
        let reason = printable(error["desc"].as_str().unwrap_or("no reason given"));
        Ok(Message::Error { id, reason })
    } else if let Some(event) = message["event"].as_str() {
        Ok(Message::Event(printable(event)))
    } else {
        Err(QmpFailure::Garbage(format!("{:?}", shown().trim_end())))
    }
}

pub(super) fn list<'v>(command: &'static str, value: &'v Value) -> Result<&'v [Value], QmpFailure> {
    match value.as_array() {
        Some(items) if items.len() <= MAX_ITEMS => Ok(items),
        _ => Err(QmpFailure::Garbage(format!(
            "{command} gave no list of up to {MAX_ITEMS}"
        ))),
    }
}

fn number(value: &Value, key: &str) -> Result<u32, QmpFailure> {
    value[key]
        .as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| QmpFailure::Garbage(format!("{key} is missing or no number")))
}

fn text(value: &Value, key: &str) -> Result<String, QmpFailure> {
    value[key]
        .as_str()
        .map(printable)
        .ok_or_else(|| QmpFailure::Garbage(format!("{key} is missing or no text")))
}

/// One item of `query-block`; `None` without a medium and for firmware.
fn disk(block: &Value) -> Option<Disk> {
    let inserted = &block["inserted"];
    let path = inserted["file"].as_str()?;
    let qdev = block["qdev"].as_str().unwrap_or("");
    let device = block["device"].as_str().unwrap_or("");
    if device.starts_with("pflash") || qdev.contains("flash") {
        return None;
    }
    let node = inserted["node-name"].as_str().unwrap_or("");
    let name = [device, qdev, node].into_iter().find(|n| !n.is_empty())?;
    Some(Disk {
        path: PathBuf::from(path),
        device: printable(name),
        read_only: inserted["ro"].as_bool().unwrap_or(false),
        format: inserted["drv"].as_str().map(printable),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

    /// What `ask` says to a server that sends `answer` and then waits for the client to go.
    fn ask_server(answer: Vec<u8>) -> Result<Answer, QmpError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(&answer);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let result = ask("web", Path::new("/run/web.qmp"), &path);
        server.join().unwrap();
        result
    }

    fn cause_of(answer: &str) -> String {
        let error = ask_server(answer.into()).unwrap_err().to_string();
        let rest = error
            .strip_prefix("web: QMP socket /run/web.qmp: ")
            .unwrap();
        rest.to_owned()
    }

    #[test]
    fn garbage_is_named_with_vm_and_socket() {
        assert!(cause_of("SSH-2.0-OpenSSH\r\n").contains("does not speak QMP"));
        assert!(cause_of("{}\n").contains("does not speak QMP"));
        assert!(cause_of("{\"return\": {}}\n").contains("no greeting"));
        assert!(
            cause_of(&format!("{GREETING}\n{{\"return\": {{}}, \"id\": 9}}\n"))
                .contains("not that to")
        );
    }

    #[test]
    fn a_line_without_end_is_cut_off() {
        assert!(cause_of(&"x".repeat(MAX_LINE + 20_000)).contains("more than"));
    }

    #[test]
    fn silence_is_waited_for_no_longer_than_promised() {
        assert!(cause_of("").contains("no answer within 500 ms"));
        let flood = format!("{GREETING}\n{}", "{\"event\": \"X\"}\n".repeat(1000));
        assert!(cause_of(&flood).contains("no answer within 500 ms"));
    }

    #[test]
    fn a_refused_command_is_told_with_qemus_words() {
        let refusal =
            r#"{"error": {"class": "CommandNotFound", "desc": "no such thing"}, "id": 1}"#;
        assert!(
            cause_of(&format!("{GREETING}\n{refusal}\n"))
                .contains("qmp_capabilities: no such thing")
        );
    }

    #[test]
    fn an_answer_of_another_shape_is_garbage() {
        let returns = |cpus: &str| {
            let values = ["{}", "{}", r#"{"status": "running"}"#, cpus, "[]", "[]"];
            let lines: Vec<String> = values
                .iter()
                .enumerate()
                .map(|(i, v)| format!("{{\"return\": {v}, \"id\": {}}}", i + 1))
                .collect();
            format!("{GREETING}\n{}\n", lines.join("\n"))
        };
        assert!(cause_of(&returns("{}")).contains("no list"));
        assert!(cause_of(&returns(r#"[{"cpu-index": -1, "thread-id": 5}]"#)).contains("cpu-index"));
        assert!(cause_of(&returns(r#"[{"cpu-index": 0}]"#)).contains("thread-id"));
        let answer = ask_server(returns(r#"[{"cpu-index": 0, "thread-id": 5}]"#).into()).unwrap();
        assert_eq!(
            (answer.vcpus, answer.status.as_str()),
            (vec![(0, 5)], "running")
        );
    }

    #[test]
    fn nobody_at_the_socket_is_an_error_and_no_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let missing = ask("web", &path, &path).unwrap_err();
        assert!(matches!(missing.cause, QmpFailure::Io(_)), "{missing}");
        drop(UnixListener::bind(&path).unwrap());
        let refused = ask("web", &path, &path).unwrap_err();
        assert!(matches!(refused.cause, QmpFailure::Io(_)), "{refused}");
    }

    #[test]
    fn firmware_and_empty_drives_are_no_disks() {
        let flash =
            json!({"device": "pflash0", "inserted": {"file": "/fw", "ro": true, "drv": "raw"}});
        let empty = json!({"device": "cd0", "qdev": "/machine/x"});
        let node = json!({"device": "", "qdev": "/machine/peripheral/virtio-disk0/virtio-backend",
            "inserted": {"file": "/a.qcow2", "ro": false, "drv": "qcow2"}});
        assert_eq!(disk(&flash), None);
        assert_eq!(disk(&empty), None);
        assert_eq!(disk(&node).unwrap().path, Path::new("/a.qcow2"));
    }

    proptest! {
        #[test]
        fn no_line_makes_the_parser_panic(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_message(&line);
        }

        #[test]
        fn messages_of_any_json_do_not_panic(
            key in "QMP|return|error|event|id|desc",
            value in "\\{\\}|\\[\\]|1|-1|null|\"x\"|\\{\"desc\":1\\}",
        ) {
            let _ = parse_message(format!("{{\"{key}\": {value}}}").as_bytes());
        }

        #[test]
        fn lines_are_the_same_however_they_are_cut(
            text in "([a-z{}]{0,5}\r?\n){0,10}[a-z]{0,3}",
            cuts in proptest::collection::vec(1usize..7, 0..80),
        ) {
            let mut lines = Lines::default();
            let mut got = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                lines.push(now).unwrap();
                rest = later;
                got.extend(std::iter::from_fn(|| lines.next()));
            }
            let complete = text.rfind('\n').map_or("", |end| &text[..=end]);
            let expected: Vec<Vec<u8>> = complete
                .split_inclusive('\n')
                .filter(|line| !line.trim().is_empty())
                .map(|line| line.as_bytes().to_vec())
                .collect();
            prop_assert_eq!(got, expected);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Reads what guests answer, in a process without privilege.
//!
//! The daemon is root. It opens the way to a guest and sends a request, but what comes back is a guest's to choose. So it
//! starts an [`AnswerProcess`] with this way as standard input: `viola worker agent-answer` or `console-answer`. That process
//! reads the answer ([`read`]), and writes a short text on its standard output. It lives for one answer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_host::answer_process::{self, AnswerProcess};
use viola_host::uml::console::{self, ConsoleError};

use crate::agent;

/// Longest text of an answer that counts, in bytes; what follows is dropped.
const MAX_TEXT_BYTES: usize = 1000;
/// Time for the process to start and to end, beside the time that the guest has.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Whose answer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// viola-agent's, to the request with this number.
    Agent(u64),
    /// A UML kernel's, to the command on its console.
    Console,
}

/// What came of a question. Texts are the guest's, without control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The guest did what was asked; the console's text, empty for an agent.
    Done(String),
    /// The guest refused, and why.
    Refused(String),
    /// Nothing came in time.
    TimedOut,
    /// The guest has closed the way.
    Closed,
    /// The way failed, or what came is no answer.
    Failed(String),
}

impl Answer {
    fn encode(&self) -> Vec<u8> {
        let (kind, text) = match self {
            Self::Done(text) => ('d', text.as_str()),
            Self::Refused(why) => ('r', why.as_str()),
            Self::TimedOut => ('t', ""),
            Self::Closed => ('c', ""),
            Self::Failed(why) => ('f', why.as_str()),
        };
        let mut bytes = format!("{kind}{text}").into_bytes();
        bytes.truncate(1 + MAX_TEXT_BYTES);
        bytes
    }

    /// The process may be the guest's by now, so any bytes are an answer.
    fn decode(bytes: &[u8]) -> Self {
        let (kind, rest) = bytes
            .split_first()
            .unwrap_or((&b'f', &b"no answer was read"[..]));
        let rest = &rest[..rest.len().min(MAX_TEXT_BYTES)];
        let text = agent::printable(&String::from_utf8_lossy(rest), MAX_TEXT_BYTES);
        match kind {
            b'd' => Self::Done(text),
            b'r' => Self::Refused(text),
            b't' => Self::TimedOut,
            b'c' => Self::Closed,
            _ => Self::Failed(text),
        }
    }

    fn of_error(e: &io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::TimedOut => Self::TimedOut,
            io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Failed(e.to_string()),
        }
    }
}

/// Reads an answer. Runs in the process without privilege.
pub fn read(question: Question, way: OwnedFd, timeout: Duration) -> Answer {
    match question {
        Question::Agent(number) => match agent::read_reply(&mut File::from(way), number, timeout) {
            Ok(Ok(())) => Answer::Done(String::new()),
            Ok(Err(why)) => Answer::Refused(why),
            Err(e) => Answer::of_error(&e),
        },
        Question::Console => match console::read_answer(way.as_fd(), timeout) {
            Ok(text) => Answer::Done(text),
            Err(ConsoleError::Refused(why)) => Answer::Refused(why),
            Err(ConsoleError::Socket(e)) => Answer::of_error(&e),
        },
    }
}

/// Writes an answer for the daemon.
///
/// # Errors
/// The kernel's.
pub fn write(answer: &Answer, to: &mut impl Write) -> io::Result<()> {
    to.write_all(&answer.encode())?;
    to.flush()
}

/// Has an agent's reply to request `number` read.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::TimedOut`] without a reply, [`io::ErrorKind::Other`] with the agent's reason.
pub(crate) fn of_agent(way: OwnedFd, number: u64, timeout: Duration) -> io::Result<()> {
    let kind = |kind, what: &str| Err(io::Error::new(kind, what.to_owned()));
    match ask(Question::Agent(number), way, timeout)? {
        Answer::Done(_) => Ok(()),
        Answer::Refused(why) | Answer::Failed(why) => Err(io::Error::other(why)),
        Answer::TimedOut => kind(
            io::ErrorKind::TimedOut,
            "viola-agent in the guest does not reply",
        ),
        Answer::Closed => kind(
            io::ErrorKind::UnexpectedEof,
            "the guest has closed its agent's port",
        ),
    }
}

/// Has the answer of a UML kernel read, which goes to the socket `way`. `timeout` is for each part of it.
///
/// # Errors
/// [`ConsoleError`].
pub(crate) fn of_console(way: OwnedFd, timeout: Duration) -> Result<String, ConsoleError> {
    match ask(Question::Console, way, timeout)? {
        Answer::Done(text) => Ok(text),
        Answer::Refused(why) => Err(ConsoleError::Refused(why)),
        Answer::Failed(why) => Err(io::Error::other(why).into()),
        Answer::TimedOut => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        Answer::Closed => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
    }
}

/// Has an answer read by a process of this program.
fn ask(question: Question, way: OwnedFd, timeout: Duration) -> io::Result<Answer> {
    if !answer_process::are_used() {
        return Ok(read(question, way, timeout));
    }
    let milliseconds = timeout.as_millis().to_string();
    let (mut answers, to) = io::pipe()?;
    let number;
    let words: &[&str] = match question {
        Question::Agent(request) => {
            number = request.to_string();
            &["agent-answer", &number, &milliseconds]
        }
        Question::Console => &["console-answer", &milliseconds],
    };
    let _process = AnswerProcess::start(words, way, to.into())?;
    let end = Instant::now() + timeout + PROCESS_TIMEOUT;
    let mut bytes = Vec::new();
    let mut piece = [0; 1 + MAX_TEXT_BYTES];
    while bytes.len() <= MAX_TEXT_BYTES {
        if !is_readable(answers.as_fd(), end)? {
            return Ok(Answer::TimedOut);
        }
        match answers.read(&mut piece)? {
            0 => break,
            count => bytes.extend_from_slice(&piece[..count]),
        }
    }
    Ok(Answer::decode(&bytes))
}

/// Waits until there is something to read, or the other end is closed; `false` at `end`.
pub(crate) fn is_readable(from: std::os::fd::BorrowedFd<'_>, end: Instant) -> io::Result<bool> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(
            &mut [PollFd::from_borrowed_fd(from, PollFlags::IN)],
            Some(&left),
        ) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_survive_the_way_to_the_daemon() {
        for answer in [
            Answer::Done(String::new()),
            Answer::Done("pts:/dev/pts/7".into()),
            Answer::Refused("no bond here".into()),
            Answer::TimedOut,
            Answer::Closed,
            Answer::Failed("broken pipe".into()),
        ] {
            assert_eq!(Answer::decode(&answer.encode()), answer);
        }
    }

    #[test]
    fn any_bytes_are_a_short_answer_without_control_characters() {
        assert_eq!(
            Answer::decode(b""),
            Answer::Failed("no answer was read".into())
        );
        assert_eq!(Answer::decode(b"\x1b[2J"), Answer::Failed("[2J".into()));
        assert_eq!(Answer::decode(b"ra\nb\x1bc"), Answer::Refused("abc".into()));
        let long = Answer::decode(&[b'd'; 100_000]);
        assert_eq!(long, Answer::Done("d".repeat(MAX_TEXT_BYTES)));
        let cut = Answer::Done("ä".repeat(MAX_TEXT_BYTES)).encode();
        assert_eq!(cut.len(), 1 + MAX_TEXT_BYTES);
        assert!(matches!(Answer::decode(&cut), Answer::Done(_)));
    }
}

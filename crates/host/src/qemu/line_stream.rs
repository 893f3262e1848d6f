// SPDX-License-Identifier: Apache-2.0
//! Lines from a stream socket, each within a time.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::message::{Lines, QmpFailure};

/// A stream socket whose peer sends lines of bounded length.
pub(crate) struct LineStream {
    stream: UnixStream,
    lines: Lines,
    /// What it means when the peer closes the stream, for [`QmpFailure::Malformed`].
    closed: &'static str,
    write_timeout: Duration,
}

impl LineStream {
    /// Reads from `stream`. A line that is sent has `write_timeout`.
    pub(crate) fn new(
        stream: UnixStream,
        write_timeout: Duration,
        closed: &'static str,
    ) -> io::Result<Self> {
        stream.set_write_timeout(Some(write_timeout))?;
        Ok(Self {
            stream,
            lines: Lines::default(),
            closed,
            write_timeout,
        })
    }

    /// Sends a line.
    pub(crate) fn send(&mut self, line: &str) -> Result<(), QmpFailure> {
        let sent = self.stream.write_all(format!("{line}\n").as_bytes());
        sent.map_err(|e| timeout_or_io(e, self.write_timeout))
    }

    /// The next line that was read and is not blank. Does not read.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        self.lines.next()
    }

    /// The next line that is not blank. Waits until `until`; `limit` is for the error.
    pub(crate) fn wait(&mut self, until: Instant, limit: Duration) -> Result<Vec<u8>, QmpFailure> {
        loop {
            if let Some(line) = self.lines.next() {
                return Ok(line);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(QmpFailure::Timeout(limit));
            }
            let timeout = self.stream.set_read_timeout(Some(left));
            timeout.map_err(QmpFailure::Io)?;
            self.read(limit)?;
        }
    }

    /// Reads all that has come. Does not wait.
    pub(crate) fn read_available(&mut self) -> Result<(), QmpFailure> {
        self.stream.set_nonblocking(true).map_err(QmpFailure::Io)?;
        let read = loop {
            match self.read(Duration::ZERO) {
                Ok(()) => {}
                Err(QmpFailure::Timeout(_)) => break Ok(()),
                Err(e) => break Err(e),
            }
        };
        self.stream.set_nonblocking(false).map_err(QmpFailure::Io)?;
        read
    }

    /// Reads once.
    fn read(&mut self, limit: Duration) -> Result<(), QmpFailure> {
        let mut chunk = [0; 16 * 1024];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(QmpFailure::Malformed(self.closed.to_owned())),
            Ok(n) => self.lines.push(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(timeout_or_io(e, limit)),
        }
    }
}

impl AsFd for LineStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn timeout_or_io(error: io::Error, limit: Duration) -> QmpFailure {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpFailure::Timeout(limit),
        _ => QmpFailure::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    fn pair() -> (LineStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stream = LineStream::new(ours, SHORT, "it has ended").unwrap();
        (stream, theirs)
    }

    #[test]
    fn lines_come_one_by_one_and_a_missing_one_is_a_timeout() {
        let (mut stream, mut peer) = pair();
        let soon = || Instant::now() + SHORT;
        peer.write_all(b"one\n\ntwo\nthr").unwrap();
        assert_eq!(stream.wait(soon(), SHORT).unwrap(), b"one\n");
        assert_eq!(stream.next(), Some(b"two\n".to_vec()));
        let missing = stream.wait(soon(), SHORT);
        assert!(matches!(missing, Err(QmpFailure::Timeout(SHORT))));
        peer.write_all(b"ee\n").unwrap();
        stream.read_available().unwrap();
        assert_eq!(stream.next(), Some(b"three\n".to_vec()));
        stream.read_available().unwrap();
        assert_eq!(stream.next(), None);
    }

    #[test]
    fn lines_before_the_end_are_still_there() {
        let (mut stream, mut peer) = pair();
        peer.write_all(b"last\n").unwrap();
        drop(peer);
        let end = stream.read_available();
        assert!(matches!(end, Err(QmpFailure::Malformed(why)) if why == "it has ended"));
        assert_eq!(stream.next(), Some(b"last\n".to_vec()));
        assert!(matches!(stream.send("x"), Err(QmpFailure::Io(_))));
    }
}

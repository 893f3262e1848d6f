// SPDX-License-Identifier: Apache-2.0
//! The port to the host, whose other end may be closed for hours.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use viola_proto::agent::{FrameReader, FrameWriter};
use viola_proto::lanes::guest::{LaneReply, LaneRequest};

use crate::io::channel::{Address, Channel};

/// Between two polls of a port whose other end is closed: such a port is readable at once.
pub const UNATTENDED_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Between two attempts to open the port.
const REOPEN_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum bytes that wait to be sent to the host.
const MAX_OUT_BYTES: usize = 64 << 10;

/// The port to the host.
#[derive(Debug)]
pub struct HostPort {
    address: Address,
    channel: Option<Channel>,
    reader: FrameReader,
    writer: FrameWriter,
    /// The port is polled or opened again at this time.
    reopen_at: Instant,
    /// Why the port cannot be opened.
    pub why: Option<String>,
}

impl HostPort {
    /// A port at this address; [`HostPort::poll_fd`] opens it.
    pub fn new(address: Address) -> Self {
        Self {
            address,
            channel: None,
            reader: FrameReader::new(),
            writer: FrameWriter::new(MAX_OUT_BYTES),
            reopen_at: Instant::now(),
            why: None,
        }
    }

    fn open(&mut self, now: Instant) {
        match Channel::open(&self.address) {
            Ok(channel) => {
                self.channel = Some(channel);
                self.why = None;
            }
            Err(e) => {
                self.reopen_at = now + REOPEN_INTERVAL;
                self.why = Some(format!("{}: {e}", self.address));
            }
        }
    }

    /// Opens the port if that is due. Returns the descriptor to poll, if any, and how long to wait at most.
    pub fn poll_fd(&mut self) -> (Option<BorrowedFd<'_>>, Duration) {
        let now = Instant::now();
        if self.channel.is_none() && now >= self.reopen_at {
            self.open(now);
        }
        let quiet = self.reopen_at.saturating_duration_since(now);
        match &self.channel {
            Some(channel) if quiet.is_zero() => (Some(channel.as_fd()), Duration::MAX),
            _ => (None, quiet),
        }
    }

    /// Reads the host's requests after a poll with these events.
    pub fn receive(&mut self, events: PollFlags) -> Vec<LaneRequest> {
        let mut asked = Vec::new();
        let Some(channel) = &mut self.channel else {
            return asked;
        };
        if events.is_empty() {
            return asked;
        }
        match self.reader.fill(channel) {
            Ok(Some(0)) | Err(_) => {
                self.reopen_at = Instant::now() + UNATTENDED_POLL_INTERVAL;
                self.reader.clear();
                self.writer.clear();
                // A port stays open and serves the next host. A terminal that was hung up is dead.
                if channel.window() > 0 || !matches!(self.address, Address::Device(_)) {
                    self.channel = None;
                }
                return asked;
            }
            Ok(None) if events.contains(PollFlags::HUP) => {
                self.reopen_at = Instant::now() + UNATTENDED_POLL_INTERVAL
            }
            Ok(_) => {}
        }
        while let Some(message) = self.reader.next::<LaneRequest>() {
            // what is no request is ignored
            asked.extend(message.ok());
        }
        asked
    }

    /// Sends an answer. An answer that the host does not take is lost.
    pub fn reply(&mut self, answer: &LaneReply) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        if self.writer.push(answer).is_err() || self.writer.flush(channel).is_err() {
            self.writer.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use viola_proto::agent::encode;
    use viola_proto::lanes::guest::VfAction;

    #[test]
    fn a_host_that_reconnects_is_served_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l");
        let mut port = HostPort::new(Address::Unix(path.clone()));
        assert!(port.poll_fd().0.is_none());
        assert!(port.why.as_ref().unwrap().contains("l: "), "{:?}", port.why);
        let listener = UnixListener::bind(&path).unwrap();
        for n in 1..3 {
            port.reopen_at = Instant::now();
            assert!(port.poll_fd().0.is_some());
            assert_eq!(port.why, None);
            let (mut host, _) = listener.accept().unwrap();
            let asked = LaneRequest {
                n,
                mac: [2, 0, 0, 0, 0, 1],
                action: VfAction::Release,
            };
            host.write_all(b"noise").unwrap();
            host.write_all(&encode(&asked).unwrap()).unwrap();
            assert_eq!(port.receive(PollFlags::IN), [asked]);
            port.reply(&LaneReply { n, failed: None });
            let mut reader = FrameReader::new();
            let answer = reader.wait::<LaneReply>(&mut host).unwrap().unwrap();
            assert_eq!(answer.unwrap().n, n);
            drop(host);
            assert_eq!(port.receive(PollFlags::IN | PollFlags::HUP), []);
            // it is not polled again at once
            let (fd, quiet) = port.poll_fd();
            assert!(fd.is_none() && quiet > Duration::ZERO && quiet <= UNATTENDED_POLL_INTERVAL);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The byte stream to an agent, as messages.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use viola_proto::agent::{BadMessage, FrameReader, FrameWriter, FromAgent, ToAgent};

use super::send_window::SendWindow;
use super::token_bucket::TokenBucket;

/// Bytes a second that are read over a longer time; a guest that sends more waits.
const MAX_RATE_BYTES_PER_S: f64 = 16.0 * 1024.0 * 1024.0;
/// Answers that wait for an agent which does not read, bytes; then the channel is closed.
const MAX_UNREAD_BYTES: usize = 4 << 20;

/// One thing heard.
pub enum Incoming {
    /// A message.
    Message(FromAgent),
    /// A frame that is none.
    Malformed(BadMessage),
}

/// A channel that is open.
#[derive(Debug)]
pub struct Channel {
    stream: File,
    reader: FrameReader,
    writer: FrameWriter,
    window: SendWindow,
    rate: TokenBucket,
}

impl Channel {
    /// Takes a connected stream of whatever kind.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
        Ok(Self {
            stream: File::from(fd),
            reader: FrameReader::new(),
            writer: FrameWriter::new(MAX_UNREAD_BYTES),
            window: SendWindow::new(),
            rate: TokenBucket::new(Instant::now(), MAX_RATE_BYTES_PER_S, MAX_RATE_BYTES_PER_S),
        })
    }

    /// What to wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// What to wait for, and how long nothing is to be read because too much was.
    pub fn wants(&mut self, now: Instant) -> (PollFlags, Option<Duration>) {
        let mut flags = PollFlags::empty();
        let pause = self.rate.delay(now);
        if pause.is_zero() {
            flags |= PollFlags::IN;
        }
        if self.writer.waiting() > 0 {
            flags |= PollFlags::OUT;
        }
        let pauses = [
            (!pause.is_zero()).then_some(pause),
            self.window.retry_delay(now),
        ];
        (flags, pauses.into_iter().flatten().min())
    }

    /// Takes what has arrived, at most one read's worth. The error says why the channel is of no use any more.
    pub fn receive(&mut self, now: Instant, mut each: impl FnMut(Incoming)) -> Result<(), String> {
        if !self.rate.delay(now).is_zero() {
            return Ok(());
        }
        match self.reader.fill(&mut self.stream) {
            Ok(None) => return Ok(()),
            Ok(Some(0)) => return Err("the other end hung up".into()),
            Ok(Some(n)) => self.rate.charge(now, n as f64),
            Err(e) => return Err(e.to_string()),
        }
        while let Some(message) = self.reader.next::<FromAgent>() {
            each(match message {
                Ok(message) => {
                    self.window.observe(&message);
                    Incoming::Message(message)
                }
                Err(e) => Incoming::Malformed(e),
            });
        }
        Ok(())
    }

    /// Sends messages, as far as window and stream take them now. To be called without any as well, whenever
    /// something was heard or time has passed.
    pub fn send(&mut self, now: Instant, messages: &[ToAgent]) -> Result<(), String> {
        for message in messages {
            self.window.push(message);
        }
        while let Some(message) = self.window.pop(now) {
            // The writer does not know that the agent may have read meanwhile.
            if self.writer.push(&message).is_err() {
                self.flush()?;
                self.writer
                    .push(&message)
                    .map_err(|e| format!("the agent does not read: {e}"))?;
            }
        }
        if self.window.waiting() > MAX_UNREAD_BYTES {
            return Err(format!(
                "the agent does not read: {} bytes wait to be sent already",
                self.window.waiting()
            ));
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), String> {
        self.writer
            .flush(&mut self.stream)
            .map(drop)
            .map_err(|e| e.to_string())
    }
}

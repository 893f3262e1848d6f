// SPDX-License-Identifier: Apache-2.0
//! Converts the byte stream of an agent to messages and back, at a bounded rate.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use viola_proto::agent::{BadMessage, FrameReader, FrameWriter, FromAgent, ToAgent};

use super::send_window::SendWindow;
use super::token_bucket::TokenBucket;

/// Average read rate, bytes per second; a guest that sends more has to wait.
const MAX_RATE_BYTES_PER_S: f64 = 16.0 * 1024.0 * 1024.0;
/// Maximum bytes of unsent messages. The worker closes the channel to an agent that reads too slowly.
const MAX_UNREAD_BYTES: usize = 4 << 20;

/// A received frame.
pub enum Incoming {
    /// A message.
    Message(FromAgent),
    /// A frame that is not a valid message.
    Malformed(BadMessage),
}

/// An open channel to an agent.
#[derive(Debug)]
pub struct Channel {
    stream: File,
    reader: FrameReader,
    writer: FrameWriter,
    window: SendWindow,
    rate: TokenBucket,
}

impl Channel {
    /// Uses a connected stream of any kind and makes it non-blocking.
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

    /// The descriptor to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns the events to poll for, and the longest time to sleep because of the rate limit or an unanswered ping.
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

    /// Reads once without waiting and passes each frame to `each`. An error gives the reason why the channel has
    /// ended.
    pub fn receive(&mut self, now: Instant, mut each: impl FnMut(Incoming)) -> Result<(), String> {
        if !self.rate.delay(now).is_zero() {
            return Ok(());
        }
        match self.reader.fill(&mut self.stream) {
            Ok(None) => return Ok(()),
            Ok(Some(0)) => return Err("the agent closed it".into()),
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

    /// Queues messages and sends as many as the window and the stream accept. Call it without
    /// messages, too, whenever something was received or time has passed. An error gives the reason
    /// why the channel must be closed.
    pub fn send(&mut self, now: Instant, messages: &[ToAgent]) -> Result<(), String> {
        for message in messages {
            self.window.push(message);
        }
        while let Some(message) = self.window.pop(now) {
            // The writer's queue is full; the agent may have read meanwhile.
            if self.writer.push(&message).is_err() {
                self.flush()?;
                self.writer
                    .push(&message)
                    .map_err(|e| format!("the agent does not read its messages: {e}"))?;
            }
        }
        if self.window.waiting() > MAX_UNREAD_BYTES {
            return Err(format!(
                "the agent does not read its messages: {} bytes are unsent",
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

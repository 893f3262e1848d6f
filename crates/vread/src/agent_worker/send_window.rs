// SPDX-License-Identifier: Apache-2.0
//! Limits the bytes that are on their way to an agent and unread.
//!
//! A guest's serial line buffers some 4 KiB; writing more hangs the line of a UML guest for good. The agent reports
//! the size of its line in its hello ([`FromAgent::Hello`]); until then the smallest size applies. The worker learns
//! from answers to pings what the agent has read: it sends a ping before the window is full, and holds messages back
//! while it is full.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use viola_proto::agent::{FromAgent, MAX_LEASES, SERIAL_LINE_BYTES, ToAgent, encode};

/// Maximum leases in one message to a serial line; with the longest numbers they take two thirds of [`SERIAL_LINE_BYTES`].
const MAX_LEASES_PER_LINE: usize = 96;
/// Room reserved for a ping, bytes.
const PING_BYTES: usize = 64;
/// Interval after which an unanswered ping is repeated: a serial line may lose it.
const PING_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum pings sent while the window is full, until a message arrives. They come on top of the window.
const MAX_PING_RETRIES: u32 = 8;
/// First number of the window's own pings; those of the session are below.
const FIRST_PING: u64 = 1 << 62;

/// The window of one channel.
#[derive(Debug)]
pub struct SendWindow {
    /// Maximum unread bytes; `None` for no limit.
    size: Option<usize>,
    /// Bytes sent so far.
    sent: u64,
    /// Sent bytes that the agent has read for certain.
    read: u64,
    /// Unanswered pings: number, and stream position after each.
    pings: VecDeque<(u64, u64)>,
    next_ping: u64,
    /// Session number of the last welcome, for the pings.
    session: u64,
    retries: u32,
    last_retry: Option<Instant>,
    /// Waiting messages with their encoded length.
    waiting: VecDeque<(ToAgent, usize)>,
    waiting_bytes: usize,
}

impl SendWindow {
    /// Starts with the smallest window, for an agent that has not said hello yet.
    pub fn new() -> Self {
        Self {
            size: Some(SERIAL_LINE_BYTES as usize),
            sent: 0,
            read: 0,
            pings: VecDeque::new(),
            next_ping: FIRST_PING,
            session: 0,
            retries: 0,
            last_retry: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
        }
    }

    /// Queues a message.
    pub fn push(&mut self, message: &ToAgent) {
        match message {
            // A later hello request or ping serves as well.
            ToAgent::HelloRequest { .. } | ToAgent::Ping { .. }
                if self.size.is_some() && !self.waiting.is_empty() => {}
            ToAgent::Withdrawn { leases } => {
                let max_leases = if self.size.is_some() {
                    MAX_LEASES_PER_LINE
                } else {
                    MAX_LEASES
                };
                for some in leases.chunks(max_leases) {
                    let leases = some.to_vec();
                    self.enqueue(ToAgent::Withdrawn { leases });
                }
            }
            other => self.enqueue(other.clone()),
        }
    }

    fn enqueue(&mut self, message: ToAgent) {
        let length = encode(&message).map_or(0, |frame| frame.len());
        self.waiting_bytes += length;
        self.waiting.push_back((message, length));
    }

    /// Bytes of waiting messages.
    pub fn waiting(&self) -> usize {
        self.waiting_bytes
    }

    /// Returns the next message that may be sent now.
    pub fn pop(&mut self, now: Instant) -> Option<ToAgent> {
        let length = self.waiting.front()?.1;
        if let Some(size) = self.size {
            let unmarked = self.sent - self.pings.back().map_or(self.read, |(_, end)| *end);
            let is_full = self.unread() > 0 && self.unread() + length + PING_BYTES > size;
            if unmarked > 0 && (is_full || unmarked as usize + length > size / 2) {
                return Some(self.new_ping(now));
            }
            if is_full {
                let due = self
                    .last_retry
                    .is_none_or(|last_retry| now >= last_retry + PING_RETRY_INTERVAL);
                if !due || self.retries >= MAX_PING_RETRIES {
                    return None;
                }
                self.retries += 1;
                return Some(self.new_ping(now));
            }
        }
        let (message, length) = self.waiting.pop_front()?;
        self.waiting_bytes -= length;
        self.sent += length as u64;
        match &message {
            ToAgent::Welcome { session, .. } => self.session = *session,
            ToAgent::HelloRequest { .. } => self.session = 0,
            ToAgent::Ping { n, .. } => self.track_ping(*n),
            _ => {}
        }
        Some(message)
    }

    /// Time until the next ping retry; `None` when only a message of the agent can open the window.
    pub fn retry_delay(&self, now: Instant) -> Option<Duration> {
        let last_retry = self.last_retry?;
        (!self.waiting.is_empty() && self.retries < MAX_PING_RETRIES)
            .then(|| (last_retry + PING_RETRY_INTERVAL).saturating_duration_since(now))
    }

    /// Updates the window by a message of the agent.
    pub fn observe(&mut self, message: &FromAgent) {
        match message {
            FromAgent::Hello { window, .. } => {
                self.size = (*window > 0).then_some(*window as usize);
                // The agent is alive, and after a restart it does not answer earlier pings.
                self.retries = 0;
                self.last_retry = None;
            }
            FromAgent::Pong { n } => {
                let Some(at) = self.pings.iter().position(|(mark, _)| mark == n) else {
                    return;
                };
                self.read = self.pings[at].1;
                self.pings.drain(..=at);
                self.retries = 0;
                if self.pings.is_empty() {
                    self.last_retry = None;
                }
            }
            _ => {}
        }
    }

    fn unread(&self) -> usize {
        (self.sent - self.read) as usize
    }

    fn new_ping(&mut self, now: Instant) -> ToAgent {
        let n = self.next_ping;
        self.next_ping += 1;
        self.last_retry = Some(now);
        let session = self.session;
        let ping = ToAgent::Ping { n, session };
        self.sent += encode(&ping).map_or(0, |frame| frame.len()) as u64;
        self.track_ping(n);
        ping
    }

    fn track_ping(&mut self, n: u64) {
        if self.size.is_some() {
            self.pings.push_back((n, self.sent));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello(window: u32) -> FromAgent {
        FromAgent::Hello {
            version: 1,
            agent_version: "0".into(),
            boot_id: "b".into(),
            session: 5,
            window,
        }
    }

    fn length(message: &ToAgent) -> usize {
        encode(message).unwrap().len()
    }

    /// All that may go now.
    fn all(window: &mut SendWindow, now: Instant) -> Vec<ToAgent> {
        std::iter::from_fn(|| window.pop(now)).collect()
    }

    #[test]
    fn an_agent_with_room_for_all_gets_all_at_once() {
        let mut window = SendWindow::new();
        window.observe(&hello(0));
        let many = ToAgent::Withdrawn {
            leases: (0..10_000).collect(),
        };
        window.push(&many);
        assert_eq!(all(&mut window, Instant::now()), [many]);
    }

    #[test]
    fn an_agent_without_hello_gets_a_bounded_number_of_bytes() {
        let mut window = SendWindow::new();
        let mut now = Instant::now();
        let mut bytes = 0;
        for _ in 0..10_000 {
            window.push(&ToAgent::HelloRequest { version: 1 });
            bytes += all(&mut window, now).iter().map(length).sum::<usize>();
            now += Duration::from_secs(2);
        }
        assert!((1000..3700).contains(&bytes), "{bytes}");
        assert!(window.waiting() < 100);
        assert_eq!(window.retry_delay(now), None);
        // The agent says hello at last, and reads.
        window.observe(&hello(SERIAL_LINE_BYTES));
        let ping = all(&mut window, now);
        let [ToAgent::Ping { n, .. }] = ping[..] else {
            panic!("{ping:?}");
        };
        window.observe(&FromAgent::Pong { n });
        assert_eq!(
            all(&mut window, now),
            [ToAgent::HelloRequest { version: 1 }]
        );
    }

    #[test]
    fn a_lost_ping_is_repeated() {
        let mut window = SendWindow::new();
        let now = Instant::now();
        for lease in 0..500 {
            window.push(&ToAgent::Named { lease });
        }
        let first = all(&mut window, now);
        assert!(window.pop(now + PING_RETRY_INTERVAL / 2).is_none());
        assert_eq!(
            window.retry_delay(now + PING_RETRY_INTERVAL / 2),
            Some(PING_RETRY_INTERVAL / 2)
        );
        let again = all(&mut window, now + PING_RETRY_INTERVAL);
        let [ToAgent::Ping { n, .. }] = again[..] else {
            panic!("{again:?}");
        };
        window.observe(&FromAgent::Pong { n });
        assert!(all(&mut window, now + PING_RETRY_INTERVAL).len() + 3 >= first.len());
    }

    proptest! {
        /// For any messages and any reading speed: every message arrives once and in order, and the unread bytes
        /// never exceed the line.
        #[test]
        fn no_line_overflows_and_nothing_is_lost(
            steps in proptest::collection::vec((0u64..200, 1usize..4000, 0u64..1500), 1..60)
        ) {
            let mut window = SendWindow::new();
            window.observe(&hello(SERIAL_LINE_BYTES));
            let (mut now, mut said, mut got) = (Instant::now(), Vec::new(), Vec::new());
            let mut line: VecDeque<ToAgent> = VecDeque::new();
            let mut next = 0;
            let mut read = |line: &mut VecDeque<ToAgent>, window: &mut SendWindow, mut bytes: usize| {
                while bytes > 0 && let Some(message) = line.pop_front() {
                    bytes = bytes.saturating_sub(length(&message));
                    match message {
                        ToAgent::Ping { n, .. } => window.observe(&FromAgent::Pong { n }),
                        ToAgent::Withdrawn { leases } => got.extend(leases),
                        _ => {}
                    }
                }
            };
            for (more, bytes, ms) in steps {
                let leases: Vec<u64> = (next..next + more).map(|i| u64::MAX - i).collect();
                next += more;
                said.extend(leases.iter().copied());
                window.push(&ToAgent::Withdrawn { leases });
                line.extend(all(&mut window, now));
                prop_assert!(line.iter().map(length).sum::<usize>() < 3900);
                read(&mut line, &mut window, bytes);
                now += Duration::from_millis(ms);
            }
            while window.waiting() > 0 || !line.is_empty() {
                line.extend(all(&mut window, now));
                read(&mut line, &mut window, usize::MAX);
                now += PING_RETRY_INTERVAL;
            }
            prop_assert_eq!(got, said);
        }
    }
}

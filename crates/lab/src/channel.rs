// SPDX-License-Identifier: Apache-2.0
//! The lab's end of a guest's command channel ([`crate::wire`]).

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::wire::{Command, MAX_LINE_BYTES, Reply, Request};

/// Time without an answer after which the guest gets an empty line.
const NUDGE_INTERVAL: Duration = Duration::from_secs(2);

/// The answer to a request, or why there is none.
type Outcome = Result<Value, String>;

pub(crate) struct Channel {
    out: Mutex<UnixStream>,
    next: AtomicU64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: HashMap<u64, Sender<Outcome>>,
    /// How often the guest's init has reported that it is up.
    boots: u64,
    closed: bool,
}

impl Channel {
    /// Starts to read. Calls `up` whenever the guest's init has come up.
    pub(crate) fn new(stream: UnixStream, up: impl Fn() + Send + 'static) -> std::io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let (input, theirs) = (stream.try_clone()?, Arc::clone(&shared));
        std::thread::Builder::new()
            .name("viola-lab-chan".into())
            .spawn(move || theirs.read(input, &up))?;
        Ok(Self {
            out: Mutex::new(stream),
            next: AtomicU64::new(1),
            shared,
        })
    }

    /// How often the guest's init has come up, that is, boots so far.
    pub(crate) fn boots(&self) -> u64 {
        self.shared.lock().boots
    }

    /// Waits until the init has come up more than `before` times. Returns false if it does not
    /// within `limit`.
    pub(crate) fn wait_up(&self, before: u64, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.shared.lock();
        while state.boots <= before && !state.closed {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.boots > before
    }

    /// Sends a request and waits for the answer.
    pub(crate) fn ask(&self, command: Command, limit: Duration) -> Outcome {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answers) = channel();
        {
            let mut state = self.shared.lock();
            if state.closed {
                return Err("it has ended".into());
            }
            state.waiting.insert(id, answer);
        }
        let sent = self.send(&Request { id, command });
        let result = sent.and_then(|()| self.wait(&answers, limit));
        self.shared.lock().waiting.remove(&id);
        result
    }

    /// Waits for an answer. A guest that is about to sleep sometimes misses the interrupt of its
    /// serial line, and only the next one wakes it; so this sends an empty line while there is no
    /// answer.
    fn wait(&self, answers: &Receiver<Outcome>, limit: Duration) -> Outcome {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("no answer within {} s", limit.as_secs_f32()));
            }
            match answers.recv_timeout(left.min(NUDGE_INTERVAL)) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => self.write(b"\n")?,
                Err(RecvTimeoutError::Disconnected) => return Err("it has ended".into()),
            }
        }
    }

    fn send(&self, request: &Request) -> Result<(), String> {
        let mut line = serde_json::to_string(request).map_err(|e| e.to_string())?;
        line.push('\n');
        if line.len() > MAX_LINE_BYTES {
            return Err(format!(
                "a request of {} bytes is too long; {MAX_LINE_BYTES} is the most",
                line.len()
            ));
        }
        self.write(line.as_bytes())
    }

    fn write(&self, bytes: &[u8]) -> Result<(), String> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        out.write_all(bytes)
            .map_err(|e| format!("its command channel: {e}"))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = out.shutdown(std::net::Shutdown::Both);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, input: UnixStream, up: &dyn Fn()) {
        let mut input = BufReader::new(input);
        let mut line = Vec::new();
        loop {
            line.clear();
            // a hostile guest can send anything: bound the line, drop what is no reply
            match std::io::Read::take(&mut input, MAX_LINE_BYTES as u64)
                .read_until(b'\n', &mut line)
            {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            if let Ok(reply) = serde_json::from_slice::<Reply>(&line) {
                if reply.event.as_deref() == Some("up") {
                    up();
                }
                self.dispatch(reply);
            }
        }
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
        self.changed.notify_all();
    }

    fn dispatch(&self, reply: Reply) {
        let mut state = self.lock();
        if reply.event.as_deref() == Some("up") {
            state.boots += 1;
            // a rebooted guest never answers earlier requests
            state.waiting.clear();
            self.changed.notify_all();
        } else if let Some(waiting) = state.waiting.remove(&reply.id) {
            let outcome = match reply.error {
                Some(sentence) => Err(sentence),
                None => Ok(reply.ok.unwrap_or(Value::Null)),
            };
            let _ = waiting.send(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Channel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Channel::new(ours, || ()).unwrap(), theirs)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn answers_may_come_in_another_order() {
        let (channel, theirs) = pair();
        let answers = std::thread::scope(|scope| {
            let one = scope.spawn(|| channel.ask(Command::Ping, LONG));
            let two = scope.spawn(|| channel.ask(Command::List, LONG));
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            let mut requests: Vec<Request> = (0..2)
                .map(|_| serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap())
                .collect();
            requests.sort_by_key(|r| r.command != Command::List);
            for request in requests {
                let what = if request.command == Command::Ping {
                    "1"
                } else {
                    "2"
                };
                writeln!(&theirs, "{{\"id\":{},\"ok\":{what}}}", request.id).unwrap();
            }
            (one.join().unwrap(), two.join().unwrap())
        });
        assert_eq!(answers, (Ok(1.into()), Ok(2.into())));
    }

    #[test]
    fn requests_fail_when_the_guest_ends() {
        let (channel, theirs) = pair();
        let answer = std::thread::scope(|scope| {
            let asked = scope.spawn(|| channel.ask(Command::Ping, LONG));
            let mut line = String::new();
            BufReader::new(theirs).read_line(&mut line).unwrap();
            asked.join().unwrap()
        });
        assert_eq!(answer, Err("it has ended".into()));
        assert_eq!(channel.ask(Command::Ping, LONG), Err("it has ended".into()));
        assert!(!channel.wait_up(0, LONG));
    }

    #[test]
    fn invalid_lines_from_a_guest_are_dropped() {
        let (channel, theirs) = pair();
        (&theirs)
            .write_all(b"\xff\xfe{\n[1]\n{\"id\":9,\"ok\":1}\n{\"event\":\"up\"}\n")
            .unwrap();
        assert!(channel.wait_up(0, LONG));
    }

    #[test]
    fn a_request_to_a_silent_guest_times_out() {
        let (channel, _theirs) = pair();
        let text = channel
            .ask(Command::Ping, Duration::from_millis(5))
            .unwrap_err();
        assert!(text.starts_with("no answer within"), "{text}");
    }
}

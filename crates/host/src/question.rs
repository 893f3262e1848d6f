// SPDX-License-Identifier: Apache-2.0
//! A question to an emulator. A thread waits for the answer, so that one that comes late holds up nobody else.

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A question that was asked.
pub(crate) struct Question<T>(Mutex<State<T>>);

struct State<T> {
    receiver: Receiver<T>,
    /// What came while somebody waited.
    reply: Option<Reply<T>>,
}

impl<T> fmt::Debug for Question<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Question")
    }
}

/// A question of any kind, for who waits for several.
pub(crate) trait Awaited {
    /// Waits for the answer. Returns whether [`Question::poll`] has something to return.
    fn is_answered(&self, until: Instant) -> bool;
}

/// What has come so far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply<T> {
    /// The answer.
    Answer(T),
    /// It has not come yet.
    Open,
    /// It will not come: the thread has ended.
    Lost,
}

impl<T: Send + 'static> Question<T> {
    /// Asks. `ask` bounds its time by itself.
    ///
    /// # Errors
    /// The kernel starts no thread.
    pub(crate) fn new(ask: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (answers, receiver) = sync_channel(1);
        std::thread::Builder::new()
            .name("emulator".into())
            .spawn(move || drop(answers.send(ask())))?;
        Ok(Self(Mutex::new(State {
            receiver,
            reply: None,
        })))
    }

    /// The answer if it has come.
    pub(crate) fn poll(&self) -> Reply<T> {
        self.is_answered(Instant::now());
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.reply.take().unwrap_or(Reply::Open)
    }
}

impl<T> Awaited for Question<T> {
    fn is_answered(&self, until: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.reply.is_none() {
            let left = until.saturating_duration_since(Instant::now());
            state.reply = match state.receiver.recv_timeout(left) {
                Ok(answer) => Some(Reply::Answer(answer)),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Reply::Lost),
            };
        }
        state.reply.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn a_prompt_answer_is_there_at_once_and_a_late_one_later() {
        let prompt = Question::new(|| 7).unwrap();
        assert!(prompt.is_answered(soon()) && prompt.is_answered(Instant::now()));
        assert_eq!(prompt.poll(), Reply::Answer(7));
        let (allow, allowed) = std::sync::mpsc::channel();
        let late = Question::new(move || {
            allowed.recv().unwrap();
            8
        })
        .unwrap();
        assert!(!late.is_answered(Instant::now() + Duration::from_millis(50)));
        assert_eq!(late.poll(), Reply::Open);
        allow.send(()).unwrap();
        assert!(late.is_answered(soon()));
        assert_eq!(late.poll(), Reply::Answer(8));
        // The thread may still be about to end.
        assert!(late.is_answered(soon()));
        assert_eq!(late.poll(), Reply::Lost, "it comes once");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A question to an emulator. A thread waits for the answer, so that one that comes late holds up nobody else.

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How long the caller waits for an answer at once. Emulators that are well answer in a millisecond or two.
const PROMPT_TIMEOUT: Duration = Duration::from_millis(50);

/// A question that was asked.
pub(crate) struct Question<T>(Mutex<Receiver<T>>);

impl<T> fmt::Debug for Question<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Question")
    }
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
        Ok(Self(Mutex::new(receiver)))
    }

    /// Waits for the answer for a moment.
    pub(crate) fn wait(&self) -> Reply<T> {
        self.within(PROMPT_TIMEOUT)
    }

    /// The answer if it has come.
    pub(crate) fn poll(&self) -> Reply<T> {
        self.within(Duration::ZERO)
    }

    fn within(&self, time: Duration) -> Reply<T> {
        let receiver = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match receiver.recv_timeout(time) {
            Ok(answer) => Reply::Answer(answer),
            Err(RecvTimeoutError::Timeout) => Reply::Open,
            Err(RecvTimeoutError::Disconnected) => Reply::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_prompt_answer_is_there_at_once_and_a_late_one_later() {
        let prompt = Question::new(|| 7).unwrap();
        assert_eq!(prompt.within(Duration::from_secs(10)), Reply::Answer(7));
        let begun = Instant::now();
        let late = Question::new(|| {
            std::thread::sleep(Duration::from_millis(400));
            8
        })
        .unwrap();
        assert_eq!((late.wait(), late.poll()), (Reply::Open, Reply::Open));
        assert!(begun.elapsed() < Duration::from_millis(300));
        assert_eq!(late.within(Duration::from_secs(10)), Reply::Answer(8));
        // The thread may still be about to end.
        let again = late.within(Duration::from_secs(10));
        assert_eq!(again, Reply::Lost, "it comes once");
    }
}

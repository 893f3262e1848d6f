// SPDX-License-Identifier: Apache-2.0
//! A loop on a thread of its own: it makes steps, carries out requests between them, and publishes its status. Lanes and the
//! supervisor of workers run so, since one of their steps may take seconds.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_cli::error::{Failure, Outcome};

/// What runs on the thread.
pub trait Steps: 'static {
    /// What the control socket shows of it.
    type Status: Clone + Default + Send + 'static;

    /// When the next step is due.
    fn due(&self) -> Instant;

    /// Makes a step, and sets when the next one is due.
    fn step(&mut self);

    /// The status after the last step.
    fn status(&self) -> Self::Status;
}

enum Message<L> {
    Request(Box<dyn FnOnce(&mut L) + Send>),
    /// Publishes the status after the request, and reports that it is done.
    Wait(Box<dyn FnOnce(&mut L) + Send>, mpsc::SyncSender<()>),
    End,
}

/// The thread. Drop ends it after the current step.
pub struct Background<L: Steps> {
    messages: mpsc::Sender<Message<L>>,
    status: Arc<Mutex<L::Status>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl<L: Steps> Background<L> {
    /// Starts a thread of this name that runs what `make` returns.
    ///
    /// # Errors
    /// When the kernel starts no thread.
    pub fn start(name: &str, make: impl FnOnce() -> L + Send + 'static) -> Outcome<Self> {
        let (messages, inbox) = mpsc::channel();
        let status = Arc::new(Mutex::new(L::Status::default()));
        let published = status.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&mut make(), &inbox, &published))
            .map_err(|e| Failure::run(format!("{name} cannot start: {e}")))?;
        Ok(Self {
            messages,
            status,
            thread: Some(thread),
        })
    }

    /// Sends a request, which is carried out before the next step.
    pub fn send(&self, request: impl FnOnce(&mut L) + Send + 'static) {
        // The thread ends only just before the process does.
        let _ = self.messages.send(Message::Request(Box::new(request)));
    }

    /// Sends a request and waits until it is carried out; `false` after `timeout`.
    pub fn send_and_wait(
        &self,
        request: impl FnOnce(&mut L) + Send + 'static,
        timeout: Duration,
    ) -> bool {
        let (done, is_done) = mpsc::sync_channel(1);
        let _ = self.messages.send(Message::Wait(Box::new(request), done));
        is_done.recv_timeout(timeout).is_ok()
    }

    /// The status that was published last.
    pub fn status(&self) -> MutexGuard<'_, L::Status> {
        lock(&self.status)
    }
}

impl<L: Steps> Drop for Background<L> {
    fn drop(&mut self) {
        let _ = self.messages.send(Message::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries out all requests that have arrived before each step, also when steps take longer than the time between them.
fn run<L: Steps>(steps: &mut L, inbox: &mpsc::Receiver<Message<L>>, status: &Mutex<L::Status>) {
    loop {
        if Instant::now() >= steps.due() {
            steps.step();
            *lock(status) = steps.status();
        }
        let mut wait = steps.due().saturating_duration_since(Instant::now());
        loop {
            match inbox.recv_timeout(wait) {
                Ok(Message::Request(request)) => request(steps),
                Ok(Message::Wait(request, done)) => {
                    request(steps);
                    *lock(status) = steps.status();
                    let _ = done.try_send(());
                }
                Err(RecvTimeoutError::Timeout) => break,
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => return,
            }
            wait = Duration::ZERO;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that are always due; during each, three requests arrive.
    struct Busy {
        to_itself: mpsc::Sender<Message<Self>>,
        start: Instant,
        requests: usize,
        before_step: Vec<usize>,
    }

    impl Steps for Busy {
        type Status = Vec<usize>;

        fn due(&self) -> Instant {
            self.start
        }

        fn step(&mut self) {
            self.before_step.push(self.requests);
            for _ in 0..3 {
                let request = |busy: &mut Self| busy.requests += 1;
                self.to_itself
                    .send(Message::Request(Box::new(request)))
                    .unwrap();
            }
            if self.before_step.len() == 5 {
                self.to_itself.send(Message::End).unwrap();
            }
        }

        fn status(&self) -> Vec<usize> {
            self.before_step.clone()
        }
    }

    #[test]
    fn requests_are_carried_out_before_the_next_step_however_long_steps_take() {
        let (to_itself, inbox) = mpsc::channel();
        let mut busy = Busy {
            to_itself,
            start: Instant::now(),
            requests: 0,
            before_step: Vec::new(),
        };
        let status = Mutex::new(Vec::new());
        run(&mut busy, &inbox, &status);
        assert_eq!(*lock(&status), [0, 3, 6, 9, 12]);
    }

    #[test]
    fn the_status_after_an_awaited_request_is_published() {
        #[derive(Default)]
        struct Idle(u32);
        impl Steps for Idle {
            type Status = u32;
            fn due(&self) -> Instant {
                Instant::now() + Duration::from_secs(60)
            }
            fn step(&mut self) {}
            fn status(&self) -> u32 {
                self.0
            }
        }
        let idle = Background::start("idle", Idle::default).unwrap();
        idle.send(|idle| idle.0 += 1);
        assert!(idle.send_and_wait(|idle| idle.0 += 1, Duration::from_secs(20)));
        assert_eq!(*idle.status(), 2);
    }
}

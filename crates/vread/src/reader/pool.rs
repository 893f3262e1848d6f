// SPDX-License-Identifier: Apache-2.0
//! A pool of threads that wait for disks.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::lock::lock;

struct State<T> {
    jobs: VecDeque<T>,
    ended: bool,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    more: Condvar,
}

/// A fixed number of threads with a bounded queue. Dropping the pool drops waiting jobs and waits for running ones.
pub(crate) struct Pool<T> {
    shared: Arc<Shared<T>>,
    limit: usize,
    threads: Vec<JoinHandle<()>>,
}

impl<T: Send + 'static> Pool<T> {
    pub(crate) fn new(
        threads: usize,
        limit: usize,
        work: impl Fn(T) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                jobs: VecDeque::new(),
                ended: false,
            }),
            more: Condvar::new(),
        });
        let work = Arc::new(work);
        let mut pool = Self {
            shared,
            limit,
            threads: Vec::new(),
        };
        for _ in 0..threads {
            let (shared, work) = (pool.shared.clone(), work.clone());
            let thread = std::thread::Builder::new()
                .name("waiter".into())
                .spawn(move || {
                    while let Some(job) = shared.take() {
                        work(job);
                    }
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Submits a job; returns it when the queue is full.
    pub(crate) fn submit(&self, job: T) -> Result<(), T> {
        let mut state = self.shared.lock();
        if state.jobs.len() >= self.limit {
            return Err(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.shared.more.notify_one();
        Ok(())
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> std::sync::MutexGuard<'_, State<T>> {
        lock(&self.state)
    }

    fn take(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self
                .more
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

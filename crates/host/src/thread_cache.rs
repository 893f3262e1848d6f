// SPDX-License-Identifier: Apache-2.0
//! The threads of a VM's process, cached so that a refresh does not read a file for each of them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::error::HostError;
use crate::proc::{stat, thread_ids};
use crate::thread::{Thread, Tid};

/// A thread's name is read at every refresh until the thread has existed for this time: its creator may still name it.
const NAME_SETTLE_TIME: Duration = Duration::from_secs(10);
/// Afterwards the name is read again at this interval.
const NAME_REFRESH_INTERVAL: Duration = Duration::from_secs(60);

/// The threads of one process as of the last refresh.
#[derive(Debug, Default)]
pub(crate) struct ThreadCache {
    /// Threads with names, in the kernel's order.
    threads: Vec<(Thread, String)>,
    /// When each of them was first seen, and last read.
    times: Vec<(Instant, Instant)>,
}

impl ThreadCache {
    /// As [`crate::proc::threads`], but takes names from the cache while they are fresh.
    ///
    /// # Errors
    /// As [`stat`].
    pub(crate) fn refresh(
        &mut self,
        pid: Tid,
        at: Instant,
    ) -> Result<&[(Thread, String)], HostError> {
        let before = std::mem::take(&mut self.threads);
        let times = std::mem::take(&mut self.times);
        let mut known: HashMap<Tid, _> = before
            .into_iter()
            .zip(times)
            .map(|(task, times)| (task.0.tid, (task, times)))
            .collect();
        for tid in thread_ids(pid)? {
            let old = known.remove(&tid).filter(|(task, _)| task.0.pid == pid);
            if let Some((task, (met, read))) = old.clone()
                && at.saturating_duration_since(met) >= NAME_SETTLE_TIME
                && at.saturating_duration_since(read) < NAME_REFRESH_INTERVAL
            {
                self.threads.push(task);
                self.times.push((met, read));
                continue;
            }
            let Some(stat) = stat(tid)?.filter(|s| !s.is_dead()) else {
                continue;
            };
            let start_time = stat.start_time;
            let thread = Thread {
                pid,
                tid,
                start_time,
            };
            let met = old
                .filter(|(task, _)| task.0 == thread)
                .map(|(_, (met, _))| met);
            self.threads.push((thread, stat.comm));
            self.times.push((met.unwrap_or(at), at));
        }
        Ok(&self.threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_new_thread_is_read_each_time_an_old_one_each_minute() {
        let (pid, start) = (std::process::id(), Instant::now());
        let (orders, names) = mpsc::channel::<&str>();
        let (done, is_done) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            for name in names {
                rustix::thread::set_name(&std::ffi::CString::new(name).unwrap()).unwrap();
                done.send(rustix::thread::gettid()).unwrap();
            }
        });
        let named = |name: &'static str| {
            orders.send(name).unwrap();
            is_done.recv().unwrap().as_raw_nonzero().get() as u32
        };
        let mut tasks = ThreadCache::default();
        let mut seen = |seconds: u64, tid: u32| {
            let found = tasks
                .refresh(pid, start + Duration::from_secs(seconds))
                .unwrap();
            let task = found.iter().find(|(t, _)| t.tid == tid);
            task.map(|(_, name)| name.clone())
        };
        let tid = named("made");
        assert_eq!(seen(0, tid).as_deref(), Some("made"));
        named("CPU 0/KVM");
        assert_eq!(seen(5, tid).as_deref(), Some("CPU 0/KVM"));
        named("CPU 1/KVM");
        assert_eq!(
            seen(11, tid).as_deref(),
            Some("CPU 0/KVM"),
            "it is believed"
        );
        assert_eq!(seen(66, tid).as_deref(), Some("CPU 1/KVM"), "for a minute");
        drop(orders);
        thread.join().unwrap();
        assert_eq!(seen(67, tid), None, "an end is seen at once");
        assert!(seen(67, pid).is_some());
    }

    #[test]
    fn an_ended_process_has_no_threads() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let (mut tasks, now) = (ThreadCache::default(), Instant::now());
        assert_eq!(tasks.refresh(child.id(), now).unwrap().len(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(tasks.refresh(child.id(), now).unwrap().is_empty());
    }
}

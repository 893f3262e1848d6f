// SPDX-License-Identifier: Apache-2.0
//! The threads of a VM's process from one look to the next, without a file for each of them each time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::error::HostError;
use crate::proc::{stat, thread_ids};
use crate::thread::{Thread, Tid};

/// A thread's line is read again until its maker will have named it...
const NAMED: Duration = Duration::from_secs(10);
/// ...and after that so often.
const TASK_AGE: Duration = Duration::from_secs(60);

/// The threads of one process, remembered between looks: most of them stay what they are for as long as their process.
#[derive(Debug, Default)]
pub(crate) struct ThreadCache {
    /// With names, in the kernel's order.
    now: Vec<(Thread, String)>,
    /// When each of `now` was met, and read last.
    times: Vec<(Instant, Instant)>,
}

impl ThreadCache {
    /// As [`crate::proc::tasks`], but lines that were read before are believed for a while.
    ///
    /// # Errors
    /// As [`stat`].
    pub(crate) fn look(&mut self, pid: Tid, at: Instant) -> Result<&[(Thread, String)], HostError> {
        let before = std::mem::take(&mut self.now);
        let times = std::mem::take(&mut self.times);
        let mut known: HashMap<Tid, _> = before
            .into_iter()
            .zip(times)
            .map(|(task, times)| (task.0.tid, (task, times)))
            .collect();
        for tid in thread_ids(pid)? {
            let old = known.remove(&tid).filter(|(task, _)| task.0.pid == pid);
            if let Some((task, (met, read))) = old.clone()
                && at.saturating_duration_since(met) >= NAMED
                && at.saturating_duration_since(read) < TASK_AGE
            {
                self.now.push(task);
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
            self.now.push((thread, stat.comm));
            self.times.push((met.unwrap_or(at), at));
        }
        Ok(&self.now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_is_read_until_it_has_its_name_and_then_each_minute() {
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
                .look(pid, start + Duration::from_secs(seconds))
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
    fn of_a_process_that_is_gone_there_are_none() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let (mut tasks, now) = (ThreadCache::default(), Instant::now());
        assert_eq!(tasks.look(child.id(), now).unwrap().len(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(tasks.look(child.id(), now).unwrap().is_empty());
    }
}

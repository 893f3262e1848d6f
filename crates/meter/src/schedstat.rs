// SPDX-License-Identifier: Apache-2.0
//! Accounting without BPF: /proc/PID/task/TID/schedstat (kernel: Documentation/scheduler/sched-stats.rst).
//!
//! It gives time on a CPU, time on the run queue and context switches of a thread, but no single waits, wake-ups or packets: without
//! BPF there are no percentiles.

use std::fs;

use viola_host::Thread;

/// Totals of one thread since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SchedStat {
    /// On a CPU, ns.
    pub run: u64,
    /// On the run queue, ns.
    pub wait: u64,
    /// Context switches to it.
    pub switches: u64,
}

/// Reads a thread's totals; `None` when it has ended or the kernel lacks CONFIG_SCHED_INFO.
pub fn read(thread: &Thread) -> Option<SchedStat> {
    parse(
        &fs::read_to_string(format!(
            "/proc/{}/task/{}/schedstat",
            thread.pid, thread.tid
        ))
        .ok()?,
    )
}

fn parse(text: &str) -> Option<SchedStat> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some(SchedStat {
        run: next()?,
        wait: next()?,
        switches: next()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_numbers_are_run_wait_and_count() {
        assert_eq!(
            parse("12 34 5\n"),
            Some(SchedStat {
                run: 12,
                wait: 34,
                switches: 5
            })
        );
        assert_eq!(parse("12 x"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_busy_thread_accumulates_run_time() {
        let me = rustix::process::getpid().as_raw_nonzero().get() as u32;
        let thread = Thread {
            pid: me,
            tid: rustix::thread::gettid().as_raw_nonzero().get() as u32,
            start_time: 0,
        };
        let before = read(&thread).unwrap();
        let mut x = 1u64;
        while read(&thread).unwrap().run < before.run + 20_000_000 {
            for i in 0..100_000u64 {
                x = std::hint::black_box(x.wrapping_mul(31) ^ i);
            }
        }
        assert!(read(&thread).unwrap().switches >= before.switches);
    }
}

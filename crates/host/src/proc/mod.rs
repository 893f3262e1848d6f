// SPDX-License-Identifier: Apache-2.0
//! The files of procfs that the inventory needs.
//!
//! | file | what it reads |
//! |---|---|
//! | `mod.rs` | threads, children, command lines, namespaces |
//! | `packet_sockets.rs` | `/proc/PID/net/packet` |
//! | `read.rs` | any file, with a bound on its size |
//! | `stat.rs` | `/proc/TID/stat` |
//! | `taps.rs` | the tap devices that a process has open |
//! | `unix_sockets.rs` | `/proc/PID/net/unix` |
//!
//! Every function returns `None` (or an empty list) for a process that has ended, and an error only for a file that exists and
//! cannot be read. Text is taken as UTF-8; other bytes become U+FFFD.

pub(crate) mod packet_sockets;
mod read;
mod stat;
mod taps;
mod terminals;
pub(crate) mod unix_diag;
pub(crate) mod unix_sockets;

use std::path::{Path, PathBuf};

use crate::cpuset::CpuSet;
use crate::error::HostError;
use crate::thread::{Thread, Tid};

use read::numbers;
pub(crate) use read::status_field;
pub use read::{read, read_link, read_text};
pub use stat::{Stat, stat};
pub use taps::{TapFd, taps};
pub use terminals::terminals;

/// All process numbers, ascending.
///
/// # Errors
/// [`HostError::Read`] when `/proc` cannot be listed.
pub fn processes() -> Result<Vec<Tid>, HostError> {
    numbers(Path::new("/proc"))
}

/// Thread numbers of a process, the main thread first; empty when it has ended.
///
/// # Errors
/// As [`read`].
pub fn thread_ids(pid: Tid) -> Result<Vec<Tid>, HostError> {
    numbers(Path::new(&format!("/proc/{pid}/task")))
}

/// Threads of a process with their names, without those that end meanwhile.
///
/// # Errors
/// As [`stat`].
pub fn threads(pid: Tid) -> Result<Vec<(Thread, String)>, HostError> {
    let mut tasks = Vec::new();
    for tid in thread_ids(pid)? {
        if let Some(stat) = stat(tid)?
            && !stat.is_dead()
        {
            let start_time = stat.start_time;
            tasks.push((
                Thread {
                    pid,
                    tid,
                    start_time,
                },
                stat.comm,
            ));
        }
    }
    Ok(tasks)
}

/// Child processes of all threads of a process. Without `CONFIG_PROC_CHILDREN` it reads all processes.
///
/// # Errors
/// As [`stat`].
pub fn children(pid: Tid) -> Result<Vec<Tid>, HostError> {
    Ok(children_by_thread(pid)?.into_iter().map(|c| c.1).collect())
}

/// As [`children`], each after the thread that created it; the main thread where the kernel does not show that.
///
/// # Errors
/// As [`stat`].
pub fn children_by_thread(pid: Tid) -> Result<Vec<(Tid, Tid)>, HostError> {
    let mut found = Vec::new();
    let mut kernel_lists_children = false;
    for tid in thread_ids(pid)? {
        if let Some(list) = read_text(format!("/proc/{pid}/task/{tid}/children"))? {
            kernel_lists_children = true;
            let numbers = list.split_ascii_whitespace();
            found.extend(numbers.filter_map(|n| Some((tid, n.parse::<Tid>().ok()?))));
        }
    }
    if !kernel_lists_children && stat(pid)?.is_some() {
        for candidate in processes()? {
            if stat(candidate)?.is_some_and(|s| s.ppid == pid) {
                found.push((pid, candidate));
            }
        }
    }
    Ok(found)
}

/// Threads that the POSIX timers of a process signal, each once, in the order in which the timers were created. Empty
/// without `CONFIG_CHECKPOINT_RESTORE`.
///
/// # Errors
/// As [`read`].
pub fn timer_threads(pid: Tid) -> Result<Vec<Tid>, HostError> {
    let text = read_text(format!("/proc/{pid}/timers"))?.unwrap_or_default();
    Ok(parse_timers(&text))
}

fn parse_timers(text: &str) -> Vec<Tid> {
    let mut timers = Vec::new();
    let mut id = None;
    for line in text.lines() {
        if let Some(number) = line.strip_prefix("ID: ") {
            id = number.trim().parse::<u32>().ok();
        } else if let Some(tid) = line.strip_prefix("notify: signal/tid.") {
            timers.extend(id.zip(tid.trim().parse::<Tid>().ok()));
        }
    }
    timers.sort_unstable();
    let mut threads = Vec::new();
    for (_, tid) in timers {
        if !threads.contains(&tid) {
            threads.push(tid);
        }
    }
    threads
}

/// Splits the text of `/proc/PID/cmdline` into arguments.
#[must_use]
pub fn split_cmdline(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes
        .split(|&b| b == 0)
        .map(|arg| String::from_utf8_lossy(arg).into_owned())
        .collect()
}

/// Arguments of a process, starting with the program's name; empty for a process without any.
///
/// # Errors
/// As [`read`].
pub fn cmdline(pid: Tid) -> Result<Option<Vec<String>>, HostError> {
    Ok(read(format!("/proc/{pid}/cmdline"))?.map(|b| split_cmdline(&b)))
}

/// The program that a process runs; ends in ` (deleted)` when the file was replaced.
///
/// # Errors
/// As [`read`].
pub fn exe(pid: Tid) -> Result<Option<PathBuf>, HostError> {
    read_link(format!("/proc/{pid}/exe"))
}

/// The kernel function that a sleeping thread waits in; `0` when it runs or this program may not trace it.
///
/// # Errors
/// As [`read`].
pub fn wchan(tid: Tid) -> Result<Option<String>, HostError> {
    read_text(format!("/proc/{tid}/wchan"))
}

/// A variable of the environment that a process was started with.
///
/// # Errors
/// As [`read`].
pub fn environment(pid: Tid, name: &str) -> Result<Option<String>, HostError> {
    let all = read(format!("/proc/{pid}/environ"))?.unwrap_or_default();
    Ok(split_cmdline(&all)
        .iter()
        .find_map(|v| Some(v.strip_prefix(name)?.strip_prefix('=')?.to_owned())))
}

/// The thread's number in its innermost PID namespace, as the thread itself sees it.
///
/// # Errors
/// As [`read`].
pub fn inner_tid(tid: Tid) -> Result<Option<Tid>, HostError> {
    let status = read_text(format!("/proc/{tid}/status"))?.unwrap_or_default();
    Ok(status_field(&status, "NSpid")
        .and_then(|all| all.split_ascii_whitespace().last())
        .and_then(|n| n.parse().ok()))
}

/// The user numbers of a process: real, effective, saved and file system; empty when it has ended.
///
/// # Errors
/// As [`read`].
pub fn users(pid: Tid) -> Result<Vec<u32>, HostError> {
    let status = read_text(format!("/proc/{pid}/status"))?.unwrap_or_default();
    let users = status_field(&status, "Uid").unwrap_or_default();
    Ok(users
        .split_ascii_whitespace()
        .filter_map(|n| n.parse().ok())
        .collect())
}

/// Inode number of the network namespace of a process.
///
/// # Errors
/// As [`read`].
pub fn netns(pid: Tid) -> Result<Option<u64>, HostError> {
    let target = read_link(format!("/proc/{pid}/ns/net"))?;
    Ok(target.and_then(|t| {
        let text = t.to_str()?;
        text.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
    }))
}

/// CPUs that a thread may run on; `None` when it has ended.
///
/// # Errors
/// [`HostError::Read`] naming the thread's folder in `/proc`.
pub fn affinity(tid: Tid) -> Result<Option<CpuSet>, HostError> {
    CpuSet::of_thread(tid).map_err(|e| HostError::read(format!("/proc/{tid}"), e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn timer_threads_come_in_the_order_of_their_timers() {
        let text = "ID: 1\nsignal: 14/000000006063b0c8\nnotify: signal/tid.48\nClockID: 1\n\
ID: 0\nsignal: 14/000000006063b0c0\nnotify: signal/tid.40\nClockID: 1\n\
ID: 2\nsignal: 0/0000000000000000\nnotify: none/pid.40\nClockID: 1\n\
ID: 3\nsignal: 14/0\nnotify: signal/tid.40\nClockID: 1\n";
        assert_eq!(parse_timers(text), [40, 48]);
        assert!(parse_timers("nonsense\nnotify: signal/tid.7\n").is_empty());
        assert!(timer_threads(std::process::id()).unwrap().is_empty());
    }

    #[test]
    fn empty_arguments_and_blanks_are_kept() {
        assert_eq!(split_cmdline(b"a\0\0b c\0"), ["a", "", "b c"]);
        assert_eq!(split_cmdline(b""), Vec::<String>::new());
        assert_eq!(split_cmdline(b"\xff\0"), ["\u{fffd}"]);
    }

    #[test]
    fn children_are_listed_until_they_end() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let me = std::process::id();
        assert!(children(me).unwrap().contains(&child.id()));
        assert_eq!(stat(child.id()).unwrap().unwrap().ppid, me);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children(me).unwrap().contains(&child.id()));
        assert_eq!(stat(child.id()).unwrap(), None);
        assert_eq!(threads(child.id()).unwrap(), []);
        assert_eq!(cmdline(child.id()).unwrap(), None);
        assert_eq!(affinity(child.id()).unwrap(), None);
        assert_eq!(taps(child.id()).unwrap(), []);
    }

    #[test]
    fn threads_are_listed_by_name() {
        let (ready, wait) = std::sync::mpsc::channel();
        let (go, stop) = std::sync::mpsc::channel::<()>();
        let other = std::thread::Builder::new()
            .name("a) b (c".into())
            .spawn(move || {
                ready.send(()).unwrap();
                let _ = stop.recv();
            })
            .unwrap();
        wait.recv().unwrap();
        let names: Vec<String> = threads(std::process::id())
            .unwrap()
            .into_iter()
            .map(|t| t.1)
            .collect();
        assert!(names.iter().any(|n| n == "a) b (c"), "{names:?}");
        drop(go);
        other.join().unwrap();
    }

    #[test]
    fn an_unreadable_file_is_named_in_the_error() {
        let error = read("/proc/self/task").unwrap_err();
        assert!(
            error.one_line().contains("/proc/self/task"),
            "{}",
            error.one_line()
        );
    }

    proptest! {
        #[test]
        fn any_bytes_split_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = split_cmdline(&bytes);
        }
    }
}

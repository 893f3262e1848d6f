// SPDX-License-Identifier: Apache-2.0
//! The few files of procfs that the inventory needs, read without surprises.
//!
//! Every function answers `None` (or an empty list) for a process that is gone, an error only for a file
//! that is there and cannot be read. Text is taken as UTF-8; other bytes become U+FFFD.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::cpuset::CpuSet;
use crate::error::HostError;
use crate::vm::{Thread, Tid};

/// Bytes read from one file of procfs at most. A command line may be 2 MiB on a stock kernel.
const MAX_FILE: u64 = 4 << 20;

/// `PF_KTHREAD` of `linux/sched.h`: a thread of the kernel.
const PF_KTHREAD: u32 = 0x0020_0000;

/// The fields of `/proc/PID/stat` that matter here; numbers in brackets are those of proc_pid_stat(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Process or thread number (1).
    pub tid: Tid,
    /// Name, at most 15 bytes (2); may hold blanks, parentheses and line ends.
    pub comm: String,
    /// State letter (3): `R` runs or waits for a CPU, `S` and `D` sleep, `Z` has ended.
    pub state: char,
    /// Parent process (4).
    pub ppid: Tid,
    /// Kernel flags of the task (9).
    pub flags: u32,
    /// Nice value, -20..=19 (19).
    pub nice: i32,
    /// Number of threads of its process (20).
    pub threads: u32,
    /// Clock ticks after boot at which it was made (22).
    pub start_time: u64,
    /// Address of the bottom of its stack (28), 0 without the right to look; a new program has another.
    pub start_stack: u64,
    /// CPU it last ran on (39).
    pub cpu: u32,
    /// Real-time priority 1..=99, or 0 (40).
    pub rt_priority: u32,
    /// Scheduling policy, `SCHED_*` of `linux/sched.h` (41).
    pub policy: u32,
}

impl Stat {
    /// Whether this is a thread of the kernel, without any program.
    #[must_use]
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Whether it has ended and only waits to be collected.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Reads one line of `/proc/PID/stat`. The name ends at the last closing parenthesis, since it may
    /// hold some itself. `None` for any other text.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        let open = line.iter().position(|&b| b == b'(')?;
        let close = line.iter().rposition(|&b| b == b')')?;
        let tid = std::str::from_utf8(line.get(..open)?).ok()?;
        let comm = String::from_utf8_lossy(line.get(open + 1..close)?).into_owned();
        let rest = std::str::from_utf8(line.get(close + 1..)?).ok()?;
        // rest begins with field 3.
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            tid: tid.trim().parse().ok()?,
            comm,
            state: field(3)?.chars().next()?,
            ppid: field(4)?.parse().ok()?,
            flags: field(9)?.parse().ok()?,
            nice: field(19)?.parse().ok()?,
            threads: field(20)?.parse().ok()?,
            start_time: field(22)?.parse().ok()?,
            start_stack: field(28)?.parse().ok()?,
            cpu: field(39)?.parse().ok()?,
            rt_priority: field(40)?.parse().ok()?,
            policy: field(41)?.parse().ok()?,
        })
    }
}

/// Whether an error only says that the process has ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// The file's bytes, up to 4 MiB; `None` when it or its process is gone.
///
/// # Errors
/// [`HostError::Read`] with the path for everything else, for example missing privilege.
pub fn read(path: impl AsRef<Path>) -> Result<Option<Vec<u8>>, HostError> {
    let path = path.as_ref();
    let mut bytes = Vec::new();
    match File::open(path).and_then(|f| f.take(MAX_FILE).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(HostError::read(path, e)),
    }
}

/// As [`read`], as text.
///
/// # Errors
/// As [`read`].
pub fn read_text(path: impl AsRef<Path>) -> Result<Option<String>, HostError> {
    Ok(read(path)?.map(|b| String::from_utf8_lossy(&b).into_owned()))
}

/// What a symbolic link such as `/proc/PID/exe` points to; `None` when there is nothing.
///
/// # Errors
/// As [`read`].
pub fn link(path: impl AsRef<Path>) -> Result<Option<PathBuf>, HostError> {
    let path = path.as_ref();
    match fs::read_link(path) {
        Ok(target) => Ok(Some(target)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(HostError::read(path, e)),
    }
}

/// Entries of a directory whose names are numbers, in the kernel's order.
fn numbers(dir: &Path) -> Result<Vec<Tid>, HostError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if is_gone(&e) => return Ok(Vec::new()),
        Err(e) => return Err(HostError::read(dir, e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) => found.extend(
                entry
                    .file_name()
                    .to_str()
                    .and_then(|n| n.parse::<Tid>().ok()),
            ),
            Err(e) if is_gone(&e) => break,
            Err(e) => return Err(HostError::read(dir, e)),
        }
    }
    Ok(found)
}

/// All process numbers, ascending.
///
/// # Errors
/// [`HostError::Read`] when `/proc` cannot be listed.
pub fn processes() -> Result<Vec<Tid>, HostError> {
    numbers(Path::new("/proc"))
}

/// Thread numbers of a process, the main thread first; empty when it is gone.
///
/// # Errors
/// As [`read`].
pub fn task_numbers(pid: Tid) -> Result<Vec<Tid>, HostError> {
    numbers(Path::new(&format!("/proc/{pid}/task")))
}

/// State of a process or of any single thread.
///
/// # Errors
/// As [`read`]; [`HostError::Parse`] when the line has not the documented form.
pub fn stat(tid: Tid) -> Result<Option<Stat>, HostError> {
    let path = format!("/proc/{tid}/stat");
    // The kernel hands this line over in one piece, well below the buffer's size; a look over the host
    // reads it for every process.
    let mut line = [0; 2048];
    match File::open(&path).and_then(|mut f| f.read(&mut line)) {
        // A process that ends between open and read gives an empty line.
        Ok(0) => Ok(None),
        Ok(length) => Stat::parse(&line[..length])
            .map(Some)
            .ok_or_else(|| HostError::parse(path, "it has not the form of proc_pid_stat(5)")),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(HostError::read(path, e)),
    }
}

/// A line of `/proc/net/unix`: its seven columns (address, references, protocol, flags, type, state, inode) and
/// the path, which may have spaces; empty strings where the line is shorter.
pub(crate) fn unix_socket(line: &str) -> ([&str; 7], &str) {
    let mut rest = line;
    let mut fields = [""; 7];
    for field in &mut fields {
        rest = rest.trim_start();
        let (now, after) = rest.split_once(' ').unwrap_or((rest, ""));
        (*field, rest) = (now, after);
    }
    (fields, rest)
}

/// Threads of a process with their names; those that end meanwhile are left out.
///
/// # Errors
/// As [`stat`].
pub fn tasks(pid: Tid) -> Result<Vec<(Thread, String)>, HostError> {
    let mut tasks = Vec::new();
    for tid in task_numbers(pid)? {
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

/// Child processes of all threads of a process. On a kernel without `CONFIG_PROC_CHILDREN` all
/// processes are looked through.
///
/// # Errors
/// As [`stat`].
pub fn children(pid: Tid) -> Result<Vec<Tid>, HostError> {
    Ok(children_by_thread(pid)?.into_iter().map(|c| c.1).collect())
}

/// As [`children`], each behind the thread that made it; that is the main thread where the kernel does not tell.
///
/// # Errors
/// As [`stat`].
pub fn children_by_thread(pid: Tid) -> Result<Vec<(Tid, Tid)>, HostError> {
    let mut found = Vec::new();
    let mut kernel_lists_children = false;
    for tid in task_numbers(pid)? {
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

/// Threads that the POSIX timers of a process signal, in the order in which the timers were made; a thread with
/// several is there once. Empty where the kernel does not tell (`CONFIG_CHECKPOINT_RESTORE`).
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

/// Arguments of a process, its program's name first; empty for a process without any.
///
/// # Errors
/// As [`read`].
pub fn cmdline(pid: Tid) -> Result<Option<Vec<String>>, HostError> {
    Ok(read(format!("/proc/{pid}/cmdline"))?.map(|b| split_cmdline(&b)))
}

/// The program a process runs; ` (deleted)` at its end says that the file was replaced.
///
/// # Errors
/// As [`read`].
pub fn exe(pid: Tid) -> Result<Option<PathBuf>, HostError> {
    link(format!("/proc/{pid}/exe"))
}

/// Kernel function that a sleeping thread waits in, `0` when it runs or may not be asked.
///
/// # Errors
/// As [`read`].
pub fn wchan(tid: Tid) -> Result<Option<String>, HostError> {
    read_text(format!("/proc/{tid}/wchan"))
}

/// One variable of the environment a process was started with.
///
/// # Errors
/// As [`read`].
pub fn environment(pid: Tid, name: &str) -> Result<Option<String>, HostError> {
    let all = read(format!("/proc/{pid}/environ"))?.unwrap_or_default();
    Ok(split_cmdline(&all)
        .iter()
        .find_map(|v| Some(v.strip_prefix(name)?.strip_prefix('=')?.to_owned())))
}

/// Value of one line `key:\tvalue` of `/proc/TID/status`.
pub(crate) fn status_field<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()))
}

/// The thread's number in the innermost PID namespace it is in, that is, as it sees itself.
///
/// # Errors
/// As [`read`].
pub fn inner_tid(tid: Tid) -> Result<Option<Tid>, HostError> {
    let status = read_text(format!("/proc/{tid}/status"))?.unwrap_or_default();
    Ok(status_field(&status, "NSpid")
        .and_then(|all| all.split_ascii_whitespace().last())
        .and_then(|n| n.parse().ok()))
}

/// Inode number of the network namespace of a process.
///
/// # Errors
/// As [`read`].
pub fn netns(pid: Tid) -> Result<Option<u64>, HostError> {
    let target = link(format!("/proc/{pid}/ns/net"))?;
    Ok(target.and_then(|t| {
        let text = t.to_str()?;
        text.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
    }))
}

/// Interfaces behind the process's descriptors of `/dev/net/tun` and `/dev/tapN`.
///
/// # Errors
/// As [`read`].
pub fn taps(pid: Tid) -> Result<Vec<TapFd>, HostError> {
    let mut taps = Vec::new();
    for fd in numbers(Path::new(&format!("/proc/{pid}/fd")))? {
        let Some(target) = link(format!("/proc/{pid}/fd/{fd}"))? else {
            continue;
        };
        let target = target.to_string_lossy();
        if target == "/dev/net/tun" {
            let info = read_text(format!("/proc/{pid}/fdinfo/{fd}"))?.unwrap_or_default();
            if let Some(name) = status_field(&info, "iff").filter(|n| !n.is_empty()) {
                let name = name.to_owned();
                taps.push(TapFd::Tap { fd, name });
            }
        } else if let Some(ifindex) = target.strip_prefix("/dev/tap").and_then(|n| n.parse().ok()) {
            taps.push(TapFd::Macvtap { fd, ifindex });
        }
    }
    Ok(taps)
}

/// An open tap of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapFd {
    /// A tap, by name.
    Tap {
        /// Descriptor.
        fd: u32,
        /// Name of the interface.
        name: String,
    },
    /// A macvtap, whose device file carries its interface's number.
    Macvtap {
        /// Descriptor.
        fd: u32,
        /// Number of the interface.
        ifindex: u32,
    },
}

/// CPUs a thread may run on; `None` when it is gone.
///
/// # Errors
/// [`HostError::Read`] naming the thread's folder in `/proc`.
pub fn affinity(tid: Tid) -> Result<Option<CpuSet>, HostError> {
    crate::attrs::raw_affinity(tid).map_err(|e| HostError::read(format!("/proc/{tid}"), e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT: &[u8] = b"9384 (lp) S 9376 9384 9384 0 -1 256 3736 96 8 0 58 53 0 0 20 -5 3 0 158530 154202112 9322 \
18446744073709551615 1610616832 1621342296 140737488348544 0 0 0 12288 5 402745050 1 0 0 17 1 7 2 0 0 0 16230\n";

    #[test]
    fn timers_name_their_threads_in_the_order_in_which_they_were_made() {
        let text = "ID: 1\nsignal: 14/000000006063b0c8\nnotify: signal/tid.48\nClockID: 1\n\
ID: 0\nsignal: 14/000000006063b0c0\nnotify: signal/tid.40\nClockID: 1\n\
ID: 2\nsignal: 0/0000000000000000\nnotify: none/pid.40\nClockID: 1\n\
ID: 3\nsignal: 14/0\nnotify: signal/tid.40\nClockID: 1\n";
        assert_eq!(parse_timers(text), [40, 48]);
        assert!(parse_timers("nonsense\nnotify: signal/tid.7\n").is_empty());
        assert!(timer_threads(std::process::id()).unwrap().is_empty());
    }

    #[test]
    fn reads_the_documented_fields_of_stat() {
        let stat = Stat::parse(STAT).unwrap();
        assert_eq!(
            (stat.tid, stat.comm.as_str(), stat.state, stat.ppid),
            (9384, "lp", 'S', 9376)
        );
        assert_eq!(
            (stat.flags, stat.nice, stat.threads, stat.start_time),
            (256, -5, 3, 158_530)
        );
        assert_eq!(stat.start_stack, 140_737_488_348_544);
        assert_eq!((stat.cpu, stat.rt_priority, stat.policy), (1, 7, 2));
    }

    #[test]
    fn a_name_with_blanks_and_parentheses_does_not_shift_the_fields() {
        for name in ["a b", ") R 1 (", "((", "x) Z 9 9\n(", ""] {
            let line = String::from_utf8_lossy(STAT).replace("(lp)", &format!("({name})"));
            let stat = Stat::parse(line.as_bytes()).unwrap();
            assert_eq!(
                (stat.comm.as_str(), stat.state, stat.ppid),
                (name, 'S', 9376)
            );
        }
    }

    #[test]
    fn a_short_or_strange_stat_is_refused() {
        for line in ["", "1 (a", "1 (a) S", "x (a) S 1", ")1 (", "1 (a) S 1 2 3"] {
            assert_eq!(Stat::parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn arguments_keep_their_blanks_and_empty_ones() {
        assert_eq!(split_cmdline(b"a\0\0b c\0"), ["a", "", "b c"]);
        assert_eq!(split_cmdline(b""), Vec::<String>::new());
        assert_eq!(split_cmdline(b"\xff\0"), ["\u{fffd}"]);
    }

    #[test]
    fn finds_a_living_child_and_forgets_a_dead_one() {
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
        assert_eq!(tasks(child.id()).unwrap(), []);
        assert_eq!(cmdline(child.id()).unwrap(), None);
        assert_eq!(affinity(child.id()).unwrap(), None);
        assert_eq!(taps(child.id()).unwrap(), []);
    }

    #[test]
    fn knows_its_own_threads_by_name() {
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
        let names: Vec<String> = tasks(std::process::id())
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
        fn no_bytes_make_the_parsers_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Stat::parse(&bytes);
            let _ = split_cmdline(&bytes);
        }
    }
}

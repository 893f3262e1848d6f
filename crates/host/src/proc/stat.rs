// SPDX-License-Identifier: Apache-2.0
//! `/proc/TID/stat`: the state of a process or thread.

use std::fs::File;
use std::io::Read;

use super::read::is_gone;
use crate::error::HostError;
use crate::thread::Tid;

/// `PF_KTHREAD` of `linux/sched.h`: a kernel thread.
const PF_KTHREAD: u32 = 0x0020_0000;

/// Fields of `/proc/PID/stat`; numbers in brackets are those of proc_pid_stat(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Process or thread number (1).
    pub tid: Tid,
    /// Name, at most 15 bytes (2); may contain spaces, parentheses and line ends.
    pub comm: String,
    /// State letter (3): `R` runs or waits for a CPU, `S` and `D` sleep, `Z` has ended.
    pub state: char,
    /// Parent process (4).
    pub ppid: Tid,
    /// Session (6): the number of the process that made it, 0 for kernel threads.
    pub session: Tid,
    /// Kernel flags of the task (9).
    pub flags: u32,
    /// Nice value, -20..=19 (19).
    pub nice: i32,
    /// Number of threads of its process (20).
    pub threads: u32,
    /// Clock ticks after boot at which it was created (22).
    pub start_time: u64,
    /// Address of the bottom of its stack (28), 0 without the right to trace it; another program has another address.
    pub start_stack: u64,
    /// CPU it last ran on (39).
    pub cpu: u32,
    /// Real-time priority 1..=99, or 0 (40).
    pub rt_priority: u32,
    /// Scheduling policy, `SCHED_*` of `linux/sched.h` (41).
    pub policy: u32,
}

impl Stat {
    /// Whether this is a kernel thread.
    #[must_use]
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Whether it has ended and waits for its parent to collect it.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Parses one line of `/proc/PID/stat`; `None` for any other text. The name ends at the last closing parenthesis, since
    /// it may contain some itself.
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
            // -1 for a thread that is ending.
            session: Tid::try_from(field(6)?.parse::<i64>().ok()?).unwrap_or(0),
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

/// The state of a process or thread; `None` when it has ended.
///
/// # Errors
/// As [`super::read`]; [`HostError::Parse`] when the line is malformed.
pub fn stat(tid: Tid) -> Result<Option<Stat>, HostError> {
    let path = format!("/proc/{tid}/stat");
    // The kernel returns this line in one read, well below the buffer's size.
    let mut line = [0; 2048];
    match File::open(&path).and_then(|mut f| f.read(&mut line)) {
        // A process that ends between open and read gives an empty line.
        Ok(0) => Ok(None),
        Ok(length) => Stat::parse(&line[..length])
            .map(Some)
            .ok_or_else(|| HostError::parse(path, "not in the form of proc_pid_stat(5)")),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(HostError::read(path, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT: &[u8] = b"9384 (lp) S 9376 9384 9384 0 -1 256 3736 96 8 0 58 53 0 0 20 -5 3 0 158530 154202112 9322 \
18446744073709551615 1610616832 1621342296 140737488348544 0 0 0 12288 5 402745050 1 0 0 17 1 7 2 0 0 0 16230\n";

    #[test]
    fn reads_the_documented_fields_of_stat() {
        let stat = Stat::parse(STAT).unwrap();
        assert_eq!(
            (stat.tid, stat.comm.as_str(), stat.state, stat.ppid),
            (9384, "lp", 'S', 9376)
        );
        assert_eq!(stat.session, 9384);
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
    fn a_malformed_stat_is_refused() {
        for line in ["", "1 (a", "1 (a) S", "x (a) S 1", ")1 (", "1 (a) S 1 2 3"] {
            assert_eq!(Stat::parse(line.as_bytes()), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Stat::parse(&bytes);
        }
    }
}

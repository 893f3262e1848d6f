// SPDX-License-Identifier: Apache-2.0
//! Repeats interrupts that a User Mode Linux guest has lost.
//!
//! User Mode Linux learns of its devices' events by an edge-triggered epoll. Every few minutes on a
//! busy host it loses an event: the device has data, but the kernel is not told again, and a disk,
//! serial line or virtio device stops until its next event, which may never come. (Observed: a
//! disk's completion that stays unread in its socket. Likely cause: epoll's events are kept in one
//! array, which a signal fills again while the kernel still works through it.) A thread of the lab
//! checks from outside: a descriptor that is ready in two checks in a row gets its epoll entry
//! re-armed, which reports it once more. A guest that had not lost the event sees an interrupt with
//! nothing to do.

use std::collections::HashSet;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Descriptors are nearly always writable, so write events are repeated only with every n-th check.
const CHECKS_PER_WRITE_REARM: u64 = 20;
/// First number of this thread's own descriptors. Copies of the guest's descriptors keep their
/// numbers below it.
const FIRST_OWN_FD: RawFd = 900;

/// One entry of an epoll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Item {
    epoll: RawFd,
    fd: RawFd,
    events: u32,
    data: u64,
}

/// Starts the thread for a guest's process. The thread ends with the process.
///
/// # Errors
/// The system's error if it cannot start another thread.
pub(crate) fn start(pid: u32) -> io::Result<()> {
    let work = move || {
        // without the thread only a guest that has lost an event keeps waiting
        let _ = Watch::new(pid).map(Watch::run);
    };
    let thread = std::thread::Builder::new().name("viola-lab-rearm".into());
    thread.spawn(work).map(drop)
}

/// State of the thread, which has its own table of descriptors.
struct Watch {
    pid: u32,
    process: RawFd,
    /// Entries that were ready at the last check.
    ready: HashSet<Item>,
}

impl Watch {
    /// Gives this thread an empty table of descriptors and opens the process.
    fn new(pid: u32) -> io::Result<Self> {
        // SAFETY: neither call touches memory. The table is unshared first, so descriptors of other
        // threads stay open, and this thread has no object that owns one.
        unsafe {
            checked(libc::unshare(libc::CLONE_FILES).into())?;
            checked(libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0))?;
        }
        // SAFETY: a system call on numbers.
        let process = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        Ok(Self {
            pid,
            process: move_above(process as RawFd)?,
            ready: HashSet::new(),
        })
    }

    fn run(mut self) {
        for check in 0_u64.. {
            let wait = i32::try_from(CHECK_INTERVAL.as_millis()).unwrap_or(i32::MAX);
            if poll(self.process, libc::POLLIN, wait) != 0 {
                return;
            }
            let slow = check % CHECKS_PER_WRITE_REARM == 0;
            if self.check(slow).unwrap_or(false) && self.handles_sigio() {
                // SAFETY: a system call on a pidfd: the signal reaches this process or none.
                unsafe {
                    let none = std::ptr::null::<libc::siginfo_t>();
                    libc::syscall(
                        libc::SYS_pidfd_send_signal,
                        self.process,
                        libc::SIGIO,
                        none,
                        0,
                    );
                }
            }
        }
    }

    /// Re-arms lost events. Returns whether there were any.
    fn check(&mut self, rearm_writes: bool) -> io::Result<bool> {
        let mut ready = HashSet::new();
        let mut armed = false;
        for epoll in self.epolls()? {
            let text = std::fs::read_to_string(format!("/proc/{}/fdinfo/{epoll}", self.pid))?;
            for item in items(epoll, &text) {
                let was_ready = self.ready.contains(&item);
                match self.rearm(&item, was_ready, rearm_writes) {
                    Ok((is, done)) => {
                        armed |= done;
                        if is {
                            ready.insert(item);
                        }
                    }
                    Err(_) => continue, // closed meanwhile
                }
            }
        }
        self.ready = ready;
        Ok(armed)
    }

    /// Whether the process has a handler for SIGIO. A kernel that has just been restarted has none
    /// yet, and the signal would end it.
    fn handles_sigio(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid));
        let caught = status.unwrap_or_default();
        let mut lines = caught
            .lines()
            .filter_map(|line| line.strip_prefix("SigCgt:"));
        let caught = lines
            .next()
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.unwrap_or(0) & 1 << (libc::SIGIO - 1) != 0
    }

    /// Descriptors of the guest's epolls.
    fn epolls(&self) -> io::Result<Vec<RawFd>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(format!("/proc/{}/fd", self.pid))?.flatten() {
            let is = std::fs::read_link(entry.path());
            if is.is_ok_and(|to| to.as_os_str() == "anon_inode:[eventpoll]") {
                found.extend(
                    entry
                        .file_name()
                        .to_str()
                        .and_then(|n| n.parse::<RawFd>().ok()),
                );
            }
        }
        Ok(found)
    }

    /// Checks one entry. Returns whether it has something to read, and whether it was re-armed.
    fn rearm(&self, item: &Item, was_ready: bool, rearm_writes: bool) -> io::Result<(bool, bool)> {
        let name = std::fs::read_link(format!("/proc/{}/fd/{}", self.pid, item.fd))?;
        // the host's random devices are always readable
        if item.fd >= FIRST_OWN_FD
            || name.starts_with("/dev/random")
            || name.starts_with("/dev/urandom")
        {
            return Ok((false, false));
        }
        let theirs = self.copy_fd(item.fd)?;
        // epoll identifies an entry by file and number: the copy needs the same number
        let mut fd = theirs;
        if theirs != item.fd {
            // SAFETY: system calls on descriptors of this thread's own table, which no object owns.
            let moved = unsafe {
                let moved = checked(libc::dup2(theirs, item.fd).into());
                libc::close(theirs);
                moved
            };
            fd = moved? as RawFd;
        }
        let is = poll(fd, libc::POLLIN, 0) != 0;
        let mut armed = false;
        if (is && was_ready) || rearm_writes {
            let epoll = self.copy_fd(item.epoll).and_then(move_above)?;
            let mut event = libc::epoll_event {
                events: item.events,
                u64: item.data,
            };
            // SAFETY: `event` lives through the call; the descriptors are this thread's own.
            unsafe {
                armed = libc::epoll_ctl(epoll, libc::EPOLL_CTL_MOD, fd, &raw mut event) == 0;
                libc::close(epoll);
            }
        }
        // SAFETY: as above.
        unsafe { libc::close(fd) };
        Ok((is, armed))
    }

    /// Copies a descriptor of the guest's process.
    fn copy_fd(&self, fd: RawFd) -> io::Result<RawFd> {
        // SAFETY: a system call on numbers.
        checked(unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.process, fd, 0) })
            .map(|fd| fd as RawFd)
    }
}

/// Moves a descriptor above the guest's numbers.
fn move_above(fd: RawFd) -> io::Result<RawFd> {
    // SAFETY: system calls on a descriptor of this thread's own table, which no object owns.
    unsafe {
        let moved = checked(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, FIRST_OWN_FD).into());
        libc::close(fd);
        moved.map(|fd| fd as RawFd)
    }
}

/// Events that poll reports for a descriptor; 0 for none.
fn poll(fd: RawFd, events: i16, wait_ms: i32) -> i16 {
    let mut one = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: `one` lives through the call.
    unsafe { libc::poll(&raw mut one, 1, wait_ms) };
    one.revents
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// The edge-triggered entries of an epoll, from its file in /proc/PID/fdinfo.
fn items(epoll: RawFd, fdinfo: &str) -> Vec<Item> {
    let item = |line: &str| {
        let mut words = line.strip_prefix("tfd:")?.split_whitespace();
        let fd = words.next()?.parse().ok()?;
        let mut hex = |name| match words.next()? == name {
            true => u64::from_str_radix(words.next()?, 16).ok(),
            false => None,
        };
        let events = u32::try_from(hex("events:")?).ok()?;
        let data = hex("data:")?;
        (events & libc::EPOLLET as u32 != 0).then_some(Item {
            epoll,
            fd,
            events,
            data,
        })
    };
    fdinfo.lines().filter_map(item).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    #[test]
    fn entries_of_an_epoll_are_parsed() {
        let text = "pos:\t0\nflags:\t02\n\
            tfd:       21 events: 8000201f data:         62531120  pos:0 ino:29b894 sdev:9\n\
            tfd:        5 events:       19 data:                5  pos:0 ino:40e sdev:10\n";
        let item = Item {
            epoll: 4,
            fd: 21,
            events: 0x8000_201f,
            data: 0x6253_1120,
        };
        assert_eq!(items(4, text), [item]);
        assert_eq!(items(4, "tfd: x\ntfd: 5 events: zz data: 1\n"), []);
    }

    fn wait(epoll: RawFd, ms: i32) -> i32 {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: `event` lives through the call and is the one that there is room for.
        unsafe { libc::epoll_wait(epoll, &raw mut event, 1, ms) }
    }

    #[test]
    fn an_event_that_stays_unread_is_repeated() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut event = libc::epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLET) as u32,
            u64: 7,
        };
        // SAFETY: `event` lives through the call; `epoll` has no other owner.
        let epoll = unsafe {
            let epoll = OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC));
            let fd = theirs.as_raw_fd();
            let added = libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event);
            assert_eq!(added, 0);
            epoll
        };
        let epoll = epoll.as_raw_fd();
        (&ours).write_all(b"x").unwrap();
        assert_eq!(wait(epoll, 20_000), 1);
        assert_eq!(wait(epoll, 0), 0, "reported twice without being re-armed");
        let twice = || {
            let mut watch = Watch::new(std::process::id()).unwrap();
            let first = watch.check(false).unwrap();
            (first, watch.check(false).unwrap())
        };
        // an entry that is ready once may be about to be read
        let (first, second) = std::thread::spawn(twice).join().unwrap();
        assert!(!first && second, "{first} {second}");
        assert_eq!(wait(epoll, 20_000), 1);
    }
}

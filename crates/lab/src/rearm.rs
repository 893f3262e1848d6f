// SPDX-License-Identifier: Apache-2.0
//! Wakes guests that have lost an interrupt.
//!
//! User Mode Linux hears of its devices by an edge-triggered epoll, and now and then, on a busy machine every few minutes,
//! forgets what that has told: a device has data, nobody is told again, and a disk, a serial line or a virtio device stands
//! still until something else happens to it, which may be never. (Seen: a disk's completion unread in its socket. Likely
//! cause: what epoll told is kept in one array, and a signal that comes while it is worked off fills it anew.) So somebody
//! looks from outside: where a descriptor has been ready for two looks in a row its place in the epoll is armed anew, which
//! tells of it once more. For a guest that had not forgotten it this is an interrupt with nothing to do.

use std::collections::HashSet;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// Room to write is there nearly always, so it is told again only with each so manieth look.
const SLOW: u64 = 20;
/// Descriptors of this module's thread are from here on; those of the guest's devices are below, at their own numbers.
const OURS: RawFd = 900;

/// One descriptor in an epoll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Item {
    epoll: RawFd,
    fd: RawFd,
    events: u32,
    data: u64,
}

/// Looks after a guest's process until that has ended.
///
/// # Errors
/// When there is no thread to be had.
pub(crate) fn start(pid: u32) -> io::Result<()> {
    let work = move || {
        // Nothing depends on it but a guest that has forgotten something, which then goes on waiting.
        let _ = Watch::new(pid).map(Watch::run);
    };
    let thread = std::thread::Builder::new().name("viola-lab-rearm".into());
    thread.spawn(work).map(drop)
}

/// What the thread has; its table of descriptors is its own.
struct Watch {
    pid: u32,
    process: RawFd,
    /// What was ready at the last look.
    ready: HashSet<Item>,
}

impl Watch {
    /// Gives this thread a table of descriptors of its own, with nothing in it but the process.
    fn new(pid: u32) -> io::Result<Self> {
        // SAFETY: neither call touches memory. The table is unshared first, so descriptors that other threads use stay
        // open there, and this thread has no object that owns one.
        unsafe {
            done(libc::unshare(libc::CLONE_FILES).into())?;
            done(libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0))?;
        }
        // SAFETY: a plain system call on numbers.
        let process = done(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        Ok(Self {
            pid,
            process: aside(process as RawFd)?,
            ready: HashSet::new(),
        })
    }

    fn run(mut self) {
        for look in 0_u64.. {
            let wait = i32::try_from(LOOK.as_millis()).unwrap_or(i32::MAX);
            if poll(self.process, libc::POLLIN, wait) != 0 {
                return;
            }
            let slow = look % SLOW == 0;
            if self.look(slow).unwrap_or(false) && self.hears() {
                // SAFETY: a plain system call; the process is there, as its descriptor says, or it is not and the
                // signal goes nowhere: it is sent by that descriptor.
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

    /// Arms what is forgotten; true when there was something.
    fn look(&mut self, slow: bool) -> io::Result<bool> {
        let mut ready = HashSet::new();
        let mut armed = false;
        for epoll in self.epolls()? {
            let text = std::fs::read_to_string(format!("/proc/{}/fdinfo/{epoll}", self.pid))?;
            for item in items(epoll, &text) {
                let told = self.ready.contains(&item);
                match self.arm(&item, told, slow) {
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

    /// Whether the process has a handler for SIGIO: a kernel that has just begun anew has none yet, and would end by it.
    fn hears(&self) -> bool {
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

    /// Whether it has something to read, and whether it was armed.
    fn arm(&self, item: &Item, told: bool, slow: bool) -> io::Result<(bool, bool)> {
        let name = std::fs::read_link(format!("/proc/{}/fd/{}", self.pid, item.fd))?;
        // the machine's random numbers are always there
        if item.fd >= OURS || name.starts_with("/dev/random") || name.starts_with("/dev/urandom") {
            return Ok((false, false));
        }
        let theirs = self.take(item.fd)?;
        // epoll knows a descriptor by its file and its number
        let mut fd = theirs;
        if theirs != item.fd {
            // SAFETY: plain system calls on descriptors of this thread's own table, which nothing else owns.
            let moved = unsafe {
                let moved = done(libc::dup2(theirs, item.fd).into());
                libc::close(theirs);
                moved
            };
            fd = moved? as RawFd;
        }
        let is = poll(fd, libc::POLLIN, 0) != 0;
        let mut armed = false;
        if (is && told) || slow {
            let epoll = self.take(item.epoll).and_then(aside)?;
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

    /// A copy of a descriptor of the guest's process.
    fn take(&self, fd: RawFd) -> io::Result<RawFd> {
        // SAFETY: a plain system call on numbers.
        done(unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.process, fd, 0) })
            .map(|fd| fd as RawFd)
    }
}

/// Moves a descriptor out of the way of the guest's numbers.
fn aside(fd: RawFd) -> io::Result<RawFd> {
    // SAFETY: plain system calls on a descriptor of this thread's own table, which nothing else owns.
    unsafe {
        let moved = done(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, OURS).into());
        libc::close(fd);
        moved.map(|fd| fd as RawFd)
    }
}

/// What poll says of a descriptor; 0 for nothing.
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

fn done(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// The edge-triggered descriptors of an epoll, by its lines in /proc.
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
    fn lines_of_an_epoll_are_understood() {
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
    fn what_is_forgotten_is_told_again() {
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
        assert_eq!(wait(epoll, 0), 0, "told twice without being armed");
        let look = || {
            let mut watch = Watch::new(std::process::id()).unwrap();
            let first = watch.look(false).unwrap();
            (first, watch.look(false).unwrap())
        };
        // once ready may be about to be read
        let (first, second) = std::thread::spawn(look).join().unwrap();
        assert!(!first && second, "{first} {second}");
        assert_eq!(wait(epoll, 20_000), 1);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Files that nobody changes while the host reads them: the kernel makes a writer wait.
//!
//! A read lease (`F_SETLEASE`) is broken by whoever opens the file for writing or truncates it; such a one waits until
//! the lease is given up, or for `/proc/sys/fs/lease-break-time` (45 seconds), after which the kernel lets it go on. A
//! file that somebody has open for writing gets no lease.
//!
//! A file that is sent again and again is looked at once: it stays under lease for some seconds after its last pipe, and a writer
//! does not wait for more than this thread's turn then.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, makedev, statx};
use viola_proto::agent::FileMap;
use viola_proto::pipe::PipeId;

use super::reason::Reason;
use crate::core::block::Millis;

// include/uapi/asm-generic/fcntl.h
const F_SETOWN_EX: i32 = 15;
const F_OWNER_TID: i32 = 0;
/// `F_RDLCK`; C libraries give it different types.
const READ: i32 = 0;
/// `F_UNLCK`
const UNLOCKED: i32 = 2;

/// How long a file stays under lease that nobody needs; a deleted one keeps its place on the disk for as long.
const KEPT: Millis = 5000;
/// How many of them.
const MANY: usize = 64;

/// `struct f_owner_ex`
#[repr(C)]
struct Owner {
    kind: i32,
    pid: libc::pid_t,
}

/// Device and inode of a file.
pub type FileKey = (u64, u64);

/// What a file is, without a question to a file system that is elsewhere or in user space.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    device: (u32, u32),
    inode: u64,
    is_file: bool,
}

impl Found {
    /// Of a descriptor.
    ///
    /// # Errors
    /// [`Reason::File`]
    pub fn of(file: BorrowedFd<'_>) -> Result<Self, Reason> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let wanted = StatxFlags::TYPE | StatxFlags::INO;
        let stat = statx(file, "", flags, wanted).map_err(|_| Reason::File)?;
        Ok(Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            is_file: FileType::from_raw_mode(stat.stx_mode.into()).is_file(),
        })
    }

    /// Number of its device, `MAJOR:MINOR`.
    pub fn device(&self) -> String {
        format!("{}:{}", self.device.0, self.device.1)
    }

    fn key(&self) -> FileKey {
        (makedev(self.device.0, self.device.1), self.inode)
    }
}

/// A file under lease.
#[derive(Debug)]
pub struct Leased {
    /// An open description of its own, for reading.
    pub file: Arc<File>,
    /// Its size in bytes.
    pub size: u64,
    /// Where its bytes are, once that is known.
    pub map: Option<FileMap>,
    pipes: BTreeSet<PipeId>,
    broken: bool,
    /// Since when no pipe needs it.
    idle: Option<Millis>,
}

/// All of them. The thread that asks for a lease hears of writers.
#[derive(Debug)]
pub struct Leases {
    files: BTreeMap<FileKey, Leased>,
    signals: OwnedFd,
    now: Millis,
}

impl Leases {
    /// None yet. The calling thread, and each that it starts, has SIGIO blocked from now on.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the set is ours and made empty before use; the results are checked.
        let signals = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGIO);
            match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
                0 => {}
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
            let raw = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if raw < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(raw)
        };
        Ok(Self {
            files: BTreeMap::new(),
            signals,
            now: 0,
        })
    }

    /// It is this late.
    pub fn at(&mut self, now: Millis) {
        self.now = now;
    }

    /// Readable when somebody wants to change a file.
    pub fn signals(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Keeps a program's file, in which this was found, from changes for this pipe.
    ///
    /// # Errors
    /// It is no regular file, the program may not read it, or somebody may write to it.
    pub fn hold(
        &mut self,
        theirs: BorrowedFd<'_>,
        found: &Found,
        pipe: PipeId,
    ) -> Result<FileKey, Reason> {
        let flags = rustix::fs::fcntl_getfl(theirs).map_err(|_| Reason::File)?;
        // the agent may read what the program may not
        if flags.contains(OFlags::PATH) || flags.contains(OFlags::WRONLY) {
            return Err(Reason::File);
        }
        if !found.is_file {
            return Err(Reason::File);
        }
        let key = found.key();
        if let Some(held) = self.files.get_mut(&key) {
            if held.broken {
                return Err(Reason::Written);
            }
            held.pipes.insert(pipe);
            held.idle = None;
            return Ok(key);
        }
        let file = own(theirs).map_err(|_| Reason::Written)?;
        let size = file.metadata().map_err(|_| Reason::File)?.len();
        let leased = Leased {
            file: Arc::new(file),
            size,
            map: None,
            pipes: BTreeSet::from([pipe]),
            broken: false,
            idle: None,
        };
        self.files.insert(key, leased);
        Ok(key)
    }

    /// A file that is held.
    pub fn get(&mut self, key: FileKey) -> Option<&mut Leased> {
        self.files.get_mut(&key)
    }

    /// This pipe needs the file no more; with the last one it may change.
    pub fn let_go(&mut self, key: FileKey, pipe: PipeId) {
        let Some(held) = self.files.get_mut(&key) else {
            return;
        };
        held.pipes.remove(&pipe);
        if held.pipes.is_empty() {
            held.idle = Some(self.now);
            if held.broken || held.map.is_none() {
                self.give_up(key);
            }
        }
    }

    /// Gives up what nobody has needed for some seconds, or all of it; whether anything is left of that kind.
    pub fn tidy(&mut self, all: bool) -> bool {
        let mut idle: Vec<(Millis, FileKey)> = self.idle().collect();
        idle.sort_unstable();
        let many = idle.len().saturating_sub(MANY);
        for (at, (since, key)) in idle.iter().enumerate() {
            if all || at < many || self.now >= since + KEPT {
                self.give_up(*key);
            }
        }
        self.idle().next().is_some()
    }

    fn idle(&self) -> impl Iterator<Item = (Millis, FileKey)> {
        let files = self.files.iter();
        files.filter_map(|(key, held)| Some((held.idle?, *key)))
    }

    fn give_up(&mut self, key: FileKey) {
        if let Some(held) = self.files.remove(&key) {
            // the mapper may have the same description still: closing is not enough
            let _ = lease(held.file.as_fd(), UNLOCKED);
        }
    }

    /// Pipes of files that somebody wants to change since the last look.
    pub fn broken(&mut self) -> Vec<PipeId> {
        let mut info = [0; 128 * 8];
        while rustix::io::read(&self.signals, &mut info).is_ok_and(|n| n > 0) {}
        let (mut pipes, mut idle) = (Vec::new(), Vec::new());
        for (key, held) in self.files.iter_mut().filter(|(_, held)| !held.broken) {
            // SAFETY: a plain question about an open descriptor.
            let is = unsafe { libc::fcntl(held.file.as_raw_fd(), libc::F_GETLEASE) };
            if is != READ {
                held.broken = true;
                pipes.extend(&held.pipes);
                idle.extend(held.idle.map(|_| *key));
            }
        }
        for key in idle {
            self.give_up(key);
        }
        pipes
    }
}

/// An open description of our own, under a read lease that this thread hears of.
fn own(theirs: BorrowedFd<'_>) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", theirs.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file: File = rustix::fs::open(path, flags, Mode::empty())?.into();
    let owner = Owner {
        kind: F_OWNER_TID,
        pid: rustix::thread::gettid().as_raw_nonzero().get(),
    };
    // SAFETY: the kernel reads a struct f_owner_ex, which `owner` is laid out as.
    if unsafe { libc::fcntl(file.as_raw_fd(), F_SETOWN_EX, &raw const owner) } < 0 {
        return Err(io::Error::last_os_error());
    }
    lease(file.as_fd(), READ)?;
    Ok(file)
}

fn lease(file: BorrowedFd<'_>, kind: i32) -> io::Result<()> {
    // SAFETY: takes a plain number.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;
    use std::time::{Duration, Instant};

    use super::*;

    fn file(folder: &tempfile::TempDir) -> std::path::PathBuf {
        let path = folder.path().join("f");
        std::fs::write(&path, b"old").unwrap();
        path
    }

    fn hold(leases: &mut Leases, file: &File, pipe: PipeId) -> Result<FileKey, Reason> {
        leases.hold(file.as_fd(), &Found::of(file.as_fd())?, pipe)
    }

    #[test]
    fn a_writer_waits_until_the_last_pipe_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let theirs = File::open(&path).unwrap();
        let mut leases = Leases::new().unwrap();
        let key = hold(&mut leases, &theirs, 1).unwrap();
        assert_eq!(hold(&mut leases, &theirs, 2).unwrap(), key);
        assert!(leases.broken().is_empty());
        let writer = {
            let path = path.clone();
            std::thread::spawn(move || File::options().write(true).open(path).unwrap().set_len(1))
        };
        let begun = Instant::now();
        let broken = loop {
            let broken = leases.broken();
            if !broken.is_empty() {
                break broken;
            }
            assert!(begun.elapsed() < Duration::from_secs(5));
            std::thread::sleep(Duration::from_millis(2));
        };
        assert_eq!(broken, [1, 2]);
        assert!(leases.broken().is_empty(), "told once");
        assert_eq!(hold(&mut leases, &theirs, 3), Err(Reason::Written));
        leases.let_go(key, 1);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 3);
        leases.let_go(key, 2);
        writer.join().unwrap().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1);
    }

    #[test]
    fn a_file_that_nobody_needs_any_more_is_kept_for_the_next_one_and_not_from_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let theirs = File::open(&path).unwrap();
        let mut leases = Leases::new().unwrap();
        let key = hold(&mut leases, &theirs, 1).unwrap();
        leases.get(key).unwrap().map = Some(FileMap::default());
        leases.let_go(key, 1);
        assert!(leases.tidy(false), "it is kept");
        assert_eq!(hold(&mut leases, &theirs, 2).unwrap(), key);
        assert!(leases.get(key).unwrap().map.is_some(), "it was looked at");
        leases.at(KEPT);
        assert!(!leases.tidy(true), "it is needed");
        leases.let_go(key, 2);
        let writer = {
            let path = path.clone();
            std::thread::spawn(move || File::options().write(true).open(path).unwrap().set_len(1))
        };
        while !writer.is_finished() {
            assert!(leases.broken().is_empty());
            std::thread::sleep(Duration::from_millis(1));
        }
        writer.join().unwrap().unwrap();
        // and what is kept says nothing of a file that was changed
        assert!(leases.get(key).is_none());
        let key = hold(&mut leases, &theirs, 3).unwrap();
        leases.get(key).unwrap().map = Some(FileMap::default());
        leases.let_go(key, 3);
        leases.at(2 * KEPT - 1);
        assert!(leases.tidy(false), "for seconds");
        leases.at(2 * KEPT);
        assert!(!leases.tidy(false) && leases.get(key).is_none());
        let key = hold(&mut leases, &theirs, 4).unwrap();
        leases.get(key).unwrap().map = Some(FileMap::default());
        leases.let_go(key, 4);
        assert!(!leases.tidy(true));
    }

    #[test]
    fn the_thread_is_woken_by_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let theirs = File::open(&path).unwrap();
        let mut leases = Leases::new().unwrap();
        hold(&mut leases, &theirs, 1).unwrap();
        let busy = File::options()
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path);
        assert_eq!(busy.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(
            leases.signals(),
            rustix::event::PollFlags::IN,
        )];
        let second = rustix::event::Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut fds, Some(&second)).unwrap(), 1);
        assert_eq!(leases.broken(), [1]);
    }

    #[test]
    fn what_the_program_cannot_read_and_what_is_written_gets_no_lease() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let mut leases = Leases::new().unwrap();
        let by_path = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(&path)
            .unwrap();
        assert_eq!(hold(&mut leases, &by_path, 1), Err(Reason::File));
        let null = File::open("/dev/null").unwrap();
        assert_eq!(hold(&mut leases, &null, 1), Err(Reason::File));
        let writer = File::options().write(true).open(&path).unwrap();
        assert_eq!(hold(&mut leases, &writer, 1), Err(Reason::File));
        let reader = File::open(&path).unwrap();
        assert_eq!(hold(&mut leases, &reader, 1), Err(Reason::Written));
        drop(writer);
        assert!(hold(&mut leases, &reader, 1).is_ok());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Read leases (fcntl(2), `F_SETLEASE`): the kernel makes a writer wait while the host reads a file.
//!
//! An open for writing or a truncation breaks the lease. It waits until the agent gives the lease up, or for
//! `/proc/sys/fs/lease-break-time` (45 seconds), after which the kernel lets it proceed. A file that is open for
//! writing gets no lease.
//!
//! The agent keeps the lease for five seconds after a file's last pipe, so that a file that is sent often
//! is mapped once. A writer then waits only for the main loop's next round.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags, makedev, statx};
use viola_proto::agent::FileMap;
use viola_proto::pipe::PipeId;

use super::reason::Reason;
use crate::clock::Millis;
use crate::io::signals::signal_fd;

// include/uapi/asm-generic/fcntl.h
const F_SETOWN_EX: i32 = 15;
const F_OWNER_TID: i32 = 0;
/// `F_RDLCK`; C libraries declare it with different types.
const F_RDLCK: i32 = 0;
/// `F_UNLCK`
const F_UNLCK: i32 = 2;

/// How long a file stays under lease after its last pipe. A deleted file keeps its blocks on the disk for as long.
const IDLE_LEASE_TIMEOUT: Millis = 5000;
/// Maximum number of leases without a pipe.
const MAX_IDLE_LEASES: usize = 64;

/// `struct f_owner_ex`
#[repr(C)]
struct Owner {
    kind: i32,
    pid: libc::pid_t,
}

/// Device number and inode number of a file.
pub type FileKey = (u64, u64);

/// Device, inode and type of a file, without asking a remote or user-space file system.
#[derive(Debug, Clone, Copy)]
pub struct FileInfo {
    device: (u32, u32),
    inode: u64,
    is_file: bool,
}

impl FileInfo {
    /// Reads them from a descriptor.
    ///
    /// # Errors
    /// [`Reason::BadFile`]
    pub fn of(file: BorrowedFd<'_>) -> Result<Self, Reason> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let wanted = StatxFlags::TYPE | StatxFlags::INO;
        let stat = statx(file, "", flags, wanted).map_err(|_| Reason::BadFile)?;
        Ok(Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            is_file: FileType::from_raw_mode(stat.stx_mode.into()).is_file(),
        })
    }

    /// The device number as `MAJOR:MINOR`.
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
    /// The agent's own open file description, for reading.
    pub file: Arc<File>,
    /// Size in bytes.
    pub size: u64,
    /// Its extents, once the mapper has found them.
    pub map: Option<FileMap>,
    pipes: BTreeSet<PipeId>,
    broken: bool,
    /// Since when it has had no pipe.
    idle: Option<Millis>,
}

/// All leases. The thread that takes a lease gets the signal of a writer.
#[derive(Debug)]
pub struct Leases {
    files: BTreeMap<FileKey, Leased>,
    signals: OwnedFd,
    now: Millis,
}

impl Leases {
    /// Starts without leases, and blocks SIGIO in the calling thread and in all that it starts later.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            files: BTreeMap::new(),
            signals: signal_fd(&[libc::SIGIO])?,
            now: 0,
        })
    }

    /// Sets the current time.
    pub fn set_time(&mut self, now: Millis) {
        self.now = now;
    }

    /// A descriptor that is readable when a writer waits.
    pub fn signals(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Takes a lease on a program's file for a pipe.
    ///
    /// # Errors
    /// [`Reason::BadFile`] when it is not a regular file or the program may not read it, [`Reason::HasWriter`]
    /// when it is open for writing.
    pub fn hold(
        &mut self,
        program_file: BorrowedFd<'_>,
        found: &FileInfo,
        pipe: PipeId,
    ) -> Result<FileKey, Reason> {
        let flags = rustix::fs::fcntl_getfl(program_file).map_err(|_| Reason::BadFile)?;
        // the agent could read more than the program
        if flags.contains(OFlags::PATH) || flags.contains(OFlags::WRONLY) {
            return Err(Reason::BadFile);
        }
        if !found.is_file {
            return Err(Reason::BadFile);
        }
        let key = found.key();
        if let Some(held) = self.files.get_mut(&key) {
            if held.broken {
                return Err(Reason::HasWriter);
            }
            held.pipes.insert(pipe);
            held.idle = None;
            return Ok(key);
        }
        let file = open_leased(program_file).map_err(|_| Reason::HasWriter)?;
        let size = file.metadata().map_err(|_| Reason::BadFile)?.len();
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

    /// A file under lease.
    pub fn get(&mut self, key: FileKey) -> Option<&mut Leased> {
        self.files.get_mut(&key)
    }

    /// A pipe is done with the file. After the last pipe the lease becomes idle.
    pub fn release(&mut self, key: FileKey, pipe: PipeId) {
        let Some(held) = self.files.get_mut(&key) else {
            return;
        };
        held.pipes.remove(&pipe);
        if held.pipes.is_empty() {
            held.idle = Some(self.now);
            if held.broken || held.map.is_none() {
                self.drop_lease(key);
            }
        }
    }

    /// Gives up idle leases that are too old or too many, or all of them. Returns whether an idle lease is left.
    pub fn release_idle(&mut self, all: bool) -> bool {
        let mut idle: Vec<(Millis, FileKey)> = self.idle().collect();
        idle.sort_unstable();
        let many = idle.len().saturating_sub(MAX_IDLE_LEASES);
        for (at, (since, key)) in idle.iter().enumerate() {
            if all || at < many || self.now >= since + IDLE_LEASE_TIMEOUT {
                self.drop_lease(*key);
            }
        }
        self.idle().next().is_some()
    }

    fn idle(&self) -> impl Iterator<Item = (Millis, FileKey)> {
        let files = self.files.iter();
        files.filter_map(|(key, held)| Some((held.idle?, *key)))
    }

    fn drop_lease(&mut self, key: FileKey) {
        if let Some(held) = self.files.remove(&key) {
            // the mapper may have the same description open, so closing does not suffice
            let _ = set_lease(held.file.as_fd(), F_UNLCK);
        }
    }

    /// Pipes whose files got a writer since the last call. Gives up idle leases that a writer waits for.
    pub fn take_broken(&mut self) -> Vec<PipeId> {
        let mut info = [0; 128 * 8];
        while rustix::io::read(&self.signals, &mut info).is_ok_and(|n| n > 0) {}
        let (mut pipes, mut idle) = (Vec::new(), Vec::new());
        for (key, held) in self.files.iter_mut().filter(|(_, held)| !held.broken) {
            // SAFETY: a plain question about an open descriptor.
            let is = unsafe { libc::fcntl(held.file.as_raw_fd(), libc::F_GETLEASE) };
            if is != F_RDLCK {
                held.broken = true;
                pipes.extend(&held.pipes);
                idle.extend(held.idle.map(|_| *key));
            }
        }
        for key in idle {
            self.drop_lease(key);
        }
        pipes
    }
}

/// Opens the file again and takes a lease whose signal this thread gets.
fn open_leased(program_file: BorrowedFd<'_>) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", program_file.as_raw_fd());
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
    set_lease(file.as_fd(), F_RDLCK)?;
    Ok(file)
}

fn set_lease(file: BorrowedFd<'_>, kind: i32) -> io::Result<()> {
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
        leases.hold(file.as_fd(), &FileInfo::of(file.as_fd())?, pipe)
    }

    #[test]
    fn a_writer_waits_until_the_last_pipe_releases_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let program_file = File::open(&path).unwrap();
        let mut leases = Leases::new().unwrap();
        let key = hold(&mut leases, &program_file, 1).unwrap();
        assert_eq!(hold(&mut leases, &program_file, 2).unwrap(), key);
        assert!(leases.take_broken().is_empty());
        let writer = {
            let path = path.clone();
            std::thread::spawn(move || File::options().write(true).open(path).unwrap().set_len(1))
        };
        let begun = Instant::now();
        let broken = loop {
            let broken = leases.take_broken();
            if !broken.is_empty() {
                break broken;
            }
            assert!(begun.elapsed() < Duration::from_secs(5));
            std::thread::sleep(Duration::from_millis(2));
        };
        assert_eq!(broken, [1, 2]);
        assert!(leases.take_broken().is_empty(), "reported once");
        assert_eq!(hold(&mut leases, &program_file, 3), Err(Reason::HasWriter));
        leases.release(key, 1);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 3);
        leases.release(key, 2);
        writer.join().unwrap().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1);
    }

    #[test]
    fn an_idle_lease_serves_the_next_pipe_and_does_not_delay_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let program_file = File::open(&path).unwrap();
        let mut leases = Leases::new().unwrap();
        let key = hold(&mut leases, &program_file, 1).unwrap();
        leases.get(key).unwrap().map = Some(FileMap::default());
        leases.release(key, 1);
        assert!(leases.release_idle(false), "it is kept");
        assert_eq!(hold(&mut leases, &program_file, 2).unwrap(), key);
        assert!(leases.get(key).unwrap().map.is_some(), "the map is kept");
        leases.set_time(IDLE_LEASE_TIMEOUT);
        assert!(!leases.release_idle(true), "it is needed");
        leases.release(key, 2);
        let writer = {
            let path = path.clone();
            std::thread::spawn(move || File::options().write(true).open(path).unwrap().set_len(1))
        };
        while !writer.is_finished() {
            assert!(leases.take_broken().is_empty());
            std::thread::sleep(Duration::from_millis(1));
        }
        writer.join().unwrap().unwrap();
        // the kept map is not used for a changed file
        assert!(leases.get(key).is_none());
        let key = hold(&mut leases, &program_file, 3).unwrap();
        leases.get(key).unwrap().map = Some(FileMap::default());
        leases.release(key, 3);
        leases.set_time(2 * IDLE_LEASE_TIMEOUT - 1);
        assert!(leases.release_idle(false), "for seconds");
        leases.set_time(2 * IDLE_LEASE_TIMEOUT);
        assert!(!leases.release_idle(false) && leases.get(key).is_none());
        let key = hold(&mut leases, &program_file, 4).unwrap();
        leases.get(key).unwrap().map = Some(FileMap::default());
        leases.release(key, 4);
        assert!(!leases.release_idle(true));
    }

    #[test]
    fn the_thread_is_woken_by_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let program_file = File::open(&path).unwrap();
        let mut leases = Leases::new().unwrap();
        hold(&mut leases, &program_file, 1).unwrap();
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
        assert_eq!(leases.take_broken(), [1]);
    }

    #[test]
    fn a_file_that_is_unreadable_or_open_for_writing_gets_no_lease() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder);
        let mut leases = Leases::new().unwrap();
        let by_path = File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(&path)
            .unwrap();
        assert_eq!(hold(&mut leases, &by_path, 1), Err(Reason::BadFile));
        let null = File::open("/dev/null").unwrap();
        assert_eq!(hold(&mut leases, &null, 1), Err(Reason::BadFile));
        let writer = File::options().write(true).open(&path).unwrap();
        assert_eq!(hold(&mut leases, &writer, 1), Err(Reason::BadFile));
        let reader = File::open(&path).unwrap();
        assert_eq!(hold(&mut leases, &reader, 1), Err(Reason::HasWriter));
        drop(writer);
        assert!(hold(&mut leases, &reader, 1).is_ok());
    }
}

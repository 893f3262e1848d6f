// SPDX-License-Identifier: Apache-2.0
//! One worker process as the daemon sees it: started, found again, given orders, ended.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use viola_host::proc;
use viola_vread::control::{
    AgentStat, Control, ControlError, Order, PeerStat, ReaderStat, Report, Role, VERSION,
    WorkerSetup, listen,
};

use crate::slices::restore;
use crate::vread::decide;
use viola_cli::log::{self, Level};

/// How long a worker may take for an order, until it is let off the cores of its VM.
const SOON: Duration = Duration::from_secs(1);

/// How long it may take then. Ending a reader's worker takes the mount away from a QEMU guest until that starts anew, so
/// it is the last thing to do.
const PATIENCE: Duration = Duration::from_secs(4);

/// Why a worker is of no use.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// It cannot be started.
    #[error("a worker cannot be started: {0}")]
    Start(#[source] io::Error),
    /// It does not answer as it should.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It did not do what it was told.
    #[error("{0}")]
    Refused(String),
    /// Something else answers.
    #[error("what answers is no worker of this version: {0}")]
    Stranger(String),
}

/// A process that runs.
#[derive(Debug)]
pub struct Worker {
    /// What it is for.
    pub role: Role,
    /// Its VM: the identity of a DataNode VM, a reader as the configuration names it.
    pub vm: String,
    /// Its process.
    pub pid: u32,
    start_time: u64,
    control: Control,
    /// When this daemon has started it.
    child: Option<Child>,
    /// Set when it did not get its turn where it was put.
    starved: Cell<bool>,
}

impl Worker {
    /// Starts a worker. `more` are its descriptors beside the listening socket at `path`, which is made here.
    pub fn start(
        role: Role,
        path: &Path,
        setup: &WorkerSetup,
        more: &[BorrowedFd<'_>],
    ) -> Result<Self, WorkerError> {
        let start = |e: io::Error| WorkerError::Start(e);
        let listener = listen(path).map_err(start)?;
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| start(e.into()))?;
        let child = Command::new("/proc/self/exe")
            .args(["worker", &role.to_string()])
            .arg(path)
            .current_dir("/")
            .env_clear()
            .envs(std::env::vars_os().filter(|(k, _)| k == "JOURNAL_STREAM"))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .map_err(start)?;
        let mut child = Started(Some(child));
        let mut fds = vec![listener.as_fd()];
        fds.extend_from_slice(more);
        Control::from_fd(ours).send_setup(setup, &fds)?;
        drop(listener);
        let mut worker = Self::adopt(path)?;
        if worker.role != role || Some(worker.pid) != child.0.as_ref().map(Child::id) {
            return Err(WorkerError::Stranger(format!("process {}", worker.pid)));
        }
        worker.child = child.0.take();
        Ok(worker)
    }

    /// Finds the worker that listens on a socket.
    pub fn adopt(path: &Path) -> Result<Self, WorkerError> {
        let control = Control::connect(path).map_err(ControlError::from)?;
        let hello = Order::Hello { version: VERSION };
        match control.order(&hello, &[], PATIENCE)? {
            Report::Hello {
                version: VERSION,
                role,
                vm,
                pid,
                ..
            } => Ok(Self {
                role,
                vm,
                pid,
                start_time: start_time(pid).ok_or_else(|| {
                    WorkerError::Stranger(format!("process {pid}, which is gone"))
                })?,
                control,
                child: None,
                starved: Cell::new(false),
            }),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Whether it is there.
    pub fn lives(&mut self) -> bool {
        match &mut self.child {
            Some(child) => matches!(child.try_wait(), Ok(None)),
            None => start_time(self.pid) == Some(self.start_time),
        }
    }

    /// Gives an order that is to be carried out.
    pub fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), WorkerError> {
        match self.ask(order, fds)? {
            Report::Done => Ok(()),
            Report::Failed { why } => Err(WorkerError::Refused(why)),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Whether it had to be let off the cores on which it was put. It is better not put there again.
    pub fn is_starved(&self) -> bool {
        self.starved.get()
    }

    /// Gives an order. A thread of the ordinary class was seen to wait for seconds on a core that emulated guests keep
    /// busy; one that is late may therefore run wherever this daemon may.
    fn ask(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<Report, ControlError> {
        match self.control.order(order, fds, SOON) {
            Err(ControlError::Timeout(_)) if self.role == Role::Reader => {}
            done => return done,
        }
        if !self.starved.replace(true)
            && let Ok(Some(all)) = viola_host::attrs::affinity(std::process::id())
            && decide::put(self.pid, &all)
        {
            log::about(
                Level::Warning,
                &self.vm,
                "vread: the reader's worker does not get its turn on the cores of its VM; it may run anywhere now",
            );
        }
        self.control.wait_for_report(PATIENCE)
    }

    /// What an agent worker has done.
    pub fn agent_stat(&self) -> Result<AgentStat, WorkerError> {
        match self.ask(&Order::Stat, &[])? {
            Report::Agent(stat) => Ok(*stat),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// What a reader worker has done.
    pub fn reader_stat(&self) -> Result<ReaderStat, WorkerError> {
        match self.ask(&Order::Stat, &[])? {
            Report::Reader(stat) => Ok(stat),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// What a peer worker has done.
    pub fn peer_stat(&self) -> Result<PeerStat, WorkerError> {
        match self.ask(&Order::Stat, &[])? {
            Report::Peer(stat) => Ok(stat),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Tells it to end, and waits until it is gone; one that does not is killed.
    pub fn end(mut self, why: &str) {
        let told = self.order(&Order::Quit { why: why.into() }, &[]);
        let deadline = Instant::now() + PATIENCE;
        while told.is_ok() && self.lives() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.kill();
    }

    /// Ends it at once.
    pub fn kill(mut self) {
        restore::kill(self.pid, self.start_time);
        if let Some(child) = &mut self.child {
            let _ = child.wait();
        }
    }
}

fn start_time(pid: u32) -> Option<u64> {
    let stat = proc::stat(pid).ok()??;
    (!stat.is_dead()).then_some(stat.start_time)
}

/// A process that is ended unless somebody takes it.
struct Started(Option<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A pair of sockets between two workers.
pub fn lookup_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// The socket to which a VM's hypervisor connects. One that is there belongs to a worker that is gone.
pub fn bind_for_vmm(path: &Path, owner: Option<u32>) -> io::Result<OwnedFd> {
    use std::os::unix::net::UnixListener;
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener?;
    if let Some(uid) = owner {
        std::os::unix::fs::chown(path, Some(uid), None)?;
    }
    Ok(listener.into())
}

/// All sockets of workers in a folder.
pub fn sockets(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let is_socket = |p: &PathBuf| p.extension().is_some_and(|e| e == "sock");
    entries
        .flatten()
        .map(|e| e.path())
        .filter(is_socket)
        .collect()
}

// SPDX-License-Identifier: Apache-2.0
//! One worker process as the daemon sees it: the daemon starts or adopts it, gives it orders, and ends it.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use viola_host::proc;
use viola_vread::control::{
    AgentStat, Control, ControlError, Order, PeerStat, ReaderStat, Report, Role, VERSION,
    WorkerSetup, listen, socket_pair,
};

use crate::host::files::bind_private;
use crate::host::{affinity, process};
use viola_cli::log::{self, Level};

/// A reader's worker that takes longer for an order may leave the cores of its VM.
const STARVED_TIMEOUT: Duration = Duration::from_secs(1);

/// A worker that takes longer for an order counts as hung. Ending a reader's worker is the last
/// resort: a QEMU guest loses the mount until the guest restarts.
const ORDER_TIMEOUT: Duration = Duration::from_secs(4);

/// Why a worker cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The process cannot be started.
    #[error("a worker cannot be started: {0}")]
    Start(#[source] io::Error),
    /// It does not answer, or the connection broke.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It refused an order.
    #[error("{0}")]
    Refused(String),
    /// Another process or another version answers on its socket.
    #[error("the reply is not that of a worker of this version: {0}")]
    Stranger(String),
}

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    /// Its task.
    pub role: Role,
    /// Its VM: the identity of a DataNode VM, a reader as the configuration names it.
    pub vm: String,
    /// Its process.
    pub pid: u32,
    start_time: u64,
    control: Control,
    /// Set when this daemon has started it.
    child: Option<Child>,
    /// Set when it did not run on the cores of its VM.
    starved: Cell<bool>,
}

impl Worker {
    /// Starts a worker that listens at `path`. `more` are its further descriptors.
    ///
    /// # Errors
    /// When it cannot be started, or does not answer.
    pub fn start(
        role: Role,
        path: &Path,
        setup: &WorkerSetup,
        more: &[BorrowedFd<'_>],
    ) -> Result<Self, WorkerError> {
        let start = |e: io::Error| WorkerError::Start(e);
        let listener = listen(path).map_err(start)?;
        let (ours, theirs) = socket_pair().map_err(start)?;
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

    /// Connects to the worker that listens on a socket.
    ///
    /// # Errors
    /// When no worker of this version answers.
    pub fn adopt(path: &Path) -> Result<Self, WorkerError> {
        let control = Control::connect(path).map_err(ControlError::from)?;
        let hello = Order::Hello { version: VERSION };
        match control.order(&hello, &[], ORDER_TIMEOUT)? {
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

    /// Whether the process runs.
    pub fn is_running(&mut self) -> bool {
        match &mut self.child {
            Some(child) => matches!(child.try_wait(), Ok(None)),
            None => start_time(self.pid) == Some(self.start_time),
        }
    }

    /// Gives an order, and waits until it is carried out.
    ///
    /// # Errors
    /// When the worker refuses it or does not answer.
    pub fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), WorkerError> {
        match self.ask(order, fds)? {
            Report::Done => Ok(()),
            Report::Failed { why } => Err(WorkerError::Refused(why)),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Whether it had to leave the cores of its VM. It must not be moved there again.
    pub fn is_starved(&self) -> bool {
        self.starved.get()
    }

    /// Gives an order. Threads of the fair class were seen to wait for seconds on a core that emulated guests keep busy, so a reader's
    /// worker that is late may run wherever the daemon may.
    fn ask(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<Report, ControlError> {
        match self.control.order(order, fds, STARVED_TIMEOUT) {
            Err(ControlError::Timeout(_)) if self.role == Role::Reader => {}
            done => return done,
        }
        if !self.starved.replace(true)
            && let Ok(Some(all)) = viola_host::attrs::affinity(std::process::id())
            && affinity::move_process(self.pid, &all)
        {
            log::about(
                Level::Warning,
                &self.vm,
                "vread: the reader's worker does not get its turn on the cores of its VM; it may run anywhere now",
            );
        }
        self.control.wait_for_report(ORDER_TIMEOUT)
    }

    /// Counts of an agent's worker.
    ///
    /// # Errors
    /// When the worker does not answer.
    pub fn agent_stat(&self) -> Result<AgentStat, WorkerError> {
        match self.ask(&Order::Stat, &[])? {
            Report::Agent(stat) => Ok(*stat),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Counts of a reader's worker.
    ///
    /// # Errors
    /// When the worker does not answer.
    pub fn reader_stat(&self) -> Result<ReaderStat, WorkerError> {
        match self.ask(&Order::Stat, &[])? {
            Report::Reader(stat) => Ok(stat),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Counts of the worker for other hosts.
    ///
    /// # Errors
    /// When the worker does not answer.
    pub fn peer_stat(&self) -> Result<PeerStat, WorkerError> {
        match self.ask(&Order::Stat, &[])? {
            Report::Peer(stat) => Ok(stat),
            other => Err(WorkerError::Stranger(format!("{other:?}"))),
        }
    }

    /// Orders it to end, and kills it after [`ORDER_TIMEOUT`]. Where another one follows, [`Killed::end`].
    pub fn end(self, why: &str) {
        Killed::default().end(self, why);
    }
}

/// A worker that was killed and has not ended, if there is one: the kernel ends no process that waits for a disk that does not
/// answer. Until it does, the process holds its socket, and may write what it reads into its VM's memory. So the next worker has
/// to wait for its end, and withdrawn blocks that it reads stay where they are.
#[derive(Debug, Default)]
pub struct Killed(Option<Worker>);

impl Killed {
    /// Kills a worker, and waits for two seconds at most until it has ended.
    pub fn kill(&mut self, worker: Worker) {
        process::kill(worker.pid, worker.start_time);
        self.0 = Some(worker);
        self.is_left();
    }

    /// Orders a worker to end, and kills it after [`ORDER_TIMEOUT`].
    pub fn end(&mut self, mut worker: Worker, why: &str) {
        let told = worker.order(&Order::Quit { why: why.into() }, &[]);
        let deadline = Instant::now() + ORDER_TIMEOUT;
        while told.is_ok() && worker.is_running() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.kill(worker);
    }

    /// Whether it still has not ended.
    pub fn is_left(&mut self) -> bool {
        if self.0.as_mut().is_some_and(|worker| !worker.is_running()) {
            self.0 = None;
        }
        self.0.is_some()
    }

    /// For messages: what became of the worker.
    pub fn state(&self) -> &'static str {
        match &self.0 {
            None => "gone",
            Some(_) => "killed, but its process has not ended, as one that waits for a disk",
        }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take().and_then(|worker| worker.child) {
            std::thread::spawn(move || child.wait());
        }
    }
}

fn start_time(pid: u32) -> Option<u64> {
    let stat = proc::stat(pid).ok()??;
    (!stat.is_dead()).then_some(stat.start_time)
}

/// A process that is killed on drop unless it was taken out.
struct Started(Option<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Binds the socket to which a VM's hypervisor connects. It replaces an existing one, which belongs
/// to a worker that is gone.
///
/// # Errors
/// When the kernel refuses.
pub fn bind_for_vmm(path: &Path, owner: Option<u32>) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = bind_private(path)?;
    if let Some(uid) = owner {
        std::os::unix::fs::chown(path, Some(uid), None)?;
    }
    Ok(listener.into())
}

/// The sockets of workers in a folder.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_socket_for_a_vm_belongs_to_its_user_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        std::fs::write(&path, "of a worker that is gone").unwrap();
        let own = rustix::process::geteuid();
        // Only root gives a file away.
        let owner = if own.is_root() { 64_055 } else { own.as_raw() };
        let _socket = bind_for_vmm(&path, Some(owner)).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o7777), (owner, 0o600));
    }
}

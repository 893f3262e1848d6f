// SPDX-License-Identifier: Apache-2.0
//! One VM that may read: its worker, and which DataNode VMs it is paired with.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use viola_host::{CpuSet, Vm};
use viola_proto::vread::Reader as Shown;
use viola_vread::control::{Order, ReaderStat, Role, WorkerSetup};

use crate::retry::{Trouble, Verdict};
use crate::supervisor::agent::Agent;
use crate::vread::apply::pairs::{Pairs, Useless};
use crate::vread::apply::stream::Line;
use crate::vread::decide;
use crate::workers::process::{self, Worker};
use crate::workers::run_dir;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::{Transport, VmVread};

/// Name by which the VM mounts the blocks: `mount -t virtiofs viola /mnt`.
pub const TAG: &str = "viola";
/// Queues for requests; a VM uses as many as it has vCPUs.
const QUEUES: usize = 4;
/// Threads that wait for disks, beside those of the queues.
const WAITERS: usize = 4;
/// A queue's thread sleeps as soon as there is nothing to do: looking on would cost the host a core's time.
const POLL_US: u64 = 0;

/// What this side knows of one reader.
#[derive(Debug)]
pub struct Reader {
    /// The VM, as the configuration names it.
    pub name: String,
    /// Its worker.
    pub worker: Option<Worker>,
    /// What that has done.
    pub stat: ReaderStat,
    socket: PathBuf,
    uid: u32,
    pairs: Pairs,
    /// Where which worker was put.
    placed: Option<(u32, CpuSet)>,
    trouble: Trouble,
    why: String,
    transport: Transport,
    line: Line,
    /// Whether the worker has told how it is.
    has_told: bool,
}

/// Who may connect to a reader's socket, and what its worker becomes.
#[derive(Debug, Clone, Copy)]
pub struct Users {
    /// Owner of the socket.
    pub vmm: Option<u32>,
    /// User and group of the worker.
    pub worker: Option<(u32, u32)>,
}

impl Reader {
    /// A reader whose hypervisor connects to `socket`.
    pub fn new(
        name: &str,
        socket: PathBuf,
        uid: u32,
        transport: Transport,
        worker: Option<Worker>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            worker,
            stat: ReaderStat::default(),
            socket,
            uid,
            pairs: Pairs::default(),
            placed: None,
            trouble: Trouble::default(),
            why: "its worker has not started yet".into(),
            transport,
            line: Line::default(),
            has_told: false,
        }
    }

    /// Whether the worker was started for this socket, user and way.
    pub fn is(&self, socket: &Path, uid: u32, transport: Transport) -> bool {
        self.socket == socket && self.uid == uid && self.transport == transport
    }

    /// Starts the worker if there is none.
    pub fn start(&mut self, now: Instant, dir: &Path, users: Users) {
        if self.worker.is_some() || self.trouble.holds_back(now) {
            return;
        }
        match self.try_start(dir, users) {
            Ok(worker) => {
                log::about(
                    Level::Info,
                    &self.name,
                    format!(
                        "vread: reader's worker runs, process {}, socket {}",
                        worker.pid,
                        self.socket.display()
                    ),
                );
                self.worker = Some(worker);
                self.has_told = false;
                self.trouble.overcome();
                self.pairs.forget();
            }
            Err(why) => self.fail(now, &why),
        }
    }

    fn try_start(&self, dir: &Path, users: Users) -> Result<Worker, String> {
        let control = run_dir::socket(dir, Role::Reader, &self.name);
        run_dir::fits(&control)?;
        run_dir::fits(&self.socket)?;
        let parent = self.socket.parent().unwrap_or(Path::new("/"));
        crate::host::lock::make_dir(parent, 0o755)
            .map_err(|e| format!("{}: {e}", parent.display()))?;
        let hazards = run_dir::new_hazards(dir, &self.name)
            .map_err(|e| format!("its hazards cannot be made: {e}"))?;
        let socket = process::bind_for_vmm(&self.socket, users.vmm)
            .map_err(|e| format!("{}: {e}", self.socket.display()))?;
        let setup = WorkerSetup::Reader {
            vm: self.name.clone(),
            tag: TAG.into(),
            queues: QUEUES,
            waiters: WAITERS,
            poll_us: POLL_US,
            uid: self.uid,
            user: users.worker,
        };
        if self.transport == Transport::Stream {
            // without a name nobody can connect to it
            let _ = std::fs::remove_file(&self.socket);
        }
        Worker::start(
            Role::Reader,
            &control,
            &setup,
            &[socket.as_fd(), hazards.as_fd()],
        )
        .map_err(|e| chain(&e))
    }

    /// The worker is of no use any more.
    pub fn fail(&mut self, now: Instant, why: &str) {
        if let Some(worker) = self.worker.take() {
            worker.kill();
        }
        let then = match self.trouble.fail(now, why.to_owned()) {
            Verdict::Retry(after) => format!("a new one starts in {} s", after.as_secs()),
            Verdict::GiveUp => "its mount is not served any more; viola start tries again".into(),
        };
        log::about(
            Level::Error,
            &self.name,
            format!("vread: the reader's worker is gone ({why}): {then}"),
        );
        self.stat = ReaderStat::default();
        self.pairs.forget();
        self.why = format!("its worker is gone: {why}");
    }

    /// Lets it be tried again, whatever has failed.
    pub fn forgive(&mut self) {
        self.trouble.forgive();
    }

    /// Looks whether the worker lives.
    pub fn look(&mut self, now: Instant) {
        if self.worker.as_mut().is_some_and(|w| !w.lives()) {
            self.fail(now, "it has ended");
        }
    }

    /// Puts the worker on cores of its VM, unless it is there.
    pub fn place(&mut self, cores: CpuSet) {
        let fed = self.worker.as_ref().filter(|w| !w.is_starved());
        let Some(pid) = fed.map(|w| w.pid) else {
            return;
        };
        let wanted = Some((pid, cores));
        if let Some((_, cores)) = wanted.as_ref().filter(|_| self.placed != wanted)
            && !cores.is_empty()
            && decide::put(pid, cores)
        {
            self.placed = wanted;
        }
    }

    /// Keeps its byte stream, if it is to have one.
    pub fn keep_line(&mut self, now: Instant, config: &VmVread, vm: Option<&Vm>) {
        let Some(worker) = self.worker.as_ref().filter(|_| self.has_told) else {
            return;
        };
        match self.line.keep(now, worker, self.stat.stream, config, vm) {
            Ok(state) => self.stat.stream = state,
            Err(why) => self.fail(now, &why),
        }
    }

    /// Asks the worker what it has done.
    pub fn ask(&mut self, now: Instant) {
        match self.worker.as_ref().map(Worker::reader_stat) {
            Some(Ok(stat)) => {
                self.stat = stat;
                self.has_told = true;
            }
            Some(Err(e)) => self.fail(now, &chain(&e)),
            None => {}
        }
    }

    /// Lets it read blocks of a VM, unless both know that already.
    pub fn pair(&mut self, now: Instant, dir: &Path, agent: &mut Agent, pools: Vec<String>) {
        let Some(worker) = &self.worker else {
            return;
        };
        match self.pairs.join(worker, &self.name, dir, agent, pools) {
            Ok(()) => {}
            Err(Useless::Reading(why)) => self.fail(now, &why),
            Err(Useless::Agent(why)) => agent.fail(now, &why),
        }
    }

    /// Lets it read nothing of VMs that are not among `datanodes`.
    pub fn part(&mut self, now: Instant, agents: &BTreeMap<String, Agent>, datanodes: &[String]) {
        let told = &mut self.stat.datanodes;
        let worker = self.worker.as_ref();
        if let Err(Useless::Reading(why) | Useless::Agent(why)) =
            self.pairs.part(worker, &self.name, agents, datanodes, told)
        {
            self.fail(now, &why);
        }
    }

    /// Lets it ask no other host.
    pub fn part_from_hosts(&mut self, now: Instant) {
        if !std::mem::take(&mut self.stat.remote) {
            return;
        }
        let told = self.worker.as_ref().map(|w| w.order(&Order::NoRemote, &[]));
        if let Some(Err(e)) = told {
            self.fail(now, &chain(&e));
        }
    }

    /// What is shown of it.
    pub fn show(&self) -> Shown {
        let stat = &self.stat;
        Shown {
            name: self.name.clone(),
            running: self.worker.is_some(),
            why: match &self.worker {
                Some(_) if stat.connected => String::new(),
                Some(_) => self.line.why().to_owned(),
                None => self.why.clone(),
            },
            pid: self.worker.as_ref().map_or(0, |w| w.pid),
            socket: match self.transport {
                Transport::Stream => String::new(),
                _ => self.socket.display().to_string(),
            },
            connected: stat.connected,
            transport: match (stat.stream, stat.connected) {
                (viola_vread::control::StreamState::Connected, _) => "stream".into(),
                (_, true) => "virtiofs".into(),
                _ => String::new(),
            },
            datanodes: self.pairs.ids().cloned().collect(),
            requests: stat.requests,
            reads: stat.reads,
            bytes: stat
                .bytes
                .iter()
                .chain(&stat.remote_bytes)
                .map(|(from, n)| (from.clone(), *n))
                .collect(),
            remote_reads: stat.remote_reads,
            remote_errors: stat.remote_errors,
            open: stat.open,
            withdrawn: stat.withdrawn,
            refusals: stat.refusals.clone(),
        }
    }

    /// Ends the worker, and takes the socket away.
    pub fn end(mut self, why: &str) {
        if let Some(worker) = self.worker.take() {
            worker.end(why);
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

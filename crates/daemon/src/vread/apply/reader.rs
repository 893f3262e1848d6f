// SPDX-License-Identifier: Apache-2.0
//! One VM that may read blocks: its worker, and the DataNode VMs whose blocks it may read.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use viola_host::unix_connect::is_connected;
use viola_host::{CpuSet, Vm};
use viola_vread::control::{Order, ReaderStat, Role, WorkerSetup};

use super::pairs::{Datanode, Failed, Pairs};
use super::stream::Stream;
use crate::host::affinity;
use crate::retry::Retry;
use crate::workers::process::{self, Killed, Worker};
use crate::workers::run_dir;
use crate::workers::user::Users;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::{Transport, VmVread};

/// How long another process than the VM's is connected to a reader's socket before the log says so.
const STRANGER_DELAY: Duration = Duration::from_secs(5);

/// State of one reader.
#[derive(Debug)]
pub struct Reader {
    /// The VM, as the configuration names it.
    pub name: String,
    /// Its worker.
    pub worker: Option<Worker>,
    killed: Killed,
    /// Its counts, as of the last poll.
    pub stat: ReaderStat,
    pub(in crate::vread) socket: PathBuf,
    uid: u32,
    pub(in crate::vread) pairs: Pairs,
    /// Process of the worker that was moved, and its cores since then.
    placed: Option<(u32, CpuSet)>,
    retry: Retry,
    pub(in crate::vread) why: String,
    pub(in crate::vread) transport: Transport,
    pub(in crate::vread) stream: Stream,
    /// Whether the counts of this worker were read.
    was_polled: bool,
    /// Number of the connection to the socket whose other end is not the VM's process, and since when; without a time once the
    /// log says so.
    stranger: Option<(u64, Option<Instant>)>,
}

impl Reader {
    /// A reader whose hypervisor connects to `socket`. `worker` is one that an earlier daemon has started.
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
            killed: Killed::default(),
            stat: ReaderStat::default(),
            socket,
            uid,
            pairs: Pairs::default(),
            placed: None,
            retry: Retry::default(),
            why: "its worker has not started yet".into(),
            transport,
            stream: Stream::default(),
            was_polled: false,
            stranger: None,
        }
    }

    /// Whether the worker was started with this socket, user and transport.
    pub fn is_started_with(&self, socket: &Path, uid: u32, transport: Transport) -> bool {
        self.socket == socket && self.uid == uid && self.transport == transport
    }

    /// Starts the worker if there is none.
    pub fn start(&mut self, now: Instant, dir: &Path, users: Users) {
        if self.worker.is_some() || self.killed.is_left() || self.retry.must_wait(now) {
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
                self.was_polled = false;
                self.stranger = None;
                self.retry.succeeded();
                self.pairs.clear();
            }
            Err(why) => self.fail(now, &why),
        }
    }

    fn try_start(&self, dir: &Path, users: Users) -> Result<Worker, String> {
        let control = run_dir::socket(dir, Role::Reader, &self.name);
        run_dir::check_socket_path(&control)?;
        run_dir::check_socket_path(&self.socket)?;
        let parent = self.socket.parent().unwrap_or(Path::new("/"));
        crate::host::files::make_dir(parent, 0o755)
            .map_err(|e| format!("{}: {e}", parent.display()))?;
        let hazards = run_dir::new_hazards(dir, &self.name)
            .map_err(|e| format!("its hazard cells cannot be created: {e}"))?;
        let socket = process::bind_for_vmm(&self.socket, users.vmm)
            .map_err(|e| format!("{}: {e}", self.socket.display()))?;
        let setup = WorkerSetup::Reader {
            vm: self.name.clone(),
            uid: self.uid,
            user: users.of_new_worker()?,
        };
        if self.transport == Transport::Stream {
            // A socket without a name accepts no connection.
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

    /// Kills the worker after a failure. A new one starts when [`Retry`] allows.
    pub fn fail(&mut self, now: Instant, why: &str) {
        if let Some(worker) = self.worker.take() {
            self.killed.kill(worker);
        }
        let next = self.retry.failed(now, why.to_owned());
        let then = next.worker_text("its mount is not served any more");
        let state = self.killed.state();
        log::about(
            Level::Error,
            &self.name,
            format!("vread: the reader's worker is {state} ({why}): {then}"),
        );
        self.stat = ReaderStat::default();
        self.pairs.clear();
        self.why = format!("its worker is {state}: {why}");
    }

    /// Forgets failures: the operator has changed something.
    pub fn reset_failures(&mut self) {
        self.retry.reset();
    }

    /// Checks whether the worker runs.
    pub fn check(&mut self, now: Instant) {
        if self.worker.as_mut().is_some_and(|w| !w.is_running()) {
            self.fail(now, "it has ended");
        }
    }

    /// Moves the worker to these cores, unless it is there or had to leave them.
    pub fn place(&mut self, cores: CpuSet) {
        let movable = self.worker.as_ref().filter(|w| !w.is_starved());
        let Some(pid) = movable.map(|w| w.pid) else {
            return;
        };
        let wanted = Some((pid, cores));
        if let Some((_, cores)) = wanted.as_ref().filter(|_| self.placed != wanted)
            && !cores.is_empty()
            && affinity::move_process(pid, cores)
        {
            self.placed = wanted;
        }
    }

    /// Connects its byte stream, if it has one and it is not connected.
    pub fn connect_stream(&mut self, now: Instant, config: &VmVread, vm: Option<&Vm>) {
        let Some(worker) = self.worker.as_ref().filter(|_| self.was_polled) else {
            return;
        };
        match self
            .stream
            .connect(now, worker, self.stat.stream, config, vm)
        {
            Ok(state) => self.stat.stream = state,
            Err(why) => self.fail(now, &why),
        }
    }

    /// Reads the counts of the worker.
    pub fn poll(&mut self, now: Instant) {
        match self.worker.as_ref().map(Worker::reader_stat) {
            Some(Ok(stat)) => {
                self.stat = stat;
                self.was_polled = true;
            }
            Some(Err(e)) => self.fail(now, &chain(&e)),
            None => {}
        }
    }

    /// Lets the connection to its socket find blocks, if the other end is the VM's process. Call it after [`Reader::poll`], which
    /// shows the connection: its number keeps the order from counting for a later one.
    pub fn confirm_connection(&mut self, now: Instant, vm: Option<&Vm>) {
        let (Some(worker), Some(connection), false) =
            (&self.worker, self.stat.connection, self.stat.confirmed)
        else {
            return;
        };
        let is_other_end = |vm: &Vm| is_connected(vm.pid, worker.pid).unwrap_or(false);
        if vm.is_some_and(is_other_end) {
            match worker.order(&Order::Serve { connection }, &[]) {
                Ok(()) => self.stat.confirmed = true,
                Err(e) => self.fail(now, &chain(&e)),
            }
            return;
        }
        // The VM may just have been started, and the list of VMs be older.
        let since = match self.stranger {
            Some((of, since)) if of == connection => since,
            _ => Some(now),
        };
        let is_certain = since.is_some_and(|since| now.duration_since(since) > STRANGER_DELAY);
        self.stranger = Some((connection, since.filter(|_| !is_certain)));
        if is_certain {
            let socket = self.socket.display();
            log::about(
                Level::Warning,
                &self.name,
                format!(
                    "vread: another process than the VM's is connected to {socket}: it finds no block, and the VM cannot connect \
                     meanwhile"
                ),
            );
        }
    }

    /// Lets it read blocks of a DataNode VM, unless both workers know that already.
    ///
    /// # Errors
    /// Why the agent's worker cannot be used.
    pub fn pair(
        &mut self,
        now: Instant,
        dir: &Path,
        datanode: Datanode<'_>,
        pools: Vec<String>,
    ) -> Result<(), String> {
        let Some(worker) = &self.worker else {
            return Ok(());
        };
        match self.pairs.join(worker, &self.name, dir, datanode, pools) {
            Ok(()) => Ok(()),
            Err(Failed::Reader(why)) => {
                self.fail(now, &why);
                Ok(())
            }
            Err(Failed::Agent(why)) => Err(why),
        }
    }

    /// Lets it read no block of VMs that are not in `kept`.
    pub fn retain_pairs(
        &mut self,
        now: Instant,
        datanodes: &BTreeMap<String, Datanode<'_>>,
        kept: &[String],
    ) {
        let (worker, known) = (self.worker.as_ref(), &mut self.stat.datanodes);
        let done = (self.pairs).retain(worker, &self.name, datanodes, kept, known);
        if let Err(Failed::Reader(why) | Failed::Agent(why)) = done {
            self.fail(now, &why);
        }
    }

    /// Lets it read no block of other hosts.
    pub fn leave_other_hosts(&mut self, now: Instant) {
        if !std::mem::take(&mut self.stat.remote) {
            return;
        }
        let done = self.worker.as_ref().map(|w| w.order(&Order::NoRemote, &[]));
        if let Some(Err(e)) = done {
            self.fail(now, &chain(&e));
        }
    }

    /// Ends the worker, and removes the socket.
    pub fn end(mut self, why: &str) {
        if let Some(worker) = self.worker.take() {
            worker.end(why);
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

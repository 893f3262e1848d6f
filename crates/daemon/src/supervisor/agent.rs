// SPDX-License-Identifier: Apache-2.0
//! One VM with an agent: its worker, the channel to its agent, its disks, and QEMU's events. The worker serves vread (blocks of a
//! DataNode VM) and vpipe (files that the host sends).

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::qemu::disk_watch::DiskWatch;
use viola_host::{Hypervisor, Nic, Vm, sockets, unix_connect};
use viola_proto::pipe::status::PipeVm;
use viola_proto::vread::Datanode as DatanodeStatus;
use viola_vread::control::{AgentStat, ImageSpec, Order, Role, Session, WorkerSetup};

use crate::retry::Retry;
use crate::vpipe::Pipes;
use crate::vread::apply::pairs::Datanode;
use crate::vread::observe::block_disks::BlockDisks;
use crate::vread::observe::disks::{self, Disk};
use crate::workers::process::{Killed, Worker, WorkerError};
use crate::workers::run_dir;
use crate::workers::user::Users;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::{VmPipe, VmVread, Vread};

/// A VM without a NIC gets a worker for vpipe after this time, which then serves blocks only.
const NIC_TIMEOUT: Duration = Duration::from_secs(10);
/// The daemon connects to the agent's channel and to QEMU's socket at most this often.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// Disks are read again this often. QEMU has no event for a live external snapshot, after which the VM writes to another file. An
/// agent names a block only some seconds after it was written, so the new file is known by then.
const DISK_INTERVAL: Duration = Duration::from_secs(1);

/// State of one VM with an agent.
#[derive(Debug)]
pub struct Agent {
    /// The VM.
    pub vm: Vm,
    /// Its worker.
    pub worker: Option<Worker>,
    killed: Killed,
    /// Its counts, as of the last poll.
    pub stat: AgentStat,
    /// Its disks, open.
    pub disks: Vec<Disk>,
    /// Those that hold blocks.
    with_blocks: BlockDisks,
    /// All disks that it ever had, so no number is used twice. Numbers start at `first_number`, which is random.
    known_disks: Vec<ImageSpec>,
    first_number: u32,
    first_seen: Instant,
    /// Disks that cannot be read, and why.
    left_out: Vec<String>,
    disks_read: Option<Instant>,
    watch: Option<DiskWatch>,
    channel_tried: Option<Instant>,
    watch_tried: Option<Instant>,
    /// Why blocks are not served.
    why: String,
    retry: Retry,
    pipes: Pipes,
}

impl Agent {
    /// A VM without a worker, or with the `worker` that an earlier daemon has started.
    pub fn new(now: Instant, vm: Vm, worker: Option<Worker>) -> Self {
        let stat = worker.as_ref().and_then(|w| w.agent_stat().ok());
        let stat = stat.unwrap_or_default();
        let mut with_blocks = BlockDisks::default();
        with_blocks.update(now, &stat.block_disks);
        Self {
            known_disks: stat.images.clone(),
            first_number: run_dir::random_id().unwrap_or(1) >> 1,
            first_seen: now,
            vm,
            worker,
            killed: Killed::default(),
            stat,
            disks: Vec::new(),
            with_blocks,
            left_out: Vec::new(),
            disks_read: None,
            watch: None,
            channel_tried: None,
            watch_tried: None,
            why: "its worker has not started yet".into(),
            retry: Retry::default(),
            pipes: Pipes::default(),
        }
    }

    /// Starts the worker if there is none. A worker with another `[vm.pipe]` is replaced.
    pub fn start(
        &mut self,
        now: Instant,
        dir: &Path,
        config: &Vread,
        pipe: Option<&VmPipe>,
        users: Users,
    ) {
        let is_sending = self.stat.pipes.is_some();
        if (!self.pipes.is_started_with(&self.vm, pipe, is_sending)
            || self.pipes.has_other_limit(now))
            && let Some(worker) = self.worker.take()
        {
            let why = "[vm.pipe], the NICs of the VM or their limits have changed";
            self.killed.end(worker, why);
            self.stat = AgentStat::default();
        }
        if self.worker.is_some() || self.killed.is_left() || self.retry.must_wait(now) {
            return;
        }
        // A VM that boots opens its NIC a little later.
        let has_nic = |pipe: &VmPipe| {
            let is_it = |nic: &Nic| pipe.tap.as_ref().is_none_or(|tap| nic.tap == *tap);
            self.vm.nics.iter().any(is_it)
        };
        if pipe.is_some_and(|pipe| !has_nic(pipe))
            && now.saturating_duration_since(self.first_seen) < NIC_TIMEOUT
        {
            return;
        }
        match self.try_start(dir, config, pipe, users) {
            Ok(worker) => {
                log::about(
                    Level::Info,
                    &self.vm.id,
                    format!("vread: agent's worker runs, process {}", worker.pid),
                );
                self.worker = Some(worker);
                self.retry.succeeded();
                self.disks_read = None;
                self.channel_tried = None;
                self.pipes.worker_started();
            }
            Err(why) => self.fail(now, &why),
        }
    }

    /// Gives the worker the VM's weight, see [`Pipes::set_weight`].
    pub fn set_weight(&mut self, weight: Option<u32>) {
        if let Some(worker) = &self.worker {
            self.pipes.set_weight(&self.vm.id, worker, weight);
        }
    }

    fn try_start(
        &mut self,
        dir: &Path,
        config: &Vread,
        pipe: Option<&VmPipe>,
        users: Users,
    ) -> Result<Worker, String> {
        let id = self.vm.id.as_str();
        let socket = run_dir::socket(dir, Role::Agent, id);
        run_dir::check_socket_path(&socket)?;
        let table = run_dir::open_table(dir, id, config.limits().blocks)
            .map_err(|e| format!("its table cannot be made: {e}"))?;
        self.pipes.prepare(&self.vm, pipe);
        let (pipes, pipe_fds) = self.pipes.setup();
        let setup = WorkerSetup::Agent {
            vm: self.vm.id.to_string(),
            limits: config.limits(),
            pipes,
            user: users.of_new_worker()?,
        };
        let mut fds = vec![table.as_fd()];
        fds.extend(pipe_fds);
        Worker::start(Role::Agent, &socket, &setup, &fds).map_err(|e| chain(&e))
    }

    /// Kills the worker after a failure. A new one starts when [`Retry`] allows.
    pub fn fail(&mut self, now: Instant, why: &str) {
        if let Some(worker) = self.worker.take() {
            self.killed.kill(worker);
        }
        let next = self.retry.failed(now, why.to_owned());
        let then = next.worker_text("its blocks are not served any more");
        let state = self.killed.state();
        let what = format!("vread: the agent's worker is {state} ({why}): {then}");
        log::about(Level::Error, &self.vm.id, what);
        self.stat = AgentStat::default();
        self.why = format!("its worker is {state}: {why}");
    }

    /// Forgets failures: the operator has changed something.
    pub fn reset_failures(&mut self) {
        self.retry.reset();
    }

    /// Reads the counts of the worker, among them which disks hold blocks.
    pub fn poll(&mut self, now: Instant) {
        match self.worker.as_ref().map(Worker::agent_stat) {
            Some(Ok(stat)) => self.stat = stat,
            Some(Err(e)) => self.fail(now, &chain(&e)),
            None => {}
        }
        for id in self.with_blocks.update(now, &self.stat.block_disks) {
            let disk = self.disks.iter().find(|d| d.spec.id == id);
            let path = disk.map_or("a disk", |d| d.spec.path.as_str());
            log::about(
                Level::Info,
                &self.vm.id,
                format!("vread: readers close {path}: its agent names no block on it any more"),
            );
        }
    }

    /// Checks whether the worker runs, takes QEMU's events, and reads the disks again when that is due.
    pub fn check(&mut self, now: Instant, config: &VmVread) {
        if self.worker.as_mut().is_some_and(|w| !w.is_running()) {
            self.fail(now, "it has ended");
        }
        if self.worker.is_none() {
            return;
        }
        let mut is_due = self
            .disks_read
            .is_none_or(|at| now.saturating_duration_since(at) >= DISK_INTERVAL);
        if is_due || !self.pipes.watches_run_state() {
            self.watch_run_state(now);
        }
        if self.vm.hypervisor == Hypervisor::Qemu {
            is_due |= self.take_events(now, config);
            is_due &= self.watch.is_some();
        }
        if is_due {
            self.read_disks(now, config);
        }
    }

    /// Takes QEMU's events; `true` when the disks have to be read again.
    fn take_events(&mut self, now: Instant, config: &VmVread) -> bool {
        let Some(watch) = &mut self.watch else {
            return self.connect_to_qemu(now, config);
        };
        match watch.changes() {
            Ok(events) if events.is_empty() => false,
            Ok(mut events) => {
                events.sort_unstable();
                events.dedup();
                let why = events.join(", ").to_lowercase();
                self.order(now, &Order::EndEpoch { why });
                true
            }
            Err(e) => {
                self.watch = None;
                self.why = format!("QEMU's events stopped: {e}");
                self.order(
                    now,
                    &Order::NoChannel {
                        why: self.why.clone(),
                    },
                );
                false
            }
        }
    }

    fn connect_to_qemu(&mut self, now: Instant, config: &VmVread) -> bool {
        if self
            .watch_tried
            .is_some_and(|at| now.saturating_duration_since(at) < RECONNECT_INTERVAL)
        {
            return false;
        }
        self.watch_tried = Some(now);
        let (path, owner) = match &config.qmp {
            Some(path) => (Some(path.clone()), None),
            None => {
                let found = sockets::event_socket(&self.vm).unwrap_or_default();
                (found, Some(self.vm.pid))
            }
        };
        let Some(path) = path else {
            self.why = "viola needs a QMP socket of its own to hear of resets, snapshots and migrations: give the VM \
                        a second one (-qmp unix:PATH,server=on,wait=off), or name it in [vm.vread] qmp"
                .into();
            return false;
        };
        match DiskWatch::connect(&path, owner) {
            Ok(watch) => {
                self.watch = Some(watch);
                // Earlier events are unknown, so names from before may be wrong.
                self.order(
                    now,
                    &Order::EndEpoch {
                        why: "events followed from now on".into(),
                    },
                );
                true
            }
            Err(e) => {
                self.why = format!("QMP socket {}: {e}", path.display());
                false
            }
        }
    }

    fn watch_run_state(&mut self, now: Instant) {
        let is_sending = self.stat.pipes.is_some();
        let worker = self.worker.as_ref();
        if let Err(e) = self.pipes.watch_run_state(&self.vm, worker, is_sending) {
            self.fail(now, &chain(&e));
        }
    }

    fn read_disks(&mut self, now: Instant, config: &VmVread) {
        self.disks_read = Some(now);
        let chains = match self.watch.as_mut().map(DiskWatch::chains) {
            Some(Ok(chains)) => Some(chains),
            Some(Err(e)) => {
                self.watch = None;
                self.why = format!("QEMU does not report its disks: {e}");
                self.order(
                    now,
                    &Order::NoChannel {
                        why: self.why.clone(),
                    },
                );
                return;
            }
            None => None,
        };
        let (disks, mut left_out) = disks::open(
            &self.vm,
            config,
            chains.as_deref(),
            &self.known_disks,
            self.first_number,
            self.pipes.may_write(),
        );
        let specs: Vec<ImageSpec> = disks.iter().map(|d| d.spec.clone()).collect();
        for spec in &specs {
            if !self.known_disks.contains(spec) {
                self.known_disks.push(spec.clone());
            }
        }
        if specs != self.stat.images {
            let order = Order::Images {
                datanode: self.vm.id.to_string(),
                images: specs.clone(),
                why: "the disks changed".into(),
            };
            let told = self
                .worker
                .as_ref()
                .map(|w| w.order(&order, &Disk::own_fds(&disks)));
            match told {
                Some(Ok(())) => self.stat.images = specs,
                Some(Err(WorkerError::Refused(why))) => left_out.push(why),
                Some(Err(e)) => self.fail(now, &chain(&e)),
                None => {}
            }
        }
        for why in left_out.iter().filter(|w| !self.left_out.contains(w)) {
            log::about(
                Level::Warning,
                &self.vm.id,
                format!("vread: a disk is left out: {why}"),
            );
        }
        self.left_out = left_out;
        self.with_blocks.retain(&disks);
        self.disks = disks;
    }

    /// Gives the worker the channel to the agent, if it has none. The worker has to know all readers before: it welcomes an agent once
    /// none of them reads by old names.
    pub fn connect(&mut self, now: Instant, config: &VmVread) {
        let is_ready = self.worker.is_some()
            && self.stat.session == Session::NoChannel
            && (self.vm.hypervisor == Hypervisor::Uml || self.watch.is_some());
        let must_wait = self
            .channel_tried
            .is_some_and(|at| now.saturating_duration_since(at) < RECONNECT_INTERVAL);
        if !is_ready || must_wait {
            return;
        }
        self.channel_tried = Some(now);
        let path = match &config.agent {
            Some(path) => Ok(Some(path.clone())),
            None => sockets::agent_socket(&self.vm),
        };
        // QEMU listens at the port itself. At the socket of a UML guest a program beside it does.
        let is_qemus = config.agent.is_none() && self.vm.hypervisor == Hypervisor::Qemu;
        let owner = is_qemus.then_some(self.vm.pid);
        let connected = match path {
            Ok(Some(path)) => unix_connect::connect(&path, owner)
                .map_err(|e| format!("its agent's channel {}: {e}", path.display())),
            Ok(None) => Err("it has no channel to an agent".into()),
            Err(e) => Err(e.one_line()),
        };
        match connected {
            Ok(stream) => {
                if let Some(worker) = &self.worker
                    && let Err(e) = worker.order(&Order::Channel, &[stream.as_fd()])
                {
                    self.fail(now, &chain(&e));
                } else {
                    self.stat.session = Session::Silent;
                    self.why = "no agent has answered yet".into();
                }
            }
            Err(why) => self.why = why,
        }
    }

    fn order(&mut self, now: Instant, order: &Order) {
        let told = self.worker.as_ref().map(|w| w.order(order, &[]));
        if let Some(Err(e)) = told {
            self.fail(now, &chain(&e));
        }
    }

    /// The VM as readers and other hosts need it.
    pub fn datanode(&self) -> Datanode<'_> {
        Datanode {
            vm: &self.vm,
            worker: self.worker.as_ref(),
            disks: &self.disks,
            with_blocks: &self.with_blocks,
        }
    }

    /// What the control socket shows of the VM as a sender.
    pub fn sender_status(&self) -> PipeVm {
        let stat = &self.stat;
        let is_proved = stat.session == Session::Proved;
        let why = match (&stat.pipes, self.pipes.error()) {
            (None, Some(why)) => why.clone(),
            _ => self.why_not(),
        };
        PipeVm {
            vm: self.vm.id.to_string(),
            name: self.vm.name.clone(),
            serving: is_proved && stat.pipes.is_some(),
            why,
            work: stat.pipes.clone().unwrap_or_default(),
        }
    }

    /// What the control socket shows of the VM as a DataNode.
    pub fn status(&self) -> DatanodeStatus {
        let stat = &self.stat;
        let why = match stat.session {
            Session::Proved if !stat.agent_why.is_empty() => stat.agent_why.clone(),
            _ => self.why_not(),
        };
        DatanodeStatus {
            vm: self.vm.id.to_string(),
            name: self.vm.name.clone(),
            serving: stat.session == Session::Proved && stat.agent_why.is_empty(),
            why,
            pid: self.worker.as_ref().map_or(0, |w| w.pid),
            agent: stat.agent_version.clone(),
            epoch: stat.epoch,
            blocks: stat.blocks,
            bytes: stat.bytes,
            extents: stat.extents,
            held_bytes: stat.agent.get("held_bytes").copied().unwrap_or(0),
            readers: stat.readers.clone(),
            images: stat.images.iter().map(|i| i.path.clone()).collect(),
            named: stat.named,
            withdrawn: stat.withdrawn,
            waiting: stat.waiting,
            lookups: stat.lookups,
            unknown: stat.unknown,
            refusals: stat.refusals.clone(),
            withdrawals: stat.withdrawals.clone(),
            ends: stat.ends.clone(),
        }
    }

    /// Why no block is served, or the disks whose blocks are served.
    fn why_not(&self) -> String {
        let stat = &self.stat;
        match stat.session {
            _ if self.worker.is_none() => self.why.clone(),
            Session::NoChannel => self.why.clone(),
            Session::Silent => "no agent has answered yet".into(),
            Session::Ending => match &stat.held_by {
                Some((reader, ms)) => format!("it waits for reads of {reader} since {ms} ms"),
                None => "the agent's session starts".into(),
            },
            Session::Welcomed if stat.images.is_empty() && !self.left_out.is_empty() => {
                self.left_out.join("; ")
            }
            Session::Welcomed => {
                "none of its file systems is on a disk that viola can read yet".into()
            }
            Session::Proved => {
                let all: Vec<&str> = stat.proved.values().map(String::as_str).collect();
                all.join("; ")
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! One DataNode VM: its worker, the channel to its agent, its disks, and QEMU's events.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::qemu::disk_watch::DiskWatch;
use viola_host::{Hypervisor, Vm, sockets, unix_connect};
use viola_policy::slices::DEFAULT_WEIGHT;
use viola_proto::pipe::status::PipeVm;
use viola_proto::vread::Datanode;
use viola_vread::control::{AgentStat, ImageSpec, Order, Role, Session, WorkerSetup};

use crate::retry::{Trouble, Verdict};
use crate::vpipe::apply::Place;
use crate::vpipe::observe::Sign;
use crate::vread::observe::disks::{self, Disk};
use crate::workers::process::{Worker, WorkerError};
use crate::workers::run_dir;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::{VmPipe, VmVread, Vread};

/// Time between two attempts to reach the agent's channel or QEMU's socket.
const RETRY: Duration = Duration::from_secs(1);
/// Disks are looked at anew after this time. A live external snapshot, which makes another file the one that is
/// written to, has no event; an agent names a block only some seconds after it was written, which is later than this.
const DISKS_AGE: Duration = Duration::from_secs(1);

/// What this side knows of one VM.
#[derive(Debug)]
pub struct Agent {
    /// The VM.
    pub vm: Vm,
    /// Its worker.
    pub worker: Option<Worker>,
    /// What that has done, as of the last time it was asked.
    pub stat: AgentStat,
    /// Its disks, open.
    pub disks: Vec<Disk>,
    /// All disks that it ever had, so that no number is given twice; the first one is random.
    numbers: Vec<ImageSpec>,
    first: u32,
    left_out: Vec<String>,
    looked: Option<Instant>,
    watch: Option<DiskWatch>,
    tried: Option<Instant>,
    watch_tried: Option<Instant>,
    /// Why there is no channel.
    why: String,
    trouble: Trouble,
    /// Process of the worker and weight that it has.
    weighed: Option<(u32, Option<u32>)>,
    /// What the worker was told of `[vm.pipe]`; `None` for one of an earlier daemon.
    started_with: Option<Option<VmPipe>>,
    /// Why the VM's files cannot be sent.
    no_pipes: Option<String>,
    /// Where they are sent from. Kept beside the worker: when that is killed its connections are reset, and what says so has
    /// to find the programs still there.
    place: Option<Place>,
    /// By what the worker sees that the VM stands still.
    sign: Option<Sign>,
}

impl Agent {
    /// A VM that was not served before, or whose worker an earlier daemon has started.
    pub fn new(vm: Vm, worker: Option<Worker>) -> Self {
        let stat = worker.as_ref().and_then(|w| w.agent_stat().ok());
        let stat = stat.unwrap_or_default();
        Self {
            numbers: stat.images.clone(),
            first: run_dir::random_id().unwrap_or(1) >> 1,
            vm,
            worker,
            stat,
            disks: Vec::new(),
            left_out: Vec::new(),
            looked: None,
            watch: None,
            tried: None,
            watch_tried: None,
            why: "its worker has not started yet".into(),
            trouble: Trouble::default(),
            weighed: None,
            started_with: None,
            no_pipes: None,
            place: None,
            sign: None,
        }
    }

    /// Starts the worker if there is none; `true` when there is a new one.
    pub fn start(
        &mut self,
        now: Instant,
        dir: &Path,
        config: &Vread,
        pipe: Option<&VmPipe>,
        user: Option<(u32, u32)>,
    ) -> bool {
        if !self.is_told(pipe)
            && let Some(worker) = self.worker.take()
        {
            worker.end("its [vm.pipe] is another one");
            self.stat = AgentStat::default();
        }
        if self.worker.is_some() || self.trouble.holds_back(now) {
            return false;
        }
        match self.try_start(dir, config, pipe, user) {
            Ok(worker) => {
                log::about(
                    Level::Info,
                    &self.vm.id,
                    format!("vread: agent's worker runs, process {}", worker.pid),
                );
                self.worker = Some(worker);
                self.trouble.overcome();
                self.looked = None;
                self.tried = None;
                self.sign = None;
                true
            }
            Err(why) => {
                self.fail(now, &why);
                false
            }
        }
    }

    /// What the worker does in the VM's place it does with the VM's weight, where it has one.
    pub fn weigh(&mut self, weight: Option<u32>) {
        let Some(worker) = &self.worker else {
            return;
        };
        let told = Some((worker.pid, weight));
        if self.weighed != told {
            let nice = viola_policy::pipes::nice(weight.unwrap_or(DEFAULT_WEIGHT));
            if let Err(e) = set_nice(worker.pid, nice) {
                let what = format!("vpipe: its worker does not get its weight: {e}");
                log::about(Level::Warning, &self.vm.id, what);
            }
            self.weighed = told;
        }
    }

    fn try_start(
        &mut self,
        dir: &Path,
        config: &Vread,
        pipe: Option<&VmPipe>,
        user: Option<(u32, u32)>,
    ) -> Result<Worker, String> {
        let id = self.vm.id.as_str();
        let socket = run_dir::socket(dir, Role::Agent, id);
        run_dir::fits(&socket)?;
        let table = run_dir::open_table(dir, id, config.limits.blocks)
            .map_err(|e| format!("its table cannot be made: {e}"))?;
        // A worker without it still serves blocks.
        self.no_pipes = None;
        self.place = match pipe.map(|pipe| Place::make(&self.vm, pipe)) {
            Some(Err(why)) => {
                log::about(Level::Error, id, &why);
                self.no_pipes = Some(why);
                None
            }
            Some(Ok(place)) => Some(place),
            None => None,
        };
        self.started_with = Some(pipe.cloned());
        let setup = WorkerSetup::Agent {
            vm: self.vm.id.to_string(),
            limits: config.limits,
            pipes: self.place.as_ref().map(|place| place.setup.clone()),
            user,
        };
        let mut fds = vec![table.as_fd()];
        fds.extend(self.place.iter().flat_map(Place::fds));
        Worker::start(Role::Agent, &socket, &setup, &fds).map_err(|e| chain(&e))
    }

    /// Whether the worker was started with this. Of one that has gone on it is only known whether it sends anything.
    fn is_told(&self, pipe: Option<&VmPipe>) -> bool {
        match &self.started_with {
            Some(told) => told.as_ref() == pipe,
            None => self.stat.pipes.is_some() == pipe.is_some(),
        }
    }

    /// The worker is of no use any more.
    pub fn fail(&mut self, now: Instant, why: &str) {
        if let Some(worker) = self.worker.take() {
            worker.kill();
        }
        let then = match self.trouble.fail(now, why.to_owned()) {
            Verdict::Retry(after) => format!("a new one starts in {} s", after.as_secs()),
            Verdict::GiveUp => "its blocks are not served any more; viola start tries again".into(),
        };
        log::about(
            Level::Error,
            &self.vm.id,
            format!("vread: the agent's worker is gone ({why}): {then}"),
        );
        self.stat = AgentStat::default();
        self.why = format!("its worker is gone: {why}");
    }

    /// Lets it be tried again, whatever has failed.
    pub fn forgive(&mut self) {
        self.trouble.forgive();
    }

    /// Asks the worker what it has done.
    pub fn ask(&mut self, now: Instant) {
        match self.worker.as_ref().map(Worker::agent_stat) {
            Some(Ok(stat)) => self.stat = stat,
            Some(Err(e)) => self.fail(now, &chain(&e)),
            None => {}
        }
    }

    /// Looks whether the worker lives, what QEMU has to say, and whether the disks are the same.
    pub fn look(&mut self, now: Instant, config: &VmVread) {
        if self.worker.as_mut().is_some_and(|w| !w.lives()) {
            self.fail(now, "it has ended");
        }
        if self.worker.is_none() {
            return;
        }
        let mut is_due = self
            .looked
            .is_none_or(|at| now.saturating_duration_since(at) >= DISKS_AGE);
        if is_due || self.sign.is_none() {
            self.look_at_pulse(now);
        }
        if self.vm.hypervisor == Hypervisor::Qemu {
            is_due |= self.listen(now, config);
            is_due &= self.watch.is_some();
        }
        if is_due {
            self.look_at_disks(now, config);
        }
    }

    /// Follows QEMU's events; `true` when disks have to be looked at again.
    fn listen(&mut self, now: Instant, config: &VmVread) -> bool {
        let Some(watch) = &mut self.watch else {
            return self.begin_to_listen(now, config);
        };
        match watch.changes() {
            Ok(events) if events.is_empty() => false,
            Ok(mut events) => {
                events.sort_unstable();
                events.dedup();
                let why = events.join(", ").to_lowercase();
                self.tell(now, &Order::EndEpoch { why });
                true
            }
            Err(e) => {
                self.watch = None;
                self.why = format!("QEMU's events cannot be followed any more: {e}");
                self.tell(
                    now,
                    &Order::NoChannel {
                        why: self.why.clone(),
                    },
                );
                false
            }
        }
    }

    fn begin_to_listen(&mut self, now: Instant, config: &VmVread) -> bool {
        if self
            .watch_tried
            .is_some_and(|at| now.saturating_duration_since(at) < RETRY)
        {
            return false;
        }
        self.watch_tried = Some(now);
        let path = match &config.qmp {
            Some(path) => Some(path.clone()),
            None => sockets::event_socket(&self.vm).unwrap_or_default(),
        };
        let Some(path) = path else {
            self.why = "viola needs a QMP socket of its own to hear of resets, snapshots and migrations: give the VM \
                        a second one (-qmp unix:PATH,server=on,wait=off), or name it in [vm.vread] qmp"
                .into();
            return false;
        };
        match DiskWatch::connect(&path) {
            Ok(watch) => {
                self.watch = Some(watch);
                // What has happened before is not known.
                self.tell(
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

    /// Tells the worker by what it sees that the VM stands still, if that has become something else.
    fn look_at_pulse(&mut self, now: Instant) {
        if self.stat.pipes.is_none() && self.place.is_none() {
            return;
        }
        let sign = Sign::of(&self.vm);
        if self.sign.as_ref() == Some(&sign) {
            return;
        }
        let files = sign.open();
        let told = (self.worker.as_ref()).map(|worker| worker.order(&files.order(), &files.fds()));
        match told {
            Some(Ok(())) => self.sign = Some(sign),
            Some(Err(e)) => self.fail(now, &chain(&e)),
            None => {}
        }
    }

    fn look_at_disks(&mut self, now: Instant, config: &VmVread) {
        self.looked = Some(now);
        let chains = match self.watch.as_mut().map(DiskWatch::chains) {
            Some(Ok(chains)) => Some(chains),
            Some(Err(e)) => {
                self.watch = None;
                self.why = format!("QEMU does not tell of its disks: {e}");
                self.tell(
                    now,
                    &Order::NoChannel {
                        why: self.why.clone(),
                    },
                );
                return;
            }
            None => None,
        };
        let pipe = self.started_with.as_ref().and_then(Option::as_ref);
        let writes = pipe.is_some_and(|pipe| pipe.writes);
        let (disks, mut left_out) = disks::open(
            &self.vm,
            config,
            chains.as_deref(),
            &self.numbers,
            self.first,
            writes,
        );
        let specs: Vec<ImageSpec> = disks.iter().map(|d| d.spec.clone()).collect();
        for spec in &specs {
            if !self.numbers.contains(spec) {
                self.numbers.push(spec.clone());
            }
        }
        if specs != self.stat.images {
            let order = Order::Images {
                datanode: self.vm.id.to_string(),
                images: specs.clone(),
                why: "other disks".into(),
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
        self.disks = disks;
    }

    /// Gives the worker the channel to the agent, if it has none. All readers have to be known to it by now: an agent
    /// is welcomed when none of them reads any more.
    pub fn connect(&mut self, now: Instant, config: &VmVread) {
        let is_ready = self.worker.is_some()
            && self.stat.session == Session::NoChannel
            && (self.vm.hypervisor == Hypervisor::Uml || self.watch.is_some());
        let waits = self
            .tried
            .is_some_and(|at| now.saturating_duration_since(at) < RETRY);
        if !is_ready || waits {
            return;
        }
        self.tried = Some(now);
        let path = match &config.agent {
            Some(path) => Ok(Some(path.clone())),
            None => sockets::agent_socket(&self.vm),
        };
        let connected = match path {
            Ok(Some(path)) => unix_connect::connect(&path)
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

    fn tell(&mut self, now: Instant, order: &Order) {
        let told = self.worker.as_ref().map(|w| w.order(order, &[]));
        if let Some(Err(e)) = told {
            self.fail(now, &chain(&e));
        }
    }

    /// What is shown of it as a VM whose files are sent.
    pub fn show_sender(&self) -> PipeVm {
        let stat = &self.stat;
        let is_proved = stat.session == Session::Proved;
        let why = match (&stat.pipes, &self.no_pipes) {
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

    /// What is shown of it.
    pub fn show(&self) -> Datanode {
        let stat = &self.stat;
        let why = match stat.session {
            Session::Proved if !stat.agent_why.is_empty() => stat.agent_why.clone(),
            _ => self.why_not(),
        };
        Datanode {
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

    /// Why nothing is served, or of which disks.
    fn why_not(&self) -> String {
        let stat = &self.stat;
        match stat.session {
            _ if self.worker.is_none() => self.why.clone(),
            Session::NoChannel => self.why.clone(),
            Session::Silent => "no agent has answered yet".into(),
            Session::Ending => match &stat.held_by {
                Some((reader, ms)) => format!("reads of {reader} are waited for since {ms} ms"),
                None => "the agent is being welcomed".into(),
            },
            Session::Welcomed if stat.images.is_empty() && !self.left_out.is_empty() => {
                self.left_out.join("; ")
            }
            Session::Welcomed => "no file system of it is on a disk that viola can read yet".into(),
            Session::Proved => {
                let all: Vec<&str> = stat.proved.values().map(String::as_str).collect();
                all.join("; ")
            }
        }
    }
}

/// For all threads of a process.
fn set_nice(pid: u32, nice: i32) -> std::io::Result<()> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = entry?.file_name();
        let thread = name.to_str().and_then(|tid| tid.parse().ok());
        if let Some(thread) = thread.and_then(rustix::process::Pid::from_raw) {
            rustix::process::setpriority_process(Some(thread), nice)?;
        }
    }
    Ok(())
}

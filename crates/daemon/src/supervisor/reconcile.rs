// SPDX-License-Identifier: Apache-2.0
//! Brings the workers in line with configuration and VMs: which run, what each of them knows, and where.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_host::Vm;
use viola_proto::vread::Vread as Shown;
use viola_vread::control::Role;
use viola_vread::sandbox;

use super::agent::Agent;
use crate::background::Steps;
use crate::host::process;
use crate::vms::named;
use crate::vread::apply::pairs::Datanode;
use crate::vread::apply::peers::{self, Peers};
use crate::vread::apply::reader::Reader;
use crate::vread::decide;
use crate::vread::keys::host_name;
use crate::workers::process::{Worker, sockets};
use crate::workers::run_dir;
use crate::workers::user::Users;
use viola_cli::log::{self, Level};
use viola_config::{Config, Transport, VmVread, Vread};

/// Time between two steps, within which the daemon notices QEMU's events.
const STEP_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two steps without workers.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);
/// Counts of workers are read this often.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A reader that has been reading a withdrawn block for longer counts as hung, ms.
const MAX_HELD_MS: u64 = 10_000;

/// State of all workers.
#[derive(Debug)]
pub struct Supervisor {
    dir: PathBuf,
    run_dir: PathBuf,
    pub(super) config: Option<Arc<Config>>,
    /// Whether the VMs of this host are known.
    has_vms: bool,
    vms: Vec<Vm>,
    pub(super) agents: BTreeMap<String, Agent>,
    pub(super) readers: BTreeMap<String, Reader>,
    pub(super) peers: Peers,
    /// Workers of an earlier daemon that nothing uses yet.
    adopted: Vec<Worker>,
    polled: Option<Instant>,
    /// When the next step is due.
    due: Instant,
    /// Who stopped everything, until [`Supervisor::resume`].
    pub(super) stopped: Option<String>,
    /// Why no worker can start, as far as it was logged.
    pub(super) error: Option<String>,
}

impl Supervisor {
    /// Adopts the workers of an earlier daemon, and kills those that do not answer.
    pub fn new(run_dir: &Path) -> Self {
        let dir = run_dir::folder(run_dir);
        let mut adopted = Vec::new();
        for socket in sockets(&dir) {
            match Worker::adopt(&socket) {
                Ok(worker) => {
                    log::about(
                        Level::Info,
                        &worker.vm,
                        format!(
                            "vread: adopted its {} worker (process {}) of an earlier daemon",
                            worker.role, worker.pid
                        ),
                    );
                    adopted.push(worker);
                }
                Err(_) => drop(std::fs::remove_file(&socket)),
            }
        }
        for (pid, start_time, _) in run_dir::workers(&dir) {
            if !adopted.iter().any(|w| w.pid == pid) {
                process::kill(pid, start_time);
            }
        }
        Self {
            dir,
            run_dir: run_dir.to_owned(),
            config: None,
            has_vms: false,
            vms: Vec::new(),
            agents: BTreeMap::new(),
            readers: BTreeMap::new(),
            peers: Peers::default(),
            adopted,
            polled: None,
            due: Instant::now(),
            stopped: None,
            error: None,
        }
    }

    /// Takes a configuration.
    pub fn configure(&mut self, config: Config) {
        self.config = Some(Arc::new(config));
        self.step_soon();
        self.agents.values_mut().for_each(Agent::reset_failures);
        self.readers.values_mut().for_each(Reader::reset_failures);
        self.peers.reset_failures();
    }

    /// Takes the VMs of this host.
    pub fn set_vms(&mut self, vms: Vec<Vm>) {
        self.vms = vms;
        self.has_vms = true;
    }

    /// Withdraws all blocks until [`Supervisor::resume`]. Workers end, except those of connected readers: their mounts become empty,
    /// and do not hang.
    pub fn stop(&mut self, why: &str) {
        self.stopped = Some(why.to_owned());
        self.peers.end(why);
        for (_, agent) in std::mem::take(&mut self.agents) {
            if let Some(worker) = agent.worker {
                worker.end(why);
            }
        }
        for worker in std::mem::take(&mut self.adopted) {
            worker.end(why);
        }
        let now = Instant::now();
        for (name, mut reader) in std::mem::take(&mut self.readers) {
            reader.poll(now);
            if reader.stat.connected {
                reader.retain_pairs(now, &BTreeMap::new(), &[]);
                reader.leave_other_hosts(now);
                self.readers.insert(name, reader);
            } else {
                reader.end(why);
            }
        }
    }

    /// Starts again after [`Supervisor::stop`].
    pub fn resume(&mut self) {
        self.stopped = None;
        self.step_soon();
        self.agents.values_mut().for_each(Agent::reset_failures);
        self.readers.values_mut().for_each(Reader::reset_failures);
        self.peers.reset_failures();
    }

    /// A change is carried out within [`STEP_INTERVAL`], also when the supervisor was idle.
    fn step_soon(&mut self) {
        self.due = self.due.min(Instant::now() + STEP_INTERVAL);
    }

    /// Whether there is nothing to do before the next request: the configuration allows nothing, and no worker runs.
    fn is_idle(&self) -> bool {
        let is_off = |config: &Config| !config.has_workers();
        self.has_no_worker() && self.has_vms && self.config.as_deref().is_some_and(is_off)
    }

    fn has_no_worker(&self) -> bool {
        self.agents.is_empty() && self.readers.is_empty() && self.adopted.is_empty()
    }

    /// Starts, introduces, polls and ends workers.
    fn reconcile(&mut self, now: Instant) {
        let Some(config) = self.config.clone() else {
            return;
        };
        if self.stopped.is_some() || !self.has_vms {
            return;
        }
        if !config.has_workers() {
            if !self.has_no_worker() {
                self.stop("the configuration allows no reader any more");
                self.stopped = None;
                for (_, reader) in std::mem::take(&mut self.readers) {
                    reader.end("the configuration allows no reader any more");
                }
            }
            return;
        }
        let Some(users) = self.users(&config.vread) else {
            return;
        };
        if let Err(e) = crate::host::files::make_dir(&self.dir, 0o700) {
            self.log_error(format!("{}: {e}", self.dir.display()));
            return;
        }
        self.reconcile_readers(now, &config, users);
        self.reconcile_agents(now, &config, users);
        if let Some(worker) = self.take_adopted(Role::Peer, &host_name()) {
            self.peers.adopt(&self.dir, worker);
        }
        self.peers.reconcile(now, &self.dir, &config.vread, users);
        // Adopted readers may still read by old names, so the others end only after all readers are known.
        self.adopted
            .drain(..)
            .for_each(|w| w.end("it is not needed any more"));
        // Before the workers are paired: readers get a disk in the step that first shows its blocks.
        if self
            .polled
            .is_none_or(|at| now.saturating_duration_since(at) >= POLL_INTERVAL)
        {
            self.polled = Some(now);
            self.agents.values_mut().for_each(|a| a.poll(now));
            for reader in self.readers.values_mut() {
                reader.poll(now);
                reader.confirm_connection(now, vm_named(&self.vms, &reader.name));
            }
            self.peers.poll(now);
            self.fail_hanging(now);
        }
        self.pair(now, &config.vread);
        self.update_peers(now, &config.vread);
        self.move_readers(&config);
        self.connect_streams(now, &config);
        for agent in self.agents.values_mut() {
            agent.connect(now, &vm_config(&config, &agent.vm));
        }
    }

    /// Fails readers that hang in a read: withdrawals of blocks wait for them.
    fn fail_hanging(&mut self, now: Instant) {
        let held = |a: &Agent| a.stat.held_by.clone().filter(|(_, ms)| *ms > MAX_HELD_MS);
        let hanging: Vec<(String, u64)> = self.agents.values().filter_map(held).collect();
        for (name, ms) in hanging {
            if name == peers::NAME {
                self.peers.fail(
                    now,
                    &format!("it has been reading a withdrawn block for {ms} ms"),
                );
            } else if let Some(reader) = self.readers.get_mut(&name)
                && reader.worker.is_some()
            {
                reader.fail(
                    now,
                    &format!("it has been reading a withdrawn block for {ms} ms"),
                );
            }
        }
    }

    /// The users of sockets and workers; `None`, logged once, when this host does not have them.
    fn users(&mut self, config: &Vread) -> Option<Users> {
        let found = sandbox::check_kernel()
            .map_err(|e| e.to_string())
            .and_then(|()| Users::find(config));
        found.map_err(|why| self.log_error(why)).ok()
    }

    fn log_error(&mut self, what: String) {
        if self.error.as_ref() != Some(&what) {
            log::line(Level::Error, format!("vread is off: {what}"));
            self.error = Some(what);
        }
    }

    fn reconcile_readers(&mut self, now: Instant, config: &Config, users: Users) {
        let sockets = match &config.vread.sockets {
            Some(dir) => dir.clone(),
            None => self.run_dir.join("mounts"),
        };
        let wanted: Vec<(&str, PathBuf, u32, Transport)> = config
            .vread
            .readers()
            .into_iter()
            .map(|name| {
                let vm = config.vm(name, name).map(|v| &v.vread);
                let uid = vm.and_then(|v| v.uid);
                let transport = vm.map(|v| v.transport).unwrap_or_default();
                let socket = sockets.join(format!("{}.sock", run_dir::component(name)));
                let uid = uid.unwrap_or(config.vread.uid);
                (name, socket, uid, transport)
            })
            .collect();
        let is_wanted = |r: &Reader| {
            wanted
                .iter()
                .any(|(n, s, uid, t)| *n == r.name && r.is_started_with(s, *uid, *t))
        };
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.readers)
            .into_iter()
            .partition(|(_, r)| is_wanted(r));
        self.readers = kept;
        for (_, reader) in gone {
            reader.end("it may not read any more, or its socket changed");
        }
        for (name, socket, uid, transport) in wanted {
            if !self.readers.contains_key(name) {
                // The socket of an adopted worker is not known, and its hypervisor is connected to it.
                let found = self.take_adopted(Role::Reader, name);
                let reader = Reader::new(name, socket, uid, transport, found);
                self.readers.insert(name.to_owned(), reader);
            }
            if let Some(reader) = self.readers.get_mut(name) {
                reader.check(now);
                reader.start(now, &self.dir, users);
            }
        }
    }

    fn reconcile_agents(&mut self, now: Instant, config: &Config, users: Users) {
        let pipe = |vm: &Vm| config.vm(vm.id.as_str(), &vm.name)?.pipe.as_ref();
        let is_wanted = |vm: &Vm| config.vread.is_datanode(&named(vm)) || pipe(vm).is_some();
        let same = |a: &Agent, vm: &Vm| {
            a.vm.id == vm.id && a.vm.pid == vm.pid && a.vm.start_time == vm.start_time
        };
        let vms: Vec<Vm> = self
            .vms
            .iter()
            .filter(|vm| is_wanted(vm))
            .cloned()
            .collect();
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.agents)
            .into_iter()
            .partition(|(_, a)| vms.iter().any(|vm| same(a, vm)));
        self.agents = kept;
        for (id, agent) in gone {
            log::about(
                Level::Info,
                &id,
                "vread: its worker ends: the VM is gone, or no VM may read its blocks any more",
            );
            if let Some(worker) = agent.worker {
                worker.end("the VM is gone");
            }
        }
        for vm in vms {
            let id = vm.id.to_string();
            if !self.agents.contains_key(&id) {
                let found = self.take_adopted(Role::Agent, &id);
                self.agents
                    .insert(id.clone(), Agent::new(now, vm.clone(), found));
            }
            if let Some(agent) = self.agents.get_mut(&id) {
                agent.vm = vm;
                let pipe = pipe(&agent.vm);
                agent.start(now, &self.dir, &config.vread, pipe, users);
                let vm = config.vm(agent.vm.id.as_str(), &agent.vm.name);
                if let Some(vm) = vm.filter(|vm| vm.pipe.is_some()) {
                    agent.set_weight(vm.weight);
                }
                agent.check(now, &vm_config(config, &agent.vm));
            }
        }
    }

    fn take_adopted(&mut self, role: Role, vm: &str) -> Option<Worker> {
        let at = self
            .adopted
            .iter()
            .position(|w| w.role == role && w.vm == vm)?;
        Some(self.adopted.swap_remove(at))
    }

    /// Introduces readers to the agents' workers whose blocks they may read.
    fn pair(&mut self, now: Instant, config: &Vread) {
        for reader in self.readers.values_mut() {
            let mut kept = Vec::new();
            for (id, agent) in &mut self.agents {
                let pools = config.pools(&reader.name, &named(&agent.vm));
                if !pools.is_empty() {
                    kept.push(id.clone());
                    let paired = reader.pair(now, &self.dir, agent.datanode(), pools);
                    if let Err(why) = paired {
                        agent.fail(now, &why);
                    }
                }
            }
            reader.retain_pairs(now, &datanodes(&self.agents), &kept);
        }
    }

    /// Tells the worker for other hosts what changed.
    fn update_peers(&mut self, now: Instant, config: &Vread) {
        let datanodes = datanodes(&self.agents);
        let failed = (self.peers).update(now, &self.dir, config, &datanodes, &mut self.readers);
        for (id, why) in failed {
            if let Some(agent) = self.agents.get_mut(&id) {
                agent.fail(now, &why);
            }
        }
    }

    /// Moves readers' workers to the cores of their VMs.
    fn move_readers(&mut self, config: &Config) {
        for reader in self.readers.values_mut() {
            // Without its VM, a worker has nothing to do.
            if let Some(vm) = vm_named(&self.vms, &reader.name)
                && let Some(pid) = reader.worker.as_ref().map(|w| w.pid)
            {
                reader.place(decide::worker_cores(vm, pid, &config.slices));
            }
        }
    }

    /// Connects the byte streams of readers without virtiofs.
    fn connect_streams(&mut self, now: Instant, config: &Config) {
        for reader in self.readers.values_mut() {
            let vm = vm_named(&self.vms, &reader.name);
            let of_config = match vm {
                Some(vm) => vm_config(config, vm),
                None => config
                    .vm(&reader.name, &reader.name)
                    .map(|v| v.vread.clone())
                    .unwrap_or_default(),
            };
            reader.connect_stream(now, &of_config, vm);
        }
    }
}

/// The VM that the configuration names so.
fn vm_named<'a>(vms: &'a [Vm], name: &str) -> Option<&'a Vm> {
    vms.iter().find(|vm| named(vm).is(name))
}

impl Steps for Supervisor {
    type Status = Shown;

    fn due(&self) -> Instant {
        self.due
    }

    fn step(&mut self) {
        self.reconcile(Instant::now());
        let interval = match self.is_idle() {
            true => IDLE_INTERVAL,
            false => STEP_INTERVAL,
        };
        self.due = Instant::now() + interval;
    }

    fn status(&self) -> Shown {
        self.show()
    }
}

/// DataNode VMs, by identity.
fn datanodes(agents: &BTreeMap<String, Agent>) -> BTreeMap<String, Datanode<'_>> {
    let agents = agents.iter();
    agents
        .map(|(id, agent)| (id.clone(), agent.datanode()))
        .collect()
}

fn vm_config(config: &Config, vm: &Vm) -> VmVread {
    config
        .vm(vm.id.as_str(), &vm.name)
        .map(|v| v.vread.clone())
        .unwrap_or_default()
}

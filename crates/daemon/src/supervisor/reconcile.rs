// SPDX-License-Identifier: Apache-2.0
//! Which workers there are to be, and what each of them has to know.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_host::Vm;
use viola_proto::pipe::status::Pipes;
use viola_proto::vread::{Datanode, Vread as Shown};
use viola_vread::control::Role;

use crate::host::users;
use crate::slices::restore;
use crate::supervisor::agent::Agent;
use crate::vread::apply::peers::{self, Peers};
use crate::vread::apply::reader::{Reader, Users};
use crate::vread::decide;
use crate::vread::keys::host_name;
use crate::workers::process::{self, Worker};
use crate::workers::run_dir;
use viola_cli::log::{self, Level};
use viola_config::vread::Named;
use viola_config::{Config, Transport, VmVread, Vread};

/// Workers are asked for their counts so often.
const ASK: Duration = Duration::from_millis(500);
/// A reader that holds a withdrawal up for so long hangs.
const HELD: u64 = 10_000;

/// Everything about vread that the daemon knows.
#[derive(Debug)]
pub struct Supervisor {
    dir: PathBuf,
    run_dir: PathBuf,
    config: Option<Arc<Config>>,
    /// Whether the VMs of this host are known.
    has_looked: bool,
    vms: Vec<Vm>,
    agents: BTreeMap<String, Agent>,
    readers: BTreeMap<String, Reader>,
    peers: Peers,
    adopted: Vec<Worker>,
    asked: Option<Instant>,
    stopped: Option<String>,
    said: Option<String>,
}

impl Supervisor {
    /// Finds the workers that an earlier daemon has left, and ends those that do not answer.
    pub fn new(run_dir: &Path) -> Self {
        let dir = run_dir::of(run_dir);
        let mut adopted = Vec::new();
        for socket in process::sockets(&dir) {
            match Worker::adopt(&socket) {
                Ok(worker) => {
                    log::about(
                        Level::Info,
                        &worker.vm,
                        format!(
                            "vread: its {} worker (process {}) has gone on",
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
                restore::kill(pid, start_time);
            }
        }
        Self {
            dir,
            run_dir: run_dir.to_owned(),
            config: None,
            has_looked: false,
            vms: Vec::new(),
            agents: BTreeMap::new(),
            readers: BTreeMap::new(),
            peers: Peers::default(),
            adopted,
            asked: None,
            stopped: None,
            said: None,
        }
    }

    /// Takes another configuration.
    pub fn configure(&mut self, config: Config) {
        self.config = Some(Arc::new(config));
        self.agents.values_mut().for_each(Agent::forgive);
        self.readers.values_mut().for_each(Reader::forgive);
        self.peers.forgive();
    }

    /// Takes the VMs of this host as they are now.
    pub fn see(&mut self, vms: Vec<Vm>) {
        self.vms = vms;
        self.has_looked = true;
    }

    /// Withdraws everything until [`Supervisor::go_on`]. Workers end, but for those of readers whose hypervisor is
    /// connected: their mounts are empty from now on, and do not hang.
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
            reader.ask(now);
            if reader.stat.connected {
                reader.part(now, &self.agents, &[]);
                reader.part_from_hosts(now);
                self.readers.insert(name, reader);
            } else {
                reader.end(why);
            }
        }
    }

    /// Goes on after [`Supervisor::stop`].
    pub fn go_on(&mut self) {
        self.stopped = None;
        self.agents.values_mut().for_each(Agent::forgive);
        self.readers.values_mut().for_each(Reader::forgive);
        self.peers.forgive();
    }

    /// Whether there is nothing to be looked at before the next request: nobody may read or send anything, and nobody does.
    pub fn rests(&self) -> bool {
        let is_off = |config: &Config| !config.has_workers();
        let nobody = self.agents.is_empty() && self.readers.is_empty() && self.adopted.is_empty();
        nobody && self.has_looked && self.config.as_deref().is_some_and(is_off)
    }

    /// Does what is to be done now.
    pub fn step(&mut self, now: Instant) {
        let Some(config) = self.config.clone() else {
            return;
        };
        if self.stopped.is_some() || !self.has_looked {
            return;
        }
        if !config.has_workers() {
            let nobody =
                self.agents.is_empty() && self.readers.is_empty() && self.adopted.is_empty();
            if !nobody {
                self.stop("nobody may read anything any more");
                self.stopped = None;
                for (_, reader) in std::mem::take(&mut self.readers) {
                    reader.end("nobody may read anything any more");
                }
            }
            return;
        }
        let Some(users) = self.users(&config.vread) else {
            return;
        };
        if let Err(e) = crate::host::lock::make_dir(&self.dir, 0o700) {
            self.say(format!("{}: {e}", self.dir.display()));
            return;
        }
        self.keep_readers(now, &config, users);
        self.keep_agents(now, &config, users);
        if let Some(worker) = self.take_adopted(Role::Peer, &host_name()) {
            self.peers.adopt(&self.dir, worker);
        }
        self.peers.keep(now, &self.dir, &config.vread, users);
        // Only now are all readers known that may still be reading under an old epoch.
        self.adopted
            .drain(..)
            .for_each(|w| w.end("it is not needed any more"));
        self.pair(now, &config.vread);
        let (agents, readers) = (&mut self.agents, &mut self.readers);
        self.peers
            .tell(now, &self.dir, &config.vread, agents, readers);
        self.place(&config);
        self.keep_lines(now, &config);
        for agent in self.agents.values_mut() {
            agent.connect(now, &vm_config(&config, &agent.vm));
        }
        if self
            .asked
            .is_none_or(|at| now.saturating_duration_since(at) >= ASK)
        {
            self.asked = Some(now);
            self.agents.values_mut().for_each(|a| a.ask(now));
            self.readers.values_mut().for_each(|r| r.ask(now));
            self.peers.ask(now);
            self.end_hanging(now);
        }
    }

    /// A reader that was stopped in the middle of a read would hold withdrawals up for ever.
    fn end_hanging(&mut self, now: Instant) {
        let held = |a: &Agent| a.stat.held_by.clone().filter(|(_, ms)| *ms > HELD);
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

    fn users(&mut self, config: &Vread) -> Option<Users> {
        let is_root = rustix::process::geteuid().is_root();
        let worker = users::user_ids(&config.user);
        let vmm = users::user_ids(&config.vmm_user);
        let missing = match (worker, vmm) {
            (None, _) => &config.user,
            (_, None) => &config.vmm_user,
            (Some((0, _)), _) => {
                self.say(format!(
                    "user {} has root's number; workers need another one",
                    config.user
                ));
                return None;
            }
            (Some(worker), Some((vmm, _))) => {
                return Some(Users {
                    vmm: is_root.then_some(vmm),
                    worker: is_root.then_some(worker),
                });
            }
        };
        self.say(format!(
            "this host has no user {missing}; see user and vmm_user in [vread]"
        ));
        None
    }

    fn say(&mut self, what: String) {
        if self.said.as_ref() != Some(&what) {
            log::line(Level::Error, format!("vread is off: {what}"));
            self.said = Some(what);
        }
    }

    fn keep_readers(&mut self, now: Instant, config: &Config, users: Users) {
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
                let socket = sockets.join(format!("{}.sock", run_dir::part(name)));
                let uid = uid.unwrap_or(config.vread.uid);
                (name, socket, uid, transport)
            })
            .collect();
        let is_wanted = |r: &Reader| {
            wanted
                .iter()
                .any(|(n, s, uid, t)| *n == r.name && r.is(s, *uid, *t))
        };
        let (kept, gone): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.readers)
            .into_iter()
            .partition(|(_, r)| is_wanted(r));
        self.readers = kept;
        for (_, reader) in gone {
            reader.end("it may not read any more, or by another socket");
        }
        for (name, socket, uid, transport) in wanted {
            if !self.readers.contains_key(name) {
                // Whether one that went on has the right socket is not known; its hypervisor is connected to it.
                let found = self.take_adopted(Role::Reader, name);
                let reader = Reader::new(name, socket, uid, transport, found);
                self.readers.insert(name.to_owned(), reader);
            }
            if let Some(reader) = self.readers.get_mut(name) {
                reader.look(now);
                reader.start(now, &self.dir, users);
            }
        }
    }

    fn keep_agents(&mut self, now: Instant, config: &Config, users: Users) {
        let pipe = |vm: &Vm| config.vm(vm.id.as_str(), &vm.name)?.pipe.as_ref();
        let is_wanted = |vm: &Vm| {
            let named = named(vm);
            config.vread.is_datanode(&named)
                || config.vread.is_remote_datanode(&named)
                || pipe(vm).is_some()
        };
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
                "vread: the VM is gone, or its blocks may not be read any more",
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
                    .insert(id.clone(), Agent::new(vm.clone(), found));
            }
            if let Some(agent) = self.agents.get_mut(&id) {
                agent.vm = vm;
                let pipe = pipe(&agent.vm);
                agent.start(now, &self.dir, &config.vread, pipe, users.worker);
                let vm = config.vm(agent.vm.id.as_str(), &agent.vm.name);
                if let Some(vm) = vm.filter(|vm| vm.pipe.is_some()) {
                    agent.weigh(vm.weight);
                }
                agent.look(now, &vm_config(config, &agent.vm));
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

    fn pair(&mut self, now: Instant, config: &Vread) {
        for reader in self.readers.values_mut() {
            let mut datanodes = Vec::new();
            for (id, agent) in &mut self.agents {
                let pools = config.pools(&reader.name, &named(&agent.vm));
                if !pools.is_empty() {
                    datanodes.push(id.clone());
                    reader.pair(now, &self.dir, agent, pools);
                }
            }
            reader.part(now, &self.agents, &datanodes);
        }
    }

    fn place(&mut self, config: &Config) {
        for reader in self.readers.values_mut() {
            let is_it = |vm: &&Vm| named(vm).is(&reader.name);
            // Before its VM runs, and after it has ended, it does nothing anyway.
            if let Some(vm) = self.vms.iter().find(is_it)
                && let Some(pid) = reader.worker.as_ref().map(|w| w.pid)
            {
                reader.place(decide::cores(vm, pid, &config.slices));
            }
        }
    }

    fn keep_lines(&mut self, now: Instant, config: &Config) {
        for reader in self.readers.values_mut() {
            let is_it = |vm: &&Vm| named(vm).is(&reader.name);
            let vm = self.vms.iter().find(is_it);
            let of_config = match vm {
                Some(vm) => vm_config(config, vm),
                None => config
                    .vm(&reader.name, &reader.name)
                    .map(|v| v.vread.clone())
                    .unwrap_or_default(),
            };
            reader.keep_line(now, &of_config, vm);
        }
    }

    /// VMs whose blocks may be read.
    fn datanodes(&self) -> Vec<Datanode> {
        let is_one = |vm: &Vm| {
            let vm = named(vm);
            let vread = self.config.as_ref().map(|config| &config.vread);
            vread.is_some_and(|v| v.is_datanode(&vm) || v.is_remote_datanode(&vm))
        };
        let agents = self.agents.values().filter(|a| is_one(&a.vm));
        agents.map(Agent::show).collect()
    }

    /// VMs whose files are sent.
    fn senders(&self) -> Pipes {
        let config = self.config.as_ref();
        let is_one = |vm: &Vm| config?.vm(vm.id.as_str(), &vm.name)?.pipe.as_ref();
        let agents = self.agents.values().filter(|a| is_one(&a.vm).is_some());
        Pipes {
            vms: agents.map(Agent::show_sender).collect(),
        }
    }

    /// What is shown of all this.
    pub fn show(&self) -> Shown {
        let why = match (&self.config, &self.stopped) {
            (None, _) => "it has not started yet".into(),
            (_, Some(why)) => format!("{why}; viola start goes on"),
            (Some(c), _) if c.vread.is_off() && c.vms.iter().all(|vm| vm.pipe.is_none()) => {
                "nobody may read anything: see allow in [vread]".to_owned()
            }
            _ => self.said.clone().unwrap_or_default(),
        };
        let (host, peers) = self.peers.show();
        Shown {
            on: why.is_empty(),
            why,
            datanodes: self.datanodes(),
            readers: self.readers.values().map(Reader::show).collect(),
            host,
            peers,
            pipes: self.senders(),
        }
    }
}

/// A VM as the configuration can name it.
pub fn named(vm: &Vm) -> Named {
    Named {
        id: vm.id.to_string(),
        name: vm.name.clone(),
    }
}

fn vm_config(config: &Config, vm: &Vm) -> VmVread {
    config
        .vm(vm.id.as_str(), &vm.name)
        .map(|v| v.vread.clone())
        .unwrap_or_default()
}

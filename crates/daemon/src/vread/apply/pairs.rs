// SPDX-License-Identifier: Apache-2.0
//! A worker that reads, and the agent workers that it is introduced to.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use viola_vread::control::Order;

use crate::supervisor::agent::Agent;
use crate::vread::observe::disks::Disk;
use crate::workers::process::{self, Worker};
use crate::workers::run_dir;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};

/// What two workers were last told of each other.
#[derive(Debug, PartialEq, Eq)]
struct Pair {
    /// Process of the one that reads.
    pid: u32,
    agent: u32,
    pools: Vec<String>,
    /// Numbers of the disks that the reading one has.
    disks: Vec<u32>,
}

/// Which of two workers is of no use, and why.
#[derive(Debug)]
pub enum Useless {
    /// The one that reads.
    Reading(String),
    /// The agent's.
    Agent(String),
}

/// Agent workers that one worker knows, by identity of their VM.
#[derive(Debug, Default)]
pub struct Pairs(BTreeMap<String, Pair>);

impl Pairs {
    /// Identities of the VMs.
    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// There is another worker, which knows nobody.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Lets `worker`, of this name to the agent's worker, read blocks of a VM, unless both know that already.
    pub fn join(
        &mut self,
        worker: &Worker,
        name: &str,
        dir: &Path,
        agent: &Agent,
        pools: Vec<String>,
    ) -> Result<(), Useless> {
        let Some(agent_worker) = &agent.worker else {
            return Ok(());
        };
        let id = agent.vm.id.to_string();
        let numbers: Vec<u32> = agent.disks.iter().map(|d| d.spec.id).collect();
        let known = self.0.get(&id);
        let is_known = known.is_some_and(|p| {
            p.pid == worker.pid && p.agent == agent_worker.pid && p.pools == pools
        });
        if !is_known {
            introduce(worker, agent_worker, dir, name, &id, &pools)?;
        }
        if !is_known || known.is_some_and(|p| p.disks != numbers) {
            let order = Order::Images {
                datanode: id.clone(),
                images: agent.disks.iter().map(|d| d.spec.clone()).collect(),
                why: String::new(),
            };
            if let Err(e) = worker.order(&order, &Disk::fds(&agent.disks)) {
                // It goes on without them; agent and operator are told by the agent's worker, which opens the same.
                log::about(Level::Warning, name, format!("vread: {}", chain(&e)));
            }
        }
        let pair = Pair {
            pid: worker.pid,
            agent: agent_worker.pid,
            pools,
            disks: numbers,
        };
        self.0.insert(id, pair);
        Ok(())
    }

    /// Lets `worker` read nothing of VMs that are not among `kept`; `told` are those that it says it knows.
    pub fn part(
        &mut self,
        worker: Option<&Worker>,
        name: &str,
        agents: &BTreeMap<String, Agent>,
        kept: &[String],
        told: &mut Vec<String>,
    ) -> Result<(), Useless> {
        let gone = |id: &&String| !kept.contains(id);
        let known = self.0.keys().chain(told.iter());
        let mut gone: Vec<String> = known.filter(gone).cloned().collect();
        gone.sort_unstable();
        gone.dedup();
        let mut done = Ok(());
        for id in gone {
            self.0.remove(&id);
            told.retain(|d| *d != id);
            let order = Order::NoDatanode { name: id.clone() };
            if let Some(Err(e)) = worker.map(|w| w.order(&order, &[])) {
                done = Err(Useless::Reading(chain(&e)));
            }
            if let Some(worker) = agents.get(&id).and_then(|a| a.worker.as_ref()) {
                // One that does not answer is noticed when it is asked for its counts.
                let _ = worker.order(&Order::NoReader { name: name.into() }, &[]);
            }
        }
        done
    }
}

/// Gives each of two workers its end of a socket for look-ups, and lets each see what the other writes down.
fn introduce(
    reading: &Worker,
    agent: &Worker,
    dir: &Path,
    name: &str,
    id: &str,
    pools: &[String],
) -> Result<(), Useless> {
    let file = |path: PathBuf| {
        let opened = File::open(&path);
        opened.map_err(|e| format!("{}: {e}", path.display()))
    };
    let hazards = file(run_dir::hazards(dir, name)).map_err(Useless::Reading)?;
    let table = file(run_dir::table(dir, id)).map_err(Useless::Agent)?;
    let (ours, theirs) = process::lookup_pair().map_err(|e| Useless::Reading(e.to_string()))?;
    let to_agent = Order::Reader {
        name: name.to_owned(),
        pools: pools.to_vec(),
    };
    agent
        .order(&to_agent, &[theirs.as_fd(), hazards.as_fd()])
        .map_err(|e| Useless::Agent(chain(&e)))?;
    let to_reader = Order::Datanode {
        name: id.to_owned(),
    };
    reading
        .order(&to_reader, &[ours.as_fd(), table.as_fd()])
        .map_err(|e| Useless::Reading(chain(&e)))
}

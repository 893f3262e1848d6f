// SPDX-License-Identifier: Apache-2.0
//! Introduces a worker that reads (of a reader, or for other hosts) to the agents' workers whose blocks it may read.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use viola_vread::control::{Order, socket_pair};

use crate::vread::observe::block_disks::BlockDisks;
use crate::vread::observe::disks::Disk;
use crate::workers::process::Worker;
use crate::workers::run_dir;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_host::Vm;

/// A DataNode VM, as the workers that read its blocks need it.
#[derive(Debug, Clone, Copy)]
pub struct Datanode<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// The worker of its agent, if it runs.
    pub worker: Option<&'a Worker>,
    /// Its disks, open.
    pub disks: &'a [Disk],
    /// Which of them hold blocks. The workers that read get no other one.
    pub with_blocks: &'a BlockDisks,
}

/// What two workers were told of each other.
#[derive(Debug, PartialEq, Eq)]
struct Pair {
    /// Process of the worker that reads.
    pid: u32,
    /// Process of the agent's worker.
    agent: u32,
    pools: Vec<String>,
    /// Numbers of the disks that the reading worker has.
    disks: Vec<u32>,
}

/// Which of two workers failed, and why.
#[derive(Debug)]
pub enum Failed {
    /// The worker that reads.
    Reader(String),
    /// The agent's worker.
    Agent(String),
}

/// The agents' workers that one worker knows, by identity of their VM.
#[derive(Debug, Default)]
pub struct Pairs(BTreeMap<String, Pair>);

impl Pairs {
    /// Identities of the DataNode VMs.
    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Forgets all pairs: a new worker runs, which knows no agent's worker.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Lets `worker` read blocks of a DataNode VM, unless both know that already. `name` is its name for the agent's worker.
    ///
    /// # Errors
    /// Which of the two workers failed, and why.
    pub fn join(
        &mut self,
        worker: &Worker,
        name: &str,
        dir: &Path,
        datanode: Datanode<'_>,
        pools: Vec<String>,
    ) -> Result<(), Failed> {
        let Some(agent_worker) = datanode.worker else {
            return Ok(());
        };
        let id = datanode.vm.id.to_string();
        let disks = datanode.with_blocks.of(datanode.disks);
        let numbers: Vec<u32> = disks.iter().map(|d| d.spec.id).collect();
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
                images: disks.iter().map(|d| d.spec.clone()).collect(),
                why: String::new(),
            };
            if let Err(e) = worker.order(&order, &Disk::fds(&disks)) {
                // It serves the other disks. The agent's worker opens the same files, and reports the error to agent and operator.
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

    /// Lets `worker` read no block of VMs that are not in `kept`. `known` are the VMs that the worker says it knows.
    ///
    /// # Errors
    /// When the worker does not take the order.
    pub fn retain(
        &mut self,
        worker: Option<&Worker>,
        name: &str,
        datanodes: &BTreeMap<String, Datanode<'_>>,
        kept: &[String],
        known: &mut Vec<String>,
    ) -> Result<(), Failed> {
        let gone = |id: &&String| !kept.contains(id);
        let all = self.0.keys().chain(known.iter());
        let mut gone: Vec<String> = all.filter(gone).cloned().collect();
        gone.sort_unstable();
        gone.dedup();
        let mut done = Ok(());
        for id in gone {
            self.0.remove(&id);
            known.retain(|d| *d != id);
            let order = Order::NoDatanode { name: id.clone() };
            if let Some(Err(e)) = worker.map(|w| w.order(&order, &[])) {
                done = Err(Failed::Reader(chain(&e)));
            }
            if let Some(worker) = datanodes.get(&id).and_then(|d| d.worker) {
                // A worker that does not answer is noticed when its counts are read.
                let _ = worker.order(&Order::NoReader { name: name.into() }, &[]);
            }
        }
        done
    }
}

/// Gives each worker its end of a socket for look-ups, and the shared memory of the other: the agent's worker gets the hazard cells
/// of the reader, the reader gets the table of blocks.
fn introduce(
    reading: &Worker,
    agent: &Worker,
    dir: &Path,
    name: &str,
    id: &str,
    pools: &[String],
) -> Result<(), Failed> {
    let file = |path: PathBuf| {
        let opened = File::open(&path);
        opened.map_err(|e| format!("{}: {e}", path.display()))
    };
    let hazards = file(run_dir::hazards(dir, name)).map_err(Failed::Reader)?;
    let table = file(run_dir::table(dir, id)).map_err(Failed::Agent)?;
    let (ours, theirs) = socket_pair().map_err(|e| Failed::Reader(e.to_string()))?;
    let to_agent = Order::Reader {
        name: name.to_owned(),
        pools: pools.to_vec(),
    };
    agent
        .order(&to_agent, &[theirs.as_fd(), hazards.as_fd()])
        .map_err(|e| Failed::Agent(chain(&e)))?;
    let to_reader = Order::Datanode {
        name: id.to_owned(),
    };
    reading
        .order(&to_reader, &[ours.as_fd(), table.as_fd()])
        .map_err(|e| Failed::Reader(chain(&e)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use viola_vread::control::{Format, ImageSpec, Inbox, Report, Role, VERSION, listen};

    use super::*;

    /// Numbers and inodes of the disks in each order with images.
    type Given = Arc<Mutex<Vec<(Vec<u32>, Vec<u64>)>>>;

    /// A worker that carries out every order.
    fn worker(dir: &Path, role: Role, vm: &str) -> (Worker, Given) {
        let path = run_dir::socket(dir, role, vm);
        let mut inbox = Inbox::new(listen(&path).unwrap());
        let given = Given::default();
        let (to, vm) = (given.clone(), vm.to_owned());
        std::thread::spawn(move || {
            let obeyed = inbox.serve(|order, fds| match order {
                Order::Hello { .. } => Report::Hello {
                    version: VERSION,
                    program: String::new(),
                    role,
                    vm: vm.clone(),
                    pid: std::process::id(),
                },
                Order::Images { images, .. } => {
                    let inode = |fd| File::from(fd).metadata().unwrap().ino();
                    let inodes = fds.into_iter().map(inode).collect();
                    let numbers = images.iter().map(|i| i.id).collect();
                    to.lock().unwrap().push((numbers, inodes));
                    Report::Done
                }
                _ => Report::Done,
            });
            obeyed.unwrap();
        });
        (Worker::adopt(&path).unwrap(), given)
    }

    fn disk(id: u32) -> (Disk, u64) {
        let file = tempfile::tempfile().unwrap();
        let meta = file.metadata().unwrap();
        let spec = ImageSpec {
            id,
            device: "ubda".into(),
            serial: None,
            layers: vec![Format::Raw],
            path: "/d.img".into(),
            file: (meta.dev(), meta.ino()),
        };
        let disk = Disk {
            spec,
            files: vec![file],
            own: None,
        };
        (disk, meta.ino())
    }

    #[test]
    fn a_reader_gets_the_descriptors_of_disks_with_blocks_and_of_no_other_one() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        run_dir::new_hazards(dir, "web").unwrap();
        run_dir::open_table(dir, "uml:dn1", 8).unwrap();
        let (reader, given) = worker(dir, Role::Reader, "web");
        let (agent, _) = worker(dir, Role::Agent, "uml:dn1");
        let ((root, _), (data, inode)) = (disk(7), disk(8));
        let (vm, disks) = (crate::testing::vm("dn1", 1, &[&[0]]), [root, data]);
        let mut pairs = Pairs::default();
        let mut join = |with_blocks: &BlockDisks| {
            let datanode = Datanode {
                vm: &vm,
                worker: Some(&agent),
                disks: &disks,
                with_blocks,
            };
            pairs
                .join(&reader, "web", dir, datanode, vec!["*".into()])
                .unwrap();
            std::mem::take(&mut *given.lock().unwrap())
        };
        let mut with_blocks = BlockDisks::default();
        let start = Instant::now();
        assert_eq!(join(&with_blocks), [(vec![], vec![])]);
        with_blocks.update(start, &[8]);
        assert_eq!(join(&with_blocks), [(vec![8], vec![inode])]);
        assert_eq!(join(&with_blocks), []);
        with_blocks.update(start + Duration::from_secs(60), &[]);
        assert_eq!(join(&with_blocks), [(vec![], vec![])]);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Test bed: guests for NameNode and DataNode, client and two neighbours, and viola.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use viola_lab::hadoop::{
    Client, FileSystem, Hadoop, Hdfs, LocalHdfs, Options, ROOT, RequestStats, make_disk,
};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};

use super::caches;
use super::daemon::Daemon;
use super::disk::LoopDevice;
use super::usage::Processes;
use super::work::{BLOCK, FILE, Phase, Side, Sizes, Work};
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Name of the client's guest.
pub const CLIENT: &str = "vread-client";
/// Name of the DataNode's guest.
pub const NODE: &str = "vread-node";
/// Name of the guest whose DataNode viola does not serve.
pub const OTHER_NODE: &str = "vread-other";
/// Drops a guest's caches.
pub const DROP_CACHES: &str = "sync; echo 3 >/proc/sys/vm/drop_caches";
const NEIGHBOURS: [&str; 2] = ["vread-busy1", "vread-busy2"];
/// Mount point of the blocks, inside the root that Java runs in.
pub(super) const MOUNT: &str = "/vread";
/// Copies of the blocks on the client's own disk.
pub(super) const OWN_BLOCKS: &str = "/mnt/blocks";
/// Configuration of the guest agent, as packaged.
pub(super) const AGENT: &str = "data = ['/mnt/data']\ndatanode = '127.0.0.1:9866'\n";
/// Maximum number of names per command, because a console line holds 4 KiB.
const MAX_NAMES_PER_COMMAND: usize = 20;
/// Timeout for the agent to name finished blocks.
const NAMING_TIMEOUT: Duration = Duration::from_secs(60);
/// Dirty page limits of the DataNode's guest, so that a row's data stays in its page cache until it is measured. The
/// kernel's defaults are close to a row's size here; whether a write waited for the disk then depended on other dirty
/// pages.
const RAISE_DIRTY_RATIO: &str =
    "cd /proc/sys/vm; echo 80 >dirty_ratio; echo 70 >dirty_background_ratio";
/// Time to wait for a DataNode to delete blocks.
const DELETE_TIME: Duration = Duration::from_secs(5);

/// Resources of a whole run, apart from the guests.
pub struct Fixtures {
    hadoop: Hadoop,
    folder: PathBuf,
    local: Option<(LocalHdfs, Client)>,
    device: Option<LoopDevice>,
}

impl Fixtures {
    /// Files go to `folder`, whose file system is measured. Fails without Hadoop.
    pub fn new(folder: &Path) -> Outcome<Self> {
        Ok(Self {
            hadoop: Hadoop::find().map_err(lab_failure)?,
            folder: std::path::absolute(folder).map_err(Failure::run)?,
            local: None,
            device: None,
        })
    }

    /// Starts HDFS on the host itself and writes the file to read.
    pub fn start_loopback(&mut self, sizes: &Sizes) -> Outcome {
        let (local, mut client) =
            LocalHdfs::start(&self.hadoop, &self.folder.join("loopback")).map_err(lab_failure)?;
        client
            .ask(&format!("stock write {FILE} {} {BLOCK} 1", sizes.file))
            .map_err(lab_failure)?;
        self.local = Some((local, client));
        Ok(())
    }

    /// Stops the host's HDFS.
    pub fn stop_loopback(&mut self) {
        self.local = None;
    }

    /// The unpacked Hadoop distribution.
    pub fn hadoop(&self) -> &Hadoop {
        &self.hadoop
    }

    /// Disk images of the guests: DataNode, client, second DataNode.
    fn images(&self) -> [PathBuf; 3] {
        ["node.img", "client.img", "other.img"].map(|name| self.folder.join(name))
    }

    /// Boots the guests. The client's guest has viola's device if there is a daemon.
    pub fn boot(
        &mut self,
        cores: Cores,
        daemon: Option<&Daemon>,
        sizes: &Sizes,
        phases: &[Phase],
    ) -> Outcome<Lab> {
        let images = self.images();
        for image in &images {
            make_disk(image, FileSystem::Ext4, sizes.room()).map_err(lab_failure)?;
        }
        self.device = match phases.contains(&Phase::Device) {
            true => Some(LoopDevice::over(&images[0])?),
            false => None,
        };
        let spec = self.spec(cores, daemon, phases)?;
        Lab::up(&spec, &Paths::find().map_err(lab_failure)?).map_err(lab_failure)
    }

    fn spec(&self, cores: Cores, daemon: Option<&Daemon>, phases: &[Phase]) -> Outcome<Spec> {
        let [image, client, other] = self.images();
        let node = self
            .device
            .as_ref()
            .map_or(image.as_path(), LoopDevice::path);
        // Untouched guest memory uses no host memory.
        let memory = match phases {
            p if p.contains(&Phase::HBase) || p.contains(&Phase::Spark) => "5G",
            _ => "1536M",
        };
        let device = daemon
            .map(|d| {
                format!(
                    "kernel_args = [\"virtio_uml.device={}:26\"]\n",
                    d.socket().display()
                )
            })
            .unwrap_or_default();
        let mut text = format!(
            "[lab]\nname = \"bench-vread\"\n\
             [[guest]]\nname = \"{NODE}\"\ncores = [{}]\nmemory = \"2G\"\ndisks = [{{ image = {node:?} }}]\n\
             [[guest]]\nname = \"{CLIENT}\"\ncores = [{}]\nmemory = \"{memory}\"\ndisks = [{{ image = {client:?} }}]\n{device}",
            cores.node, cores.client,
        );
        if phases.contains(&Phase::Hybrid) {
            text.push_str(&format!(
                "[[guest]]\nname = \"{OTHER_NODE}\"\ncores = [{}]\nmemory = \"1G\"\ndisks = [{{ image = {other:?} }}]\n",
                cores.node
            ));
        }
        for name in NEIGHBOURS {
            text.push_str(&format!(
                "[[guest]]\nname = \"{name}\"\ncores = [{}]\n",
                cores.node
            ));
        }
        Spec::from_toml(&text, "bench-vread", &self.folder).map_err(lab_failure)
    }

    /// Starts HDFS in the guests, writes the file to read, and sets up all sides.
    pub fn bed<'a>(
        &'a mut self,
        lab: &'a Lab,
        daemon: Option<&'a Daemon>,
        sizes: &Sizes,
    ) -> Outcome<TestBed<'a>> {
        let mut images = Vec::from(self.images());
        images.extend(self.device.as_ref().map(|d| d.path().to_owned()));
        let hdfs = Hdfs::start(&self.hadoop, guest(lab, NODE)?, &Options::default())
            .map_err(lab_failure)?;
        sh(guest(lab, NODE)?, RAISE_DIRTY_RATIO)?;
        sh(
            guest(lab, CLIENT)?,
            "mount -t ext4 -o noatime /dev/ubda /mnt",
        )?;
        let mut client = hdfs.client(lab, guest(lab, CLIENT)?).map_err(lab_failure)?;
        if daemon.is_some() {
            sh(
                guest(lab, CLIENT)?,
                &format!("mount -t virtiofs viola {ROOT}{MOUNT}"),
            )?;
        }
        for side in [Side::Stock, Side::Viola, Side::Unverified, Side::Disk] {
            let request = format!(
                "open {} {}",
                side.word(),
                side.keys(MOUNT, OWN_BLOCKS).join(" ")
            );
            client.ask(&request).map_err(lab_failure)?;
        }
        let mut bed = TestBed {
            lab,
            daemon,
            hdfs,
            client,
            apps: BTreeMap::new(),
            local: self.local.as_mut(),
            images,
            agent: false,
        };
        bed.ask(
            Side::Stock,
            &format!("stock write {FILE} {} {BLOCK} 1", sizes.file),
        )?;
        bed.export()?;
        bed.run_agent(true)?;
        bed.warm(sizes)?;
        Ok(bed)
    }
}

/// Cores of the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// Core of the client.
    pub client: usize,
    /// Core of DataNode and neighbours.
    pub node: usize,
}

/// A complete setup for one phase.
pub struct TestBed<'a> {
    pub(super) lab: &'a Lab,
    pub(super) daemon: Option<&'a Daemon>,
    pub(super) hdfs: Hdfs<'a>,
    client: Client,
    /// Clients of the applications, by name of the side.
    pub(super) apps: BTreeMap<String, Client>,
    local: Option<&'a mut (LocalHdfs, Client)>,
    /// Files and devices behind the guests' disks.
    images: Vec<PathBuf>,
    agent: bool,
}

impl<'a> TestBed<'a> {
    /// Warms up all kinds of reads on each side for the same time, so that later reads run compiled code.
    fn warm(&mut self, sizes: &Sizes) -> Outcome {
        for side in self.sides(Work::Warm) {
            let request = format!("{} warm {FILE} {}", side.word(), sizes.warm_s);
            self.ask(side, &request)?;
        }
        Ok(())
    }

    /// The work's sides that this setup supports.
    pub fn sides(&self, work: Work) -> Vec<Side> {
        let has = |side: &Side| match side {
            Side::Viola | Side::Unverified => self.daemon.is_some(),
            Side::Loopback => self.local.is_some(),
            Side::Stock | Side::Disk => true,
        };
        work.sides().iter().copied().filter(has).collect()
    }

    /// Bytes that viola has served so far, once the counter is stable.
    pub fn served(&self, side: Side) -> Outcome<u64> {
        let (Some(daemon), false) = (self.daemon, side == Side::Loopback) else {
            return Ok(0);
        };
        daemon.served()
    }

    /// Waits until written blocks are in their lasting state: named, if the agent runs.
    pub fn settle_named(&mut self, side: Side) -> Outcome {
        self.settle()?;
        match side == Side::Viola && self.agent {
            true => self.wait_named(),
            false => Ok(()),
        }
    }

    /// Processes whose CPU time counts on a side.
    pub fn processes(&self, side: Side) -> Outcome<Processes> {
        Ok(match (side, &self.local) {
            (Side::Loopback, Some((local, _))) => match local.pids()[..] {
                [client, node, ..] => Processes::OnHost { client, node },
                _ => return Err(Failure::run("the host's HDFS has ended")),
            },
            _ => Processes::Guests {
                client: guest(self.lab, CLIENT)?.pid(),
                node: guest(self.lab, NODE)?.pid(),
                daemon: self.daemon.map(Daemon::pid),
            },
        })
    }

    /// Sends a request to the side's client.
    pub fn ask(&mut self, side: Side, request: &str) -> Outcome<RequestStats> {
        interrupt::check()?;
        let word = request.split(' ').next().unwrap_or_default();
        let client = match (side, self.local.as_mut(), self.apps.get_mut(word)) {
            (Side::Loopback, Some((_, client)), _) => client,
            (_, _, Some(app)) => app,
            _ => &mut self.client,
        };
        client.ask(request).map_err(lab_failure)
    }

    /// Runs the agent, except on the stock side of works that write.
    pub fn choose_agent(&mut self, work: Work, side: Side) -> Outcome {
        match side {
            Side::Loopback => Ok(()),
            _ => self.run_agent(!work.writes() || side == Side::Viola),
        }
    }

    /// Prepares the state in which a work is measured on a side.
    pub fn prepare(&mut self, work: Work, side: Side, sizes: &Sizes, round: usize) -> Outcome {
        match work {
            work if work.is_cold() => self.drop_caches()?,
            work if work.writes() => self.settle()?,
            // Their own caches and the last round warm all sides equally.
            Work::HBase(_) | Work::Spark => {}
            // Read once, so that caches and compiled code are the same for all.
            Work::Dfsio => {
                self.run(work, side, sizes, 0)?;
            }
            Work::Hybrid | Work::HybridNeighbours => {
                self.run(Work::Hybrid, side, sizes, 0)?;
            }
            _ => {
                self.ask(side, &Work::Warm.request(side, sizes, 0))?;
            }
        }
        match work {
            Work::Random(_) | Work::DeviceRandom => {
                sh(guest(self.lab, CLIENT)?, DROP_CACHES)?;
            }
            Work::RandomAgain(_) => {
                self.ask(side, &work.request(side, sizes, round))?;
            }
            _ => {}
        }
        for name in NEIGHBOURS {
            let busy = guest(self.lab, name)?;
            if work.is_disturbed() {
                busy.start("hog", Workload::hog()).map_err(lab_failure)?;
            }
        }
        Ok(())
    }

    /// Undoes the part of [`TestBed::prepare`] that belongs to this work.
    pub fn clean_up(&mut self, work: Work) -> Outcome {
        if work.is_disturbed() {
            for name in NEIGHBOURS {
                guest(self.lab, name)?.stop("hog").map_err(lab_failure)?;
            }
        }
        Ok(())
    }

    /// Drops the images' data from the caches of guests and host.
    fn drop_caches(&mut self) -> Outcome {
        for name in [NODE, CLIENT] {
            sh(guest(self.lab, name)?, DROP_CACHES)?;
        }
        // A device's pages are written to the file below it.
        for image in self.images.iter().rev() {
            caches::drop_caches(image)?;
        }
        if let Some((local, _)) = &self.local {
            let data = local.folder().join("data/current");
            let files = caches::files(&data);
            for file in files.map_err(|e| Failure::run(format!("{}: {e}", data.display())))? {
                caches::drop_caches(&file)?;
            }
        }
        Ok(())
    }

    /// Waits for the effects of earlier works: a DataNode deletes blocks some seconds later, and dirty pages go to the
    /// disk later still. All sides wait equally; otherwise the side whose agent has just started would have more rest.
    fn settle(&self) -> Outcome {
        std::thread::sleep(DELETE_TIME);
        sh(guest(self.lab, NODE)?, "sync")?;
        let image = std::fs::File::open(&self.images[0]);
        image.and_then(|i| i.sync_all()).map_err(Failure::run)
    }

    /// Starts or stops the agent. After a start, waits until all finished blocks can be read.
    pub(super) fn run_agent(&mut self, expected: bool) -> Outcome {
        if self.daemon.is_none() || expected == self.agent {
            return Ok(());
        }
        let node = guest(self.lab, NODE)?;
        self.agent = expected;
        if !expected {
            return node.stop("agent").map(drop).map_err(lab_failure);
        }
        node.start("agent", Workload::agent(AGENT))
            .map_err(lab_failure)?;
        self.wait_named()
    }

    pub(super) fn wait_named(&self) -> Outcome {
        let client = guest(self.lab, CLIENT)?;
        let started = Instant::now();
        loop {
            interrupt::check()?;
            // List the blocks each time, because a deleted block disappears some seconds later.
            let expected = blocks(guest(self.lab, NODE)?)?.into_iter();
            let expected: Vec<String> = expected
                .map(|(pool, name)| format!("{ROOT}{MOUNT}/{pool}/{name}"))
                .collect();
            let missing = first_missing(client, &expected)?;
            if missing.is_empty() {
                return Ok(());
            }
            if started.elapsed() > NAMING_TIMEOUT {
                let words = self.daemon.map(Daemon::log_tail).unwrap_or_default();
                return Err(Failure::run(format!(
                    "viola does not show block {}: {words}",
                    missing.trim()
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Copies the file's blocks to the client's own disk, under their names.
    fn export(&mut self) -> Outcome {
        let blocks = blocks(guest(self.lab, NODE)?)?;
        let Some((pool, _)) = blocks.first() else {
            return Err(Failure::run("the DataNode has no blocks"));
        };
        let names: Vec<&str> = blocks.iter().map(|(_, name)| name.as_str()).collect();
        let request = format!(
            "stock export {FILE} {OWN_BLOCKS}/{pool} {}",
            names.join(" ")
        );
        self.ask(Side::Stock, &request)?;
        sh(guest(self.lab, CLIENT)?, "sync").map(drop)
    }
}

/// Pool and name of a block, from the path of its meta file.
pub fn block_of(path: &str) -> Option<(String, String)> {
    let mut parts = path.trim().rsplit('/');
    let name = parts.next()?.strip_suffix(".meta")?;
    let pool = parts.find(|part| part.starts_with("BP-"))?;
    Some((pool.to_owned(), name.to_owned()))
}

/// The guest with this name.
pub(super) fn guest<'a>(lab: &'a Lab, name: &str) -> Outcome<&'a Guest> {
    lab.guest(name).map_err(lab_failure)
}

/// Blocks of the DataNode in this guest, as pool and name in the mount, in order of block number.
pub(super) fn blocks(node: &Guest) -> Outcome<Vec<(String, String)>> {
    // A block that is deleted during the search is no failure.
    let found = sh(
        node,
        "find /mnt/data -name 'blk_*.meta' -path '*/finalized/*' 2>/dev/null || [ -d /mnt/data/current ]",
    )?;
    let mut blocks: Vec<_> = found.lines().filter_map(block_of).collect();
    blocks.sort_by_key(|(_, name)| (name.len(), name.clone()));
    Ok(blocks)
}

/// The first of these paths that is missing in the guest; empty if all exist.
pub(super) fn first_missing(guest: &Guest, paths: &[String]) -> Outcome<String> {
    for some in paths.chunks(MAX_NAMES_PER_COMMAND) {
        let script = format!(
            "for f in {}; do [ -e $f ] || {{ echo $f; exit; }}; done",
            some.join(" ")
        );
        let missing = sh(guest, &script)?;
        if !missing.is_empty() {
            return Ok(missing);
        }
    }
    Ok(String::new())
}

/// Runs a script that must succeed and returns its output.
pub(super) fn sh(guest: &Guest, script: &str) -> Outcome<String> {
    let output = guest.exec(&["sh", "-ec", script]).map_err(lab_failure)?;
    if output.status != 0 {
        return Err(Failure::run(format!(
            "{}: `{script}`: {}",
            guest.name(),
            output.stderr.trim()
        )));
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_known_by_its_pool_and_name() {
        let path = "/mnt/data/current/BP-1-10.77.0.11-5/current/finalized/subdir0/subdir0/blk_1073741825_1001.meta";
        assert_eq!(
            block_of(path),
            Some(("BP-1-10.77.0.11-5".into(), "blk_1073741825_1001".into()))
        );
        assert_eq!(block_of("/mnt/data/current/VERSION"), None);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The DataNode on another host: two network namespaces connected by a veth, with a daemon in each. Compares HDFS over
//! TCP with blocks through both daemons, over the same veth.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use viola_lab::hadoop::{
    Client, FileSystem, Hadoop, Hdfs, Options as HdfsOptions, ROOT, make_disk,
};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, NetnsHost, Paths, Spec};

use super::bed::{Cores, DROP_CACHES, blocks, first_missing, sh};
use super::caches;
use super::daemon::{Daemon, head};
use super::rows::Reading;
use super::usage::{CpuTotals, Processes, Usage};
use super::work::{BLOCK, FILE, Side, Sizes, Work};
use crate::harness::cpu::ThreadSampler;
use crate::harness::progress::Progress;
use crate::harness::row::{Goal, Row};
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

const CLIENT: &str = "remote-client";
const NODE: &str = "remote-node";
const PORT: u16 = 7670;
/// Mount point of the blocks, inside the root that Java runs in.
const MOUNT: &str = "/vread";
/// Timeout for the agent to name finished blocks.
const NAMING_TIMEOUT: Duration = Duration::from_secs(60);
/// Duration of a measurement, including its preparation.
const CELL_TIME: Duration = Duration::from_secs(6);
/// Minimum speedup over HDFS on the same veth.
const MIN_RATIO: f64 = 1.5;

const WORKS: [Work; 4] = [Work::Cold, Work::Warm, Work::Random(4), Work::Random(64)];
const SIDES: [Side; 3] = [Side::Stock, Side::Viola, Side::Unverified];

/// The selected works.
pub fn works(is_wanted: impl Fn(&str) -> bool) -> Vec<Work> {
    let all = WORKS.into_iter();
    all.filter(|work| is_wanted(&name(*work))).collect()
}

fn name(work: Work) -> String {
    format!("other host, {}", work.name())
}

/// Duration of all measurements.
pub fn time(works: &[Work], rounds: usize) -> Duration {
    Duration::from_secs(60) + CELL_TIME * (works.len() * SIDES.len() * rounds) as u32
}

/// Measures the works and returns the rows of the result.
pub fn run(
    works: &[Work],
    rounds: usize,
    cores: Cores,
    sizes: &Sizes,
    folder: &Path,
    progress: &mut Progress,
) -> Outcome<Vec<Row>> {
    let hadoop = Hadoop::find().map_err(lab_failure)?;
    let folder = std::path::absolute(folder).map_err(Failure::run)?;
    progress.step("HDFS on another host", Duration::from_secs(60));
    let hosts = Hosts::start()?;
    let images = ["remote-node.img", "remote-client.img"].map(|name| folder.join(name));
    for image in &images {
        make_disk(image, FileSystem::Ext4, sizes.file + (1 << 30)).map_err(lab_failure)?;
    }
    let labs = hosts.boot(cores, &images, &folder)?;
    let hdfs = Hdfs::start(&hadoop, labs.node()?, &HdfsOptions::default()).map_err(lab_failure)?;
    let mut bed = TestBed::new(&hosts, &labs, &hdfs, &images, sizes)?;
    let mut sampler = ThreadSampler::new()?;
    let mut found: Vec<(Work, Side, Reading)> = Vec::new();
    for round in 0..rounds {
        for work in works {
            for side in super::turn(&SIDES, round) {
                let label = format!(
                    "round {} of {rounds}: {}, {}",
                    round + 1,
                    name(*work),
                    side.name()
                );
                progress.step(&label, CELL_TIME);
                let reading = bed.measure(&mut sampler, *work, side, sizes, round)?;
                found.push((*work, side, reading));
            }
        }
    }
    drop((bed, hdfs));
    labs.down()?;
    Ok(works.iter().flat_map(|work| rows(*work, &found)).collect())
}

/// Two hosts with their daemons: the reader's and the DataNode's.
struct Hosts {
    daemons: [Daemon; 2],
    sites: [NetnsHost; 2],
}

impl Hosts {
    fn start() -> Outcome<Self> {
        let site = |name: &str, n: u8| NetnsHost::new(name, Ipv4Addr::new(10, 97, 0, n));
        let here = site("remote-here", 1).map_err(lab_failure)?;
        let there = site("remote-there", 2).map_err(lab_failure)?;
        here.connect(&there).map_err(lab_failure)?;
        let folders = [Daemon::folder(".here")?, Daemon::folder(".there")?];
        let mut keys = Vec::new();
        for folder in &folders {
            keys.push(make_key(folder)?);
        }
        let address = there.address();
        let asks = format!(
            "{}allow = [{{ reader = {CLIENT:?}, datanode = {NODE:?} }}]\n\
             [[vread.peer]]\nname = \"there\"\naddress = \"{address}:{PORT}\"\nfingerprint = {:?}\n",
            own(&folders[0]),
            keys[1]
        );
        let serves = format!(
            "{}listen = \"{address}:{PORT}\"\nallow = [{{ host = \"here\", datanode = {NODE:?} }}]\n\
             [[vread.peer]]\nname = \"here\"\nfingerprint = {:?}\n",
            own(&folders[1]),
            keys[0]
        );
        let [near, far] = folders;
        let daemons = [
            Daemon::begin(near, &asks, Some(CLIENT), Some(here.netns()))?,
            Daemon::begin(far, &serves, None, Some(there.netns()))?,
        ];
        Ok(Self {
            daemons,
            sites: [here, there],
        })
    }

    fn boot(&self, cores: Cores, images: &[PathBuf; 2], folder: &Path) -> Outcome<Labs> {
        let lab = |site: &NetnsHost, name: &str, address: u8, guest: String| {
            let text = format!(
                "[lab]\nname = \"bench-{name}\"\n[[bridge]]\nname = \"br0\"\naddress = \"{}/24\"\n\
                 [[guest]]\nname = \"{name}\"\ntaps = [{{ address = \"10.97.0.{address}/24\" }}]\n{guest}",
                site.address()
            );
            let spec = Spec::from_toml(&text, name, folder).map_err(lab_failure)?;
            let paths = Paths::find().map_err(lab_failure)?;
            Lab::up_in(site, &spec, &paths).map_err(lab_failure)
        };
        let node = format!(
            "cores = [{}]\nmemory = \"2G\"\ndisks = [{{ image = {:?} }}]\n",
            cores.node, images[0]
        );
        let client = format!(
            "cores = [{}]\nmemory = \"1G\"\ndisks = [{{ image = {:?} }}]\nkernel_args = [\"virtio_uml.device={}:26\"]\n",
            cores.client,
            images[1],
            self.daemons[0].socket().display()
        );
        Ok(Labs {
            node: lab(&self.sites[1], NODE, 12, node)?,
            client: lab(&self.sites[0], CLIENT, 11, client)?,
        })
    }
}

/// Guests of both hosts.
struct Labs {
    node: Lab,
    client: Lab,
}

impl Labs {
    fn node(&self) -> Outcome<&Guest> {
        self.node.guest(NODE).map_err(lab_failure)
    }

    fn client(&self) -> Outcome<&Guest> {
        self.client.guest(CLIENT).map_err(lab_failure)
    }

    fn down(self) -> Outcome {
        self.client.down().map_err(lab_failure)?;
        self.node.down().map_err(lab_failure)
    }
}

/// A complete setup.
struct TestBed<'a> {
    hosts: &'a Hosts,
    labs: &'a Labs,
    client: Client,
    images: Vec<PathBuf>,
}

impl<'a> TestBed<'a> {
    fn new(
        hosts: &'a Hosts,
        labs: &'a Labs,
        hdfs: &Hdfs<'_>,
        images: &[PathBuf],
        sizes: &Sizes,
    ) -> Outcome<Self> {
        let mut client = hdfs
            .client(&labs.client, labs.client()?)
            .map_err(lab_failure)?;
        sh(
            labs.client()?,
            &format!("mount -t virtiofs viola {ROOT}{MOUNT}"),
        )?;
        for side in SIDES {
            let keys = side.keys(MOUNT, MOUNT).join(" ");
            let request = format!("open {} {keys}", side.word());
            client.ask(&request).map_err(lab_failure)?;
        }
        let write = format!("stock write {FILE} {} {BLOCK} 1", sizes.file);
        client.ask(&write).map_err(lab_failure)?;
        let agent = Workload::agent(super::bed::AGENT);
        labs.node()?.start("agent", agent).map_err(lab_failure)?;
        let bed = Self {
            hosts,
            labs,
            client,
            images: images.to_vec(),
        };
        bed.wait_named()?;
        Ok(bed)
    }

    /// Waits until the client sees all blocks of the DataNode.
    fn wait_named(&self) -> Outcome {
        let blocks: Vec<String> = blocks(self.labs.node()?)?
            .into_iter()
            .map(|(pool, name)| format!("{ROOT}{MOUNT}/{pool}/{name}"))
            .collect();
        if blocks.is_empty() {
            return Err(Failure::run("the DataNode has no blocks"));
        }
        let started = Instant::now();
        loop {
            interrupt::check()?;
            let missing = first_missing(self.labs.client()?, &blocks)?;
            if missing.is_empty() {
                return Ok(());
            }
            if started.elapsed() > NAMING_TIMEOUT {
                let [near, far] = &self.hosts.daemons;
                return Err(Failure::run(format!(
                    "viola does not show block {}: {} / {}",
                    missing.trim(),
                    near.log_tail(),
                    far.log_tail()
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn measure(
        &mut self,
        sampler: &mut ThreadSampler,
        work: Work,
        side: Side,
        sizes: &Sizes,
        round: usize,
    ) -> Outcome<Reading> {
        interrupt::check()?;
        match work {
            Work::Cold => self.drop_caches()?,
            // Read once, so that caches and compiled code are the same for all.
            _ => {
                self.ask(&Work::Warm.request(side, sizes, 0))?;
            }
        }
        if let Work::Random(_) = work {
            sh(self.labs.client()?, DROP_CACHES)?;
        }
        let processes = Processes::Hosts {
            client: self.labs.client()?.pid(),
            node: self.labs.node()?.pid(),
            daemons: [0, 1].map(|i| self.hosts.daemons[i].pid()),
        };
        let before = CpuTotals::now(sampler, processes)?;
        let answer = self.ask(&work.request(side, sizes, round))?;
        let usage: Usage = CpuTotals::now(sampler, processes)?.since(&before);
        if side.is_local() && answer.local < answer.bytes {
            return Err(Failure::run(format!(
                "{}, {}: {} of {} bytes came from the DataNode",
                name(work),
                side.name(),
                answer.bytes - answer.local,
                answer.bytes
            )));
        }
        Ok(Reading { answer, usage })
    }

    fn ask(&mut self, request: &str) -> Outcome<viola_lab::hadoop::RequestStats> {
        self.client.ask(request).map_err(lab_failure)
    }

    /// Drops the images' data from the caches of guests and host.
    fn drop_caches(&self) -> Outcome {
        for guest in [self.labs.node()?, self.labs.client()?] {
            sh(guest, DROP_CACHES)?;
        }
        self.images
            .iter()
            .try_for_each(|image| caches::drop_caches(image))
    }
}

fn own(folder: &Path) -> String {
    let at = |name: &str| folder.join(name).display().to_string();
    format!(
        "{}key = {:?}\ncertificate = {:?}\n",
        head(folder, "own"),
        at("key"),
        at("certificate")
    )
}

/// Makes viola create a host key and returns its fingerprint.
fn make_key(folder: &Path) -> Outcome<String> {
    let failed = |what: String| Failure::run(format!("viola keys init: {what}"));
    let config = folder.join("keys.toml");
    std::fs::write(&config, own(folder)).map_err(|e| failed(e.to_string()))?;
    let output = Command::new(crate::harness::program::viola()?)
        .args(["keys", "init", "--host", "bench", "--config"])
        .arg(&config)
        .output()
        .map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let fingerprint = text.lines().find_map(|l| l.strip_prefix("fingerprint "));
    fingerprint
        .map(str::to_owned)
        .ok_or_else(|| failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

type Figure = fn(&Reading) -> f64;

/// Rate with its goal, times of single reads, and CPU-seconds per GiB.
fn rows(work: Work, found: &[(Work, Side, Reading)]) -> Vec<Row> {
    let (stock, viola) = (Side::Stock.name(), Side::Viola.name());
    let row = |what: &str, unit: &'static str, figure: Figure| {
        let row = Row::new(format!("{}{what}", name(work)), unit);
        let row = SIDES.iter().fold(row, |row, side| {
            let readings = found.iter().filter(|(w, s, _)| (w, s) == (&work, side));
            row.side(side.name(), readings.map(|(_, _, r)| figure(r)))
        });
        row.against(viola, stock)
    };
    let mut rows = Vec::new();
    if let Work::Random(_) = work {
        let rate: Figure = |r| r.answer.reads as f64 / r.answer.wall_s;
        rows.push(row("", "reads/s", rate).goal(Goal::AtLeast(MIN_RATIO), viola));
        rows.push(row(", p50", "us", |r| r.answer.p50_us));
        rows.push(row(", p99", "us", |r| r.answer.p99_us));
    } else {
        let rate: Figure = |r| r.answer.bytes as f64 / f64::from(1 << 20) / r.answer.wall_s;
        rows.push(row("", "MiB/s", rate).goal(Goal::AtLeast(MIN_RATIO), viola));
    }
    let costs: [(&str, Figure); 4] = [
        (", client's CPU", |r| r.usage.per_gib(r.answer.bytes).client),
        (", DataNode's CPU", |r| r.usage.per_gib(r.answer.bytes).node),
        (", both daemons' CPU", |r| {
            r.usage.per_gib(r.answer.bytes).daemon
        }),
        (", host's CPU", |r| r.usage.per_gib(r.answer.bytes).host),
    ];
    rows.extend(costs.map(|(what, figure)| row(what, "s/GiB", figure)));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_config::Config;
    use viola_lab::hadoop::RequestStats;

    #[test]
    fn a_daemon_keeps_to_its_own_host() {
        let config = Config::parse(Path::new("v.toml"), &own(Path::new("/run/x"))).unwrap();
        assert_eq!(config.daemon.vms, viola_config::VmScope::Own);
        assert_eq!(config.vread.key, Path::new("/run/x/key"));
    }

    #[test]
    fn the_rate_is_judged_and_costs_are_shown() {
        let reading = |wall_s: f64| Reading {
            answer: RequestStats {
                bytes: 1 << 30,
                wall_s,
                ..RequestStats::default()
            },
            usage: Usage {
                client: 1.0,
                node: 0.0,
                daemon: 0.5,
                host: 2.0,
            },
        };
        let found = [
            (Work::Warm, Side::Stock, reading(4.0)),
            (Work::Warm, Side::Viola, reading(2.0)),
        ];
        let rows = rows(Work::Warm, &found);
        assert_eq!(rows[0].name, "other host, sequential 1 MiB, again");
        assert_eq!((rows[0].ratio, rows[0].met), (Some(2.0), Some(true)));
        assert_eq!(
            rows[3].name,
            "other host, sequential 1 MiB, again, both daemons' CPU"
        );
        assert_eq!(rows[3].median("viola"), Some(0.5));
    }

    #[test]
    fn works_are_chosen_by_their_names() {
        assert_eq!(works(|n| n.contains("other host")).len(), 4);
        assert_eq!(works(|n| n.contains("random 4")), [Work::Random(4)]);
        assert!(time(&WORKS, 5) > CELL_TIME * 60);
    }
}

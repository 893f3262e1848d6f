// SPDX-License-Identifier: Apache-2.0
//! Test bed: a guest with each web server twice, without and with the library, neighbours on its core, and viola.

use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_extents::Extent;
use viola_extents::host::{Image, Layer};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::pipe::status::{self, Pipes};

use super::super::vread::daemon::{Daemon, head};
use super::servers::{SOCKET, Work};
use crate::harness::side::lab_failure;
use crate::harness::tool;
use crate::harness::vmm::GuestKind;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Sizes of the files that are served, in bytes.
pub const SIZES: [usize; 9] = [
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
    MAX_FILE_BYTES,
];
/// Size of the largest file, bytes.
pub const MAX_FILE_BYTES: usize = 256 << 20;
/// Block size of the guest's file system, bytes.
const BLOCK: u64 = 4096;
/// Size of the guest's disk, bytes.
const IMAGE: usize = 3 << 30;
const WEB: &str = "vpipe-web";
const NEIGHBOURS: [&str; 3] = ["vpipe-busy1", "vpipe-busy2", "vpipe-busy3"];
/// Timeout for the agent to prove which disk it has.
const PROOF_TIMEOUT: Duration = Duration::from_secs(30);
/// Server of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// The web server without the library.
    Stock,
    /// The same with the library.
    Viola,
    /// The host alone, from the same image: the upper bound.
    Host,
}

impl Side {
    /// Name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Viola => "viola",
            Self::Host => "host",
        }
    }
}

/// Contents that follow from the byte's offset.
pub fn pattern_bytes(size: usize) -> Vec<u8> {
    let mut word = size as u64 | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        word = word
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&word.rotate_left(17).to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// Creates an image with all blocks allocated on the host's disk, as after much writing. Otherwise block allocation
/// would dominate writes on every side.
fn fill(image: &Path) -> std::io::Result<()> {
    let mut file = File::create(image)?;
    let zeros = vec![0; 8 << 20];
    for _ in 0..IMAGE / zeros.len() {
        file.write_all(&zeros)?;
    }
    file.sync_all()
}

/// Path of the file of this size.
pub fn path(size: usize) -> String {
    format!("/f{size}")
}

/// The files and their image.
pub struct Fixtures {
    image: PathBuf,
    /// Contents of the files, in the order of [`SIZES`].
    files: Vec<Vec<u8>>,
    /// Extents of the files in the image, in the same order; valid as long as no file moves.
    extents: Vec<Vec<Extent>>,
    daemon: Daemon,
}

impl Fixtures {
    /// Creates the image in `folder` and starts viola.
    ///
    /// # Errors
    /// No space is left, mkfs.ext4 is missing, or the daemon does not start.
    pub fn new(folder: &Path) -> Outcome<Self> {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
        let tree = folder.join("tree");
        let _ = fs::remove_dir_all(&tree);
        fs::create_dir_all(&tree).map_err(failed)?;
        let files: Vec<Vec<u8>> = SIZES.iter().map(|size| pattern_bytes(*size)).collect();
        for file in &files {
            let name = path(file.len());
            fs::write(tree.join(&name[1..]), file).map_err(failed)?;
        }
        let image = folder.join("web.img");
        let _ = fs::remove_file(&image);
        fill(&image).map_err(failed)?;
        tool::output(
            Command::new("/usr/sbin/mkfs.ext4")
                .args(["-q", "-b", "4096", "-E", "nodiscard", "-d"])
                .args([&tree, &image]),
        )?;
        let extents = SIZES.iter().map(|size| extents(&image, *size));
        let extents = extents.collect::<Outcome<_>>()?;
        let own = Daemon::folder("-vpipe")?;
        let config = format!(
            "{}\n[[vm]]\nname = \"{WEB}\"\n[vm.pipe]\nwrites = true\n",
            head(&own, "all")
        );
        let daemon = Daemon::begin(own, &config, None, None)?;
        Ok(Self {
            image,
            files,
            extents,
            daemon,
        })
    }

    /// Contents of the file of this size.
    pub fn file(&self, size: usize) -> Outcome<&[u8]> {
        let file = self.files.iter().find(|file| file.len() == size);
        let file = file.ok_or_else(|| Failure::run(format!("cannot find {}", path(size))))?;
        Ok(file)
    }

    /// Boots the guests on this core.
    ///
    /// # Errors
    /// The guest image is missing, or a guest does not boot.
    pub fn boot(&self, core: usize, kind: GuestKind) -> Outcome<Lab> {
        let image = self.image.display().to_string();
        let image = fs::canonicalize(&image).map_err(|e| Failure::run(format!("{image}: {e}")))?;
        let mut text = format!(
            "[lab]\nname = \"bench-vpipe\"\n{}[[guest]]\nname = \"{WEB}\"\ncores = [{core}]\nmemory = \"768M\"\n\
             disks = [{{ image = {:?} }}]\n",
            kind.lab_keys(),
            image.display().to_string()
        );
        for name in NEIGHBOURS {
            text.push_str(&format!("[[guest]]\nname = \"{name}\"\ncores = [{core}]\n"));
        }
        let spec = Spec::from_toml(&text, "bench-vpipe", Path::new("/")).map_err(lab_failure)?;
        Lab::up(&spec, &Paths::find().map_err(lab_failure)?).map_err(lab_failure)
    }

    /// Starts all servers in the guest. For a control run neither side uses the library.
    ///
    /// # Errors
    /// A server does not start, or the daemon does not serve the guest.
    pub fn bed<'a>(&'a self, lab: &'a Lab, kind: GuestKind, control: bool) -> Outcome<TestBed<'a>> {
        let bed = TestBed {
            fixtures: self,
            lab,
        };
        bed.sh(&format!("mount -o noatime {} /mnt", kind.disk(0)))?;
        let agent = format!(
            "[pipe]\nfiles = ['/mnt']\ninto = ['/mnt']\nrelay = true\nusers = ['root']\nsocket = '{SOCKET}'\n"
        );
        let web = bed.web()?;
        web.start("agent", Workload::agent(&agent))
            .map_err(lab_failure)?;
        bed.wait_proved()?;
        let host = bed.host().to_string();
        for work in Work::SERVERS {
            for side in [Side::Stock, Side::Viola] {
                if let Some(script) = work.start(side, &host, control) {
                    bed.sh(&script)?;
                }
            }
        }
        Ok(bed)
    }
}

/// Running guests.
pub struct TestBed<'a> {
    fixtures: &'a Fixtures,
    lab: &'a Lab,
}

impl<'a> TestBed<'a> {
    /// Contents of the file of this size.
    pub fn file(&self, size: usize) -> Outcome<&'a [u8]> {
        self.fixtures.file(size)
    }

    /// The guest with the web servers.
    pub fn web(&self) -> Outcome<&Guest> {
        self.lab.guest(WEB).map_err(lab_failure)
    }

    /// Runs a script in the guest and returns its output.
    ///
    /// # Errors
    /// The script fails; the error quotes it and its stderr.
    pub fn sh(&self, script: &str) -> Outcome<String> {
        let output = self.web()?.exec(&["sh", "-ec", script]);
        let output = output.map_err(lab_failure)?;
        if output.status != 0 {
            let why = format!("{WEB}: `{script}`: {}", output.stderr.trim());
            return Err(Failure::run(why));
        }
        Ok(output.stdout)
    }

    /// Status and refusals of the guest's agent.
    pub fn agent_status(&self) -> Outcome<String> {
        self.sh("viola-agent --config /run/viola/agent.toml status")
    }

    /// Last lines of the daemon's log.
    pub fn daemon_log(&self) -> String {
        self.fixtures.daemon.log_tail()
    }

    /// The host's counters so far.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn counters(&self) -> Outcome<status::PipeStats> {
        let pipes: Pipes = self.fixtures.daemon.ask("/pipes")?;
        Ok(pipes
            .vms
            .first()
            .map(|vm| vm.work.clone())
            .unwrap_or_default())
    }

    fn wait_proved(&self) -> Outcome {
        let started = Instant::now();
        loop {
            interrupt::check()?;
            let pipes: Pipes = self.fixtures.daemon.ask("/pipes")?;
            if pipes.vms.iter().any(|vm| vm.serving) {
                return Ok(());
            }
            if started.elapsed() > PROOF_TIMEOUT {
                let why = pipes
                    .vms
                    .first()
                    .map(|vm| vm.why.clone())
                    .unwrap_or_default();
                return Err(Failure::run(format!(
                    "the daemon does not serve {WEB}: {why}"
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts or stops the neighbours' work.
    pub fn set_neighbours_busy(&self, busy: bool) -> Outcome {
        for name in NEIGHBOURS {
            let guest = self.lab.guest(name).map_err(lab_failure)?;
            match busy {
                true => guest.start("hog", Workload::hog()).map_err(lab_failure)?,
                false => drop(guest.stop("hog").map_err(lab_failure)?),
            }
        }
        Ok(())
    }

    /// Address of a side's server.
    pub fn address(&self, work: Work, side: Side) -> Outcome<SocketAddr> {
        let ip = match side {
            Side::Host => self.host(),
            _ => self
                .web()?
                .address()
                .ok_or_else(|| Failure::run("the guest has no network address"))?
                .into(),
        };
        Ok((ip, work.port(side)).into())
    }

    /// Address of the host on the guests' network, where its clients run.
    pub fn host(&self) -> IpAddr {
        self.lab.spec().bridges[0].address.into()
    }

    /// Runs a closure in the clients' network namespace.
    pub fn at_clients<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Outcome<T> {
        self.lab.in_netns(job).map_err(lab_failure)
    }

    /// Checks that the served files are unchanged on the disk, so that no write went to a wrong
    /// block.
    ///
    /// # Errors
    /// A file has other bytes; the error names the file and the first offset.
    pub fn check(&self) -> Outcome {
        for file in &self.fixtures.files {
            let (image, extents) = self.source(file.len())?;
            let size = file.len() as u64;
            let map = image.check(&extents, size).map_err(Failure::run)?;
            let mut received = vec![0; file.len()];
            image
                .read_at(&map, 0, &mut received)
                .map_err(Failure::run)?;
            if received != *file {
                let at = received.iter().zip(file).position(|(a, b)| a != b);
                let why = format!(
                    "{}: other bytes on the disk from {at:?} on",
                    path(file.len())
                );
                return Err(Failure::run(why));
            }
        }
        Ok(())
    }

    /// Extents of a file in the image, for the host alone.
    pub fn source(&self, size: usize) -> Outcome<(Arc<Image>, Vec<Extent>)> {
        let file = File::open(&self.fixtures.image).map_err(Failure::run)?;
        let image = Image::open(vec![Layer::raw(file)]).map_err(Failure::run)?;
        let of_size = SIZES.iter().position(|one| *one == size);
        let extents = of_size.and_then(|at| self.fixtures.extents.get(at));
        let extents = extents.ok_or_else(|| Failure::run("cannot find the file"))?;
        Ok((Arc::new(image), extents.clone()))
    }
}

/// Extents of a file in an image that no guest uses yet.
fn extents(image: &Path, size: usize) -> Outcome<Vec<Extent>> {
    let listed = Command::new("/usr/sbin/debugfs")
        .args(["-R", &format!("blocks {}", path(size))])
        .arg(image)
        .output()
        .map_err(|e| Failure::run(format!("debugfs: {e}")))?;
    let blocks = String::from_utf8_lossy(&listed.stdout).into_owned();
    let extents = blocks
        .split_ascii_whitespace()
        .filter_map(|number| number.parse::<u64>().ok())
        .enumerate()
        .map(|(at, number)| Extent {
            logical: at as u64 * BLOCK,
            physical: number * BLOCK,
            length: BLOCK,
            zero: false,
        });
    let extents = joined_extents(extents);
    match extents.iter().map(|e| e.length).sum::<u64>() == size as u64 {
        true => Ok(extents),
        false => Err(Failure::run(format!(
            "debugfs does not find {}",
            path(size)
        ))),
    }
}

/// Joins adjacent extents.
fn joined_extents(extents: impl Iterator<Item = Extent>) -> Vec<Extent> {
    let mut all: Vec<Extent> = Vec::new();
    for extent in extents {
        match all.last_mut() {
            Some(last)
                if last.logical + last.length == extent.logical
                    && last.physical + last.length == extent.physical =>
            {
                last.length += extent.length;
            }
            _ => all.push(extent),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_extents_are_joined() {
        let extent = |logical, physical, length| Extent {
            logical,
            physical,
            length,
            zero: false,
        };
        let pieces = [extent(0, 8, 4), extent(4, 12, 4), extent(8, 4, 4)];
        assert_eq!(
            joined_extents(pieces.into_iter()),
            [extent(0, 8, 8), extent(8, 4, 4)]
        );
    }
}

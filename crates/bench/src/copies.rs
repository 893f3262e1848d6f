// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench copies`: copies files in emulated PCs, by the guest and by the host, with and without neighbours on
//! the vCPU's core. The disks are those of real PCs (NVMe, virtio). (A User Mode Linux disk needs one system call per
//! page; `viola-lab bench vpipe` measures it.) The images are in memory, because flushes to a host disk would dominate
//! both sides.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use viola_lab::Paths;
use viola_lab::qemu::{Image, QemuVm, VmSpec};
use viola_lab::wire::Workload;
use viola_netdev::Netns;
use viola_proto::pipe::status::{PipeStats, Pipes};

use super::vpipe::pattern_bytes;
use super::vread::daemon::{Daemon, head};
use crate::Options;
use crate::harness::folder::Folder;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use crate::harness::side::lab_failure;
use crate::harness::tool;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

const NAME: &str = "bench-copies";
const MIB: usize = 1 << 20;
/// Sizes of the files `f0`, `f1` ..., bytes. Each figure includes the fixed cost of a copy.
const SIZES: [usize; 2] = [64 * MIB, 256 * MIB];
/// Space for their copies, bytes.
const COPY_ROOM: usize = 512 * MIB;
const NEIGHBOURS: usize = 3;
const SIDES: [&str; 2] = ["stock", "viola"];
const BOOT_TIME: Duration = Duration::from_secs(25);
/// Timeout for the daemon to serve a guest, and for its counters.
const SERVICE_TIMEOUT: Duration = Duration::from_secs(90);
/// Timeout for one copy.
const COPY_TIMEOUT: Duration = Duration::from_secs(300);
/// Environment of a program in the guest.
const LIBRARY: &str = "LD_PRELOAD=/usr/lib/libvpipe_preload.so VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock";

/// Disk type of the files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disk {
    /// The disk writes zeros by itself.
    Nvme,
    /// The guest has to write zeros.
    Virtio,
}

impl Disk {
    fn name(self) -> &'static str {
        match self {
            Self::Nvme => "NVMe",
            Self::Virtio => "virtio-blk",
        }
    }

    /// Device in the guest; the first virtio disk holds the programs.
    fn device(self) -> &'static str {
        match self {
            Self::Nvme => "nvme0n1",
            Self::Virtio => "vdb",
        }
    }
}

/// What is copied: a file of [`SIZES`] on a disk, with or without busy neighbours.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    busy: bool,
    disk: Disk,
    file: usize,
}

impl Cell {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for disk in [Disk::Nvme, Disk::Virtio] {
            for busy in [false, true] {
                all.extend((0..SIZES.len()).map(|file| Self { busy, disk, file }));
            }
        }
        all
    }

    fn name(&self) -> String {
        let busy = if self.busy { ", busy neighbours" } else { "" };
        let (size, disk) = (SIZES[self.file] / MIB, self.disk.name());
        format!("cp, {size} MiB, {disk}{busy}")
    }

    /// Approximate duration of a round of this cell: a copy on each side.
    fn length(&self) -> Duration {
        let alone = Duration::from_millis((SIZES[self.file] / MIB * 40) as u64);
        alone * if self.busy { NEIGHBOURS as u32 + 1 } else { 1 }
    }
}

/// One copy, seconds: wall-clock time, CPU time of the vCPU thread and of all QEMU threads.
struct Reading {
    clock: f64,
    vcpu: f64,
    qemu: f64,
}

/// Readings of each side.
type Measurements = BTreeMap<Cell, [Vec<Reading>; 2]>;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    super::need_root()?;
    let selected = |cell: &Cell| {
        let only = options.only.as_deref();
        only.is_none_or(|only| cell.name().contains(only)) && !(options.quick && cell.file > 0)
    };
    let cells: Vec<Cell> = Cell::all().into_iter().filter(selected).collect();
    if cells.is_empty() {
        return Err(Failure::usage(
            "no cell name contains the pattern of --only; try NVMe, virtio, `256 MiB` or `neighbours`",
        ));
    }
    let rounds = options.rounds();
    let each: Duration = cells.iter().map(Cell::length).sum();
    let mut disks: Vec<Disk> = cells.iter().map(|cell| cell.disk).collect();
    disks.dedup();
    let total_time = each * rounds as u32 + BOOT_TIME * disks.len() as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("copies", rounds);
    let mut found = Measurements::new();
    for disk in disks {
        progress.step(&format!("{}: boot", disk.name()), BOOT_TIME);
        // The kernel ends QEMU when the thread that started it ends. The tap exists only in that thread's namespace.
        let netns = Netns::new().map_err(Failure::run)?;
        let cells: Vec<Cell> = cells.iter().copied().filter(|c| c.disk == disk).collect();
        let measured = || measure(disk, &cells, options, &mut progress, &mut found);
        netns.run(measured).map_err(Failure::run)??;
    }
    drop(progress);
    let guests = "QEMU's emulation, one vCPU, images in memory; neighbours are three spinning threads on the vCPU's core";
    let results = Results::new(rounds, guests, rows(&found));
    let is_whole = !options.quick && rounds >= 5 && options.only.is_none();
    let path = options.path("copies", is_whole);
    results.publish("copies", &path)
}

/// Measures both sides of the cells of one disk, in turn.
fn measure(
    disk: Disk,
    cells: &[Cell],
    options: &Options,
    progress: &mut Progress,
    found: &mut Measurements,
) -> Outcome {
    let rounds = options.rounds();
    let vm = Vm::boot(disk)?;
    // Load the programs into memory.
    for side in 0..SIDES.len() {
        vm.copy(side, 0)?;
    }
    let mut copies = 1;
    for round in 0..rounds {
        for cell in cells {
            let label = format!("round {} of {rounds}: {}", round + 1, cell.name());
            progress.step(&label, cell.length());
            let neighbours = || Neighbours::beside(&vm, options.core);
            let _neighbours = cell.busy.then(neighbours).transpose()?;
            for turn in 0..SIDES.len() {
                interrupt::check()?;
                let side = (round + turn) % SIDES.len();
                let reading = vm.copy(side, cell.file)?;
                found.entry(*cell).or_default()[side].push(reading);
            }
            copies += 1;
        }
    }
    vm.check_copied(copies)
}

fn rows(found: &Measurements) -> Vec<Row> {
    let mut rows = Vec::new();
    for (cell, sides) in found {
        let mib = (SIZES[cell.file] / MIB) as f64;
        let row = |what: &str, unit, of: &dyn Fn(&Reading) -> f64| {
            let row = Row::new(format!("{}{what}", cell.name()), unit);
            let row = (SIDES.iter().zip(sides)).fold(row, |row, (name, readings)| {
                row.side(*name, readings.iter().map(of))
            });
            row.against("viola", "stock")
        };
        let speed = row("", "MiB/s", &|reading| mib / reading.clock);
        rows.push(match cell.busy {
            true => speed.goal(Goal::AtLeast(3.0), "viola"),
            false => speed.goal(Goal::AtLeast(0.98), "viola"),
        });
        let gib = 1024.0 / mib;
        rows.push(row(", vCPU", "s/GiB", &|reading| reading.vcpu * gib));
        rows.push(row(", CPU of all of QEMU", "s/GiB", &|reading| {
            reading.qemu * gib
        }));
    }
    rows
}

/// A guest with the files, and its daemon.
struct Vm {
    machine: QemuVm,
    daemon: Daemon,
    _folder: Folder,
}

impl Vm {
    fn boot(disk: Disk) -> Outcome<Self> {
        let own = Daemon::folder("-copies")?;
        let config = format!(
            "{}\n[[vm]]\nname = \"qemu:{NAME}\"\n[vm.pipe]\nwrites = true\n",
            head(&own, "all")
        );
        let daemon = Daemon::begin(own, &config, None, None)?;
        // The image is in memory.
        let at = format!("/dev/shm/viola-copies.{}", std::process::id());
        let folder = Folder::new(at.into())?;
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.0.display()));
        let tree = folder.0.join("tree");
        fs::create_dir(&tree).map_err(failed)?;
        for (number, size) in SIZES.into_iter().enumerate() {
            fs::write(tree.join(format!("f{number}")), pattern_bytes(size)).map_err(failed)?;
        }
        let files = ext4(
            &folder.0,
            "d.img",
            &tree,
            SIZES.iter().sum::<usize>() + COPY_ROOM,
        )?;
        fs::remove_dir_all(&tree).map_err(failed)?;
        let root = Paths::find().map_err(lab_failure)?.image.join("root");
        let tools = ext4(&folder.0, "t.img", &root, 256 * MIB)?;
        let spec = VmSpec::new(NAME)
            .memory(1024)
            .disk("tools", &tools, "raw")
            .tap("tap0", "52:54:00:77:00:11")
            .agent();
        let spec = match disk {
            Disk::Nvme => spec.nvme("files", &files),
            Disk::Virtio => spec.disk("files", &files, "raw"),
        };
        let image = Image::find_from([Path::new(".")], "new").map_err(lab_failure)?;
        let machine = QemuVm::start(&spec, &image, &folder.0).map_err(lab_failure)?;
        let vm = Self {
            machine,
            daemon,
            _folder: folder,
        };
        vm.sh(&format!(
            "modprobe virtio_net; ip link set lo up; ip address add 10.77.0.11/24 dev eth0; ip link set eth0 up; \
             mkdir -p /r /run/viola; mount -o ro /dev/vda /r; mount -t tmpfs tmpfs /r/tmp; mount -t proc proc /r/proc; \
             mount --bind /dev /r/dev; mkdir /r/tmp/d /r/tmp/n; mount /dev/{} /r/tmp/d",
            disk.device()
        ))?;
        let agent = Workload::agent(
            "[pipe]\nfiles = ['/r/tmp/d']\ninto = ['/r/tmp/d']\nsocket = '/r/tmp/n/pipe.sock'\n",
        );
        let started = vm.machine.start_workload("agent", agent);
        started.map_err(lab_failure)?;
        vm.wait("the daemon does not serve the guest", |pipes| {
            pipes.vms.iter().any(|vm| vm.serving)
        })?;
        Ok(vm)
    }

    fn sh(&self, script: &str) -> Outcome<String> {
        let output = self
            .machine
            .exec(script, COPY_TIMEOUT)
            .map_err(lab_failure)?;
        match output.status {
            0 => Ok(output.stdout),
            _ => Err(Failure::run(format!(
                "{NAME}: `{script}`: {}{}",
                output.stdout, output.stderr
            ))),
        }
    }

    /// Runs a script in the guest in the folder of the files, with the lab's programs.
    fn run(&self, script: &str) -> Outcome<String> {
        self.sh(&format!(
            "chroot /r sh -c 'set -e; cd /tmp/d; {script}' 2>&1"
        ))
    }

    /// Copies a file that is in the guest's page cache and flushes the copy.
    fn copy(&self, side: usize, file: usize) -> Outcome<Reading> {
        let library = if side == 1 { LIBRARY } else { "" };
        self.run(&format!("rm -f new; sync; cat f{file} > /dev/null"))?;
        let (started, before) = (Instant::now(), self.cpu()?);
        self.run(&format!("{library} /usr/bin/cp f{file} new; sync -f new"))?;
        let (clock, after) = (started.elapsed().as_secs_f64(), self.cpu()?);
        self.run(&format!("cmp f{file} new"))?;
        Ok(Reading {
            clock,
            vcpu: after[0] - before[0],
            qemu: after[1] - before[1],
        })
    }

    /// Threads of QEMU and their names.
    fn threads(&self) -> Outcome<Vec<(PathBuf, String)>> {
        let tasks = format!("/proc/{}/task", self.machine.pid());
        let failed = |e: std::io::Error| Failure::run(format!("{tasks}: {e}"));
        let mut threads = Vec::new();
        for task in fs::read_dir(&tasks).map_err(failed)? {
            let task = task.map_err(failed)?.path();
            // A thread may have ended meanwhile.
            let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
            threads.push((task, name));
        }
        Ok(threads)
    }

    /// CPU time of the vCPU thread and of all QEMU threads, in seconds.
    fn cpu(&self) -> Outcome<[f64; 2]> {
        let (mut vcpu, mut all) = (0.0, 0.0);
        for (task, name) in self.threads()? {
            let text = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
            let on = text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
            let on = on.unwrap_or_default() / 1e9;
            all += on;
            if name.starts_with("CPU 0") {
                vcpu += on;
            }
        }
        Ok([vcpu, all])
    }

    fn wait(&self, what: &str, condition: impl Fn(&Pipes) -> bool) -> Outcome {
        let started = Instant::now();
        loop {
            interrupt::check()?;
            let pipes: Pipes = self.daemon.ask("/pipes")?;
            if condition(&pipes) {
                return Ok(());
            }
            if started.elapsed() > SERVICE_TIMEOUT {
                let daemon_log = self.daemon.log_tail();
                return Err(Failure::run(format!(
                    "{NAME}: {what}; the daemon: {daemon_log}"
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Checks that the host made exactly `copies` copies and refused none.
    fn check_copied(&self, copies: u64) -> Outcome {
        let is =
            |work: &PipeStats| (work.begun, work.returned, work.refused) == (copies, copies, 0);
        let what = format!("the host did not make {copies} copies");
        self.wait(&what, |pipes| pipes.vms.iter().any(|vm| is(&vm.work)))
    }
}

/// Threads that spin on the vCPU's core.
struct Neighbours {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Neighbours {
    /// Pins the vCPU thread to the same core, where it stays.
    fn beside(vm: &Vm, core: usize) -> Outcome<Self> {
        let mut only = CpuSet::new();
        only.set(core);
        for (task, name) in vm.threads()? {
            let tid = task.file_name().and_then(|tid| tid.to_str()?.parse().ok());
            if let (Some(tid), true) = (tid.and_then(Pid::from_raw), name.starts_with("CPU 0")) {
                sched_setaffinity(Some(tid), &only).map_err(Failure::run)?;
            }
        }
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for _ in 0..NEIGHBOURS {
            let stop = Arc::clone(&stop);
            threads.push(std::thread::spawn(move || {
                // On another core the thread would not compete, and its figures would show it.
                let _ = sched_setaffinity(None, &only);
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }));
        }
        Ok(Self { stop, threads })
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Creates a disk image whose file system contains the folder.
fn ext4(folder: &Path, name: &str, tree: &Path, size: usize) -> Outcome<PathBuf> {
    let image = folder.join(name);
    let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", image.display()));
    let file = File::create(&image).map_err(failed)?;
    file.set_len(size as u64).map_err(failed)?;
    tool::output(
        Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-d"])
            .args([tree, &image]),
    )?;
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_is_measured() {
        let names: Vec<String> = Cell::all().iter().map(Cell::name).collect();
        assert_eq!(names.len(), 8);
        assert_eq!(names[0], "cp, 64 MiB, NVMe");
        assert_eq!(names[7], "cp, 256 MiB, virtio-blk, busy neighbours");
    }

    #[test]
    fn the_goal_is_for_busy_neighbours() {
        let cell = |busy| Cell {
            busy,
            disk: Disk::Nvme,
            file: 1,
        };
        let reading = |clock| Reading {
            clock,
            vcpu: clock / 2.0,
            qemu: clock,
        };
        let found =
            [true, false].map(|busy| (cell(busy), [vec![reading(2.0)], vec![reading(1.0)]]));
        let rows = rows(&found.into_iter().collect());
        let seen = |name: &str| {
            let row = rows.iter().find(|row| row.name == name).unwrap();
            (row.ratio, row.met)
        };
        assert_eq!(seen("cp, 256 MiB, NVMe"), (Some(2.0), Some(true)));
        assert_eq!(
            seen("cp, 256 MiB, NVMe, busy neighbours"),
            (Some(2.0), Some(false))
        );
        assert_eq!(seen("cp, 256 MiB, NVMe, vCPU"), (Some(0.5), None));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench backlog`: measures how long TCP segments wait on the backlog of a socket whose owner is not
//! running, relative to the round trip, on a current kernel, without and with early acknowledgements (`guest-kmod/`).
//! The guest is an emulated PC with two vCPUs. The sender runs on the host, on the core of vCPU 0, which takes the
//! interrupts.

mod cells;
mod peer;
mod trace;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};
use viola_netdev::Netns;

use cells::{CELLS, Cell, Load};
pub use peer::backlog;
use peer::{Sent, ask, send};
use trace::Waits;

use crate::Options;
use crate::harness::folder::Folder;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 11);
/// Address of the receiver behind the long line, in a network namespace of the guest.
const FAR: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const PORT: u16 = 5001;
const NEIGHBOURS: usize = 3;
const SIDES: [&str; 2] = ["stock", "early"];
const BOOT_TIME: Duration = Duration::from_secs(25);
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(120);
const TC: &str = "/usr/sbin/tc";
const IN_FAR: &str = "/usr/bin/ip netns exec far";
const PARAMETERS: &str = "/sys/module/viola_ack/parameters";
const TRACING: &str = "/sys/kernel/tracing";

struct Reading {
    sent: Sent,
    waits: Waits,
    /// Acknowledgements sent by the module.
    early: u64,
}

/// Readings of each side, by index of the cell.
type Measurements = BTreeMap<usize, [Vec<Reading>; 2]>;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    super::need_root()?;
    let selected = |at: &usize| {
        let only = options.only.as_deref();
        only.is_none_or(|only| CELLS[*at].name.contains(only))
    };
    let cells: Vec<usize> = (0..CELLS.len()).filter(selected).collect();
    if cells.is_empty() {
        return Err(Failure::usage(
            "no cell name contains the pattern of --only; try turbo, neighbours, spinner or `4 KiB`",
        ));
    }
    let rounds = options.rounds();
    let round: Duration = cells.iter().map(|at| CELLS[*at].total_time()).sum();
    let total_time = BOOT_TIME + round * (rounds * SIDES.len()) as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("backlog", rounds);
    progress.step("boot", BOOT_TIME);
    let mut found = Measurements::new();
    // The kernel ends QEMU when the thread that started it ends. The tap exists only in that thread's namespace.
    let netns = Netns::new().map_err(Failure::run)?;
    let measured = || measure(&cells, options, &mut progress, &mut found);
    netns.run(measured).map_err(Failure::run)??;
    drop(progress);
    let guests = "QEMU's emulation, two vCPUs, kernel of Debian's backports; neighbours are three spinning threads";
    let results = Results::new(rounds, guests, rows(&found));
    let is_whole = !options.quick && rounds >= 5 && options.only.is_none();
    let path = options.path("backlog", is_whole);
    results.publish("backlog", &path)
}

fn measure(
    cells: &[usize],
    options: &Options,
    progress: &mut Progress,
    found: &mut Measurements,
) -> Outcome {
    let rounds = options.rounds();
    let vm = Vm::boot(options.core)?;
    for round in 0..rounds {
        for at in cells {
            let cell = &CELLS[*at];
            for turn in 0..SIDES.len() {
                interrupt::check()?;
                let side = (round + turn) % SIDES.len();
                let label = format!("round {} of {rounds}: {}", round + 1, cell.name);
                progress.step(&label, cell.total_time());
                let reading = vm.measure(cell, side == 1, options.core)?;
                found.entry(*at).or_default()[side].push(reading);
            }
        }
    }
    Ok(())
}

fn rows(found: &Measurements) -> Vec<Row> {
    let mut rows = Vec::new();
    for (at, sides) in found {
        let cell = &CELLS[*at];
        let row = |what: &str, unit, of: &dyn Fn(&Reading) -> f64| {
            let row = Row::new(format!("{}: {what}", cell.name), unit);
            (SIDES.iter().zip(sides)).fold(row, |row, (name, readings)| {
                row.side(*name, readings.iter().map(of))
            })
        };
        let trip = |r: &Reading| r.sent.round_trip_us;
        let part = |r: &Reading| 100.0 * r.waits.of_all_us() / trip(r).max(1.0);
        rows.push(row("round trip", "ms", &|r| trip(r) / 1e3).against("early", "stock"));
        rows.push(row("mean wait, of the round trip", "%", &part));
        rows.push(row("segments that waited", "%", &|r| {
            100.0 * r.waits.waited as f64 / (r.waits.segments as f64).max(1.0)
        }));
        rows.push(row("wait, p50", "ms", &|r| r.waits.p50_us / 1e3));
        rows.push(row("wait, p99", "ms", &|r| r.waits.p99_us / 1e3));
        rows.push(row("acknowledged early", "times", &|r| r.early as f64));
        rows.push(row("sent again", "segments", &|r| {
            f64::from(r.sent.retransmits)
        }));
        let speed = match cell.load {
            Load::Requests(size) => row("answers", "1/s", &|r| {
                r.sent.bytes as f64 / size as f64 / r.sent.seconds
            }),
            Load::Bulk(_) => row("received", "MB/s", &|r| {
                r.sent.bytes as f64 / 1e6 / r.sent.seconds
            }),
        };
        rows.push(
            speed
                .against("early", "stock")
                .goal(Goal::AtLeast(0.95), "early"),
        );
    }
    rows
}

/// The guest with the module, which does nothing until its parameter names ports.
struct Vm {
    machine: QemuVm,
    viola: String,
    _folder: Folder,
}

impl Vm {
    fn boot(core: usize) -> Outcome<Self> {
        for words in [
            "link set lo up",
            "link add br0 type bridge",
            "address add 10.77.0.1/24 dev br0",
            "link set br0 up",
            "tuntap add dev tap0 mode tap",
            "link set tap0 master br0 up",
            &format!("route add {FAR} via {GUEST}"),
        ] {
            ip(words)?;
        }
        let at = format!("/dev/shm/viola-backlog.{}", std::process::id());
        let folder = Folder::new(at.into())?;
        let own = crate::harness::program::lab()?;
        let image = Image::find_from([Path::new(".")], "new").map_err(lab_failure)?;
        let module = module(&image)?;
        let program = Program::pack(&own, &folder.0).map_err(lab_failure)?;
        let spec = program
            .disk(VmSpec::new("bench-backlog").cpus(2).cores(&[]).memory(768))
            .word("-drive")
            .word(format!(
                "if=none,id=module,file={},format=raw,read-only=on",
                module.display()
            ))
            .arg("-device virtio-blk-pci,drive=module")
            .tap("tap0", "52:54:00:77:00:11");
        let machine = QemuVm::start(&spec, &image, &folder.0).map_err(lab_failure)?;
        program.unpack(&machine).map_err(lab_failure)?;
        let size = std::fs::metadata(&module).map_err(Failure::run)?.len();
        let vm = Self {
            machine,
            viola: format!("{} internal backlog", program.command()),
            _folder: folder,
        };
        let events: String = (trace::EVENTS.iter())
            .map(|event| format!("echo '{event}' >>{TRACING}/kprobe_events; "))
            .collect();
        vm.sh(&format!(
            "head -c {size} /dev/vdb >/tmp/viola_ack.ko; insmod /tmp/viola_ack.ko; modprobe virtio_net; modprobe sch_netem; \
             ip link set lo up; ip address add {GUEST}/24 dev eth0; ip link set eth0 up; \
             for n in $(sed -n 's/^ *\\([0-9]*\\):.*virtio.*put.*/\\1/p' /proc/interrupts); do echo 0 >/proc/irq/$n/smp_affinity_list; done; \
             modprobe veth; mkdir -p /var/run; sysctl -q -w net.ipv4.ip_forward=1; /usr/bin/ip netns add far; \
             /usr/bin/ip link add way type veth peer name end netns far; /usr/bin/ip address add 10.78.0.1/24 dev way; \
             /usr/bin/ip link set way up; {IN_FAR} /usr/bin/ip address add {FAR}/24 dev end; \
             {IN_FAR} /usr/bin/ip link set end up; {IN_FAR} /usr/bin/ip route add default via 10.78.0.1; \
             sysctl -q -w net.core.rmem_max=45000000; for there in '' '{IN_FAR}'; do \
             $there sysctl -q -w 'net.ipv4.tcp_rmem=4096 131072 45000000'; done; \
             mount -t tracefs t {TRACING}; echo 0 >{TRACING}/tracing_on; echo mono >{TRACING}/trace_clock; \
             echo 30000 >{TRACING}/buffer_size_kb; {events} echo 1 >{TRACING}/events/viola/enable"
        ))?;
        vm.pin(core)?;
        Ok(vm)
    }

    /// Pins vCPU 1 to the core and all other QEMU threads to the other cores.
    fn pin(&self, core: usize) -> Outcome {
        let tasks = PathBuf::from(format!("/proc/{}/task", self.machine.pid()));
        for task in std::fs::read_dir(tasks).map_err(Failure::run)? {
            let task = task.map_err(Failure::run)?;
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            let tid = task.file_name().to_str().and_then(|tid| tid.parse().ok());
            // A thread may have ended meanwhile.
            if let Some(tid) = tid.and_then(Pid::from_raw) {
                let _ = sched_setaffinity(Some(tid), &cores(core, name.starts_with("CPU 1")));
            }
        }
        Ok(())
    }

    fn sh(&self, script: &str) -> Outcome<String> {
        let script = format!("set -e; {script}");
        let output = self
            .machine
            .exec(&script, SCRIPT_TIMEOUT)
            .map_err(lab_failure)?;
        match output.status {
            0 => Ok(output.stdout),
            _ => Err(Failure::run(format!(
                "the guest: `{script}`: {}{}",
                output.stdout, output.stderr
            ))),
        }
    }

    fn measure(&self, cell: &Cell, early: bool, core: usize) -> Outcome<Reading> {
        let _neighbours = cell.neighbours.then(|| Neighbours::on(core));
        let Self { viola, .. } = self;
        let ports = if early {
            PORT.to_string()
        } else {
            String::new()
        };
        let mask = 1 << cell.vcpu;
        let receiver = match cell.load {
            Load::Requests(size) => format!("echo {PORT} {size}"),
            Load::Bulk(read) => format!("recv {PORT} {read} 0 0 0"),
        };
        let spinner = match cell.spinner {
            true => format!(
                "taskset {mask} env {viola} spin </dev/null >/dev/null 2>&1 & echo $! >/tmp/spinner; "
            ),
            false => String::new(),
        };
        let (line, inside, to) = match cell.line {
            "" => (String::new(), "", GUEST),
            netem => {
                let line = format!("{TC} qdisc add dev way root netem {netem} limit 100000; ");
                (line, IN_FAR, FAR)
            }
        };
        let before = acknowledged(&self.counts()?)?;
        self.sh(&format!(
            "echo '{ports}' >{PARAMETERS}/ports; {line}\
             taskset {mask} {inside} env {viola} {receiver} </dev/null >/tmp/received 2>&1 & {spinner}\
             while ! {inside} grep -q ' 00000000:{PORT:04X} ' /proc/net/tcp; do usleep 50000; done; \
             echo >{TRACING}/trace; echo 1 >{TRACING}/tracing_on"
        ))?;
        let to = SocketAddr::new(to.into(), PORT);
        let sent = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                // The sender shares a core with vCPU 0, if there is a second core.
                let _ = sched_setaffinity(None, &cores(core, false));
                let sent = match cell.load {
                    Load::Requests(size) => ask(to, cell.load_time(), size),
                    Load::Bulk(_) => send(to, cell.load_time()),
                };
                sent.map_err(|e| e.to_string())
            });
            sender.join()
        });
        let sent = sent.map_err(|_| Failure::run("the sender's thread failed"))?;
        let sent = sent.map_err(|e| Failure::run(format!("{}: {e}", cell.name)))?;
        let text = self.sh(&format!(
            "echo 0 >{TRACING}/tracing_on; [ ! -e /tmp/spinner ] || {{ kill $(cat /tmp/spinner); rm /tmp/spinner; }}; \
             {TC} qdisc del dev way root 2>/dev/null || true; cat {TRACING}/trace >/tmp/trace; {viola} waits /tmp/trace; \
             while {inside} grep -q ' 00000000:{PORT:04X} ' /proc/net/tcp; do usleep 50000; done; grep -q error /tmp/received && exit 1; true"
        ))?;
        let waits = match text.lines().last() {
            Some(last) => parsed(cell, last),
            // The command channel of a busy guest may lose the reply; the trace is still in the guest.
            None => parsed(cell, &self.sh(&format!("{viola} waits /tmp/trace"))?),
        }?;
        if sent.ended != "end" {
            let why = format!("{}: the stream ended: {}", cell.name, sent.ended);
            return Err(Failure::run(why));
        }
        let counts = self.counts()?;
        let after = acknowledged(&counts)?;
        if early && after == before && matches!(cell.load, Load::Bulk(_)) {
            return Err(Failure::run(format!(
                "{}: the module acknowledged nothing: {}",
                cell.name,
                counts.trim().replace('\n', ", ")
            )));
        }
        Ok(Reading {
            sent,
            waits,
            early: after.saturating_sub(before),
        })
    }

    /// Work of the module, and why it did not acknowledge more.
    fn counts(&self) -> Outcome<String> {
        self.sh(&format!("cat {PARAMETERS}/counts"))
    }
}

/// Number of acknowledgements sent, from the module's counters.
fn acknowledged(counts: &str) -> Outcome<u64> {
    let of = |line: &str| line.strip_prefix("sent ")?.trim().parse().ok();
    let unparsable = || {
        Failure::run(format!(
            "cannot parse the counters of viola_ack: \"{counts}\""
        ))
    };
    counts.lines().find_map(of).ok_or_else(unparsable)
}

fn parsed(cell: &Cell, text: &str) -> Outcome<Waits> {
    serde_json::from_str(text.trim())
        .map_err(|e| Failure::run(format!("{}: {e}: \"{text}\"", cell.name)))
}

/// This core, or all other cores. With a single core, both are that core.
fn cores(core: usize, this: bool) -> CpuSet {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let mut set = CpuSet::new();
    for other in (0..all).filter(|other| (*other == core) == this || all == 1) {
        set.set(other);
    }
    set
}

/// The module built by scripts/guest-kmod.sh.
fn module(image: &Image) -> Outcome<PathBuf> {
    let path = image.beside("kmod/viola_ack.ko");
    match path.is_file() {
        true => Ok(path),
        false => Err(Failure::run(format!(
            "{}: the module is missing; run scripts/guest-kmod.sh",
            path.display()
        ))),
    }
}

fn ip(words: &str) -> Outcome {
    let output = Command::new("ip").args(words.split(' ')).output();
    let output = output.map_err(Failure::run)?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Failure::run(format!("ip {words}: {why}")))
        }
    }
}

/// Threads that spin on the core of the receiver's vCPU.
struct Neighbours {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Neighbours {
    fn on(core: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for _ in 0..NEIGHBOURS {
            let stop = Arc::clone(&stop);
            threads.push(std::thread::spawn(move || {
                // On another core the thread would not compete, and the figures would show it.
                let _ = sched_setaffinity(None, &cores(core, true));
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }));
        }
        Self { stop, threads }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_what_part_of_the_round_trip_segments_waited() {
        let reading = |trip| Reading {
            sent: Sent {
                bytes: 100_000_000,
                seconds: 2.0,
                round_trip_us: trip,
                retransmits: 0,
                ended: "end".into(),
            },
            waits: Waits {
                segments: 10,
                waited: 5,
                mean_us: 1000.0,
                ..Waits::default()
            },
            early: 0,
        };
        let found = Measurements::from([(5, [vec![reading(5000.0)], vec![reading(1000.0)]])]);
        let rows = rows(&found);
        let of = |what: &str| {
            let row = rows.iter().find(|row| row.name.ends_with(what)).unwrap();
            (row.median("stock"), row.ratio)
        };
        assert_eq!(of("of the round trip"), (Some(10.0), None));
        assert_eq!(of(": round trip"), (Some(5.0), Some(0.2)));
        assert_eq!(of("received"), (Some(50.0), Some(1.0)));
    }
}

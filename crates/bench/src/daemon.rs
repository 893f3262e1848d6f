// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench daemon`: measures the CPU time and memory of the daemon with 64 to 512 VMs.
//!
//! A VM is a process that looks like QEMU, with threads named like its vCPUs that work and sleep. The daemon reads the
//! real /proc, and the accounting program counts real context switches. Daemon and VMs run in their own network
//! namespace, so the daemon does not see other VMs of this machine.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Options;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use crate::harness::{cpu, spawn};
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_proto::{CpuTime, Decisions, Status, VmList, VmReport};

/// A cell: number of VMs, vCPUs per VM, and sampling interval in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    vms: usize,
    vcpus: usize,
    interval_ms: u64,
}

const CELLS: [Cell; 4] = [
    Cell {
        vms: 64,
        vcpus: 2,
        interval_ms: 30,
    },
    Cell {
        vms: 64,
        vcpus: 1,
        interval_ms: 100,
    },
    Cell {
        vms: 256,
        vcpus: 1,
        interval_ms: 100,
    },
    Cell {
        vms: 512,
        vcpus: 1,
        interval_ms: 100,
    },
];

/// Times for which a vCPU thread works and sleeps in turn, in microseconds.
const WORK_US: u64 = 50;
const SLEEP_US: u64 = 50_000;
/// Settling time; after that the daemon knows all VMs and its histories are long enough.
const SETTLE_TIME: Duration = Duration::from_secs(8);
/// Timeout for the daemon to find all VMs.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(60);

impl Cell {
    fn name(&self) -> String {
        format!("{} VMs each {} ms", self.vms, self.interval_ms)
    }
}

/// Result of one run.
#[derive(Debug, Clone, Copy)]
struct Reading {
    cell: usize,
    percent: f64,
    mib: f64,
    /// CPU time of a decision, ms.
    decision_ms: f64,
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let rounds = options.rounds();
    let measured = Duration::from_secs(if options.quick { 5 } else { 20 });
    let selected = |cell: &Cell| {
        let only = options.only.as_deref();
        only.is_none_or(|only| cell.name().contains(only))
    };
    let cells: Vec<usize> = (0..CELLS.len()).filter(|i| selected(&CELLS[*i])).collect();
    if cells.is_empty() {
        return Err(Failure::usage(
            "no cell name contains the pattern of --only; try `64 VMs`",
        ));
    }
    // SAFETY: a plain system call, made on the thread that starts all children.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let e = std::io::Error::last_os_error();
        return Err(Failure::run(format!(
            "cannot create a network namespace: {e}"
        )));
    }
    let each = SETTLE_TIME + measured + Duration::from_secs(3);
    let total_time = each * (rounds * cells.len()) as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("daemon", rounds);
    let mut found = Vec::new();
    for round in 0..rounds {
        let mut order = cells.clone();
        order.rotate_left(round % cells.len());
        for i in order {
            interrupt::check()?;
            let label = format!("round {} of {rounds}: {}", round + 1, CELLS[i].name());
            progress.step(&label, each);
            found.push(measure(i, measured)?);
        }
    }
    drop(progress);
    let rows = rows(&found);
    let is_full = rounds >= 5 && cells.len() == CELLS.len() && !options.quick;
    let path = options.path("daemon", is_full);
    let guests = format!("threads that work {WORK_US} us and sleep {SLEEP_US} us, 3 or 4 a VM");
    let results = Results::new(rounds, &guests, rows);
    results.publish("daemon", &path)
}

fn rows(found: &[Reading]) -> Vec<Row> {
    let of = |i: usize, value: fn(&Reading) -> f64| {
        let readings = found.iter().filter(move |r| r.cell == i);
        readings.map(value).collect::<Vec<f64>>()
    };
    let mut rows = Vec::new();
    for (i, cell) in CELLS.iter().enumerate() {
        let is_goal = i == 0;
        let row = Row::new(format!("{}, CPU", cell.name()), "% of a core");
        let row = row.side("viola", of(i, |r| r.percent));
        rows.push(match is_goal {
            true => row.goal(Goal::FigureAtMost(1.0), "viola"),
            false => row,
        });
        let row = Row::new(format!("{}, memory", cell.name()), "MiB");
        let row = row.side("viola", of(i, |r| r.mib));
        rows.push(match is_goal {
            true => row.goal(Goal::FigureAtMost(30.0), "viola"),
            false => row,
        });
    }
    let of_decisions = CELLS.len() - 1;
    rows.push(
        Row::new(
            format!("{}, CPU of a decision", CELLS[of_decisions].name()),
            "ms",
        )
        .side("viola", of(of_decisions, |r| r.decision_ms))
        .goal(Goal::FigureAtMost(2.0), "viola"),
    );
    // Goal of linear growth: a VM among 512 costs no more than a VM among 64.
    let per_vm = |i: usize| {
        let vms = CELLS[i].vms as f64;
        of(i, |r| r.percent).into_iter().map(move |p| p / vms * 1e3)
    };
    rows.push(
        Row::new("CPU for each VM, 512 against 64, each 100 ms", "0.001 %")
            .side("64", per_vm(1))
            .side("256", per_vm(2))
            .side("512", per_vm(3))
            .against("512", "64")
            .goal(Goal::AtMost(1.0), "512"),
    );
    rows.retain(Row::is_measured);
    rows
}

fn measure(i: usize, span: Duration) -> Outcome<Reading> {
    let cell = CELLS[i];
    let bed = TestBed::new(cell)?;
    let pid = bed.daemon.id();
    bed.wait()?;
    sleep_for(SETTLE_TIME)?;
    let (before, decided_before) = (cpu::tree(pid), bed.decisions()?);
    sleep_for(span)?;
    let used = cpu::tree(pid).since(&before)[0];
    let decided = bed.decisions()?;
    let count = decided.count.saturating_sub(decided_before.count).max(1);
    let cpu_ns = decided.cpu_ns.saturating_sub(decided_before.cpu_ns);
    let reading = Reading {
        cell: i,
        percent: used.share * 100.0,
        mib: peak_mib(pid)?,
        decision_ms: cpu_ns as f64 / 1e6 / count as f64,
    };
    bed.check()?;
    Ok(reading)
}

fn sleep_for(span: Duration) -> Outcome {
    let end = Instant::now() + span;
    while Instant::now() < end {
        interrupt::check()?;
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Peak memory of a process, MiB, without pages shared with the kernel.
fn peak_mib(pid: u32) -> Outcome<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"))
        .and_then(|n| n.trim().parse::<f64>().ok());
    kib.map(|k| k / 1024.0)
        .ok_or_else(|| Failure::run("the daemon has ended"))
}

/// VMs and a daemon; drop ends them and removes their files.
struct TestBed {
    folder: PathBuf,
    vms: Vec<Child>,
    daemon: Child,
    cell: Cell,
}

impl TestBed {
    fn new(cell: Cell) -> Outcome<Self> {
        let folder = std::env::temp_dir().join(format!("viola-daemon-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let program = folder.join("qemu-system-x86_64");
        if !program.exists() {
            let me = crate::harness::program::lab()?;
            // The daemon recognises QEMU by its file name, so a symbolic link is enough.
            std::fs::hard_link(&me, &program)
                .or_else(|_| std::fs::copy(&me, &program).map(|_| ()))
                .map_err(failed)?;
        }
        let mut vms = Vec::new();
        for n in 0..cell.vms {
            let child = start_vm(&program, n, cell.vcpus);
            match child {
                Ok(child) => vms.push(child),
                Err(e) => {
                    end(&mut vms);
                    return Err(failed(e));
                }
            }
        }
        let config = folder.join("viola.toml");
        let here = folder.display();
        let text = format!(
            "[daemon]\nsocket = \"{here}/v.sock\"\ngroup = \"root\"\nrun_dir = \"{here}/run\"\n\
             state_dir = \"{here}/state\"\ninterval = \"{}ms\"\nvms = \"own\"\n[slices]\nenabled = false\n",
            cell.interval_ms
        );
        let daemon = std::fs::write(&config, text)
            .and_then(|()| spawn::daemon(&config, &folder.join("log"), None));
        match daemon {
            Ok(daemon) => Ok(Self {
                folder,
                vms,
                daemon,
                cell,
            }),
            Err(e) => {
                end(&mut vms);
                Err(failed(e))
            }
        }
    }

    fn vm_list(&self) -> Option<VmList> {
        let client = Client::new(&self.folder.join("v.sock"));
        client.get("/vms").ok()
    }

    /// What the daemon's decisions have cost.
    fn decisions(&self) -> Outcome<Decisions> {
        let client = Client::new(&self.folder.join("v.sock"));
        let status: Status = client.get("/status")?;
        Ok(status.decisions)
    }

    /// Waits until the daemon knows all VMs.
    fn wait(&self) -> Outcome {
        let deadline = Instant::now() + DISCOVERY_TIMEOUT;
        loop {
            interrupt::check()?;
            let seen = self.vm_list().map_or(0, |list| list.vms.len());
            if seen == self.cell.vms {
                return Ok(());
            }
            if Instant::now() > deadline {
                let expected = self.cell.vms;
                let what = format!("the daemon found {seen} of {expected} VMs");
                return Err(Failure::run(what));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Checks that the daemon did its work: it metered each VM's vCPUs and kept each interval.
    fn check(&self) -> Outcome {
        not_metered(&self.vm_list().unwrap_or_default(), self.cell)
            .map_or(Ok(()), |why| Err(Failure::run(why)))
    }
}

/// Reports missing metering data, if any. When the accounting map is full, a VM appears without vCPU times.
fn not_metered(list: &VmList, cell: Cell) -> Option<String> {
    let is_wrong = |vm: &&VmReport| {
        let has_run = |vcpu: &CpuTime| vcpu.run_ns > 0;
        vm.vcpus != cell.vcpus || vm.by_vcpu.len() != cell.vcpus || !vm.by_vcpu.iter().all(has_run)
    };
    match list.vms.iter().find(is_wrong) {
        _ if list.vms.len() != cell.vms => Some("the daemon lost VMs".to_owned()),
        wrong => wrong.map(|vm| format!("the daemon did not meter {}", vm.name)),
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.daemon);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.daemon.wait();
        end(&mut self.vms);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn failed(e: std::io::Error) -> Failure {
    Failure::run(format!("the benchmark's VMs: {e}"))
}

fn start_vm(program: &Path, n: usize, vcpus: usize) -> std::io::Result<Child> {
    Command::new(program)
        .args(["internal", "stand", "vm"])
        .args([vcpus as u64, WORK_US, SLEEP_US].map(|n| n.to_string()))
        .args(["-name", &format!("vm{n:03}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

fn end(vms: &mut [Child]) {
    for vm in vms.iter_mut() {
        let _ = vm.kill();
    }
    for vm in vms {
        let _ = vm.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_on_64_vms_and_cost_is_compared_by_vm() {
        let reading = |cell, percent| Reading {
            cell,
            percent,
            mib: 20.0,
            decision_ms: 1.0,
        };
        let rows = rows(&[reading(0, 0.9), reading(1, 0.64), reading(3, 4.0)]);
        let by_name = |name: &str| rows.iter().find(|r| r.name.starts_with(name)).unwrap();
        assert_eq!(by_name("64 VMs each 30 ms, CPU").met, Some(true));
        assert_eq!(by_name("64 VMs each 30 ms, mem").met, Some(true));
        assert_eq!(by_name("512 VMs").met, None);
        let linear = by_name("CPU for each VM");
        assert_eq!(linear.met, Some(true), "{:?}", linear.ratio);
        assert!(!rows.iter().any(|r| r.name.starts_with("256")));
    }

    #[test]
    fn a_vm_without_times_was_not_metered() {
        let mut list = viola_daemon::testing::view(&["a", "b"]).vms;
        let cell = Cell {
            vms: 2,
            vcpus: 1,
            interval_ms: 100,
        };
        for vm in &mut list.vms {
            vm.vcpus = 1;
            vm.by_vcpu = vec![CpuTime {
                run_ns: 5,
                ..CpuTime::default()
            }];
        }
        assert_eq!(not_metered(&list, cell), None);
        list.vms[1].by_vcpu.clear();
        assert_eq!(
            not_metered(&list, cell).unwrap(),
            "the daemon did not meter b"
        );
        list.vms[1].by_vcpu.push(CpuTime::default());
        assert_eq!(
            not_metered(&list, cell).unwrap(),
            "the daemon did not meter b"
        );
        list.vms.pop();
        assert_eq!(not_metered(&list, cell).unwrap(), "the daemon lost VMs");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Processes that stand in for VMs: their work, and how they start.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use viola_host::{CpuSet, Hypervisor, Thread, Vcpu, Vm, VmId, attrs, proc};
use viola_policy::slices::{DEFAULT_WEIGHT, US};

use super::{Outcome, now};

/// Imitates QEMU with `vcpus` vCPU threads that work `work` us and sleep `sleep` us in turn. The
/// process ends when its parent ends.
pub fn vm(vcpus: u32, work: u64, sleep: u64) -> Outcome {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let (work, sleep) = (Duration::from_micros(work), Duration::from_micros(sleep));
    let turns = move || {
        loop {
            let until = Instant::now() + work;
            while Instant::now() < until {
                compute();
            }
            if !sleep.is_zero() {
                std::thread::sleep(sleep);
            }
        }
    };
    // Every QEMU process has this.
    std::thread::Builder::new()
        .name("IO iothread0".into())
        .stack_size(64 << 10)
        .spawn(wait_forever)?;
    for i in 0..vcpus {
        std::thread::Builder::new()
            .name(format!("CPU {i}/TCG"))
            .stack_size(64 << 10)
            .spawn(turns)?;
    }
    wait_forever();
    Ok(())
}

fn wait_forever() {
    loop {
        std::thread::park();
    }
}

/// Runs the threads of a VM: the first as `kind` says, the others spin.
pub fn work(kind: &str, path: &Path, threads: u32) -> Outcome {
    for _ in 1..threads {
        std::thread::spawn(|| {
            loop {
                compute();
            }
        });
    }
    let socket = UnixDatagram::bind(path)?;
    socket.set_nonblocking(kind == "busy")?;
    let mut ask = [0; 64];
    loop {
        if kind == "spin" {
            compute();
            continue;
        }
        if let Ok(permille) = kind.parse::<u64>() {
            let end = cpu_time() + Duration::from_micros(permille);
            while cpu_time() < end {
                compute();
            }
            std::thread::sleep(Duration::from_micros(1000_u64.saturating_sub(permille)));
            continue;
        }
        match socket.recv_from(&mut ask) {
            Ok((n, from)) => {
                let now = now().to_ne_bytes();
                if let Some(path) = from.as_pathname().filter(|_| n == 8) {
                    ask[8..16].copy_from_slice(&now);
                    let _ = socket.send_to(&ask[..16], path);
                }
            }
            // The VM's own work.
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                compute();
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Works for some microseconds. The spin hint makes an emulator that counts instructions switch to its next CPU. With
/// nothing but hints the guest runs at a twentieth of its speed; without hints its CPUs see each other's interrupts up to
/// milliseconds late.
fn compute() {
    let mut x = 1_u64;
    for _ in 0..100 {
        x = std::hint::black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
    std::hint::spin_loop();
}

/// CPU time of the calling thread, ns.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Class of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Ls,
    Batch,
    /// A VM whose first thread is a turbo vCPU.
    Turbo,
    /// A host program.
    Fair,
}

/// Cores of the VMs.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub regular: u32,
    pub turbo: Option<u32>,
}

impl Place {
    /// Parses `CPU` or `CPU,TURBO`.
    pub fn parse(cpus: &str) -> Outcome<Self> {
        let mut words = cpus.split(',');
        let regular = words.next().ok_or("the CPU is missing")?.parse()?;
        let turbo = words.next().map(str::parse).transpose()?;
        Ok(Self { regular, turbo })
    }

    pub fn has(self, cpu: u32) -> bool {
        self.regular == cpu || self.turbo == Some(cpu)
    }
}

/// A process that stands in for a VM.
pub struct StandIn {
    child: Child,
    pub kind: Kind,
    /// Whether its first thread replies to requests.
    pub answers: bool,
    pub weight: u32,
    /// Cap, thousandths of a core.
    pub cap: Option<u32>,
    /// Microslice, ns.
    pub micro: u64,
    /// Part of their share that VMs keep for their regular vCPUs, thousandths.
    pub reserve: u32,
    pub path: PathBuf,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

impl StandIn {
    pub fn start(number: usize, spec: &str, place: Place) -> Outcome<Self> {
        let mut words = spec.split(',');
        let (class, does) = words
            .next()
            .and_then(|w| w.split_once(':'))
            .ok_or("a VM begins with CLASS:KIND")?;
        let kind = match class {
            "ls" => Kind::Ls,
            "batch" => Kind::Batch,
            "turbo" => Kind::Turbo,
            "fair" => Kind::Fair,
            _ => return Err(format!("unknown class {class} of a VM").into()),
        };
        let (mut weight, mut cap, mut micro, mut reserve) = (DEFAULT_WEIGHT, None, 300, 400);
        let mut threads = if kind == Kind::Turbo { 2 } else { 1 };
        for word in words {
            match word.split_once('=').ok_or("NAME=VALUE")? {
                ("weight", n) => weight = n.parse()?,
                ("cap", n) => cap = Some(n.parse()?),
                ("micro", n) => micro = n.parse()?,
                ("threads", n) => threads = n.parse()?,
                ("reserve", n) => reserve = n.parse()?,
                (name, _) => return Err(format!("unknown key {name} of a VM").into()),
            }
        }
        let path = std::env::temp_dir().join(format!("scx-{}-{number}", std::process::id()));
        let child = Command::new("/proc/self/exe")
            .args(["internal", "stand", "work", does])
            .arg(&path)
            .arg(threads.to_string())
            .spawn()?;
        let stand = Self {
            child,
            kind,
            answers: matches!(does, "busy" | "idle"),
            weight,
            cap,
            micro: micro * US,
            reserve,
            path,
        };
        let end = Instant::now() + Duration::from_secs(20);
        let there = |s: &Self| {
            s.path.exists() && tids(s.child.id()).len() == usize::try_from(threads).unwrap_or(1)
        };
        while !there(&stand) {
            if Instant::now() > end {
                return Err("a VM stand-in did not start".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        for tid in tids(stand.pid()) {
            let _ = attrs::set_affinity(tid, &stand.cores(tid, place))?;
        }
        Ok(stand)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Core of a thread.
    fn cores(&self, tid: u32, place: Place) -> CpuSet {
        let turbo = place.turbo.filter(|_| self.is_turbo_vcpu(tid));
        std::iter::once(turbo.unwrap_or(place.regular)).collect()
    }

    fn is_turbo_vcpu(&self, tid: u32) -> bool {
        self.kind == Kind::Turbo && tid == self.pid()
    }

    /// Its threads on the turbo core, or those on the regular core.
    pub fn threads(&self, turbo: bool, place: Place) -> Vec<u32> {
        let there = |tid: &u32| turbo == (place.turbo.is_some() && self.is_turbo_vcpu(*tid));
        tids(self.pid()).into_iter().filter(there).collect()
    }

    /// CPU time of all its threads, and of its first thread, ns.
    pub fn cpu_times(&self) -> (u64, u64) {
        (run_time(self.pid()), thread_time(self.pid(), self.pid()))
    }

    pub fn vm(&self, place: Place) -> Outcome<Vm> {
        let pid = self.pid();
        let start_time = proc::stat(pid)?.ok_or("the process has ended")?.start_time;
        let thread = |tid| Thread {
            pid,
            tid,
            start_time,
        };
        let vcpu = |(index, tid): (usize, u32)| Vcpu {
            index: index as u32,
            threads: vec![thread(tid)],
            kernel_thread: None,
            cores: self.cores(tid, place),
        };
        let mut cores: CpuSet = std::iter::once(place.regular).collect();
        cores.extend(&place.turbo.into_iter().collect());
        Ok(Vm {
            id: VmId::new(Hypervisor::Uml, &format!("pid-{pid:06}")),
            name: format!("pid-{pid}"),
            hypervisor: Hypervisor::Uml,
            pid,
            start_time,
            vcpus: tids(pid).into_iter().enumerate().map(vcpu).collect(),
            service: Vec::new(),
            disks: Vec::new(),
            nics: Vec::new(),
            cgroup: None,
            cores,
            status: None,
            uuid: None,
            libvirt: false,
            confirmed: None,
        })
    }
}

fn tids(pid: u32) -> Vec<u32> {
    let tasks = proc::thread_ids(pid).unwrap_or_default();
    tasks.into_iter().collect()
}

/// CPU time of a process's threads, ns.
pub fn run_time(pid: u32) -> u64 {
    tids(pid).into_iter().map(|tid| thread_time(pid, tid)).sum()
}

fn thread_time(pid: u32, tid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat"));
    let text = text.unwrap_or_default();
    let first = text.split_whitespace().next();
    first.and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

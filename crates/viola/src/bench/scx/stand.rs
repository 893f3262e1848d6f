// SPDX-License-Identifier: Apache-2.0
//! Processes that stand for VMs share a core by one mechanism or another: what the benchmark and the test bed of
//! sched_ext run in a guest whose kernel has it. As `viola internal stand WORDS`:
//! ```text
//!     probe                             whether this kernel takes the scheduler, and what verifying costs
//!     run MECHANISM CPU SECONDS VM...   what each VM got, and how fast the first one answered; JSON
//!     eject CPU                         never runs one VM, until the kernel ends the scheduler
//!     policies PID...                   scheduling policy and CPU time (ns) of processes
//!     vm VCPUS WORK SLEEP -name NAME    as a program called qemu-system-*: threads named as QEMU's, which work and sleep for so
//!                                       many microseconds in turn
//! ```
//! MECHANISM is stock, eevdf, slots, sched_ext or tick (sched_ext without timers). VM is CLASS:KIND with further
//! ,weight=N ,cap=PERMILLE ,micro=US ,threads=N. CLASS is ls or batch; KIND is busy (answers between two pieces of
//! work), idle (sleeps until asked) or spin.

use std::error::Error;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use viola_host::attrs;
use viola_host::{CpuSet, Hypervisor, Thread, Vcpu, Vm, VmId, proc};
use viola_meter::Meter;
use viola_policy::slices::{Class, DEFAULT_WEIGHT, Params, US};
use viola_sched::eevdf::Eevdf;
use viola_sched::scx::{self, Knobs, Scx};
use viola_sched::slots::{Helper, Slots};
use viola_sched::{Algorithm, BATCH_SLICE, CorePlan, Mechanism, Plan, ThreadPlan, VmPlan};

use crate::error::chain;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Runs it; `words` are those after `stand`.
pub fn stand(words: &[String]) -> crate::error::Outcome {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    carry_out(&words).map_err(|e| crate::error::Failure::run(chain(e.as_ref())))
}

fn carry_out(words: &[&str]) -> Outcome {
    match words {
        ["work", kind, path, threads] => work(kind, Path::new(path), threads.parse()?),
        ["probe"] => {
            match scx::load() {
                Ok(ready) => {
                    let verified = ready.verified();
                    let all: u32 = verified.iter().map(|(_, n)| n).sum();
                    println!("yes");
                    println!("the verifier looked at {all} instructions: {verified:?}");
                }
                Err(e) => println!("no: {}", chain(&e)),
            }
            Ok(())
        }
        ["policies", pids @ ..] => {
            for pid in pids {
                let policy = attrs::get(pid.parse()?)?.map(|a| format!("{:?}", a.policy));
                let policy = policy.unwrap_or("gone".into());
                println!("{pid} {policy} {}", run_time(pid.parse()?));
            }
            Ok(())
        }
        ["vm", vcpus, work, sleep, "-name", _] => vm(vcpus.parse()?, work.parse()?, sleep.parse()?),
        ["eject", cpu] => eject(cpu.parse()?),
        ["run", mechanism, cpu, seconds, vms @ ..] if !vms.is_empty() => {
            run(mechanism, cpu.parse()?, seconds.parse()?, vms)
        }
        _ => Err("this command is for tests, not for people".into()),
    }
}

/// Ends with whoever has started it.
fn vm(vcpus: u32, work: u64, sleep: u64) -> Outcome {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let (work, sleep) = (Duration::from_micros(work), Duration::from_micros(sleep));
    let turns = move || {
        loop {
            let until = Instant::now() + work;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            if !sleep.is_zero() {
                std::thread::sleep(sleep);
            }
        }
    };
    // what every QEMU has
    std::thread::Builder::new()
        .name("IO iothread0".into())
        .stack_size(64 << 10)
        .spawn(park)?;
    for i in 0..vcpus {
        std::thread::Builder::new()
            .name(format!("CPU {i}/TCG"))
            .stack_size(64 << 10)
            .spawn(turns)?;
    }
    park();
    Ok(())
}

fn park() {
    loop {
        std::thread::park();
    }
}

/// What a VM does.
fn work(kind: &str, path: &Path, threads: u32) -> Outcome {
    for _ in 1..threads {
        std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    let socket = UnixDatagram::bind(path)?;
    socket.set_nonblocking(kind == "busy")?;
    let mut ask = [0; 64];
    loop {
        if kind == "spin" {
            std::hint::spin_loop();
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
            // its own work
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                for _ in 0..50 {
                    std::hint::spin_loop();
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// A process that stands for a VM.
struct Stand {
    child: Child,
    class: Class,
    weight: u32,
    cap: Option<u32>,
    micro: u64,
    path: PathBuf,
}

impl Drop for Stand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Stand {
    fn start(number: usize, spec: &str, cpu: u32) -> Outcome<Self> {
        let mut words = spec.split(',');
        let (class, kind) = words
            .next()
            .and_then(|w| w.split_once(':'))
            .ok_or("CLASS:KIND")?;
        let (mut weight, mut cap, mut micro, mut threads) = (DEFAULT_WEIGHT, None, 300, 1);
        for word in words {
            match word.split_once('=').ok_or("NAME=VALUE")? {
                ("weight", n) => weight = n.parse()?,
                ("cap", n) => cap = Some(n.parse()?),
                ("micro", n) => micro = n.parse()?,
                ("threads", n) => threads = n.parse()?,
                (name, _) => return Err(format!("unknown {name}").into()),
            }
        }
        let path = std::env::temp_dir().join(format!("scx-{}-{number}", std::process::id()));
        let child = Command::new("/proc/self/exe")
            .args(["internal", "stand", "work", kind])
            .arg(&path)
            .arg(threads.to_string())
            .spawn()?;
        let stand = Self {
            child,
            class: if class == "ls" {
                Class::Ls
            } else {
                Class::Batch
            },
            weight,
            cap,
            micro: micro * US,
            path,
        };
        let end = Instant::now() + Duration::from_secs(20);
        let there = |s: &Self| {
            s.path.exists() && tids(s.child.id()).len() == usize::try_from(threads).unwrap_or(1)
        };
        while !there(&stand) {
            if Instant::now() > end {
                return Err("a stand-in did not start".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let cores: CpuSet = cpu.to_string().parse()?;
        for tid in tids(stand.child.id()) {
            let _ = attrs::set_affinity(tid, &cores)?;
        }
        Ok(stand)
    }

    fn vm(&self, cpu: u32) -> Outcome<Vm> {
        let pid = self.child.id();
        let start_time = proc::stat(pid)?.ok_or("it has ended")?.start_time;
        let cores: CpuSet = cpu.to_string().parse()?;
        let thread = |tid| Thread {
            pid,
            tid,
            start_time,
        };
        let vcpu = |(index, tid): (usize, u32)| Vcpu {
            index: index as u32,
            threads: vec![thread(tid)],
            kernel_thread: None,
            cores: cores.clone(),
        };
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
        })
    }
}

fn tids(pid: u32) -> Vec<u32> {
    let tasks = proc::task_numbers(pid).unwrap_or_default();
    tasks.into_iter().collect()
}

/// Time that a process' threads ran, ns.
fn run_time(pid: u32) -> u64 {
    let of = |tid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    tids(pid).into_iter().filter_map(of).sum()
}

fn plan(cpu: u32, vms: &[Vm], stands: &[Stand], index: impl Fn(&Vm) -> u32) -> Plan {
    let vms = vms.iter().zip(stands).enumerate();
    let vms = vms.map(|(i, (vm, s))| VmPlan {
        params: Params {
            id: i as u32,
            class: s.class,
            weight: s.weight,
            cap_permille: s.cap,
            microslice: s.micro,
        },
        index: index(vm),
        pid: vm.pid as i32,
        sees_packets: false,
        threads: vm
            .threads()
            .map(|t| ThreadPlan {
                tid: t.tid as i32,
                service: false,
            })
            .collect(),
        regular_vcpus: (0, 0),
        park: None,
    });
    Plan {
        cores: vec![CorePlan {
            cpu,
            algorithm: Algorithm::Interleaved,
            batch_slice: BATCH_SLICE,
            budget_permille: None,
            reserve_permille: 0,
            vms: vms.collect(),
        }],
    }
}

fn file(what: &str) -> PathBuf {
    std::env::temp_dir().join(format!("scx-{what}-{}.json", std::process::id()))
}

/// CLOCK_MONOTONIC, ns.
fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Asks the first VM again and again; the times until it had the core and took the question, in ns. The way back is
/// left out: it is the same for all mechanisms.
fn ask(to: &Path, until: Instant) -> Outcome<Vec<u64>> {
    let me = file("ask");
    let socket = UnixDatagram::bind(&me)?;
    socket.set_read_timeout(Some(Duration::from_secs(4)))?;
    let (mut trips, mut ask, mut answer) = (Vec::new(), 0_u64, [0; 16]);
    while Instant::now() < until {
        // not in step with any slice
        ask = ask.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros(7_000 + (ask >> 33) % 9_000));
        let begin = now();
        socket.send_to(&ask.to_ne_bytes(), to)?;
        while socket
            .recv(&mut answer)
            .map_err(|e| format!("no answer: {e}"))?
            != 16
            || answer[..8] != ask.to_ne_bytes()
        {}
        let mut taken = [0; 8];
        taken.copy_from_slice(&answer[8..]);
        trips.push(u64::from_ne_bytes(taken).saturating_sub(begin));
    }
    let _ = std::fs::remove_file(&me);
    Ok(trips)
}

fn quantile(sorted: &[u64], q: f64) -> f64 {
    let at = ((sorted.len() as f64 - 1.0) * q).round() as usize;
    sorted.get(at).map_or(f64::NAN, |ns| *ns as f64 / 1e3)
}

fn run(mechanism: &str, cpu: u32, seconds: f64, specs: &[&str]) -> Outcome {
    // Whoever asks has another core.
    let online = viola_host::topology::online()?;
    let others: CpuSet = online.iter().filter(|c| *c != cpu).collect();
    let _ = attrs::set_affinity(std::process::id(), &others)?;
    let stands = specs
        .iter()
        .enumerate()
        .map(|(i, spec)| Stand::start(i, spec, cpu))
        .collect::<Outcome<Vec<_>>>()?;
    let vms = stands
        .iter()
        .map(|s| s.vm(cpu))
        .collect::<Outcome<Vec<_>>>()?;
    let pids: Vec<u32> = vms.iter().map(|vm| vm.pid).collect();
    let numbers: Vec<String> = pids.iter().map(u32::to_string).collect();
    println!("pids {}", numbers.join(" "));
    let mut meter = None;
    let knobs = Knobs {
        no_timer: u32::from(mechanism == "tick"),
        ..Knobs::default()
    };
    let mut scx = Scx::with_knobs(file("saved"), knobs);
    let helper = Helper {
        program: "/proc/self/exe".into(),
        args: vec!["internal".into(), "slots-watchdog".into()],
    };
    let mut slots = Slots::new(helper, file("slots"));
    let mut eevdf = Eevdf::new(file("eevdf"));
    let used: Option<&mut dyn Mechanism> = match mechanism {
        "stock" => None,
        "eevdf" => Some(&mut eevdf),
        "slots" => {
            let mut m = Meter::exact()?;
            m.follow(&vms)?;
            meter = Some(m);
            Some(&mut slots)
        }
        "sched_ext" | "tick" => Some(&mut scx),
        _ => return Err("no such mechanism".into()),
    };
    if let Some(used) = used {
        let index = |vm: &Vm| meter.as_ref().and_then(|m| m.index(&vm.id)).unwrap_or(0);
        let plan = plan(cpu, &vms, &stands, index);
        used.apply(&plan, &vms, meter.as_mut().and_then(Meter::acct))?;
    }
    std::thread::sleep(Duration::from_millis(500));
    let before: Vec<u64> = pids.iter().map(|pid| run_time(*pid)).collect();
    let begin = Instant::now();
    let until = begin + Duration::from_secs_f64(seconds);
    let mut trips = if specs[0].contains(":spin") {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        Vec::new()
    } else {
        ask(&stands[0].path, until)?
    };
    let span = begin.elapsed().as_nanos() as f64;
    let shares: Vec<f64> = pids
        .iter()
        .zip(&before)
        .map(|(pid, b)| 100.0 * (run_time(*pid) - b) as f64 / span)
        .collect();
    trips.sort_unstable();
    let mut report = json!({
        "mechanism": mechanism,
        "shares_percent": shares,
        "answers": trips.len(),
        "answer_p50_us": quantile(&trips, 0.5),
        "answer_p99_us": quantile(&trips, 0.99),
        "answer_max_us": quantile(&trips, 1.0),
    });
    let ended: [Option<String>; 2] = [scx.health().ended, slots.health().ended];
    report["ended"] = ended.into_iter().flatten().collect();
    report["cost"] = cost(&scx);
    println!("{report}");
    scx.stop()?;
    slots.stop()?;
    eevdf.stop()?;
    Ok(())
}

fn cost(scx: &Scx) -> Value {
    let stats = scx.stats();
    let vms: Vec<Value> = stats
        .iter()
        .map(|(_, _, s)| {
            json!({"run_ms": s.run / 1_000_000, "turns": s.turns, "waits": s.waits, "wait_mean_us": s.wait_sum / 1000 / s.waits.max(1),
                "wait_max_us": s.wait_max / 1000, "boosts": s.boosts})
        })
        .collect();
    let core = scx.core_stats();
    let cores: Vec<Value> = core
        .iter()
        .map(|(cpu, s)| {
            json!({"cpu": cpu, "decisions": s.decisions, "switches": s.switches, "kicks": s.kicks, "decide_mean_ns": s.decide_ns / s.decisions.max(1),
                "late_max_us": s.late_max / 1000, "starved": s.starved})
        })
        .collect();
    json!({"vms": vms, "cores": cores})
}

/// One VM of two is never run.
fn eject(cpu: u32) -> Outcome {
    let stands = [
        Stand::start(0, "batch:spin", cpu)?,
        Stand::start(1, "batch:spin", cpu)?,
    ];
    let vms = [stands[0].vm(cpu)?, stands[1].vm(cpu)?];
    let knobs = Knobs {
        starve_id: 2,
        ..Knobs::default()
    };
    let mut scx = Scx::with_knobs(file("saved"), knobs);
    scx.apply(&plan(cpu, &vms, &stands, |_| 0), &vms, None)?;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(60) {
        if let Some(why) = scx.health().ended {
            println!("{:.0} s: {why}", begin.elapsed().as_secs_f64());
            std::thread::sleep(Duration::from_secs(1));
            let before = run_time(vms[1].pid);
            std::thread::sleep(Duration::from_secs(2));
            let policy = attrs::get(vms[1].pid)?.map(|a| a.policy);
            println!(
                "then {policy:?}, ran {} ms of 2000",
                (run_time(vms[1].pid) - before) / 1_000_000
            );
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err("the kernel did not end it within a minute".into())
}

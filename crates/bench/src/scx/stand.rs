// SPDX-License-Identifier: Apache-2.0
//! Runs processes that stand in for VMs on one core under a given mechanism. The benchmark and the test bed of
//! sched_ext run it in a guest whose kernel has sched_ext, as `viola-lab internal stand WORDS`:
//! ```text
//!     probe                             tests whether this kernel accepts the scheduler, and the cost of verification
//!     run MECHANISM CPU[,TURBO] SECONDS VM...
//!                                       prints each VM's share and the reply times of the first VM as JSON
//!     hold PROGRAM FILE                 runs another sched_ext scheduler as long as FILE exists
//!     eject CPU                         never runs one VM, until the kernel ends the scheduler
//!     policies PID...                   prints scheduling policy and CPU time (ns) of processes
//!     vm VCPUS WORK SLEEP -name NAME    imitates QEMU (the program must be called qemu-system-*): its vCPU threads work
//!                                       WORK us and sleep SLEEP us in turn
//! ```
//! MECHANISM is stock, eevdf, slots, sched_ext, tick (sched_ext without timers), or the path of another sched_ext
//! scheduler that is already active. VM is CLASS:KIND, followed by any of ,weight=N ,cap=PERMILLE ,micro=US ,threads=N
//! ,reserve=PERMILLE (the first VM's reserve applies to all).
//!
//! CLASS is ls, batch, turbo or fair. A turbo VM's first thread is its turbo vCPU, on CPU TURBO if the mechanism
//! supports that; the default is two threads. fair is a host program instead of a VM.
//!
//! KIND is the work of the first thread: busy (replies between two pieces of work), idle (sleeps until a request), spin,
//! or a number N (runs N thousandths of the time, in turns of one millisecond). All other threads spin.

mod other;
mod process;

use std::error::Error;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use viola_host::attrs;
use viola_host::confirm::registrations::{self, FOLDER};
use viola_host::{CpuSet, Vm};
use viola_meter::Meter;
use viola_policy::slices::{Class, Params};
use viola_policy::turbo::TURBO_SLOT;
use viola_sched::eevdf::Eevdf;
use viola_sched::scx::{self, Knobs, Scx};
use viola_sched::slots::{HelperCommand, Slots};
use viola_sched::{Algorithm, BATCH_SLICE, CorePlan, Mechanism, Plan, ThreadPlan, VmPlan};

use self::other::Other;
use self::process::{Kind, Place, StandIn, run_time, vm, work};
use viola_cli::error::chain;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Runs a subcommand; `words` are the arguments after `stand`.
pub fn stand(words: &[String]) -> viola_cli::error::Outcome {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    run_words(&words).map_err(|e| viola_cli::error::Failure::run(chain(e.as_ref())))
}

fn run_words(words: &[&str]) -> Outcome {
    match words {
        ["work", kind, path, threads] => work(kind, Path::new(path), threads.parse()?),
        ["probe"] => {
            match scx::load() {
                Ok(ready) => {
                    let verified = ready.verified();
                    let all: u32 = verified.iter().map(|(_, n)| n).sum();
                    println!("yes");
                    println!("the verifier processed {all} instructions: {verified:?}");
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
        ["vm", vcpus, work, sleep, "-name", name] => {
            registrations::write(Path::new(FOLDER), std::process::id(), name)?;
            vm(vcpus.parse()?, work.parse()?, sleep.parse()?)
        }
        ["hold", program, file] => {
            Other::start(Path::new(program))?.hold_until_removed(Path::new(file))
        }
        ["eject", cpu] => eject(cpu.parse()?),
        ["run", mechanism, cpu, seconds, vms @ ..] if !vms.is_empty() => {
            run(mechanism, cpu, seconds.parse()?, vms)
        }
        _ => Err("unknown arguments; benchmarks and tests use this command".into()),
    }
}

fn plan(place: Place, stands: &[StandIn], vms: &[Vm], index: impl Fn(&Vm) -> u32) -> Plan {
    let on = |cpu: u32, turbo: bool| {
        let vms = vms.iter().zip(stands).enumerate();
        let vms = vms.filter_map(|(i, (vm, s))| {
            let threads = s.threads(turbo, place);
            let plan = VmPlan {
                params: Params {
                    id: i as u32,
                    class: match s.kind {
                        Kind::Ls => Class::Ls,
                        Kind::Turbo if turbo => Class::Ls,
                        _ => Class::Batch,
                    },
                    weight: s.weight,
                    cap_permille: s.cap,
                    microslice: if turbo { TURBO_SLOT } else { s.micro },
                },
                index: index(vm),
                pid: vm.pid as i32,
                sees_packets: false,
                resets_on_fork: false,
                threads: threads.iter().map(|tid| planned(*tid)).collect(),
                regular_vcpus: (u32::from(!turbo), 1),
                hold_cpu: turbo.then_some(place.regular),
            };
            (!threads.is_empty()).then_some(plan)
        });
        CorePlan {
            cpu,
            algorithm: match (place.turbo, turbo) {
                (None, _) => Algorithm::Interleaved,
                (_, false) => Algorithm::Regular,
                (_, true) => Algorithm::Turbo,
            },
            batch_slice: BATCH_SLICE,
            budget_permille: None,
            reserve_permille: if turbo { stands[0].reserve } else { 0 },
            vms: vms.collect(),
        }
    };
    let mut cores = vec![on(place.regular, false)];
    cores.extend(place.turbo.map(|cpu| on(cpu, true)));
    Plan { cores }
}

fn planned(tid: u32) -> ThreadPlan {
    ThreadPlan {
        tid: tid as i32,
        service: false,
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

/// Sends requests to the first VM one after the other. Returns the times until it had the core and received the
/// request, in ns. The way back is excluded, as it is the same for all mechanisms.
fn ask(to: &Path, until: Instant) -> Outcome<Vec<u64>> {
    let me = file("ask");
    let socket = UnixDatagram::bind(&me)?;
    socket.set_read_timeout(Some(Duration::from_secs(4)))?;
    let (mut trips, mut ask, mut answer) = (Vec::new(), 0_u64, [0; 16]);
    while Instant::now() < until {
        // Random pauses, so that requests do not fall in step with slices.
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
        let mut timestamp = [0; 8];
        timestamp.copy_from_slice(&answer[8..]);
        trips.push(u64::from_ne_bytes(timestamp).saturating_sub(begin));
    }
    let _ = std::fs::remove_file(&me);
    Ok(trips)
}

fn quantile(sorted: &[u64], q: f64) -> f64 {
    let at = ((sorted.len() as f64 - 1.0) * q).round() as usize;
    sorted.get(at).map_or(f64::NAN, |ns| *ns as f64 / 1e3)
}

fn run(mechanism: &str, cpus: &str, seconds: f64, specs: &[&str]) -> Outcome {
    let mut place = Place::parse(cpus)?;
    // The requester has another core.
    let online = viola_host::topology::online()?;
    let others: CpuSet = online.iter().filter(|c| !place.has(*c)).collect();
    let _ = attrs::set_affinity(std::process::id(), &others)?;
    if !matches!(mechanism, "slots" | "sched_ext" | "tick") {
        place.turbo = None;
    }
    let knobs = Knobs {
        no_timer: u32::from(mechanism == "tick"),
        ..Knobs::default()
    };
    let mut scx = Scx::with_knobs(file("saved"), knobs);
    // Complete slow setup before the VMs use the guest's CPUs.
    if matches!(mechanism, "sched_ext" | "tick") {
        scx.prepare()?;
    }
    let mut meter = match mechanism {
        "slots" => Some(Meter::exact()?),
        _ => None,
    };
    let stands = specs
        .iter()
        .enumerate()
        .map(|(i, spec)| StandIn::start(i, spec, place))
        .collect::<Outcome<Vec<_>>>()?;
    let managed = stands.iter().take_while(|s| s.kind != Kind::Fair).count();
    let vms = stands[..managed]
        .iter()
        .map(|s| s.vm(place))
        .collect::<Outcome<Vec<_>>>()?;
    let pids: Vec<u32> = stands.iter().map(StandIn::pid).collect();
    let numbers: Vec<String> = pids.iter().map(u32::to_string).collect();
    println!("pids {}", numbers.join(" "));
    let helper = HelperCommand {
        program: crate::harness::program::viola()?,
        args: vec!["internal".into(), "slots-watchdog".into()],
    };
    let mut slots = Slots::new(helper, file("slots"));
    let mut eevdf = Eevdf::new(file("eevdf"));
    let used: Option<&mut dyn Mechanism> = match mechanism {
        "stock" => None,
        "eevdf" => Some(&mut eevdf),
        "slots" => {
            if let Some(meter) = &mut meter {
                meter.follow(&vms)?;
            }
            Some(&mut slots)
        }
        "sched_ext" | "tick" => Some(&mut scx),
        path if path.starts_with('/') && scx::active_scheduler().is_some() => None,
        path if path.starts_with('/') => {
            return Err(format!("{path} is not the active scheduler").into());
        }
        _ => return Err("unknown mechanism".into()),
    };
    if let Some(used) = used {
        let index = |vm: &Vm| meter.as_ref().and_then(|m| m.index(&vm.id)).unwrap_or(0);
        let plan = plan(place, &stands, &vms, index);
        used.apply(&plan, &vms, meter.as_mut().and_then(Meter::acct))?;
    }
    std::thread::sleep(Duration::from_millis(500));
    let before: Vec<(u64, u64)> = stands.iter().map(StandIn::cpu_times).collect();
    let begin = Instant::now();
    let until = begin + Duration::from_secs_f64(seconds);
    let mut trips = if stands[0].answers {
        ask(&stands[0].path, until)?
    } else {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        Vec::new()
    };
    let span = begin.elapsed().as_nanos() as f64;
    let percent = |ns: u64| 100.0 * ns as f64 / span;
    let (mut shares, mut first) = (Vec::new(), Vec::new());
    for (stand, (all, one)) in stands.iter().zip(before) {
        let now = stand.cpu_times();
        shares.push(percent(now.0 - all));
        first.push(percent(now.1 - one));
    }
    trips.sort_unstable();
    let mut report = json!({
        "mechanism": mechanism,
        "shares_percent": shares,
        "first_threads_percent": first,
        "answers": trips.len(),
        "answer_p50_us": quantile(&trips, 0.5),
        "answer_p99_us": quantile(&trips, 0.99),
        "answer_max_us": quantile(&trips, 1.0),
    });
    let other = mechanism.starts_with('/') && scx::active_scheduler().is_none();
    let other = other.then(|| format!("{mechanism} has ended"));
    let ended = [scx.health().ended, slots.health().ended, other];
    report["ended"] = ended.into_iter().flatten().collect();
    report["cost"] = cost(&scx);
    println!("{report}");
    scx.stop()?;
    slots.stop()?;
    eevdf.stop()?;
    Ok(())
}

fn cost(scx: &Scx) -> Value {
    let stats = scx.usage();
    let vms: Vec<Value> = stats
        .iter()
        .map(|s| {
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

/// Never runs one of two VMs, so that the kernel's watchdog ends the scheduler.
fn eject(cpu: u32) -> Outcome {
    let place = Place::parse(&cpu.to_string())?;
    let stands = [
        StandIn::start(0, "batch:spin", place)?,
        StandIn::start(1, "batch:spin", place)?,
    ];
    let vms = [stands[0].vm(place)?, stands[1].vm(place)?];
    let knobs = Knobs {
        starve_id: 2,
        ..Knobs::default()
    };
    let mut scx = Scx::with_knobs(file("saved"), knobs);
    scx.apply(&plan(place, &stands, &vms, |_| 0), &vms, None)?;
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
    Err("the kernel did not end the scheduler within a minute".into())
}

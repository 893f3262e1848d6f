// SPDX-License-Identifier: Apache-2.0
//! Schedules one core by slots with ordinary processes as VMs, for experiments with the mechanism alone.
//!
//!     slots CPU MODE MICROSLICE_US SECONDS CLASS:VM...
//!
//! VM is the name of a VM on this host or the number of any process; MODE is interleaved, paper, credit or plain; CLASS is ls or
//! batch. Prints the time that each process ran and waited.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use viola_host::{CpuSet, Hypervisor, Inventory, Thread, Vcpu, Vm, VmId, proc};
use viola_meter::Meter;
use viola_policy::slices::{Class, DEFAULT_WEIGHT, Params, US};
use viola_sched::slots::watchdog::{HelperArgs, run_controller, run_watchdog};
use viola_sched::slots::{HelperCommand, Slots};
use viola_sched::{
    Algorithm, BATCH_SLICE, CorePlan, Mechanism, PAPER_SLICE, Plan, ThreadPlan, VmPlan,
};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let exe = std::env::current_exe()?;
    match args
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["watchdog", json] => {
            let args: HelperArgs = serde_json::from_str(json)?;
            let end = run_watchdog(&args, Command::new(exe).arg("controller"))?;
            std::process::exit(end as i32);
        }
        ["controller", json] => Ok(run_controller(&serde_json::from_str(json)?)?),
        [cpu, mode, micro, seconds, vms @ ..] if !vms.is_empty() => run(
            exe,
            cpu.parse()?,
            mode,
            micro.parse()?,
            seconds.parse()?,
            vms,
        ),
        _ => Err("usage: slots CPU MODE MICROSLICE_US SECONDS CLASS:VM...".into()),
    }
}

fn run(
    exe: PathBuf,
    cpu: u32,
    mode: &str,
    micro: u64,
    seconds: f64,
    specs: &[&str],
) -> Result<(), Box<dyn Error>> {
    let inventory = Inventory::scan()?;
    let mut vms = Vec::new();
    let mut classes = Vec::new();
    for spec in specs {
        let (class, name) = spec.split_once(':').ok_or("expected CLASS:VM")?;
        classes.push(if class == "ls" {
            Class::Ls
        } else {
            Class::Batch
        });
        vms.push(match name.parse() {
            Ok(pid) => process(pid, cpu)?,
            Err(_) => inventory.find(name).ok_or("no VM of this name")?.clone(),
        });
    }
    let mut meter = Meter::exact()?;
    meter.follow(&vms)?;
    let on_core: Vec<_> = vms.iter().map(|vm| (vm.id.clone(), cpu)).collect();
    let seen = meter.watch_packets(&on_core)?;
    let mut cores = CorePlan {
        cpu,
        algorithm: match mode {
            "paper" => Algorithm::Paper,
            "credit" => Algorithm::Credit { boost: true },
            "plain" => Algorithm::Credit { boost: false },
            _ => Algorithm::Interleaved,
        },
        batch_slice: if mode == "interleaved" {
            BATCH_SLICE
        } else {
            PAPER_SLICE
        },
        budget_permille: None,
        reserve_permille: 0,
        vms: Vec::new(),
    };
    for (i, (vm, class)) in vms.iter().zip(classes).enumerate() {
        cores.vms.push(VmPlan {
            hold_cpu: None,
            resets_on_fork: false,
            params: Params {
                id: i as u32,
                class,
                weight: DEFAULT_WEIGHT,
                cap_permille: None,
                microslice: micro * US,
            },
            regular_vcpus: (0, 0),
            index: meter.index(&vm.id).ok_or("too many VMs")?,
            pid: vm.pid as i32,
            sees_packets: seen.contains(&vm.id),
            threads: vm
                .threads()
                .map(|t| ThreadPlan {
                    tid: t.tid as i32,
                    service: vm.service.iter().any(|s| s.thread == *t)
                        || vm.vcpus.iter().any(|v| v.kernel_thread == Some(t.tid)),
                })
                .collect(),
        });
    }
    let saved =
        std::env::temp_dir().join(format!("viola-slots-example-{}.json", std::process::id()));
    let mut slots = Slots::new(
        HelperCommand {
            program: exe,
            args: vec!["watchdog".into()],
        },
        saved,
    );
    slots.apply(&Plan { cores: vec![cores] }, &vms, meter.acct())?;
    std::thread::sleep(Duration::from_millis(300));
    meter.snapshot();
    let before = slots.health();
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let s = meter.snapshot().clone();
    let after = slots.health();
    for (vm, id) in s.vms.iter().zip(&vms) {
        let t = vm.vcpu_total();
        let waits = meter.vm_waits(&id.id).unwrap_or_default();
        println!(
            "{:<16} ran {:5.1} %  waited {:5.1} %  switches {:6}  residual wait mean {:7.0} us  p99 {:7.0} us",
            vm.id.to_string(),
            100.0 * t.run as f64 / s.span as f64,
            100.0 * t.wait as f64 / s.span as f64,
            t.switches,
            waits.residual_mean().unwrap_or(0) as f64 / 1e3,
            waits.residual_quantile(0.99).unwrap_or(0) as f64 / 1e3,
        );
    }
    for (b, a) in before.cores.iter().zip(&after.cores) {
        println!(
            "core {}: {:.0} decisions/s, {:.0} system calls/s, controller {:.2} % of a core, late at most {} us; {:?}",
            a.cpu,
            (a.decisions - b.decisions) as f64 / seconds,
            (a.calls - b.calls) as f64 / seconds,
            100.0 * (a.cpu_ns - b.cpu_ns) as f64 / 1e9 / seconds,
            a.late_max / 1000,
            after.ended
        );
    }
    slots.stop()?;
    Ok(())
}

/// A process as a VM with one vCPU.
fn process(pid: u32, cpu: u32) -> Result<Vm, Box<dyn Error>> {
    let start_time = proc::stat(pid)?.ok_or("no such process")?.start_time;
    let cores: CpuSet = cpu.to_string().parse()?;
    let thread = Thread {
        pid,
        tid: pid,
        start_time,
    };
    Ok(Vm {
        id: VmId::new(Hypervisor::Uml, &format!("pid-{pid:06}")),
        name: format!("pid-{pid}"),
        hypervisor: Hypervisor::Uml,
        pid,
        start_time,
        vcpus: vec![Vcpu {
            index: 0,
            threads: vec![thread],
            kernel_thread: None,
            cores: cores.clone(),
        }],
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

// SPDX-License-Identifier: Apache-2.0
//! `viola sim import`: a scenario from the output of `viola vms --json`.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::io::Read;
use std::path::Path;

use viola_proto::{Class, VmList, VmReport};

use viola_cli::error::{Failure, Outcome};

/// Makes a scenario from a snapshot in a file or on standard input (`-`).
///
/// # Errors
/// Exit status 2 when the snapshot cannot be read or names no VM.
pub fn read(file: &Path) -> Outcome<String> {
    let name = file.display();
    let mut text = String::new();
    if file.as_os_str() == "-" {
        let mut input = std::io::stdin().lock();
        input.read_to_string(&mut text).map_err(Failure::usage)?;
    } else {
        text = std::fs::read_to_string(file).map_err(|e| Failure::usage(format!("{name}: {e}")))?;
    }
    let list: VmList = serde_json::from_str(&text)
        .map_err(|e| Failure::usage(format!("{name}: not output of viola vms --json: {e}")))?;
    if list.vms.is_empty() {
        return Err(Failure::usage(format!("{name}: it has no VM")));
    }
    Ok(scenario(&list))
}

/// CPU time that a VM would use if it never waited, percent of one core.
fn demand(vm: &VmReport) -> f64 {
    let wanted = vm.used / (1.0 - vm.wait_share).max(0.01);
    (100.0 * wanted * vm.cores.len() as f64).clamp(0.0, 100.0)
}

fn scenario(list: &VmList) -> String {
    let cpus: BTreeSet<u32> = list.vms.iter().flat_map(|vm| &vm.cores).copied().collect();
    let cpus: Vec<u32> = cpus.into_iter().collect();
    let mut on = vec![0usize; cpus.len().max(1)];
    let mut text = format!(
        "# From viola vms --json: {} VMs. Core k is the host's CPU {}.\n\
         # Each VM has one vCPU here, on the core of its own that has fewest so far; its packets are taken for requests and\n\
         # answers, and traffic of its disks is left out.\n\
         name = \"imported\"\nseconds = 60.0\n\n[host]\nscheduler = \"{}\"\ncores = {}\n",
        list.vms.len(),
        cpus.iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(", "),
        match list.vms.iter().any(|vm| vm.scheduled_by == "slots") {
            true => "viola",
            false => "eevdf",
        },
        on.len(),
    );
    for vm in &list.vms {
        let own = cpus
            .iter()
            .enumerate()
            .filter(|(_, cpu)| vm.cores.contains(cpu));
        let core = own.map(|(k, _)| k).min_by_key(|&k| on[k]).unwrap_or(0);
        on[core] += 1;
        one(&mut text, vm, core);
    }
    text
}

fn one(text: &mut String, vm: &VmReport, core: usize) {
    let name = toml::Value::String(vm.name.clone());
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "\n[[vm]]\nname = {name}\ncore = {core}\nweight = {}\n",
        vm.weight
    );
    if vm.class != Class::Batch {
        let us = (vm.microslice_ns / 1_000).clamp(10, 100_000);
        let _ = writeln!(text, "class = \"ls\"\nmicroslice_us = {us}");
    }
    if let Some(cap) = vm.cap_permille {
        let _ = writeln!(
            text,
            "cap_percent = {:.1}",
            (f64::from(cap) / 10.0).clamp(0.1, 100.0)
        );
    }
    let load = demand(vm).round() as u64;
    if load > 0 {
        let _ = writeln!(text, "load_percent = {load}");
    }
    if vm.vcpus > 1 {
        let _ = writeln!(text, "# It has {} vCPUs.", vm.vcpus);
    }
    if vm.net_packets_per_s >= 1.0 {
        let pause = 2_000.0 / vm.net_packets_per_s;
        let _ = writeln!(
            text,
            "[[vm.work]]\nkind = \"ping\"\npause_ms = {pause:.3}\nprocess_us = 20.0"
        );
    }
    if vm.disk_bytes_per_s >= 1e6 {
        let _ = writeln!(
            text,
            "# Its disks move {:.0} MB/s.",
            vm.disk_bytes_per_s / 1e6
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_sim::scenario::Scenario;

    fn vm(name: &str, cores: &[u32], used: f64, wait: f64) -> serde_json::Value {
        serde_json::json!({
            "id": format!("uml:{name}"), "name": name, "hypervisor": "uml", "pid": 1, "vcpus": 1,
            "class": "batch", "class_setting": "auto", "class_source": "default",
            "microslice_ns": 300_000, "weight": 256, "weight_source": "default", "cap_source": "default",
            "cores": cores, "share": 0.25, "used": used, "wait": wait, "wakes_per_s": 0.0,
            "net_bytes_per_s": 0.0, "net_packets_per_s": 0.0, "disk_bytes_per_s": 0.0, "by_vcpu": [],
            "service": {"run_ns": 0, "wait_ns": 0, "blocked_ns": 0, "wakes": 0, "switches": 0, "preempted": 0},
            "scheduled_by": "stock"
        })
    }

    #[test]
    fn a_snapshot_becomes_a_scenario_that_runs() {
        let mut web = vm("we\"b", &[4], 0.25, 0.75);
        web["class"] = "ls".into();
        web["cap_permille"] = 500.into();
        web["net_packets_per_s"] = 400.0.into();
        web["disk_bytes_per_s"] = 5e6.into();
        let vms = [
            web,
            vm("a", &[4, 6], 0.5, 0.0),
            vm("b", &[4], 0.25, 0.75),
            vm("idle", &[6], 0.0, 0.0),
        ];
        let list: VmList =
            serde_json::from_value(serde_json::json!({"vms": vms, "measured_ns": 1_000_000_000}))
                .unwrap();
        let text = scenario(&list);
        let made = Scenario::parse("i.toml", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let places: Vec<usize> = made.host.vms.iter().map(|vm| vm.core).collect();
        assert_eq!((made.host.cores, places), (2, vec![0, 1, 0, 1]), "{text}");
        assert_eq!(made.host.vms[0].cap_permille, Some(500));
        let outcome = made.run(1);
        assert_eq!(outcome.vms[0].name, "we\"b");
        // Two that want all share core 0; the third has its own core and what it wants of it.
        let ran: Vec<f64> = outcome.vms.iter().map(|vm| vm.ran).collect();
        assert!(
            (ran[0] - 0.5).abs() < 0.05 && (ran[2] - 0.5).abs() < 0.05 && ran[1] > 0.9,
            "{ran:?}"
        );
        assert!(
            outcome.vms[0]
                .figures
                .iter()
                .any(|f| f.1 == "answers" && f.2 > 1_000.0)
        );
    }

    #[test]
    fn what_is_no_snapshot_is_refused_in_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.json");
        for (text, said) in [
            ("{}", "not output of viola vms --json"),
            ("{\"vms\": [], \"measured_ns\": 1}", "it has no VM"),
        ] {
            std::fs::write(&file, text).unwrap();
            let Failure::Usage(e) = read(&file).unwrap_err() else {
                panic!("{text}");
            };
            assert!(e.contains("x.json: ") && e.contains(said), "{e}");
        }
        assert!(read(Path::new("/no/such/file")).is_err());
    }
}

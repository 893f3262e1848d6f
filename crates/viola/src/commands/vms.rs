// SPDX-License-Identifier: Apache-2.0
//! `viola vms`

use std::path::Path;
use std::time::Duration;

use viola_host::{CpuSet, Inventory};
use viola_meter::Meter;
use viola_policy::slices;
use viola_proto::{Class, ClassSetting, VmList, VmReport};

use crate::PROGRAM;
use crate::args;
use viola_cli::client::{Client, ClientError};
use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::quantities::{byte_rate, percent, rounded};
use viola_cli::table::{Colour, align, coloured, note, paint, print, print_json};
use viola_config::{self as config, Config};
use viola_daemon::vms::recent::Recent;
use viola_daemon::vms::report::{VmState, cores_text, reports};
use viola_daemon::vms::settings::Settings;

/// Duration of the measurement without a daemon.
const MEASURE_TIME: Duration = Duration::from_secs(1);

/// Shows all VMs as the daemon measures them, or measures them for a second without a daemon.
pub fn vms(args: &args::Vms) -> Outcome {
    let socket = args.socket.path();
    let list = match Client::new(&socket).get::<VmList>("/vms") {
        Ok(list) => list,
        Err(e @ (ClientError::NoDaemon { .. } | ClientError::Denied { .. })) => {
            let why = match e {
                ClientError::NoDaemon { .. } => format!("no daemon on {}", socket.display()),
                other => other.to_string(),
            };
            let seconds = MEASURE_TIME.as_secs();
            note(PROGRAM, &format!("{why}; measuring for {seconds} s"));
            measure()?
        }
        Err(e) => return Err(e.into()),
    };
    for warning in &list.warnings {
        note(PROGRAM, warning);
    }
    if args.json {
        print_json(&list)
    } else {
        print(&text(&list, coloured()))
    }
}

fn measure() -> Outcome<VmList> {
    let mut inventory = Inventory::new().map_err(|e| Failure::run(e.one_line()))?;
    inventory
        .refresh_fully()
        .map_err(|e| Failure::run(e.one_line()))?;
    let mut warnings = inventory.warnings().to_vec();
    if inventory.vms().is_empty() {
        return Ok(VmList {
            warnings,
            ..VmList::default()
        });
    }
    let mut meter = Meter::exact().unwrap_or_else(|e| {
        warnings.push(format!(
            "P50 DELAY and P99 DELAY are missing, because times are sampled: {}",
            chain(&e)
        ));
        Meter::sampled()
    });
    let failed = |e| Failure::run(chain(&e));
    meter.follow(inventory.vms()).map_err(failed)?;
    meter.snapshot();
    std::thread::sleep(MEASURE_TIME);
    inventory
        .refresh()
        .map_err(|e| Failure::run(e.one_line()))?;
    meter.follow(inventory.vms()).map_err(failed)?;
    meter.snapshot();
    let recent = Recent::from_history(meter.history());
    // Settings hold only while a daemon runs; weights and quotas of control groups hold always.
    let config = Config::parse(Path::new(config::DEFAULT_PATH), "")?;
    let (settings, _) = Settings::read(Path::new("/nonexistent"));
    let states = inventory
        .vms()
        .iter()
        .map(|vm| VmState {
            vm,
            controls: settings.controls(&config, vm),
            class: slices::Class::Batch,
            turbo: false,
            scheduled_by: None,
            turns: None,
            remarks: Vec::new(),
            why: String::new(),
            advice: None,
        })
        .collect();
    Ok(VmList {
        vms: reports(states, &meter, &recent),
        measured_ns: recent.span,
        warnings,
    })
}

fn text(list: &VmList, colour: bool) -> String {
    if list.vms.is_empty() {
        return "no VM found on this host (QEMU, Firecracker, Cloud Hypervisor, User Mode Linux)\n"
            .into();
    }
    let head = [
        "NAME",
        "CLASS",
        "BY",
        "CORES",
        "SHARE",
        "USED",
        "WAIT",
        "P50 DELAY",
        "P99 DELAY",
        "NET",
        "DISK",
        "HELP",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(list.vms.iter().map(|vm| row(vm, list)));
    let table = align(&rows);
    match (colour, table.split_once('\n')) {
        (true, Some((head, rest))) => format!("{}\n{rest}", paint(head, Colour::Bold)),
        _ => table,
    }
}

/// A class as tables show it.
pub(super) fn class_text(class: Class) -> &'static str {
    match class {
        Class::Ls => "ls",
        Class::Batch => "batch",
        Class::Turbo => "turbo",
    }
}

/// Whether no other VM of the list has the name of this one.
pub(super) fn has_own_name(vm: &VmReport, list: &VmList) -> bool {
    list.vms.iter().filter(|o| o.name == vm.name).count() == 1
}

/// The VM's name, or its identity if other VMs have that name.
pub(super) fn shown_name(vm: &VmReport, list: &VmList) -> String {
    match has_own_name(vm, list) {
        true => vm.name.clone(),
        false => vm.id.clone(),
    }
}

fn row(vm: &VmReport, list: &VmList) -> Vec<String> {
    let class = class_text(vm.class);
    let chosen = if vm.class_setting == ClassSetting::Auto {
        "*"
    } else {
        ""
    };
    let cores: CpuSet = vm.cores.iter().copied().collect();
    let delay = vm.packet_delay.as_ref();
    let text = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), rounded);
    vec![
        shown_name(vm, list),
        format!("{class}{chosen}"),
        vm.scheduled_by.clone(),
        cores_text(&cores),
        percent(vm.share),
        percent(vm.used),
        vm.waiting.map_or_else(|| "-".to_owned(), percent),
        text(delay.and_then(|d| d.p50_ns)),
        text(delay.and_then(|d| d.p99_ns)),
        byte_rate(vm.net_bytes_per_s),
        byte_rate(vm.disk_bytes_per_s),
        if vm.help.is_empty() {
            "-".to_owned()
        } else {
            vm.help.join(", ")
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_daemon::testing::view;

    #[test]
    fn the_table_has_a_row_per_vm() {
        let mut list = view(&["db01", "web"]).vms;
        list.vms[0].help = vec!["slices".into()];
        list.vms[1].class = Class::Ls;
        list.vms[1].class_setting = ClassSetting::Auto;
        list.vms[1].scheduled_by = "sched_ext".into();
        list.vms[1].packet_delay = None;
        assert_eq!(
            text(&list, false),
            "NAME  CLASS  BY         CORES  SHARE  USED  WAIT  P50 DELAY  P99 DELAY  NET      DISK      HELP\n\
             db01  batch  stock      1      25 %   25 %  15 %  4 ms       17 ms      12 MB/s  3.0 MB/s  slices\n\
             web   ls*    sched_ext  1      25 %   25 %  15 %  -          -          12 MB/s  3.0 MB/s  -\n"
        );
        assert!(text(&VmList::default(), false).contains("no VM found"));
    }

    #[test]
    fn vms_of_one_name_are_shown_by_identity() {
        let mut list = view(&["web", "web"]).vms;
        list.vms[1].id = "qemu:web".into();
        let text = text(&list, false);
        assert!(
            text.contains("uml:web") && text.contains("qemu:web"),
            "{text}"
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola set`, `stop`, `start` and `status`: requests to the daemon.

use viola_proto::lanes::{LaneChange, Nic};
use viola_proto::{Change, Class, ClassSetting, Done, Source, Stage, Status, VmReport};

use crate::args;
use viola_cli::client::{Client, ClientError, segment};
use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::{TEMPORARY, cap_text, duration_in, exact, rounded};
use viola_cli::table::{Colour, align, coloured, paint, print, print_json};

/// `viola set`
pub fn set(args: &args::Set) -> Outcome {
    let weight = match &args.weight {
        Some(text) => Some(text.trim().parse::<i64>().map_err(|_| {
            Failure::usage(format!(
                "weight: {} is not a number; 1 to 65535 is allowed",
                viola_cli::quantities::quoted(text)
            ))
        })?),
        None => None,
    };
    let for_s = match &args.length {
        Some(text) => {
            let ns =
                duration_in(text, &TEMPORARY).map_err(|e| Failure::usage(format!("for: {e}")))?;
            Some((ns / 1_000_000_000) as u32)
        }
        None => None,
    };
    let change = Change {
        class: args.class,
        microslice: args.microslice.clone(),
        weight,
        cap: args.cap.clone(),
        keep: args.keep,
        reset: args.reset,
        for_s,
    };
    let client = Client::new(&args.socket.path());
    let lane = LaneChange {
        lane: args.lane,
        keep: args.keep,
        reset: args.reset,
    };
    let set_lane = || -> Outcome {
        let nic: Nic = client.patch(&format!("/lanes/{}", segment(&args.vm)), &lane)?;
        print(&format!("{}: lane {}\n", nic.guest, nic.lane))
    };
    let only_lane = Change {
        keep: args.keep,
        reset: args.reset,
        ..Change::default()
    };
    if args.lane.is_some() {
        set_lane()?;
        if change == only_lane {
            return Ok(());
        }
    }
    let now = client.patch::<VmReport>(&format!("/vms/{}", segment(&args.vm)), &change);
    match now {
        // A network namespace has only a lane.
        Err(ClientError::Refused { status: 404, .. }) if change == only_lane => set_lane(),
        now => print(&described(&now?)),
    }
}

/// The VM's settings in one line, and a line for each remark.
fn described(vm: &VmReport) -> String {
    let class = match (vm.class_setting, vm.class) {
        (ClassSetting::Auto, Class::Ls) => "auto (ls now)",
        (ClassSetting::Auto, Class::Batch) => "auto (batch now)",
        (ClassSetting::Auto, Class::Turbo) => "auto (turbo now)",
        (_, Class::Turbo) => "turbo",
        (_, Class::Ls) => "ls",
        (_, Class::Batch) => "batch",
    };
    let microslice = match vm.class {
        Class::Ls => format!(", microslice {}", exact(vm.microslice_ns)),
        Class::Batch | Class::Turbo => String::new(),
    };
    let cap = vm
        .cap_permille
        .map(|c| format!(", cap {}", cap_text(Some(c))))
        .unwrap_or_default();
    let sources = [vm.class_source, vm.weight_source, vm.cap_source];
    let kept = if sources.contains(&Source::Kept) {
        " (kept)"
    } else {
        ""
    };
    let mut text = format!(
        "{}: class {class}{microslice}, weight {}{cap}{kept}; scheduled by {}\n",
        vm.name, vm.weight, vm.scheduled_by
    );
    for remark in &vm.remarks {
        text.push_str(&format!("{}: {remark}\n", vm.name));
    }
    text
}

/// `viola stop --all`
pub fn stop(args: &args::Stop) -> Outcome {
    post(&args.socket, "/stop")
}

/// `viola start`
pub fn start(socket: &args::Socket) -> Outcome {
    post(socket, "/start")
}

fn post(socket: &args::Socket, path: &str) -> Outcome {
    let done: Done = Client::new(&socket.path()).post(path)?;
    print(&format!("{}\n", done.done))
}

/// `viola status`
pub fn status(args: &args::Status) -> Outcome {
    let status: Status = Client::new(&args.socket.path()).get("/status")?;
    if args.json {
        print_json(&status)
    } else {
        print(&table(&status, coloured()))
    }
}

fn table(s: &Status, colour: bool) -> String {
    let stage = match s.stage {
        Stage::Running => "running",
        Stage::Idle => "idle",
        Stage::Waiting => "waiting",
        Stage::Off => "off",
        Stage::Stopped => "stopped",
        Stage::Advising => "dry run",
    };
    let bad = matches!(s.stage, Stage::Waiting | Stage::Off);
    let stage = match (colour, bad) {
        (false, _) => stage.to_owned(),
        (true, true) => paint(stage, Colour::Red),
        (true, false) => paint(stage, Colour::Green),
    };
    let mut text = format!(
        "viola {}, process {}, up {}, interval {}\nslices: {stage}: {}\naccounting: {}\n",
        s.version,
        s.pid,
        rounded(s.uptime_ns / 1_000_000_000 * 1_000_000_000),
        exact(s.interval_ns),
        s.why,
        s.accounting
    );
    if s.failures > 0 {
        text.push_str(&format!("failures since the start: {}\n", s.failures));
    }
    if !s.cores.is_empty() {
        let mut rows = vec![
            ["CORE", "BY", "VMS", "CONTROLLER", "WHY"]
                .map(str::to_owned)
                .to_vec(),
        ];
        for c in &s.cores {
            let by = if c.managed {
                s.mechanism.as_deref().unwrap_or("viola")
            } else {
                "stock"
            };
            let vms = if c.vms.is_empty() {
                "-".to_owned()
            } else {
                c.vms.join(",")
            };
            rows.push(vec![
                c.cpu.to_string(),
                by.to_owned(),
                vms,
                format!("{:.1} %", c.controller_share * 100.0),
                c.why.clone(),
            ]);
        }
        text.push_str(&align(&rows));
    }
    for l in &s.unmanaged {
        text.push_str(&format!("{}: {}\n", l.vm, l.why));
    }
    for w in &s.warnings {
        text.push_str(&format!("warning: {w}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_daemon::testing::view;

    #[test]
    fn a_vm_is_described_with_what_stands_in_its_way() {
        let mut vm = view(&["db01"]).vms.vms.remove(0);
        vm.class = Class::Ls;
        vm.class_setting = ClassSetting::Ls;
        vm.class_source = Source::Kept;
        vm.cap_permille = Some(500);
        vm.remarks = vec!["core 1 keeps stock scheduling".into()];
        assert_eq!(
            described(&vm),
            "db01: class ls, microslice 300us, weight 256, cap 50% (kept); scheduled by stock\n\
             db01: core 1 keeps stock scheduling\n"
        );
    }

    #[test]
    fn the_status_has_a_line_per_core() {
        let mut s = view(&[]).status;
        s.cores = vec![viola_proto::Core {
            cpu: 1,
            managed: false,
            why: "no VM runs there".into(),
            vms: Vec::new(),
            decisions: 0,
            controller_ns: 100_000_000,
            controller_share: 0.01,
            late_max_ns: 0,
        }];
        let text = table(&s, false);
        assert!(
            text.contains("slices: idle: no VM is latency-sensitive\n"),
            "{text}"
        );
        assert!(
            text.contains("\n1     stock  -    1.0 %       no VM runs there\n"),
            "{text}"
        );
    }
}

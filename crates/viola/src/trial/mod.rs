// SPDX-License-Identifier: Apache-2.0
//! `viola try`: measures on running VMs what a class does for them and for the other VMs.
//!
//! Windows with the class alternate with windows of class batch, in pairs whose order is drawn by lot. The daemon ends the class
//! of a window by itself, so a command that dies leaves no VM in another class than before for long.
//!
//! | module | does |
//! |---|---|
//! | `windows` | sets the classes, and reads the figures of each window |
//! | `samples` | collects the figures of windows, and compares them |
//! | `show` | table and verdict |
//! | `page` | the same as an HTML page, with a picture |

mod page;
mod samples;
mod show;
mod windows;

use viola_proto::{Class, ClassSetting, Stage, Status, VmList, VmReport};

use crate::PROGRAM;
use crate::args;
use samples::Samples;
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_cli::quantities::{duration, rounded};
use viola_cli::table::{note, print, print_json};
use viola_daemon::vms::find;
use viola_daemon::vms::report::class_text;
use windows::{WINDOW, Windows};

/// Fewest pairs of windows that can show a difference (`viola_policy::compare`).
const MIN_PAIRS: u32 = 8;

/// Compares a class with class batch on running VMs, for the time of `--for`.
pub fn run(args: &args::Try) -> Outcome {
    let pairs = pairs(&args.length)?;
    let client = Client::new(&args.socket.path());
    refuse_idle_daemon(&client.get("/status")?)?;
    let list: VmList = client.get("/vms")?;
    let (tried, class) = match args.auto {
        true => (chosen_by_auto(&list)?, ClassSetting::Auto),
        false => (chosen(&list, &args.vms)?, args.class),
    };
    interrupt::watch()?;
    let names: Vec<&str> = tried.iter().map(|vm| vm.name.as_str()).collect();
    let time = WINDOW * 2 * pairs;
    note(
        PROGRAM,
        &format!(
            "{}: class {} against class batch, {pairs} pairs of windows of {} s, {} in all; Ctrl-C ends it earlier",
            names.join(", "),
            class_text(class),
            WINDOW.as_secs(),
            rounded(time.as_nanos() as u64),
        ),
    );
    let mut samples = Samples::new(&list, &tried);
    let windows = Windows {
        client: &client,
        tried: &tried,
        class,
    };
    if let Some(why) = windows.measure(pairs, &mut samples)? {
        note(PROGRAM, &why);
    }
    let report = samples.report(class_text(class));
    if report.pairs < MIN_PAIRS as usize {
        return Err(Failure::run(format!(
            "{} pairs of windows are too few to tell chance from effect; {MIN_PAIRS} are the least",
            report.pairs
        )));
    }
    match args.json {
        true => print_json(&report)?,
        false => print(&show::text(&report))?,
    }
    // Last, so that a file that cannot be written loses nothing.
    match &args.report {
        Some(file) => std::fs::write(file, page::html(&report))
            .map_err(|e| Failure::run(format!("{}: {e}", file.display()))),
        None => Ok(()),
    }
}

/// Number of pairs of windows in a time.
fn pairs(length: &str) -> Outcome<u32> {
    let ns = duration(length).map_err(|e| Failure::usage(format!("for: {e}")))?;
    let pairs = u32::try_from(ns / (WINDOW * 2).as_nanos() as u64).unwrap_or(u32::MAX);
    if pairs < MIN_PAIRS {
        let least = WINDOW * 2 * MIN_PAIRS;
        return Err(Failure::usage(format!(
            "for: {length} is too short to tell chance from effect; {} s are the least",
            least.as_secs()
        )));
    }
    Ok(pairs.min(viola_policy::compare::MAX_PAIRS as u32))
}

/// Refuses a daemon that schedules nothing: a class has no effect then.
fn refuse_idle_daemon(status: &Status) -> Outcome {
    match status.stage {
        Stage::Running | Stage::Idle => Ok(()),
        Stage::Waiting | Stage::Off | Stage::Stopped | Stage::Advising => Err(Failure::usage(
            format!("the daemon changes nothing now: {}", status.why),
        )),
    }
}

/// The VMs to try: those that were named, or those that class ls would help.
fn chosen<'a>(list: &'a VmList, names: &[String]) -> Outcome<Vec<&'a VmReport>> {
    if names.is_empty() {
        let is_helped = |vm: &&VmReport| vm.help.iter().any(|what| what == "slices");
        let helped: Vec<&VmReport> = list.vms.iter().filter(is_helped).collect();
        return match helped.is_empty() {
            false => Ok(helped),
            true => Err(Failure::usage(
                "viola vms shows no VM that class ls would help; name a VM to try it nevertheless",
            )),
        };
    }
    let known = list.vms.iter().map(|vm| (vm.name.as_str(), vm.id.as_str()));
    let find = |name: &String| match find::find(known.clone(), name) {
        Ok(at) => Ok(&list.vms[at]),
        Err(e) => Err(Failure::usage(e.answer(name).1.error)),
    };
    names.iter().map(find).collect()
}

/// The VMs that have another class than batch because class auto chose it.
fn chosen_by_auto(list: &VmList) -> Outcome<Vec<&VmReport>> {
    let has_class =
        |vm: &&VmReport| vm.class_setting == ClassSetting::Auto && vm.class != Class::Batch;
    let chosen: Vec<&VmReport> = list.vms.iter().filter(has_class).collect();
    match chosen.is_empty() {
        false => Ok(chosen),
        true => Err(Failure::usage(
            "class auto has chosen a class for no VM; viola why shows what it waits for",
        )),
    }
}

/// Whether the VM has the class of a window, and viola schedules it so.
fn has_class(vm: &VmReport, class: ClassSetting) -> bool {
    let is_scheduled = vm.scheduled_by != "stock";
    match class {
        ClassSetting::Ls => vm.class == Class::Ls && is_scheduled,
        ClassSetting::Batch => vm.class == Class::Batch,
        ClassSetting::Turbo => vm.class == Class::Turbo && is_scheduled,
        ClassSetting::Auto => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_daemon::testing::view;

    #[test]
    fn a_time_becomes_pairs_of_windows() {
        assert_eq!(pairs("10m").unwrap(), 25);
        assert_eq!(pairs("192s").unwrap(), 8);
        assert_eq!(pairs("1000h").unwrap(), 200);
        let short = pairs("2m").unwrap_err().to_string();
        assert!(short.contains("192 s are the least"), "{short}");
        assert!(pairs("soon").is_err());
    }

    #[test]
    fn vms_are_named_or_are_those_that_would_gain() {
        let mut list = view(&["db01", "web"]).vms;
        let none = chosen(&list, &[]).unwrap_err().to_string();
        assert!(none.contains("name a VM"), "{none}");
        list.vms[1].help = vec!["slices".into()];
        assert_eq!(chosen(&list, &[]).unwrap()[0].name, "web");
        assert_eq!(chosen(&list, &["db01".into()]).unwrap()[0].name, "db01");
        assert!(chosen(&list, &["db02".into()]).is_err());
        list.vms[1].name = "db01".into();
        let twice = chosen(&list, &["db01".into()]).unwrap_err().to_string();
        assert!(twice.contains("several VMs"), "{twice}");
        assert_eq!(chosen(&list, &["uml:web".into()]).unwrap().len(), 1);
    }

    #[test]
    fn only_vms_with_a_class_by_choice_of_auto_are_tried_with_auto() {
        let mut list = view(&["db01", "web"]).vms;
        let none = chosen_by_auto(&list).unwrap_err().to_string();
        assert!(none.contains("viola why"), "{none}");
        for vm in &mut list.vms {
            vm.class = Class::Ls;
        }
        list.vms[1].class_setting = ClassSetting::Auto;
        let chosen = chosen_by_auto(&list).unwrap();
        assert_eq!((chosen.len(), chosen[0].name.as_str()), (1, "web"));
    }

    #[test]
    fn a_daemon_that_changes_nothing_is_refused() {
        let mut status = view(&[]).status;
        assert!(refuse_idle_daemon(&status).is_ok());
        status.stage = Stage::Advising;
        status.why = "this is a dry run".into();
        let why = refuse_idle_daemon(&status).unwrap_err().to_string();
        assert!(why.contains("dry run"), "{why}");
    }
}

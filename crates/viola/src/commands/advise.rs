// SPDX-License-Identifier: Apache-2.0
//! `viola advise`

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use viola_proto::VmList;

use super::vms::shown_name;
use super::vread::row;
use crate::args;
use crate::record::Recording;
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::percent;
use viola_cli::table::{align, print, print_json};

/// What would help one VM.
#[derive(Debug, PartialEq, Serialize)]
struct Proposal {
    /// Name of the VM, or its identity if others have that name.
    vm: String,
    /// Accelerators that would help.
    help: Vec<String>,
    /// Part of the moments that were looked at in which they would have helped: 1 for the present moment alone.
    part: f64,
    /// Why, in a sentence.
    why: String,
}

/// Shows what would help which VM, now or over a recording. Changes nothing.
pub fn advise(args: &args::Advise) -> Outcome {
    let proposals = match &args.from {
        Some(file) => recorded(file)?,
        None => {
            let list: VmList = Client::new(&args.socket.path()).get("/vms")?;
            proposals([list])
        }
    };
    if args.json {
        return print_json(&proposals);
    }
    print(&text(&proposals, args.from.is_some()))
}

fn recorded(file: &Path) -> Outcome<Vec<Proposal>> {
    let mut recording = Recording::open(file).map_err(Failure::usage)?;
    let mut moments = Vec::with_capacity(recording.len());
    for at in 0..recording.len() {
        moments.push(recording.moment(at).map_err(Failure::run)?.vms);
    }
    Ok(proposals(moments))
}

/// The proposals of all moments, those that held longest first. A VM's part is of the moments in which it ran.
fn proposals(moments: impl IntoIterator<Item = VmList>) -> Vec<Proposal> {
    let mut vms: BTreeMap<String, (u32, u32, Option<Proposal>)> = BTreeMap::new();
    for list in moments {
        for vm in &list.vms {
            let (seen, helped, last) = vms.entry(vm.id.clone()).or_default();
            *seen += 1;
            let Some(why) = &vm.advice else { continue };
            *helped += 1;
            *last = Some(Proposal {
                vm: shown_name(vm, &list),
                help: vm.help.clone(),
                part: 0.0,
                why: why.clone(),
            });
        }
    }
    let mut all: Vec<Proposal> = vms
        .into_values()
        .filter_map(|(seen, helped, last)| {
            Some(Proposal {
                part: f64::from(helped) / f64::from(seen),
                ..last?
            })
        })
        .collect();
    all.sort_by(|a, b| b.part.total_cmp(&a.part));
    all
}

fn text(proposals: &[Proposal], is_recorded: bool) -> String {
    if proposals.is_empty() {
        return "no VM would gain by a change that viola knows; viola why tells what each one has\n"
            .into();
    }
    let mut rows = vec![match is_recorded {
        true => row(&["VM", "HELP", "TIME", "WHY"]),
        false => row(&["VM", "HELP", "WHY"]),
    }];
    rows.extend(proposals.iter().map(|p| {
        let (help, time) = (p.help.join(","), percent(p.part));
        match is_recorded {
            true => row(&[&p.vm, &help, &time, &p.why]),
            false => row(&[&p.vm, &help, &p.why]),
        }
    }));
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_daemon::testing::view;

    /// A moment in which these of the VMs `db01` and `web` have advice.
    fn moment(advised: &[&str]) -> VmList {
        let mut list = view(&["db01", "web"]).vms;
        for vm in &mut list.vms {
            let advice = advised.contains(&vm.name.as_str());
            vm.advice = advice.then(|| format!("{} waits", vm.name));
            vm.help = advice.then(|| "slices".to_owned()).into_iter().collect();
        }
        list
    }

    #[test]
    fn the_vm_that_would_gain_is_listed_with_the_reason() {
        let said = text(&proposals([moment(&["web"])]), false);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines, ["VM   HELP    WHY", "web  slices  web waits"]);
        let said = text(&proposals([moment(&[])]), false);
        assert!(said.starts_with("no VM would gain"), "{said}");
    }

    #[test]
    fn a_recording_tells_for_which_part_of_it() {
        let moments = [&["web", "db01"][..], &["web"], &["web"], &[]].map(moment);
        let said = text(&proposals(moments), true);
        let lines: Vec<&str> = said.lines().collect();
        assert!(
            lines[1].starts_with("web   slices  75 %  web waits"),
            "{said}"
        );
        assert!(lines[2].starts_with("db01  slices  25 %"), "{said}");
    }
}

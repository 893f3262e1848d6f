// SPDX-License-Identifier: Apache-2.0
//! `viola why`

use serde::Serialize;
use viola_proto::lanes::{Lanes, Nic};
use viola_proto::pipe::status::{PipeVm, Pipes};
use viola_proto::vread::{Datanode, Reader, Vread};
use viola_proto::{VmList, VmReport};

use super::vms::{class_text, has_own_name, shown_name};
use super::vread::{row, size};
use crate::args;
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::quoted;
use viola_cli::table::{align, print, print_json};

/// What one accelerator does for a VM.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Reason {
    /// Name of the VM, or its identity if others have that name.
    vm: String,
    /// `slices`, `vread`, `vpipe` or `lanes`; several in a line of advice.
    what: String,
    /// What the VM has of it, in a word or two.
    state: String,
    /// Why, in a sentence; empty if there is no reason to give.
    why: String,
}

/// What the daemon says of all VMs.
struct Host {
    vms: VmList,
    vread: Vread,
    pipes: Pipes,
    lanes: Lanes,
}

/// Shows what each VM has of each accelerator, and why.
pub fn why(args: &args::Why) -> Outcome {
    let client = Client::new(&args.socket.path());
    let host = Host {
        vms: client.get("/vms")?,
        vread: client.get("/vread")?,
        pipes: client.get("/pipes")?,
        lanes: client.get("/lanes")?,
    };
    let reasons = host.reasons(args.vm.as_deref())?;
    if args.json {
        return print_json(&reasons);
    }
    print(&text(&reasons))
}

fn text(reasons: &[Reason]) -> String {
    if reasons.is_empty() {
        return "the daemon has found no VM on this host\n".into();
    }
    let mut rows = vec![row(&["VM", "WHAT", "STATE", "WHY"])];
    rows.extend(reasons.iter().map(|r| {
        let why = if r.why.is_empty() { "-" } else { &r.why };
        row(&[&r.vm, &r.what, &r.state, why])
    }));
    align(&rows)
}

impl Host {
    /// The reasons of all VMs, or of the one with this name or identity.
    fn reasons(&self, only: Option<&str>) -> Outcome<Vec<Reason>> {
        let vms = &self.vms.vms;
        let chosen: Vec<&VmReport> = (vms.iter())
            .filter(|vm| only.is_none_or(|name| vm.name == name || vm.id == name))
            .collect();
        match only {
            Some(name) if chosen.is_empty() => Err(Failure::usage(format!(
                "no VM {} is on this host; viola vms lists them",
                quoted(name)
            ))),
            _ => Ok(chosen.into_iter().flat_map(|vm| self.of(vm)).collect()),
        }
    }

    fn of(&self, vm: &VmReport) -> Vec<Reason> {
        let is_unique = has_own_name(vm, &self.vms);
        let name = shown_name(vm, &self.vms);
        let is_it = |id: &str, other: &str| id == vm.id || (is_unique && other == vm.name);
        let datanodes = self
            .vread
            .datanodes
            .iter()
            .filter(|d| is_it(&d.vm, &d.name));
        let readers = (self.vread.readers.iter()).filter(|r| is_it(&r.name, &r.name));
        let pipes = self.pipes.vms.iter().filter(|p| is_it(&p.vm, &p.name));
        let lanes = self.lanes.nics.iter().filter(|n| is_it(&n.guest, &n.name));
        let said = std::iter::once(slices(vm))
            .chain(datanodes.map(datanode))
            .chain(readers.map(reader))
            .chain(pipes.map(pipe))
            .chain(lanes.map(lane))
            .map(|(what, state, why)| (what.to_owned(), state, why));
        let advice =
            (vm.advice.iter()).map(|why| (vm.help.join(","), "would help".to_owned(), why.clone()));
        said.chain(advice)
            .map(|(what, state, why)| Reason {
                vm: name.clone(),
                what,
                state,
                why,
            })
            .collect()
    }
}

type Said = (&'static str, String, String);

fn slices(vm: &VmReport) -> Said {
    let said = [&vm.why].into_iter().chain(&vm.remarks);
    let why: Vec<&str> = said.map(String::as_str).filter(|s| !s.is_empty()).collect();
    (
        "slices",
        format!("class {}, {}", class_text(vm.class), vm.scheduled_by),
        why.join("; "),
    )
}

fn datanode(d: &Datanode) -> Said {
    let state = match d.serving {
        true => format!("serves {} blocks", d.blocks),
        false => "serves none".into(),
    };
    ("vread", state, d.why.clone())
}

fn reader(r: &Reader) -> Said {
    let state = match (r.connected, r.running) {
        (true, _) => format!("has read {}", size(r.bytes.values().sum())),
        (false, true) => "not connected".into(),
        (false, false) => "off".into(),
    };
    ("vread", state, r.why.clone())
}

fn pipe(p: &PipeVm) -> Said {
    let state = match p.serving {
        true => format!("has moved {}", size(p.work.bytes)),
        false => "off".into(),
    };
    ("vpipe", state, p.why.clone())
}

fn lane(nic: &Nic) -> Said {
    let state = match &nic.vf {
        Some((pf, number)) => format!("VF {number} of {pf}"),
        None => "no VF".into(),
    };
    ("lanes", state, nic.why.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_daemon::testing::view;
    use viola_proto::Class;

    fn host() -> Host {
        let mut vms = view(&["db01", "web"]).vms;
        vms.vms[0].advice = Some("db01 waits".into());
        vms.vms[0].help = vec!["slices".into()];
        vms.vms[1].class = Class::Ls;
        vms.vms[1].why = "auto by the configuration: class ls is being tried".into();
        Host {
            vms,
            vread: Vread {
                readers: vec![Reader {
                    name: "db01".into(),
                    why: "its worker has ended".into(),
                    ..Reader::default()
                }],
                ..Vread::default()
            },
            pipes: Pipes {
                vms: vec![PipeVm {
                    vm: "uml:web".into(),
                    name: "web".into(),
                    serving: true,
                    why: "vda".into(),
                    ..PipeVm::default()
                }],
            },
            lanes: Lanes::default(),
        }
    }

    #[test]
    fn each_accelerator_of_a_vm_has_a_line() {
        assert_eq!(
            text(&host().reasons(None).unwrap()),
            "VM    WHAT    STATE               WHY\n\
             db01  slices  class batch, stock  set by default\n\
             db01  vread   off                 its worker has ended\n\
             db01  slices  would help          db01 waits\n\
             web   slices  class ls, stock     auto by the configuration: class ls is being tried\n\
             web   vpipe   has moved 0 B       vda\n"
        );
    }

    #[test]
    fn one_vm_is_found_by_name_and_by_identity_and_others_are_refused() {
        for name in ["web", "uml:web"] {
            let reasons = host().reasons(Some(name)).unwrap();
            assert_eq!(reasons.len(), 2, "{reasons:?}");
        }
        let refused = host().reasons(Some("web9")).unwrap_err().to_string();
        assert!(
            refused.contains("web9") && refused.contains("viola vms"),
            "{refused}"
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola log`

use viola_proto::{Event, EventKind, Events};

use super::vread::row;
use crate::args;
use viola_cli::client::Client;
use viola_cli::date::utc;
use viola_cli::error::Outcome;
use viola_cli::table::{align, print, print_json};

/// Shows the daemon's last changes, errors and warnings, with their reasons.
pub fn log(args: &args::Log) -> Outcome {
    let mut events: Events = Client::new(&args.socket.path()).get("/events")?;
    events.events.retain(|e| is_shown(e, args));
    if args.json {
        return print_json(&events.events);
    }
    print(&text(&events.events))
}

fn is_shown(event: &Event, args: &args::Log) -> bool {
    let is_about = |vm: &str| {
        let id = event.vm.as_deref().unwrap_or_default();
        id == vm || id.split_once(':').is_some_and(|(_, name)| name == vm)
    };
    (args.all || event.kind != EventKind::Info) && args.vm.as_deref().is_none_or(is_about)
}

fn text(events: &[Event]) -> String {
    if events.is_empty() {
        return "nothing to show among the daemon's last 256 lines\n".into();
    }
    let mut rows = vec![row(&["TIME", "VM", "KIND", "WHAT"])];
    rows.extend(events.iter().map(|e| {
        let kind = match e.kind {
            EventKind::Error => "error",
            EventKind::Warning => "warning",
            EventKind::Change => "change",
            EventKind::Info => "info",
        };
        let at = utc(e.at_ms / 1000);
        row(&[&at, e.vm.as_deref().unwrap_or("-"), kind, &e.what])
    }));
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventKind, vm: Option<&str>) -> Event {
        Event {
            number: 1,
            at_ms: 1_700_000_000_000,
            kind,
            vm: vm.map(str::to_owned),
            what: "class ls (auto, was batch): 600 packets/s".into(),
        }
    }

    fn args(vm: Option<&str>, all: bool) -> args::Log {
        args::Log {
            vm: vm.map(str::to_owned),
            all,
            json: false,
            socket: args::Socket { socket: None },
        }
    }

    #[test]
    fn a_change_has_its_time_vm_and_reason() {
        let said = text(&[event(EventKind::Change, Some("qemu:web"))]);
        let line = said.lines().nth(1).unwrap();
        assert!(
            line.contains("2023-11-14") && line.contains("qemu:web"),
            "{said}"
        );
        assert!(
            line.ends_with("change  class ls (auto, was batch): 600 packets/s"),
            "{said}"
        );
        assert!(text(&[]).contains("nothing"));
    }

    #[test]
    fn one_vms_lines_are_chosen_by_name_or_identity_and_information_only_by_all() {
        let change = event(EventKind::Change, Some("qemu:web"));
        for vm in ["web", "qemu:web"] {
            assert!(is_shown(&change, &args(Some(vm), false)));
        }
        assert!(!is_shown(&change, &args(Some("eb"), false)));
        let host = event(EventKind::Info, None);
        assert!(!is_shown(&host, &args(None, false)));
        assert!(is_shown(&host, &args(None, true)));
        assert!(!is_shown(&host, &args(Some("web"), true)));
    }
}

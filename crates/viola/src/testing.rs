// SPDX-License-Identifier: Apache-2.0
//! Events and moments for unit tests.

use viola_daemon::testing::view;

/// An event of the daemon's log.
pub fn event(at_ms: u64, vm: Option<&str>, what: &str) -> viola_proto::Event {
    viola_proto::Event {
        number: at_ms,
        at_ms,
        kind: viola_proto::EventKind::Change,
        vm: vm.map(str::to_owned),
        what: what.to_owned(),
    }
}

/// What a daemon with these VMs showed at a time.
pub fn moment(at_ms: u64, names: &[&str]) -> crate::record::Moment {
    let view = view(names);
    crate::record::Moment {
        at_ms,
        stage: view.status.stage,
        why: view.status.why,
        mechanism: view.status.mechanism,
        vms: view.vms,
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Takes back the VFs of an earlier daemon by its journal (`viola restore`); `adopt` lets a new daemon take them over.

mod adopt;

use std::path::Path;

use viola_lanes::transfer::Transfer;
use viola_lanes::{Entry, Journal, Pf, PfEswitch, StepTimes, VfDevice, VfSettings};
use viola_netdev::Link;

use crate::lanes::JOURNAL;

/// Takes back all VFs of the journal. Returns a sentence about each.
pub fn take_back(run_dir: &Path) -> Vec<String> {
    let (mut journal, warning) = Journal::read(&run_dir.join(JOURNAL));
    let mut done: Vec<String> = warning.into_iter().collect();
    let links = viola_netdev::links().unwrap_or_default();
    for entry in journal.entries().to_vec() {
        done.push(take_back_one(&mut journal, &entry, &links));
    }
    done
}

/// Takes one VF back. Returns a sentence about it.
pub fn take_back_one(journal: &mut Journal, entry: &Entry, links: &[Link]) -> String {
    let vf = VfDevice {
        pf: Pf::new(&entry.pf),
        index: entry.vf,
        address: entry.address.clone(),
    };
    let card = PfEswitch {
        pf: entry.pf.clone(),
        uplink: links
            .iter()
            .any(|l| l.name == entry.pf && l.master.is_some()),
        port: None,
    };
    let mut guest = entry.access.clone();
    let mut switch = Transfer {
        eswitch: &card,
        vf: &vf,
        id: &entry.guest,
        access: &entry.access,
        attachment: guest.attachment(),
        steps: StepTimes::default(),
    };
    let taken = switch.revoke(journal, entry.mac, VfSettings::default());
    let what = format!("VF {} of {}", entry.vf, entry.pf);
    match taken {
        Ok(()) => format!("{}: {what} taken back", entry.guest),
        Err(e) => format!("{}: {what} not taken back: {e}", entry.guest),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn without_a_journal_no_vf_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        assert!(super::take_back(folder.path()).is_empty());
    }
}

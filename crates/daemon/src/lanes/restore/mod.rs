// SPDX-License-Identifier: Apache-2.0
//! Takes back all VFs that the journal knows of, without a daemon.

mod adopt;

use std::path::Path;

use viola_lanes::transfer::Transfer;
use viola_lanes::{Entry, Journal, Pf, PfEswitch, StepTimes, VfDevice, VfSettings};
use viola_netdev::Link;

use crate::lanes::JOURNAL;

/// Sentences about what was done.
pub fn take_back(run_dir: &Path) -> Vec<String> {
    let (mut journal, said) = Journal::read(&run_dir.join(JOURNAL));
    let mut done: Vec<String> = said.into_iter().collect();
    let links = viola_netdev::links().unwrap_or_default();
    for entry in journal.entries().to_vec() {
        done.push(take_one(&mut journal, &entry, &links));
    }
    done
}

/// Takes one VF back; a sentence about it.
pub fn take_one(journal: &mut Journal, entry: &Entry, links: &[Link]) -> String {
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
        attachment: &mut guest,
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
    fn without_a_journal_nothing_is_to_be_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        assert!(super::take_back(folder.path()).is_empty());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Decides which VF to add to the bond, and which port to activate.

use std::collections::BTreeSet;

use viola_netdev::{Link, Mac};

/// The bond and its paravirtual port, by interface index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The bond.
    pub bond: u32,
    /// The paravirtual NIC.
    pub nic: u32,
    /// Ethernet address of the bond, the NIC and its VFs.
    pub mac: Mac,
}

/// A change to the bond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make this interface a port of the bond.
    AddPort(u32),
    /// Make this port the active one.
    Activate(u32),
}

/// The VFs that are there, and what was done with them.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// VFs that were added. Each is added once: one that is being unplugged must stay out.
    added: BTreeSet<u32>,
    /// VFs that the host has asked for.
    reclaimed: BTreeSet<u32>,
}

impl Plan {
    /// The changes that are due for these interfaces.
    pub fn next(&mut self, pair: &Pair, links: &[Link]) -> Vec<Action> {
        let is_there = |index: &u32| links.iter().any(|l| l.index == *index);
        self.added.retain(is_there);
        self.reclaimed.retain(is_there);
        let active = links.iter().find(|l| l.index == pair.bond);
        let active = active.and_then(|bond| bond.active);
        let mut actions = Vec::new();
        for link in links.iter().filter(|l| is_vf_of(pair, l)) {
            let index = link.index;
            match link.master {
                None if !self.added.contains(&index) && !self.reclaimed.contains(&index) => {
                    self.added.insert(index);
                    actions.push(Action::AddPort(index));
                }
                Some(master)
                    if master == pair.bond
                        && link.running
                        && active != Some(index)
                        && !self.reclaimed.contains(&index) =>
                {
                    actions.push(Action::Activate(index));
                }
                _ => {}
            }
        }
        actions
    }

    /// Whether a VF in the bond has no link yet.
    #[must_use]
    pub fn is_waiting_for_link(&self, pair: &Pair, links: &[Link]) -> bool {
        let is_waiting_for_link = |l: &Link| l.master == Some(pair.bond) && !l.running;
        links.iter().any(|l| {
            is_vf_of(pair, l) && is_waiting_for_link(l) && !self.reclaimed.contains(&l.index)
        })
    }

    /// The host is about to take the VFs: returns all of them.
    pub fn reclaim(&mut self, pair: &Pair, links: &[Link]) -> Vec<u32> {
        let vfs: Vec<u32> = links
            .iter()
            .filter(|l| is_vf_of(pair, l))
            .map(|l| l.index)
            .collect();
        self.reclaimed.extend(&vfs);
        vfs
    }

    /// The host lets the guest keep the VFs.
    pub fn keep(&mut self) {
        self.reclaimed.clear();
        self.added.clear();
    }
}

/// Whether an interface is a VF of this pair: hardware with the same address.
pub fn is_vf_of(pair: &Pair, link: &Link) -> bool {
    link.index != pair.bond
        && link.index != pair.nic
        && link.kind.is_none()
        && link.mac == Some(pair.mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [0x52, 0x54, 0, 0, 9, 2];
    const PAIR: Pair = Pair {
        bond: 1,
        nic: 2,
        mac: MAC,
    };

    fn link(index: u32, master: Option<u32>) -> Link {
        Link {
            index,
            mac: Some(MAC),
            master,
            ..Link::default()
        }
    }

    fn bond(active: u32) -> Link {
        Link {
            kind: Some("bond".into()),
            active: Some(active),
            ..link(1, None)
        }
    }

    #[test]
    fn a_vf_is_added_once_and_activated_when_it_has_a_link() {
        let mut plan = Plan::default();
        let nic = link(2, Some(1));
        assert_eq!(plan.next(&PAIR, &[bond(2), nic.clone()]), []);
        let came = [bond(2), nic.clone(), link(5, None)];
        assert_eq!(plan.next(&PAIR, &came), [Action::AddPort(5)]);
        // it is being unplugged: it is not added again
        assert_eq!(plan.next(&PAIR, &came), []);
        let mut vf = link(5, Some(1));
        let added = [bond(2), nic.clone(), vf.clone()];
        assert_eq!(plan.next(&PAIR, &added), []);
        assert!(plan.is_waiting_for_link(&PAIR, &added));
        vf.running = true;
        let up = [bond(2), nic.clone(), vf.clone()];
        assert_eq!(plan.next(&PAIR, &up), [Action::Activate(5)]);
        assert!(!plan.is_waiting_for_link(&PAIR, &up));
        assert_eq!(plan.next(&PAIR, &[bond(5), nic.clone(), vf]), []);
        // it goes, and another one comes
        assert_eq!(plan.next(&PAIR, &[bond(2), nic.clone()]), []);
        let other = [bond(2), nic, link(6, None)];
        assert_eq!(plan.next(&PAIR, &other), [Action::AddPort(6)]);
    }

    #[test]
    fn a_reclaimed_vf_is_left_alone_until_the_host_lets_it_stay() {
        let mut plan = Plan::default();
        let nic = link(2, Some(1));
        let vf = Link {
            running: true,
            ..link(5, Some(1))
        };
        let links = [bond(5), nic.clone(), vf];
        assert_eq!(plan.reclaim(&PAIR, &links), [5]);
        assert_eq!(
            plan.next(&PAIR, &[bond(2), links[1].clone(), links[2].clone()]),
            []
        );
        let out = [bond(2), nic, link(5, None)];
        assert_eq!(plan.next(&PAIR, &out), []);
        plan.keep();
        assert_eq!(plan.next(&PAIR, &out), [Action::AddPort(5)]);
    }

    #[test]
    fn virtual_interfaces_and_other_addresses_are_left_alone() {
        let mut plan = Plan::default();
        let other = Link {
            mac: Some([2; 6]),
            ..link(7, None)
        };
        let vlan = Link {
            kind: Some("vlan".into()),
            ..link(8, None)
        };
        let elsewhere = link(9, Some(4));
        assert_eq!(plan.next(&PAIR, &[bond(2), other, vlan, elsewhere]), []);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What is to be done with the interfaces that there are.

use std::collections::BTreeSet;

use viola_netdev::{Link, Mac};

/// The bond and the port of it that stays, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The bond.
    pub bond: u32,
    /// The paravirtual NIC.
    pub nic: u32,
    /// Address of all of them.
    pub mac: Mac,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Make this interface a port of the bond.
    Take(u32),
    /// Send and receive by this port.
    Use(u32),
}

/// What was done with VFs that are still there.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Those that were made ports. Each is taken once: one that is being unplugged has to be let go.
    taken: BTreeSet<u32>,
    /// Those that the host has asked for.
    left: BTreeSet<u32>,
}

impl Plan {
    /// What is to be done now.
    pub fn next(&mut self, pair: &Pair, links: &[Link]) -> Vec<Act> {
        let is_there = |index: &u32| links.iter().any(|l| l.index == *index);
        self.taken.retain(is_there);
        self.left.retain(is_there);
        let active = links.iter().find(|l| l.index == pair.bond);
        let active = active.and_then(|bond| bond.active);
        let mut acts = Vec::new();
        for link in links.iter().filter(|l| could_be(pair, l)) {
            let index = link.index;
            match link.master {
                None if !self.taken.contains(&index) && !self.left.contains(&index) => {
                    self.taken.insert(index);
                    acts.push(Act::Take(index));
                }
                Some(master)
                    if master == pair.bond
                        && link.running
                        && active != Some(index)
                        && !self.left.contains(&index) =>
                {
                    acts.push(Act::Use(index));
                }
                _ => {}
            }
        }
        acts
    }

    /// Whether a VF is in the bond and has no link yet.
    #[must_use]
    pub fn waits(&self, pair: &Pair, links: &[Link]) -> bool {
        let waits = |l: &Link| l.master == Some(pair.bond) && !l.running;
        links
            .iter()
            .any(|l| could_be(pair, l) && waits(l) && !self.left.contains(&l.index))
    }

    /// All VFs that there are; the host is about to take them.
    pub fn leave(&mut self, pair: &Pair, links: &[Link]) -> Vec<u32> {
        let vfs: Vec<u32> = links
            .iter()
            .filter(|l| could_be(pair, l))
            .map(|l| l.index)
            .collect();
        self.left.extend(&vfs);
        vfs
    }

    /// The host leaves them here.
    pub fn stay(&mut self) {
        self.left.clear();
        self.taken.clear();
    }
}

/// Whether an interface is a VF in place of the pair's paravirtual NIC: hardware with the same address.
pub fn could_be(pair: &Pair, link: &Link) -> bool {
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
    fn a_vf_is_taken_once_and_used_when_it_has_a_link() {
        let mut plan = Plan::default();
        let nic = link(2, Some(1));
        assert_eq!(plan.next(&PAIR, &[bond(2), nic.clone()]), []);
        let came = [bond(2), nic.clone(), link(5, None)];
        assert_eq!(plan.next(&PAIR, &came), [Act::Take(5)]);
        // it is going: nobody takes it again
        assert_eq!(plan.next(&PAIR, &came), []);
        let mut vf = link(5, Some(1));
        let taken = [bond(2), nic.clone(), vf.clone()];
        assert_eq!(plan.next(&PAIR, &taken), []);
        assert!(plan.waits(&PAIR, &taken));
        vf.running = true;
        let up = [bond(2), nic.clone(), vf.clone()];
        assert_eq!(plan.next(&PAIR, &up), [Act::Use(5)]);
        assert!(!plan.waits(&PAIR, &up));
        assert_eq!(plan.next(&PAIR, &[bond(5), nic.clone(), vf]), []);
        // it goes, and another one comes
        assert_eq!(plan.next(&PAIR, &[bond(2), nic.clone()]), []);
        let other = [bond(2), nic, link(6, None)];
        assert_eq!(plan.next(&PAIR, &other), [Act::Take(6)]);
    }

    #[test]
    fn one_that_the_host_has_asked_for_is_left_until_the_host_leaves_it_here() {
        let mut plan = Plan::default();
        let nic = link(2, Some(1));
        let vf = Link {
            running: true,
            ..link(5, Some(1))
        };
        let links = [bond(5), nic.clone(), vf];
        assert_eq!(plan.leave(&PAIR, &links), [5]);
        assert_eq!(
            plan.next(&PAIR, &[bond(2), links[1].clone(), links[2].clone()]),
            []
        );
        let out = [bond(2), nic, link(5, None)];
        assert_eq!(plan.next(&PAIR, &out), []);
        plan.stay();
        assert_eq!(plan.next(&PAIR, &out), [Act::Take(5)]);
    }

    #[test]
    fn what_is_no_hardware_or_has_another_address_is_left_alone() {
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

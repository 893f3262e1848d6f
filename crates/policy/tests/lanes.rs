// SPDX-License-Identifier: Apache-2.0
//! Properties of the assignment of VFs, for all traffic and settings.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use viola_policy::lanes::{
    Action, Config, Decision, Kind, Nic, NicObservation, Pool, Reason, Setting, Traffic, Vf,
    VfScheduler,
};

fn observed() -> impl Strategy<Value = NicObservation> {
    let setting = prop_oneof![
        8 => Just(Setting::Auto),
        1 => Just(Setting::Pin),
        1 => Just(Setting::Never),
    ];
    let di2 = prop_oneof![1 => Just(0.0), 4 => 0.0..100.0_f64];
    let traffic = (0.0..=100.0_f64, 0..20_u32).prop_map(|(freq, avg)| Traffic {
        freq,
        avg: f64::from(avg) * 100.0,
    });
    (0..12_u32, 0..3_u32, di2, traffic, setting, 0..4_u32).prop_map(
        |(vm, network, di2, traffic, setting, max_vfs)| NicObservation {
            nic: Nic { vm, network },
            di2,
            traffic,
            setting,
            max_vfs,
            attach_time: 0,
        },
    )
}

/// The NICs of one decision, each once.
fn moment() -> impl Strategy<Value = Vec<NicObservation>> {
    prop::collection::vec(observed(), 0..30).prop_map(|all| {
        let by_nic: BTreeMap<Nic, NicObservation> = all.into_iter().map(|o| (o.nic, o)).collect();
        by_nic.into_values().collect()
    })
}

fn pools() -> impl Strategy<Value = Vec<Pool>> {
    prop::collection::vec((0..3_u32, 0..5_u32), 0..4).prop_map(|of| {
        of.into_iter()
            .zip(0..)
            .map(|((network, vfs), id)| Pool { id, network, vfs })
            .collect()
    })
}

/// Carries the actions out on a table of its own and checks that each is possible.
fn carry_out(
    table: &mut BTreeMap<Vf, Nic>,
    decision: &Decision,
    pools: &[Pool],
) -> Result<(), TestCaseError> {
    table.retain(|vf, _| pools.iter().any(|p| p.id == vf.pool));
    for action in &decision.actions {
        match *action {
            Action::Revoke { vf, nic, .. } => prop_assert_eq!(table.remove(&vf), Some(nic)),
            Action::Grant { vf, nic, .. } => {
                let pool = pools.iter().find(|p| p.id == vf.pool).unwrap();
                prop_assert!(vf.index < pool.vfs && pool.network == nic.network);
                prop_assert_eq!(table.insert(vf, nic), None);
            }
        }
    }
    Ok(())
}

fn count(table: &BTreeMap<Vf, Nic>, nic: Nic) -> u32 {
    table.values().filter(|&&n| n == nic).count() as u32
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The actions lead to the table that VfScheduler keeps. No NIC has more VFs than it may have. Without a change of
    /// the input nothing changes.
    #[test]
    fn actions_and_holders_agree(
        moments in prop::collection::vec((moment(), pools()), 1..8),
        hold in prop::sample::select(vec![0_u64, 1, 3]),
        moves in prop::sample::select(vec![0_usize, 2, usize::MAX]),
    ) {
        let mut lanes = VfScheduler::new(Config { hold, moves, ..Config::paper() });
        let mut table = BTreeMap::new();
        for (now, (seen, pools)) in (1..).zip(&moments) {
            let d = lanes.decide(now, pools, seen);
            carry_out(&mut table, &d, pools)?;
            prop_assert!(lanes.holders().eq(table.iter().map(|(&vf, &nic)| (vf, nic))));
            prop_assert_eq!(d.nics.len(), seen.len());
            for (o, s) in seen.iter().zip(&d.nics) {
                prop_assert_eq!((o.nic, s.holds), (s.nic, count(&table, o.nic)));
                prop_assert!(o.setting != Setting::Never || s.holds == 0);
                prop_assert!(!s.why.to_string().is_empty());
            }
            if moves == usize::MAX {
                let again = lanes.clone().decide(now, pools, seen);
                prop_assert_eq!(again.actions, vec![]);
            }
        }
    }

    /// With the paper's rules the holders are those that would get the VFs if all were assigned anew.
    #[test]
    fn the_nics_of_highest_priority_hold_the_vfs(before in moment(), seen in moment(), pools in pools()) {
        let config = Config::paper();
        let mut lanes = VfScheduler::new(config);
        lanes.decide(1, &pools, &before);
        let d = lanes.decide(2, &pools, &seen);
        for (network, vfs) in pools.iter().fold(BTreeMap::new(), |mut sums, p| {
            *sums.entry(p.network).or_insert(0) += p.vfs as usize;
            sums
        }) {
            // All wanted VFs of this network by priority; pinned ones first.
            let mut bids: Vec<(bool, f64)> = Vec::new();
            let mut held: Vec<(bool, f64)> = Vec::new();
            for (o, s) in seen.iter().zip(&d.nics).filter(|(o, _)| o.nic.network == network) {
                let pinned = o.setting == Setting::Pin;
                let wants = match (o.setting, s.kind) {
                    (Setting::Never, _) => 0,
                    (_, Kind::NetHeavy) => o.max_vfs.max(1),
                    (_, Kind::Net) | (Setting::Pin, _) => 1,
                    _ => 0,
                };
                let worth = |k: u32| (pinned && k == 1, s.intensity / f64::from(k));
                bids.extend((1..=wants).map(worth));
                held.extend((1..=s.holds.min(wants)).map(worth));
            }
            for list in [&mut bids, &mut held] {
                list.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)));
            }
            bids.truncate(vfs);
            prop_assert_eq!(held, bids, "network {}", network);
        }
    }

    /// During a hold only the operator's setting, or the end of a VM or NIC, revokes a VF.
    #[test]
    fn a_vf_stays_for_its_hold(moments in prop::collection::vec(moment(), 1..20), hold in 1_u64..6) {
        let pools = [0, 1, 2].map(|network| Pool { id: network, network, vfs: 2 });
        let mut lanes = VfScheduler::new(Config { hold, ..Config::paper() });
        let mut since: BTreeMap<Vf, u64> = BTreeMap::new();
        for (now, seen) in (1..).zip(&moments) {
            let d = lanes.decide(now, &pools, seen);
            let pins = seen.iter().any(|o| o.setting == Setting::Pin);
            for action in &d.actions {
                match *action {
                    Action::Grant { vf, .. } => { since.insert(vf, now); }
                    Action::Revoke { why: Reason::Gone | Reason::Setting, .. } => {}
                    Action::Revoke { why: Reason::GaveWay { .. }, .. } if pins => {}
                    Action::Revoke { vf, .. } => prop_assert!(now - since[&vf] >= hold),
                }
            }
        }
    }
}

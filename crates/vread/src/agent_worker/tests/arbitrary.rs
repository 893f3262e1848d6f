// SPDX-License-Identifier: Apache-2.0
//! Agents that send arbitrary messages.

use super::*;

fn any_map() -> impl Strategy<Value = FileMap> {
    let offset = prop_oneof![0u64..3 * DISK, Just(u64::MAX), Just(1 << 63), any::<u64>()];
    let extent = (
        offset.clone(),
        offset.clone(),
        offset.clone(),
        any::<bool>(),
    );
    (offset, proptest::collection::vec(extent, 0..4)).prop_map(|(size, e)| file(size, &e))
}

fn any_message() -> impl Strategy<Value = FromAgent> {
    let why = Just(WithdrawReason::Moved);
    prop_oneof![
        1 => (0u64..3).prop_map(hello),
        2 => (0u32..3, 0u32..3).prop_map(|(fs, place)| proof_with(fs, file(4096, &[(0, proof_at(place), 4096, false)]))),
        6 => (0u64..8, 0i64..4).prop_map(|(lease, id)| name(lease, id)),
        3 => (0u64..8, 0u32..3, 0i64..4, any_map(), any_map())
            .prop_map(|(lease, fs, id, data, meta)| FromAgent::Name { lease, fs, key: key(id), data, meta }),
        4 => (proptest::collection::vec(0u64..9, 0..4), why).prop_map(|(leases, why)| FromAgent::Withdraw { leases, why }),
        1 => (0u32..3).prop_map(|fs| FromAgent::WithdrawAll { fs, why: WithdrawReason::Filesystem }),
    ]
}

proptest! {
    /// For any messages of an agent: the lease of a withdrawn or replaced block is never valid, valid leases lie
    /// within the disk, no withdrawal is confirmed while the block is read, no agent is welcomed while a read of
    /// the old epoch is in flight, and a proof is accepted only if its file was written in this session.
    #[test]
    fn any_messages_keep_leases_and_limits_correct(steps in proptest::collection::vec((any_message(), proptest::option::of(0u32..4), proptest::option::of(0u32..3)), 0..120)) {
        let mut test = TestSession::new(Limits { blocks: 4, extents: 8, names_per_s: 1000 });
        let view = table::View::map(&test.table).unwrap();
        let mut slots: std::collections::BTreeMap<u64, u32> = std::collections::BTreeMap::new();
        let mut unconfirmed: std::collections::BTreeMap<u64, u32> = std::collections::BTreeMap::new();
        // File systems whose proof files were written in this session.
        let mut written = std::collections::BTreeSet::new();
        for (message, reader, writes) in steps {
            if let (Some(fs), Some(challenge)) = (writes, test.challenge) {
                write_proof(&test.disk, fs, challenge);
                written.insert(fs);
            }
            test.reader.0.set(reader);
            let said = message.clone();
            let mut answers = test.handle(message);
            if let FromAgent::Withdraw { leases, .. } = &said {
                for lease in leases {
                    unconfirmed.extend(slots.remove(lease).map(|slot| (*lease, slot)));
                }
            }
            answers.extend(test.complete_pending());
            for answer in answers {
                match answer {
                    ToAgent::Welcome { .. } => {
                        prop_assert_eq!(reader, None);
                        slots.clear();
                        unconfirmed.clear();
                        written.clear();
                    }
                    ToAgent::ProofOk { fs } => {
                        let FromAgent::Proof { map, .. } = &said else { panic!("proof") };
                        prop_assert_eq!(map.extents[0].physical, proof_at(fs));
                        prop_assert!(written.contains(&fs));
                    }
                    ToAgent::Named { lease } => {
                        let FromAgent::Name { key, .. } = &said else { panic!("named") };
                        let found = test.session.find(key).unwrap();
                        prop_assert!(view.holds(found.lease));
                        for map in [&found.data, &found.meta] {
                            for e in &map.extents {
                                prop_assert!(e.physical.checked_add(e.length).is_some_and(|end| end <= DISK));
                                prop_assert!(e.logical.checked_add(e.length).is_some_and(|end| end <= map.size));
                            }
                        }
                        // No two blocks share a slot.
                        prop_assert!(!slots.values().chain(unconfirmed.values()).any(|s| *s == found.lease.slot));
                        slots.insert(lease, found.lease.slot);
                    }
                    ToAgent::Withdrawn { leases } => for lease in leases {
                        if let Some(slot) = unconfirmed.remove(&lease) {
                            prop_assert_ne!(Some(slot), reader);
                        }
                        prop_assert!(!slots.contains_key(&lease));
                    },
                    _ => {}
                }
            }
            let stat = test.stat();
            prop_assert!(stat.blocks <= 4 && stat.extents <= 8);
        }
    }
}

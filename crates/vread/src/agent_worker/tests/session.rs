// SPDX-License-Identifier: Apache-2.0
//! Tests of the session's states.

use super::*;

#[test]
fn a_block_is_found_from_its_name_to_its_withdrawal() {
    let mut test = TestSession::proved(Limits::default());
    assert_eq!(test.handle(name(5, 7)), [ToAgent::Named { lease: 5 }]);
    let found = test.session.find(&key(7)).unwrap();
    let view = table::View::map(&test.table).unwrap();
    assert!(view.holds(found.lease));
    assert_eq!(
        (found.image, found.data.size, found.meta.size),
        (1, 4096, 39)
    );
    assert_eq!(found.data.extents[0].physical, 8192);
    assert!(test.session.find(&key(8)).is_none());
    let withdraw = FromAgent::Withdraw {
        leases: vec![5],
        why: WithdrawReason::Deleted,
    };
    test.reader.0.set(Some(found.lease.slot));
    assert_eq!(test.handle(withdraw.clone()), []);
    assert!(!view.holds(found.lease) && test.session.find(&key(7)).is_none());
    // A read is in flight; a repeated withdrawal does not end it.
    assert_eq!(test.complete_pending(), []);
    assert_eq!(test.handle(withdraw.clone()), []);
    test.now += Duration::from_millis(250);
    assert_eq!(test.stat().held_by, Some(("vm1".into(), 250)));
    test.reader.0.set(None);
    assert_eq!(
        test.complete_pending(),
        [ToAgent::Withdrawn { leases: vec![5] }]
    );
    // The confirmation may have been lost.
    assert_eq!(
        test.handle(withdraw),
        [ToAgent::Withdrawn { leases: vec![5] }]
    );
    let stat = test.stat();
    assert_eq!(
        (stat.named, stat.withdrawn, stat.blocks, stat.unknown),
        (1, 1, 0, 2)
    );
    assert_eq!(stat.withdrawals["deleted"], 1);
}

#[test]
fn an_agent_is_not_welcomed_while_the_old_epoch_is_read() {
    let mut test = TestSession::proved(Limits::default());
    test.handle(name(5, 7));
    let lease = test.session.find(&key(7)).unwrap().lease;
    let view = table::View::map(&test.table).unwrap();
    test.reader.0.set(Some(lease.slot));
    assert_eq!(test.handle(hello(2)), []);
    assert!(!view.holds(lease) && test.session.find(&key(7)).is_none());
    assert_eq!(test.complete_pending(), []);
    assert_eq!(test.stat().session, Session::Ending);
    // The agent repeats hello; only the last session number counts.
    assert_eq!(test.handle(hello(3)), []);
    assert_eq!(test.handle(name(6, 7)), []);
    test.reader.0.set(None);
    let welcome = test.complete_pending();
    assert!(
        matches!(welcome[..], [ToAgent::Welcome { session: 3, epoch, .. }] if epoch > lease.epoch)
    );
    assert!(test.refused(name(6, 7)).contains("not proved"));
}

#[test]
fn a_table_taken_over_from_a_dead_worker_begins_with_a_new_epoch() {
    let mut test = TestSession::proved(Limits::default());
    test.handle(name(5, 7));
    let lease = test.session.find(&key(7)).unwrap().lease;
    let view = table::View::map(&test.table).unwrap();
    let sink: LogSink = Box::new(|_, _| {});
    let table = Table::map(&test.table).unwrap();
    let mut next = AgentSession::new(table, Limits::default(), Journal::new(sink), test.now);
    assert!(!view.holds(lease));
    let mut out = Vec::new();
    next.open(test.now, &mut out);
    assert_eq!(
        out,
        [ToAgent::HelloRequest {
            version: agent::VERSION
        }]
    );
    next.handle(test.now, hello(9), &mut out);
    test.reader.0.set(Some(lease.slot));
    out.clear();
    next.complete_pending(test.now, &test.reader, &mut out);
    assert_eq!(out, []);
    test.reader.0.set(None);
    next.complete_pending(test.now, &test.reader, &mut out);
    assert!(matches!(out[..], [ToAgent::Welcome { session: 9, .. }]));
}

#[test]
fn a_proof_must_be_on_a_disk_of_the_vm() {
    let mut test = TestSession::new(Limits::default());
    test.handle(hello(1));
    test.complete_pending();
    assert!(test.refused(proof(0)).contains("no disk of the VM"));
    assert!(test.refused(name(1, 1)).contains("not proved"));
    write_proof(&test.disk, 0, test.challenge.unwrap());
    let mut with = |map: FileMap| test.refused(proof_with(0, map));
    assert!(with(file(4096, &[(0, DISK, 4096, false)])).contains("no disk"));
    assert!(with(file(4096, &[(0, u64::MAX - 10, 4096, false)])).contains("no disk"));
    assert!(with(file(4096, &[])).contains("holes"));
    assert!(with(file(4096, &[(0, PROOF_AT, 4096, true)])).contains("holes"));
    assert!(with(file(4095, &[(0, PROOF_AT, 4095, false)])).contains("4096"));
    assert_eq!(test.handle(proof(0)), [ToAgent::ProofOk { fs: 0 }]);
    assert_eq!(test.stat().refusals["proof"], 6);
    assert_eq!(test.stat().proved["0"], "/data (ext4) on /images/dn1");
}

#[test]
fn bytes_of_the_agents_choice_prove_nothing() {
    let mut test = TestSession::new(Limits::default());
    test.handle(hello(1));
    test.complete_pending();
    let empty = file(4096, &[(0, 8192, 4096, false)]);
    assert!(test.refused(proof_with(0, empty)).contains("no disk"));
    let chosen: Vec<u8> = (0..PROOF_BYTES).map(|i| (i * 7 + i / 256) as u8).collect();
    test.disk.write_all_at(&chosen, PROOF_AT).unwrap();
    assert!(test.refused(proof(0)).contains("no disk"));
    // The challenge itself, repeated: no chunk of the file may stand for another one.
    let challenge = test.challenge.unwrap();
    let repeated = challenge.0.repeat(PROOF_BYTES / challenge.0.len());
    test.disk.write_all_at(&repeated, PROOF_AT).unwrap();
    assert!(test.refused(proof(0)).contains("no disk"));
    // One wrong bit.
    let mut content = challenge.proof_content(0);
    content[PROOF_BYTES - 1] ^= 1;
    test.disk.write_all_at(&content, PROOF_AT).unwrap();
    assert!(test.refused(proof(0)).contains("no disk"));
    assert!(test.refused(name(1, 1)).contains("not proved"));
    assert_eq!(test.prove(0), [ToAgent::ProofOk { fs: 0 }]);
}

#[test]
fn the_proof_file_of_an_earlier_session_proves_nothing() {
    let mut test = TestSession::proved(Limits::default());
    let earlier = test.challenge.unwrap();
    test.handle(hello(2));
    test.complete_pending();
    assert_ne!(test.challenge.unwrap(), earlier);
    assert!(test.refused(proof(0)).contains("no disk"));
    assert!(test.refused(name(1, 1)).contains("not proved"));
    assert_eq!(test.prove(0), [ToAgent::ProofOk { fs: 0 }]);
}

#[test]
fn the_proof_file_of_another_file_system_proves_nothing() {
    let mut test = TestSession::proved(Limits::default());
    let of_fs_0 = file(4096, &[(0, PROOF_AT, 4096, false)]);
    assert!(test.refused(proof_with(1, of_fs_0)).contains("no disk"));
    assert_eq!(test.prove(1), [ToAgent::ProofOk { fs: 1 }]);
}

/// Two disks of one size get their proof files at the same place. The guest's names of the disks do not help.
#[test]
fn equal_disks_are_told_apart() {
    let mut test = TestSession::new(Limits::default());
    let others = [disk(), disk()];
    let images = others.iter().map(|d| d.try_clone().unwrap().into());
    let disks = open_images(vec![spec(1), spec(2)], images.collect()).unwrap();
    test.session
        .replace_disks(test.now, disks, "hot plug", &mut Vec::new());
    test.handle(hello(1));
    test.complete_pending();
    let challenge = test.challenge.unwrap();
    for (fs, disk) in [1, 0].into_iter().zip(&others) {
        let content = challenge.proof_content(fs);
        disk.write_all_at(&content, PROOF_AT).unwrap();
    }
    for (fs, image) in [(0, 2), (1, 1)] {
        let map = file(4096, &[(0, PROOF_AT, 4096, false)]);
        assert_eq!(test.handle(proof_with(fs, map)), [ToAgent::ProofOk { fs }]);
        let FromAgent::Name {
            lease, data, meta, ..
        } = name(u64::from(fs), i64::from(fs))
        else {
            unreachable!()
        };
        let key = key(i64::from(fs));
        test.handle(FromAgent::Name {
            lease,
            fs,
            key: key.clone(),
            data,
            meta,
        });
        assert_eq!(test.session.find(&key).unwrap().image, image);
    }
}

#[test]
fn invalid_extents_are_refused() {
    let mut test = TestSession::proved(Limits::default());
    let bad = [
        file(10, &[(0, DISK - 5, 10, false)]),
        file(u64::MAX, &[(0, 1 << 63, 1 << 63, false)]),
        file(20, &[(0, 0, 10, false), (5, 4096, 10, false)]),
        file(20, &[(10, 0, 10, false), (0, 4096, 10, false)]),
        file(5, &[(0, 0, 10, false)]),
        file(5, &[(0, 0, 0, false)]),
        file(10, &[(0, 1 << 63, 10, true)]),
    ];
    for (i, map) in bad.into_iter().enumerate() {
        for is_meta in [false, true] {
            let good = file(1, &[(0, 0, 1, false)]);
            let (data, meta) = if is_meta {
                (good, map.clone())
            } else {
                (map.clone(), good)
            };
            let lease = i as u64;
            let message = FromAgent::Name {
                lease,
                fs: 0,
                key: key(1),
                data,
                meta,
            };
            assert!(
                test.refused(message).contains("BP-1/blk_1_1001: "),
                "{map:?}"
            );
        }
    }
    let stat = test.stat();
    assert_eq!(
        (stat.blocks, stat.extents, stat.refusals["bad extents"]),
        (0, 0, 14)
    );
    // Fourteen refusals are one line.
    let lines = test.lines.lock().unwrap();
    assert_eq!(
        lines.iter().filter(|l| l.contains("refused")).count(),
        1,
        "{lines:?}"
    );
}

#[test]
fn blocks_extents_and_names_a_second_are_bounded() {
    let limits = |blocks, extents, names_per_s| Limits {
        blocks,
        extents,
        names_per_s,
    };
    let mut test = TestSession::proved(limits(3, 100, 1000));
    let answers: Vec<_> = (0..5)
        .flat_map(|i| test.handle(name(i, i as i64)))
        .collect();
    assert_eq!(
        answers
            .iter()
            .filter(|a| matches!(a, ToAgent::Named { .. }))
            .count(),
        3
    );
    assert_eq!(test.stat().refusals["too many blocks"], 2);
    let mut test = TestSession::proved(limits(50, 5, 1000));
    let answers: Vec<_> = (0..5)
        .flat_map(|i| test.handle(name(i, i as i64)))
        .collect();
    assert_eq!(
        answers
            .iter()
            .filter(|a| matches!(a, ToAgent::Named { .. }))
            .count(),
        2
    );
    assert_eq!(test.stat().refusals["too many extents"], 3);
    let mut test = TestSession::proved(limits(50, 500, 2));
    let answers: Vec<_> = (0..20)
        .flat_map(|i| test.handle(name(i, i as i64)))
        .collect();
    assert_eq!(
        answers
            .iter()
            .filter(|a| matches!(a, ToAgent::Named { .. }))
            .count(),
        8
    );
    test.now += Duration::from_secs(1);
    assert_eq!(test.handle(name(30, 30)), [ToAgent::Named { lease: 30 }]);
}

#[test]
fn a_number_in_use_is_neither_taken_nor_refused() {
    let mut test = TestSession::proved(Limits::default());
    test.handle(name(5, 7));
    assert_eq!(test.handle(name(5, 8)), []);
    assert!(test.session.find(&key(8)).is_none());
    assert!(test.session.find(&key(7)).is_some());
}

#[test]
fn a_file_system_that_is_withdrawn_has_to_be_proved_again() {
    let mut test = TestSession::proved(Limits::default());
    test.handle(name(5, 7));
    assert_eq!(
        test.handle(FromAgent::WithdrawAll {
            fs: 0,
            why: WithdrawReason::Filesystem
        }),
        []
    );
    assert!(test.session.find(&key(7)).is_none());
    assert!(test.refused(name(6, 8)).contains("not proved"));
    assert_eq!(test.prove(0), [ToAgent::ProofOk { fs: 0 }]);
    // Only when the agent withdraws it by its number, its slot is free again.
    let withdraw = FromAgent::Withdraw {
        leases: vec![5],
        why: WithdrawReason::Filesystem,
    };
    assert_eq!(test.handle(withdraw), []);
    assert_eq!(
        test.complete_pending(),
        [ToAgent::Withdrawn { leases: vec![5] }]
    );
}

#[test]
fn replaced_disks_end_the_epoch() {
    let mut test = TestSession::proved(Limits::default());
    test.handle(name(5, 7));
    let lease = test.session.find(&key(7)).unwrap().lease;
    let mut out = Vec::new();
    test.disk = disk();
    let image = test.disk.try_clone().unwrap().into();
    let disks = open_images(vec![spec(2)], vec![image]).unwrap();
    test.session
        .replace_disks(test.now, disks, "block job", &mut out);
    assert_eq!(
        out,
        [ToAgent::HelloRequest {
            version: agent::VERSION
        }]
    );
    assert!(!table::View::map(&test.table).unwrap().holds(lease));
    assert_eq!(test.handle(name(6, 8)), []);
    assert_eq!(test.stat().ends["block job"], 1);
    test.handle(hello(2));
    test.complete_pending();
    test.prove(0);
    test.handle(name(1, 7));
    assert_eq!(test.session.find(&key(7)).unwrap().image, 2);
}

#[test]
fn a_silent_agent_is_pinged_and_then_its_blocks_are_not_served() {
    let mut test = TestSession::proved(Limits::default());
    test.handle(name(5, 7));
    assert_eq!(test.after(1), []);
    assert_eq!(test.after(1), [ToAgent::Ping { n: 1, session: 1 }]);
    test.handle(FromAgent::Pong { n: 1 });
    test.after(9);
    assert!(test.session.find(&key(7)).is_some());
    assert_eq!(
        test.after(1),
        [ToAgent::HelloRequest {
            version: agent::VERSION
        }]
    );
    assert!(test.session.find(&key(7)).is_none());
    assert_eq!(test.stat().ends["silent agent"], 1);
    // The worker asks for a hello repeatedly, and the agent may come back.
    test.complete_pending();
    assert_eq!(
        test.after(2),
        [ToAgent::HelloRequest {
            version: agent::VERSION
        }]
    );
    test.handle(hello(2));
    assert!(matches!(
        test.complete_pending()[..],
        [ToAgent::Welcome { session: 2, .. }]
    ));
}

#[test]
fn an_agent_of_another_version_is_not_served() {
    let mut test = TestSession::new(Limits::default());
    test.handle(FromAgent::Hello {
        version: agent::VERSION + 1,
        agent_version: "9".into(),
        boot_id: String::new(),
        session: 1,
        window: 0,
    });
    assert_eq!(test.complete_pending(), []);
    assert!(
        test.lines
            .lock()
            .unwrap()
            .iter()
            .any(|l| l.contains("install the same release"))
    );
}

#[test]
fn an_agent_that_names_nothing_says_why() {
    let mut test = TestSession::proved(Limits::default());
    let says = |why: &str| {
        FromAgent::Stats(agent::Stats {
            why: why.into(),
            ..agent::Stats::default()
        })
    };
    test.handle(says("the cluster demands\x1b[2J tokens"));
    let why = test.stat().agent_why;
    assert!(why.starts_with("the cluster demands") && !why.contains('\x1b'));
    let lines = test.lines.lock().unwrap().join("\n");
    assert!(lines.contains(&why) && !lines.contains('\x1b'), "{lines}");
    test.handle(says(""));
    assert_eq!(test.stat().agent_why, "");
}

#[test]
fn only_a_proved_disk_with_blocks_is_reported_for_readers() {
    let mut test = TestSession::new(Limits::default());
    let empty = tempfile::tempfile().unwrap();
    empty.set_len(DISK).unwrap();
    let fds = vec![empty.into(), test.disk.try_clone().unwrap().into()];
    let disks = open_images(vec![spec(1), spec(2)], fds).unwrap();
    let (now, mut out) = (test.now, Vec::new());
    test.session.replace_disks(now, disks, "disks", &mut out);
    test.complete_pending();
    test.handle(hello(1));
    test.complete_pending();
    assert_eq!(test.prove(0), [ToAgent::ProofOk { fs: 0 }]);
    // vpipe, too, proves file systems; readers get the disk with the first block.
    assert!(test.stat().block_disks.is_empty());
    test.handle(name(5, 7));
    assert_eq!(test.stat().block_disks, [2]);
    let all = FromAgent::WithdrawAll {
        fs: 0,
        why: WithdrawReason::Filesystem,
    };
    test.handle(all);
    assert!(test.stat().block_disks.is_empty());
    test.prove(0);
    test.handle(name(6, 8));
    assert_eq!(test.stat().block_disks, [2]);
    test.session.end_epoch(now, "reset", &mut out);
    assert!(test.stat().block_disks.is_empty());
}

// SPDX-License-Identifier: Apache-2.0
//! A block's life, sentence by sentence.

use super::*;

pub(crate) const T: Timing = Timing {
    quiet: 3000,
    settle: 500,
    recheck: 60_000,
    repeat: 2000,
    answer_timeout: 10_000,
    retry: 5000,
};

type B = Block<u8>;

/// A block that is linked at 3000, mapped at 3500 and ready.
fn ready() -> B {
    let mut b = settled();
    assert_eq!(b.tick(3500, &T), Some(Effect::Map { attempt: 1 }));
    assert_eq!(b.map_done(3500, &T, 1, Ok(7)), None);
    assert!(b.is_ready_to_name());
    b
}

fn settled() -> B {
    let mut b = B::new(0, &T);
    assert!(!b.is_ready_to_link(2999));
    assert!(b.is_ready_to_link(3000));
    b.start_linking();
    assert_eq!(b.link_done(3000, &T, Ok(())), None);
    b
}

fn named() -> B {
    let mut b = ready();
    assert_eq!(b.start_naming(4000, &T, 1), Some(&7));
    b.host_named(4001, &T, 1);
    b
}

fn withdrawn(why: WithdrawReason, after: Disposition) -> B {
    let mut b = named();
    assert_eq!(
        b.touched(5000, &T, after, why),
        Some(Effect::Withdraw { lease: 1, why })
    );
    b
}

#[test]
fn an_event_restarts_the_quiet_time() {
    let mut b = B::new(0, &T);
    assert_eq!(
        b.touched(2000, &T, Disposition::Remap, WithdrawReason::Changed),
        None
    );
    assert!(!b.is_ready_to_link(4999));
    assert!(b.is_ready_to_link(5000));
    assert_eq!(
        b.touched(5000, &T, Disposition::Forget, WithdrawReason::Deleted),
        Some(Effect::Forget)
    );
}

#[test]
fn a_deleted_block_keeps_its_links_until_the_host_confirms() {
    let mut b = withdrawn(WithdrawReason::Deleted, Disposition::Forget);
    assert_eq!(b.tick(6999, &T), None);
    let again = Some(Effect::Withdraw {
        lease: 1,
        why: WithdrawReason::Deleted,
    });
    for now in [7000, 9000, 11_000, 1_000_000] {
        assert_eq!(b.tick(now, &T), again);
        assert!(b.is_linked());
    }
    assert_eq!(b.host_withdrew(1_000_001, &T, 2), None, "another's lease");
    assert_eq!(b.host_withdrew(1_000_001, &T, 1), Some(Effect::Unlink));
    assert_eq!(b.lease(), None);
    assert_eq!(b.unlink_done(1_000_002, &T, true), Some(Effect::Forget));
}

#[test]
fn a_new_session_ends_old_leases() {
    let mut b = withdrawn(WithdrawReason::Deleted, Disposition::Forget);
    assert_eq!(b.session_opened(6000, &T), Some(Effect::Unlink));
    let mut b = named();
    assert_eq!(b.session_opened(6000, &T), None);
    assert!(
        b.is_ready_to_name(),
        "its links and extents are as good as ever"
    );
}

#[test]
fn links_that_cannot_be_removed_are_tried_again() {
    let mut b = withdrawn(WithdrawReason::Deleted, Disposition::Forget);
    b.host_withdrew(5001, &T, 1);
    assert_eq!(b.unlink_done(5002, &T, false), None);
    assert!(b.is_linked());
    assert_eq!(b.tick(10_002, &T), Some(Effect::Unlink));
    assert_eq!(b.unlink_done(10_003, &T, true), Some(Effect::Forget));
}

#[test]
fn an_event_during_a_job_voids_its_result() {
    let mut b = B::new(0, &T);
    b.start_linking();
    b.touched(3001, &T, Disposition::Forget, WithdrawReason::Moved);
    assert_eq!(b.link_done(3002, &T, Ok(())), Some(Effect::Unlink));
    assert_eq!(b.unlink_done(3003, &T, true), Some(Effect::Forget));

    let mut b = settled();
    b.tick(3500, &T);
    b.touched(3600, &T, Disposition::Remap, WithdrawReason::Relocated);
    assert_eq!(b.map_done(3700, &T, 1, Ok(7)), None);
    assert!(!b.is_ready_to_name());
    assert_eq!(b.tick(6699, &T), None);
    assert_eq!(b.tick(6700, &T), Some(Effect::Map { attempt: 2 }));
}

#[test]
fn extents_found_before_an_event_are_not_used_after_it() {
    let mut b = named();
    assert_eq!(b.tick(64_001, &T), Some(Effect::Map { attempt: 2 }));
    b.touched(64_002, &T, Disposition::Remap, WithdrawReason::Relocated);
    b.host_withdrew(64_003, &T, 1);
    assert_eq!(b.tick(67_003, &T), Some(Effect::Map { attempt: 3 }));
    assert_eq!(b.map_done(67_004, &T, 2, Ok(7)), None);
    assert!(!b.is_ready_to_name(), "attempt 2 was before the change");
    b.map_done(67_005, &T, 3, Ok(8));
    assert_eq!(b.start_naming(67_006, &T, 2), Some(&8));
}

#[test]
fn extents_that_moved_are_named_again_under_another_lease() {
    let mut b = named();
    assert_eq!(b.tick(64_001, &T), Some(Effect::Map { attempt: 2 }));
    assert_eq!(b.map_done(64_002, &T, 2, Ok(7)), None);
    assert_eq!(b.lease(), Some(1), "nothing moved");
    assert_eq!(b.tick(124_002, &T), Some(Effect::Map { attempt: 3 }));
    let why = WithdrawReason::Relocated;
    assert_eq!(
        b.map_done(124_003, &T, 3, Ok(8)),
        Some(Effect::Withdraw { lease: 1, why })
    );
    assert_eq!(b.host_withdrew(124_004, &T, 1), None);
    assert!(b.is_linked());
    assert_eq!(b.tick(127_004, &T), Some(Effect::Map { attempt: 4 }));
}

#[test]
fn a_name_without_an_answer_is_withdrawn_and_given_again() {
    let mut b = ready();
    b.start_naming(4000, &T, 1);
    let why = WithdrawReason::Unanswered;
    assert_eq!(b.tick(14_000, &T), Some(Effect::Withdraw { lease: 1, why }));
    assert_eq!(b.host_withdrew(14_001, &T, 1), None);
    assert_eq!(b.tick(17_001, &T), Some(Effect::Map { attempt: 2 }));
}

#[test]
fn a_block_that_the_host_refuses_is_unlinked() {
    let mut b = ready();
    b.start_naming(4000, &T, 1);
    assert_eq!(b.host_refused(4001, &T, 1), Some(Effect::Unlink));
    assert_eq!(b.unlink_done(4002, &T, true), None);
    assert_eq!(b.state(), &State::Refused);
    b.session_opened(5000, &T);
    assert!(b.is_ready_to_link(8000), "another session, another try");
}

#[test]
fn a_block_that_comes_back_is_linked_anew_after_its_unlink() {
    let mut b = withdrawn(WithdrawReason::Moved, Disposition::Forget);
    assert_eq!(b.appeared(5500, &T), None);
    assert_eq!(b.host_withdrew(6000, &T, 1), Some(Effect::Unlink));
    assert_eq!(b.unlink_done(6001, &T, true), None);
    assert!(!b.is_ready_to_link(9000));
    assert!(b.is_ready_to_link(9001));
}

#[test]
fn a_block_that_cannot_be_linked_waits_or_is_forgotten() {
    for (after, ends) in [
        (Disposition::Forget, Some(Effect::Forget)),
        (Disposition::Relink, None),
    ] {
        let mut b = B::new(0, &T);
        b.start_linking();
        assert_eq!(b.link_done(3000, &T, Err(after)), ends);
    }
    let mut b = B::new(0, &T);
    b.start_linking();
    b.link_done(3000, &T, Err(Disposition::Relink));
    assert!(!b.is_ready_to_link(7999));
    assert!(b.is_ready_to_link(8000));
}

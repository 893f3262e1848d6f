// SPDX-License-Identifier: Apache-2.0
//! A block's life, sentence by sentence.

use super::*;

const T: Times = Times {
    quiet: 3000,
    settle: 500,
    recheck: 60_000,
    repeat: 2000,
    answer: 10_000,
    retry: 5000,
};

type B = Block<u8>;

/// A block that is linked at 3000, mapped at 3500 and ready.
fn ready() -> B {
    let mut b = settled();
    assert_eq!(b.tick(3500, &T), Some(Do::Map { turn: 1 }));
    assert_eq!(b.mapped(3500, &T, 1, Ok(7)), None);
    assert!(b.wants_name());
    b
}

fn settled() -> B {
    let mut b = B::new(0, &T);
    assert!(!b.wants_link(2999));
    assert!(b.wants_link(3000));
    b.linking();
    assert_eq!(b.linked_now(3000, &T, Ok(())), None);
    b
}

fn named() -> B {
    let mut b = ready();
    assert_eq!(b.naming(4000, &T, 1), Some(&7));
    b.host_named(4001, &T, 1);
    b
}

fn withdrawn(why: Why, after: After) -> B {
    let mut b = named();
    assert_eq!(
        b.touched(5000, &T, after, why),
        Some(Do::Withdraw { lease: 1, why })
    );
    b
}

#[test]
fn whatever_happens_while_it_waits_begins_the_wait_again() {
    let mut b = B::new(0, &T);
    assert_eq!(b.touched(2000, &T, After::Again, Why::Changed), None);
    assert!(!b.wants_link(4999));
    assert!(b.wants_link(5000));
    assert_eq!(
        b.touched(5000, &T, After::Forget, Why::Deleted),
        Some(Do::Forget)
    );
}

#[test]
fn a_deleted_block_keeps_its_links_until_the_host_has_let_go() {
    let mut b = withdrawn(Why::Deleted, After::Forget);
    assert_eq!(b.tick(6999, &T), None);
    let again = Some(Do::Withdraw {
        lease: 1,
        why: Why::Deleted,
    });
    for now in [7000, 9000, 11_000, 1_000_000] {
        assert_eq!(b.tick(now, &T), again);
        assert!(b.linked());
    }
    assert_eq!(b.host_withdrew(1_000_001, &T, 2), None, "another's lease");
    assert_eq!(b.host_withdrew(1_000_001, &T, 1), Some(Do::Drop));
    assert_eq!(b.lease(), None);
    assert_eq!(b.dropped(1_000_002, &T, true), Some(Do::Forget));
}

#[test]
fn a_new_session_lets_go_too() {
    let mut b = withdrawn(Why::Deleted, After::Forget);
    assert_eq!(b.welcome(6000, &T), Some(Do::Drop));
    let mut b = named();
    assert_eq!(b.welcome(6000, &T), None);
    assert!(b.wants_name(), "its links and extents are as good as ever");
}

#[test]
fn links_that_cannot_be_removed_are_tried_again() {
    let mut b = withdrawn(Why::Deleted, After::Forget);
    b.host_withdrew(5001, &T, 1);
    assert_eq!(b.dropped(5002, &T, false), None);
    assert!(b.linked());
    assert_eq!(b.tick(10_002, &T), Some(Do::Drop));
    assert_eq!(b.dropped(10_003, &T, true), Some(Do::Forget));
}

#[test]
fn a_change_while_a_worker_is_at_it_spoils_the_result() {
    let mut b = B::new(0, &T);
    b.linking();
    b.touched(3001, &T, After::Forget, Why::Moved);
    assert_eq!(b.linked_now(3002, &T, Ok(())), Some(Do::Drop));
    assert_eq!(b.dropped(3003, &T, true), Some(Do::Forget));

    let mut b = settled();
    b.tick(3500, &T);
    b.touched(3600, &T, After::Again, Why::Relocated);
    assert_eq!(b.mapped(3700, &T, 1, Ok(7)), None);
    assert!(!b.wants_name());
    assert_eq!(b.tick(6699, &T), None);
    assert_eq!(b.tick(6700, &T), Some(Do::Map { turn: 2 }));
}

#[test]
fn extents_found_before_a_change_are_not_taken_after_it() {
    let mut b = named();
    assert_eq!(b.tick(64_001, &T), Some(Do::Map { turn: 2 }));
    b.touched(64_002, &T, After::Again, Why::Relocated);
    b.host_withdrew(64_003, &T, 1);
    assert_eq!(b.tick(67_003, &T), Some(Do::Map { turn: 3 }));
    assert_eq!(b.mapped(67_004, &T, 2, Ok(7)), None);
    assert!(!b.wants_name(), "turn 2 was before the change");
    b.mapped(67_005, &T, 3, Ok(8));
    assert_eq!(b.naming(67_006, &T, 2), Some(&8));
}

#[test]
fn extents_that_moved_are_named_again_under_another_lease() {
    let mut b = named();
    assert_eq!(b.tick(64_001, &T), Some(Do::Map { turn: 2 }));
    assert_eq!(b.mapped(64_002, &T, 2, Ok(7)), None);
    assert_eq!(b.lease(), Some(1), "nothing moved");
    assert_eq!(b.tick(124_002, &T), Some(Do::Map { turn: 3 }));
    let why = Why::Relocated;
    assert_eq!(
        b.mapped(124_003, &T, 3, Ok(8)),
        Some(Do::Withdraw { lease: 1, why })
    );
    assert_eq!(b.host_withdrew(124_004, &T, 1), None);
    assert!(b.linked());
    assert_eq!(b.tick(127_004, &T), Some(Do::Map { turn: 4 }));
}

#[test]
fn a_name_without_an_answer_is_withdrawn_and_given_again() {
    let mut b = ready();
    b.naming(4000, &T, 1);
    let why = Why::Unanswered;
    assert_eq!(b.tick(14_000, &T), Some(Do::Withdraw { lease: 1, why }));
    assert_eq!(b.host_withdrew(14_001, &T, 1), None);
    assert_eq!(b.tick(17_001, &T), Some(Do::Map { turn: 2 }));
}

#[test]
fn a_block_that_the_host_refuses_is_not_held() {
    let mut b = ready();
    b.naming(4000, &T, 1);
    assert_eq!(b.host_refused(4001, &T, 1), Some(Do::Drop));
    assert_eq!(b.dropped(4002, &T, true), None);
    assert_eq!(b.state(), &State::Refused);
    b.welcome(5000, &T);
    assert!(b.wants_link(8000), "another session, another try");
}

#[test]
fn a_block_that_comes_back_begins_anew_after_its_links_are_gone() {
    let mut b = withdrawn(Why::Moved, After::Forget);
    assert_eq!(b.appeared(5500, &T), None);
    assert_eq!(b.host_withdrew(6000, &T, 1), Some(Do::Drop));
    assert_eq!(b.dropped(6001, &T, true), None);
    assert!(!b.wants_link(9000));
    assert!(b.wants_link(9001));
}

#[test]
fn a_block_that_cannot_be_linked_waits_or_goes() {
    for (after, ends) in [(After::Forget, Some(Do::Forget)), (After::Fresh, None)] {
        let mut b = B::new(0, &T);
        b.linking();
        assert_eq!(b.linked_now(3000, &T, Err(after)), ends);
    }
    let mut b = B::new(0, &T);
    b.linking();
    b.linked_now(3000, &T, Err(After::Fresh));
    assert!(!b.wants_link(7999));
    assert!(b.wants_link(8000));
}

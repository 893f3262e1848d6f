// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn threads_are_held_and_released_once() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, true);
    assert_eq!(t.hold(false, |_| panic!("none is away")).calls, 0);
    assert_eq!(t.hold(true, |_| 0).calls, 2);
    assert!(t.is_held_elsewhere());
    assert_eq!(t.hold(true, |_| panic!("all are away")).calls, 0);
    // One that was made there.
    t.add(3, false);
    assert_eq!(t.hold(true, |tid| if tid == 3 { 0 } else { 1 }).calls, 1);
    assert_eq!(t.hold(false, |_| 0).calls, 3);
    assert!(!t.is_held_elsewhere());
    assert_eq!(t.hold(true, |_| libc::EINVAL).refused, libc::EINVAL);
    assert!(!t.is_held_elsewhere());
}

/// A sleeping process, ended when dropped.
struct Sleeper(std::process::Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_is_set_alone_is_not_inherited_and_an_ordinary_thread_has_no_flag() {
    use viola_host::attrs::{self, Policy, RESET_ON_FORK, SchedAttr};
    let sleeper = Sleeper(
        std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap(),
    );
    let tid = sleeper.0.id();
    let now = || attrs::get(tid).unwrap().unwrap();
    // Real-time classes need root.
    if set_fifo_alone(tid as i32, 18) != 0 {
        return;
    }
    let with_flag = SchedAttr {
        flags: RESET_ON_FORK,
        ..SchedAttr::fifo(18)
    };
    assert_eq!(now(), with_flag);
    assert_eq!(set_fifo(tid as i32, 20), 0);
    assert_eq!(now(), SchedAttr::fifo(20));
    assert_eq!(set_fifo_alone(tid as i32, 20), 0);
    assert_eq!(set_ordinary(tid as i32), 0);
    assert_eq!((now().policy, now().flags), (Policy::Normal, 0));
}

#[test]
fn a_service_thread_ranks_one_above_the_vcpus_of_its_vm() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, true);
    let mut seen = Vec::new();
    t.apply(Rank::Owner, |tid, p| {
        seen.push((tid, p));
        0
    });
    seen.sort_unstable();
    assert_eq!(seen, [(1, 18), (2, 19)]);
}

#[test]
fn level_service_threads_come_first_in_their_vms_rank() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, true);
    t.set_level(true);
    let mut seen = Vec::new();
    t.apply(Rank::Waiting, |_, _| 0);
    t.apply(Rank::Owner, |tid, p| {
        seen.push((tid, p));
        0
    });
    assert_eq!(seen, [(2, 18), (1, 18)]);
    seen.clear();
    let led = t.lead(|tid, p| {
        seen.push((tid, p));
        0
    });
    assert_eq!((led.calls, &seen[..]), (2, &[(2, 19), (2, 18)][..]));
    t.set_level(true);
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 0);
    t.set_level(false);
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 1);
}

#[test]
fn level_service_threads_end_their_turn_after_the_vcpus() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, true);
    t.set_level(true);
    t.apply(Rank::Boost, |_, _| 0);
    let mut seen = Vec::new();
    for trails in [true, false, false] {
        t.apply(Rank::Background, |tid, p| {
            seen.push((tid, p));
            0
        });
        assert_eq!(t.trails(), trails);
    }
    assert_eq!(seen, [(1, 14), (2, 14)]);
    // Not after a change in between.
    t.apply(Rank::Boost, |_, _| 0);
    t.apply(Rank::Background, |_, _| 0);
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 2);
    assert!(!t.trails());
}

#[test]
fn an_unchanged_rank_costs_no_system_call_but_a_new_thread_is_set() {
    let mut t = VmThreads::new();
    t.add(1, false);
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 1);
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 0);
    t.add(2, false);
    assert_eq!(
        t.apply(Rank::Owner, |tid, _| if tid == 2 {
            0
        } else {
            panic!("{tid}")
        })
        .calls,
        1
    );
}

#[test]
fn forgotten_priorities_are_set_again() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, true);
    t.apply(Rank::Owner, |_, _| 0);
    t.forget_priorities();
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 2);
}

#[test]
fn released_threads_get_their_priority_again_at_the_same_rank() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, true);
    t.apply(Rank::Owner, |_, _| 0);
    assert_eq!(t.release(|_| 0).calls, 2);
    assert_eq!(t.release(|_| 0).calls, 0);
    t.add(3, false);
    assert_eq!(
        t.release(|tid| if tid == 3 { 0 } else { panic!("{tid}") })
            .calls,
        1
    );
    assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 3);
    t.release(|_| libc::ESRCH);
    assert_eq!(t.len(), 3);
}

#[test]
fn an_ended_thread_is_removed() {
    let mut t = VmThreads::new();
    t.add(1, false);
    t.add(2, false);
    t.apply(Rank::Boost, |tid, _| if tid == 1 { libc::ESRCH } else { 0 });
    assert_eq!(t.len(), 1);
    assert_eq!(t.apply(Rank::Background, |_, _| 0).calls, 1);
}

#[test]
fn a_full_table_removes_ended_threads() {
    let mut t = VmThreads::new();
    let me = std::process::id() as i32;
    t.add(me, true);
    // Above any number that the kernel gives out.
    for tid in 0..MAX_VM_THREADS as i32 {
        assert!(t.add(i32::MAX - tid, false));
    }
    assert_eq!(t.len(), 2);
}

#[test]
fn a_refusal_is_reported_and_tried_again() {
    let mut t = VmThreads::new();
    t.add(1, false);
    assert_eq!(
        t.apply(Rank::Owner, |_, _| libc::EPERM).refused,
        libc::EPERM
    );
    assert_eq!(t.apply(Rank::Waiting, |_, _| 0).calls, 1);
}

#[test]
fn vcpus_of_one_vm_take_turns() {
    let mut t = VmThreads::new();
    for tid in 1..=3 {
        t.add(tid, false);
    }
    let mut firsts = std::collections::BTreeSet::new();
    for _ in 0..3 {
        let mut first = None;
        t.apply(Rank::Boost, |tid, _| {
            first.get_or_insert(tid);
            0
        });
        firsts.insert(first);
        t.apply(Rank::Background, |_, _| 0);
    }
    assert_eq!(firsts.len(), 3);
}

// SPDX-License-Identifier: Apache-2.0
use super::*;
use proptest::prelude::*;

const SECOND: u64 = 1_000_000_000;

/// Sends all that is granted until this much has gone, at `rate` bytes a second; when it was over.
fn send(purse: &mut Purse<u32>, bytes: u64, rate: u64, mut now: u64) -> u64 {
    let mut left = bytes;
    while left > 0 {
        match purse.grant(now) {
            Grant::Send { vm, bytes } => {
                purse.spent(vm, bytes, bytes);
                left = left.saturating_sub(bytes);
                now += (u128::from(bytes) * u128::from(SECOND) / u128::from(rate)) as u64;
            }
            Grant::Wait { until_ns } => {
                assert!(until_ns > now, "it waits for the past");
                now = until_ns;
            }
            Grant::Idle => panic!("somebody wants to send"),
        }
    }
    now
}

#[test]
fn nobody_wants_nobody_gets() {
    let mut purse = Purse::default();
    assert_eq!(purse.grant(0), Grant::Idle);
    purse.set(1, 100, None, 0);
    assert_eq!(purse.grant(0), Grant::Idle);
    purse.want(1);
    assert_eq!(
        purse.grant(0),
        Grant::Send {
            vm: 1,
            bytes: QUANTUM
        }
    );
    purse.rest(1);
    assert_eq!(purse.grant(0), Grant::Idle);
    purse.want(2); // has no account
    assert_eq!(purse.grant(0), Grant::Idle);
}

#[test]
fn who_was_idle_has_saved_nothing() {
    let mut purse = Purse::default();
    for vm in [1, 2] {
        purse.set(vm, 100, None, 0);
    }
    purse.want(1);
    send(&mut purse, 100 * QUANTUM, SECOND, 0);
    purse.want(2);
    send(&mut purse, 20 * QUANTUM, SECOND, 0);
    assert!(
        purse.sent(2).abs_diff(10 * QUANTUM) <= QUANTUM,
        "{}",
        purse.sent(2)
    );
}

#[test]
fn what_was_not_sent_is_not_charged() {
    let mut purse = Purse::default();
    for vm in [1, 2] {
        purse.set(vm, 100, None, 0);
        purse.want(vm);
    }
    // 1 has slow clients: of each grant it sends a tenth
    let mut turns = [0, 0];
    for _ in 0..1100 {
        if let Grant::Send { vm, bytes } = purse.grant(0) {
            let sent = if vm == 1 { bytes / 10 } else { bytes };
            purse.spent(vm, bytes, sent);
            turns[vm as usize - 1] += 1;
        }
    }
    assert!(
        purse.sent(1).abs_diff(purse.sent(2)) <= 2 * QUANTUM,
        "{turns:?}"
    );
}

#[test]
fn a_capped_vm_waits_when_it_is_alone_and_others_do_not_wait_for_it() {
    let mut purse = Purse::default();
    let cap = 10 << 20;
    purse.set(1, 100, Some(cap), 0);
    purse.want(1);
    let end = send(&mut purse, 50 << 20, u64::MAX / 4, 0);
    assert!(end.abs_diff(5 * SECOND) <= SECOND / 5, "{end}");
    purse.set(2, 100, None, end);
    purse.want(2);
    let before = purse.sent(1);
    let after = send(&mut purse, 1 << 30, 1 << 30, end);
    let capped = purse.sent(1) - before;
    assert!(
        after.abs_diff(end + SECOND) <= SECOND / 50,
        "the other one waited"
    );
    assert!(capped <= cap + cap / 10 + QUANTUM, "{capped}");
}

#[test]
fn a_cap_holds_for_one_who_sends_more_than_he_may() {
    let rate = 1 << 20;
    let mut cap = Cap::new(rate, 0);
    let (mut now, mut sent) = (0, 0);
    while sent < 10 * rate {
        match cap.ready(now, QUANTUM) {
            // as with one that empties a pipe of 256 KiB whatever the leave
            Ok(bytes) => {
                cap.take(bytes + (256 << 10));
                sent += bytes + (256 << 10);
            }
            Err(until) => now = until,
        }
    }
    let least = (sent - rate / 10 - (356 << 10)) as f64 / rate as f64;
    assert!(now as f64 >= least * SECOND as f64, "{now}, {least}");
}

#[test]
fn a_cap_can_be_lifted_and_a_vm_can_go() {
    let mut purse = Purse::default();
    purse.set(1, 1, Some(0), 0);
    purse.want(1);
    let Grant::Send { bytes, .. } = purse.grant(0) else {
        panic!()
    };
    assert!(bytes < QUANTUM);
    assert!(matches!(purse.grant(0), Grant::Wait { .. }));
    purse.set(1, 1, None, 0);
    assert!(matches!(purse.grant(0), Grant::Send { .. }));
    purse.remove(1);
    purse.spent(1, QUANTUM, QUANTUM);
    assert_eq!(purse.grant(0), Grant::Idle);
}

proptest! {
    /// Goyal et al., theorem 1: while both want to send, two VMs differ by no more than a quantum of each.
    #[test]
    fn shares_follow_the_weights(weights in proptest::collection::vec(1u32..1000, 2..6), quanta in 100u64..600) {
        let mut purse = Purse::default();
        for (vm, &weight) in weights.iter().enumerate() {
            purse.set(vm as u32, weight, None, 0);
            purse.want(vm as u32);
        }
        send(&mut purse, quanta * QUANTUM, SECOND, 0);
        let normal: Vec<f64> = weights.iter().enumerate()
            .map(|(vm, &weight)| purse.sent(vm as u32) as f64 / f64::from(weight)).collect();
        for (i, a) in normal.iter().enumerate() {
            for (j, b) in normal.iter().enumerate() {
                let bound = QUANTUM as f64 / f64::from(weights[i]) + QUANTUM as f64 / f64::from(weights[j]);
                prop_assert!((a - b).abs() <= bound + 1.0, "{i} {a} {j} {b}");
            }
        }
    }

    /// Over any time a capped VM sends no more than its rate and a tenth of a second's.
    #[test]
    fn a_cap_is_kept(rate in (64u64 << 10)..(1 << 34), steps in proptest::collection::vec(0u64..SECOND / 5, 1..200)) {
        let mut purse = Purse::default();
        purse.set(1, 1, Some(rate), 0);
        purse.want(1);
        let mut now = 0;
        for step in steps {
            now += step;
            while let Grant::Send { vm, bytes } = purse.grant(now) {
                purse.spent(vm, bytes, bytes);
            }
            let most = u128::from(rate) * u128::from(now) / u128::from(SECOND) + u128::from(rate / 10);
            prop_assert!(u128::from(purse.sent(1)) <= most + 1, "{} of {most} at {now}", purse.sent(1));
        }
    }

    /// Whatever is asked in whatever order: no panic, and never more than the quantum.
    #[test]
    fn anything_may_be_asked(steps in proptest::collection::vec((0u8..6, 0u32..4, 0u64..u64::MAX / 2), 0..300)) {
        let mut purse = Purse::default();
        let mut now = 0u64;
        for (what, vm, number) in steps {
            match what {
                0 => purse.set(vm, number as u32, (number % 3 == 0).then_some(number), now),
                1 => purse.want(vm),
                2 => purse.rest(vm),
                3 => purse.spent(vm, number, number / 2),
                4 => purse.remove(vm),
                _ => {
                    now = now.saturating_add(number % SECOND);
                    if let Grant::Send { bytes, .. } = purse.grant(now) {
                        prop_assert!(bytes <= QUANTUM && bytes > 0);
                    }
                }
            }
        }
    }
}

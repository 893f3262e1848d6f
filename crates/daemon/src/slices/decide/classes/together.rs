// SPDX-License-Identifier: Apache-2.0
//! Several VMs of class auto: those of a core are tried together, those of different cores at the same time.

use super::tests::{AUTO, GATHERING_TIME, Host, S, TRIAL_TIME, worth};
use super::*;
use crate::testing::vm;

/// Runs two VMs until the trial of the second one, which comes first, has ended.
fn run_until_only_b_was_tried(h: &mut Host, a: &Vm, b: &Vm) {
    let said = h.run(&[a, b], ClassSetting::Auto, GATHERING_TIME);
    assert!(
        said.len() == 1 && said[0].starts_with("b: tries"),
        "{said:?}"
    );
    h.run(&[a, b], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!((h.class(a), h.class(b)), (Class::Batch, Class::Ls));
}

#[test]
fn vms_of_a_core_are_tried_together() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    let said = h.run(&[&a, &b], ClassSetting::Auto, GATHERING_TIME);
    assert!(
        said.len() == 2
            && said[0].starts_with("a: tries")
            && said[0].ends_with("; it is tried together with uml:b")
            && said[1].starts_with("b: tries")
            && said[1].ends_with("; it is tried together with uml:a"),
        "{said:?}"
    );
    assert_eq!(h.class(&a), h.class(&b));
    let said = h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!(said.len(), 2, "{said:?}");
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
}

#[test]
fn of_vms_that_harm_a_neighbour_together_each_is_tried_in_its_turn_the_one_that_runs_least_first() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    (h.heavy, h.neighbour) = (Some(a.id.clone()), (0.3, 0.27));
    h.work = 15 * MS;
    let said = h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME - 5 * S);
    assert!(
        said.len() == 4
            && said[2].starts_with("b: ends its trial of class ls (auto): with 1 others it harmed a VM: the CPU time of uml:neighbour")
            && said[3].starts_with("a: ends its trial"),
        "{said:?}"
    );
    let why = h.classes.why(&a.id, AUTO, worth());
    assert!(why.contains("tried again in its turn"), "{why}");
    let said = h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME);
    assert!(
        said[0].starts_with("b: tries") && !said[0].contains("together"),
        "{said:?}"
    );
    assert_eq!((h.class(&a), h.class(&b)), (Class::Batch, Class::Ls));
    let said = h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME + 10 * S);
    assert!(
        said.iter()
            .any(|line| line.contains("a: class batch (auto): it harmed a neighbour")),
        "{said:?}"
    );
    assert_eq!((h.class(&a), h.class(&b)), (Class::Batch, Class::Ls));
    assert_eq!(h.run(&[&a, &b], ClassSetting::Auto, 500 * S), [""; 0]);
}

#[test]
fn vms_with_few_packets_are_tried_after_the_others() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.quiet = Some(a.id.clone());
    run_until_only_b_was_tried(&mut h, &a, &b);
    h.run(&[&a, &b], ClassSetting::Auto, 2 * TRIAL_TIME);
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
}

#[test]
fn a_vm_that_is_gone_ends_its_trial_and_those_that_were_tried_with_it_begin_anew() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    for gone in [&a, &b] {
        h.classes = Classes::default();
        h.run(&[&a, &b], ClassSetting::Auto, 20 * S);
        h.classes.forget(&gone.id);
        let left = if gone.id == a.id { &b } else { &a };
        let said = h.run(&[left], ClassSetting::Auto, 100 * MS);
        assert!(
            said.len() == 1
                && said[0].contains("ends its trial of class ls (auto): class ls of another VM"),
            "{said:?}"
        );
        assert_eq!(h.class(left), Class::Batch);
        h.run(&[left], ClassSetting::Auto, TRIAL_TIME);
        assert_eq!(h.class(left), Class::Ls);
    }
    h.classes = Classes::default();
    h.run(&[&a], ClassSetting::Auto, 20 * S);
    h.classes.forget(&a.id);
    assert!(h.classes.trials.is_empty());
    h.run(&[&a], ClassSetting::Auto, 2 * S);
    assert_eq!(h.classes.gatherings.len(), 1);
    h.classes.forget(&a.id);
    assert!(h.classes.gatherings.is_empty());
}

#[test]
fn vms_of_different_cores_are_tried_at_the_same_time() {
    let mut h = Host::new();
    h.apart = true;
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[2]]));
    let said = h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME);
    let begins = |line: &String| line.contains("tries class ls");
    assert_eq!(said.len(), 4, "{said:?}");
    assert!(said[..2].iter().all(begins), "{said:?}");
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
}

#[test]
fn a_trial_ends_when_another_vm_on_trial_comes_to_its_core() {
    let mut h = Host::new();
    h.apart = true;
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[2]]));
    h.run(&[&a, &b], ClassSetting::Auto, 10 * S);
    assert_eq!(h.classes.trials.len(), 2);
    h.apart = false;
    let said = h.run(&[&a, &b], ClassSetting::Auto, S);
    assert_eq!(
        said,
        ["a: ends its trial of class ls (auto): a VM on trial came to its core"]
    );
    assert_eq!(h.classes.trials.len(), 1);
    let said = h.run(&[&a, &b], ClassSetting::Auto, 2 * TRIAL_TIME);
    assert_eq!(said.len(), 3, "one after the other: {said:?}");
}

#[test]
fn a_second_server_may_take_a_part_of_what_the_first_one_gained() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!(h.class(&a), Class::Ls);
    // Requests to a waited 1 ms since then, and 17 ms on stock.
    h.delay.1 = 3 * MS;
    h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
}

#[test]
fn a_trial_ends_when_class_ls_of_a_neighbour_ends() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    h.run(&[&a, &b], ClassSetting::Auto, 10 * S);
    assert_eq!(h.classes.trials.len(), 1);
    h.packets = 0;
    h.run(&[&a], ClassSetting::Auto, 11 * S);
    h.packets = 40;
    assert_eq!(
        h.run(&[&b], ClassSetting::Auto, 100 * MS),
        ["b: ends its trial of class ls (auto): class ls of another VM of its core ended"]
    );
}

#[test]
fn a_vm_that_no_longer_serves_gathers_nobody() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, 2 * S);
    assert_eq!(h.classes.gatherings.len(), 1);
    h.packets = 0;
    h.run(&[&a], ClassSetting::Auto, 20 * S);
    assert!(h.classes.gatherings.is_empty() && h.classes.trials.is_empty());
    h.packets = 40;
    h.run(&[&b], ClassSetting::Auto, GATHERING_TIME);
    assert!(h.classes.trials[0].tries(&b.id));
}

#[test]
fn a_vm_that_wants_more_than_its_share_is_tried_last_and_takes_nothing_from_the_others() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.greedy = Some(a.id.clone());
    run_until_only_b_was_tried(&mut h, &a, &b);
    // Requests to b waited 1 ms since then, and 17 ms on stock.
    h.greedy_delay = 3 * MS;
    let said = h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME + 10 * S);
    let last = said.last().unwrap();
    assert!(
        last.contains("a: class batch (auto): it harmed a neighbour: the packet delay of uml:b"),
        "{said:?}"
    );
    assert_eq!((h.class(&a), h.class(&b)), (Class::Batch, Class::Ls));
}

#[test]
fn a_trial_ends_when_a_vm_that_is_tried_with_another_leaves_its_core() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.run(&[&a, &b], ClassSetting::Auto, 10 * S);
    assert_eq!(h.classes.trials[0].tried.len(), 2);
    h.apart = true;
    let said = h.run(&[&a, &b], ClassSetting::Auto, 100 * MS);
    assert!(
        said.len() == 2 && said[0].ends_with("(auto): a VM that was tried with it left its core"),
        "{said:?}"
    );
    h.run(&[&a, &b], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
}

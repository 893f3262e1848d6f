// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::testing::vm;
use viola_meter::{Times, Traffic};

const S: Nanos = 1000 * MS;

/// What a server spends in 100 ms: it waits, and gets so many packets.
fn sample(vm: &Vm, packets: u64) -> VmSample {
    VmSample {
        id: vm.id.clone(),
        vcpus: vec![Times {
            run: 25 * MS,
            wait: 60 * MS,
            blocked: 15 * MS,
            wakes: 9,
            ..Times::default()
        }],
        service: Times::default(),
        traffic: Traffic {
            rx_packets: packets,
            ..Traffic::default()
        },
    }
}

struct Host {
    classes: Classes,
    now: Nanos,
    p99: Nanos,
    no_packets: bool,
    neighbours: Vec<Neighbour>,
}

impl Host {
    fn new() -> Self {
        Self {
            classes: Classes::default(),
            now: 0,
            p99: 17 * MS,
            no_packets: false,
            neighbours: Vec::new(),
        }
    }

    /// Lets time pass, and returns the log lines.
    fn run(
        &mut self,
        vms: &[&Vm],
        setting: ClassSetting,
        time: Nanos,
        packets: u64,
    ) -> Vec<String> {
        let end = self.now + time;
        let mut said = Vec::new();
        while self.now < end {
            self.now += 100 * MS;
            for vm in vms {
                let advice = Some(Advice {
                    figure: Some(Figure::PacketDelay),
                    now: self.p99,
                    after: MS,
                });
                let o = Observation {
                    vm,
                    setting,
                    sample: &sample(vm, packets),
                    at: self.now,
                    span: 100 * MS,
                    figures: self.figures(),
                    advice,
                    neighbours: &|| self.neighbours.clone(),
                };
                said.extend(
                    self.classes
                        .observe(&o)
                        .map(|s| format!("{}: {s}", vm.name)),
                );
            }
        }
        said
    }

    /// Packets wait long, waits are short on the average.
    fn figures(&self) -> Figures {
        Figures {
            packet_delay: (!self.no_packets).then_some(self.p99),
            residual_wait: Some(self.p99 / 4),
            mean_wait: None,
        }
    }

    fn class(&self, vm: &Vm) -> Class {
        self.classes.class(&vm.id, ClassSetting::Auto)
    }
}

#[test]
fn the_operators_class_goes_before_the_classifiers() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    assert!(h.run(&[&a], ClassSetting::Batch, 60 * S, 40).is_empty());
    assert_eq!(h.classes.class(&a.id, ClassSetting::Batch), Class::Batch);
    assert_eq!(h.classes.class(&a.id, ClassSetting::Ls), Class::Ls);
}

#[test]
fn a_server_that_waits_becomes_ls_and_stays_ls_if_its_waits_became_shorter() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    let said = h.run(&[&a], ClassSetting::Auto, S, 40);
    assert_eq!(
        said,
        [
            "a: class ls (auto, was batch): 400 packets/s, and it waits 60 % of the time; \
          class ls would cut its packet delay p99 from 17 ms to about 1.0 ms"
        ]
    );
    h.p99 = MS;
    let said = h.run(&[&a], ClassSetting::Auto, 20 * S, 40);
    assert_eq!(
        said,
        ["a: stays class ls (auto): its packet delay p99 went from 17 ms to 1 ms"]
    );
    assert_eq!(h.class(&a), Class::Ls);
}

#[test]
fn a_change_that_did_not_help_is_taken_back_for_ten_minutes() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, S, 40);
    assert_eq!(h.class(&a), Class::Ls);
    let said = h.run(&[&a], ClassSetting::Auto, 20 * S, 40);
    assert_eq!(
        said,
        [
            "a: class batch (auto, was ls): it did not help, its packet delay p99 went from 17 ms to 17 ms"
        ]
    );
    assert!(h.run(&[&a], ClassSetting::Auto, 500 * S, 40).is_empty());
    assert_eq!(h.class(&a), Class::Batch);
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 120 * S, 40).len(), 2);
}

#[test]
fn a_trial_compares_the_figure_that_it_began_with() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.no_packets = true;
    h.run(&[&a], ClassSetting::Auto, S, 40);
    assert_eq!(h.class(&a), Class::Ls);
    // Packets come, and their delay is longer than the residual wait was.
    (h.no_packets, h.p99) = (false, 8 * MS);
    let said = h.run(&[&a], ClassSetting::Auto, 20 * S, 40);
    assert_eq!(
        said,
        ["a: stays class ls (auto): its residual wait p99 went from 4.3 ms to 2 ms"]
    );
}

#[test]
fn one_vm_is_on_trial_at_a_time() {
    let mut h = Host::new();
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    h.run(&[&a, &b], ClassSetting::Auto, 5 * S, 40);
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Batch));
    h.p99 = 10 * MS;
    h.run(&[&a, &b], ClassSetting::Auto, 10 * S, 40);
    assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
    // A VM that is gone ends its trial.
    h.classes.forget(&b.id);
    assert!(h.classes.trial.is_none());
}

#[test]
fn a_vm_that_stops_its_io_becomes_batch() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, S, 40);
    let said = h.run(&[&a], ClassSetting::Auto, 11 * S, 0);
    assert_eq!(
        said,
        ["a: class batch (auto, was ls): it computes (85 % of the time) and does little I/O"]
    );
}

#[test]
fn advice_is_for_vms_set_to_batch_whose_waits_would_become_shorter() {
    let (mut h, a) = (Host::new(), vm("a b", 10, &[&[1]]));
    let advice = Some(Advice {
        figure: Some(Figure::ResidualWait),
        now: 17 * MS,
        after: MS,
    });
    assert_eq!(
        h.classes.advice(&a, ClassSetting::Batch, 0.38, advice),
        None
    );
    h.run(&[&a], ClassSetting::Batch, S, 40);
    assert_eq!(
        h.classes
            .advice(&a, ClassSetting::Batch, 0.38, advice)
            .unwrap(),
        "a b waits 38 % of the time it wants to run (residual wait p99 17 ms); class ls would cut that to about 1 ms. \
         Try: viola set 'a b' --class ls"
    );
    assert_eq!(h.classes.advice(&a, ClassSetting::Auto, 0.38, advice), None);
    assert_eq!(
        h.classes.advice(
            &a,
            ClassSetting::Batch,
            0.38,
            advice.map(|a| Advice { now: MS, ..a })
        ),
        None
    );
    assert_eq!(h.classes.advice(&a, ClassSetting::Batch, 0.38, None), None);
}

#[test]
fn a_change_by_which_a_neighbour_lost_is_taken_back() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    let neighbour = |p99| Neighbour {
        id: vm("b", 20, &[&[1]]).id,
        name: "b".into(),
        p99,
    };
    h.neighbours = vec![neighbour(MS)];
    h.run(&[&a], ClassSetting::Auto, S, 40);
    assert_eq!(h.class(&a), Class::Ls);
    (h.p99, h.neighbours) = (MS, vec![neighbour(5 * MS)]);
    let said = h.run(&[&a], ClassSetting::Auto, 20 * S, 40);
    assert_eq!(
        said,
        [
            "a: class batch (auto, was ls): it harmed a neighbour, packet delay p99 of b went from 1 ms to 5 ms"
        ]
    );
    assert_eq!(h.class(&a), Class::Batch);
}

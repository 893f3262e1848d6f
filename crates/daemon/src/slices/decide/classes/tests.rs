// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::testing::vm;
use viola_meter::acct::{HistCounters, bucket_of};
use viola_meter::{Times, Traffic, VmCounters};

pub(super) const S: Nanos = 1000 * MS;

/// What a server spends in 100 ms: it waits, and gets so many packets.
fn sample(vm: &Vm, packets: u64, run: Nanos) -> VmSample {
    VmSample {
        id: vm.id.clone(),
        vcpus: vec![Times {
            run,
            wait: 60 * MS,
            blocked: 40 * MS - run,
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

pub(super) struct Host {
    pub(super) classes: Classes,
    now: Nanos,
    /// The delay of the packets of a VM in class batch and in class ls, ns.
    pub(super) delay: (Nanos, Nanos),
    /// Parts of the core that a neighbour gets while a VM is batch and while one is ls.
    pub(super) neighbour: (f64, f64),
    /// Packets of each VM in 100 ms, and how long it runs.
    pub(super) packets: u64,
    pub(super) work: Nanos,
    /// A VM that runs twice as long, and the only one by which the neighbour loses.
    pub(super) heavy: Option<VmId>,
    /// A VM that wants more than its share, and the delay of the others while it is ls, ns; 0: as it is without.
    pub(super) greedy: Option<VmId>,
    pub(super) greedy_delay: Nanos,
    /// A VM of which few packets are seen.
    pub(super) quiet: Option<VmId>,
    /// Whether each VM has a core of its own.
    pub(super) apart: bool,
    seen: Counters,
}

impl Host {
    pub(super) fn new() -> Self {
        Self {
            classes: Classes::default(),
            now: 0,
            delay: (17 * MS, MS),
            neighbour: (0.5, 0.5),
            packets: 40,
            work: 25 * MS,
            heavy: None,
            greedy: None,
            greedy_delay: 0,
            quiet: None,
            apart: false,
            seen: Counters::new(),
        }
    }

    /// Lets time pass, and returns the log lines.
    pub(super) fn run(&mut self, vms: &[&Vm], setting: ClassSetting, time: Nanos) -> Vec<String> {
        let end = self.now + time;
        let mut said = Vec::new();
        let neighbour = vm("neighbour", 90, &[&[1]]);
        while self.now < end {
            self.now += 100 * MS;
            for vm in vms {
                let is_ls = self.classes.class(&vm.id, setting) == Class::Ls;
                let is_heavy = self.heavy.as_ref() == Some(&vm.id);
                let is_greedy = self.greedy.as_ref() == Some(&vm.id);
                let greedy_class = (self.greedy.as_ref()).map(|id| self.classes.class(id, setting));
                let delay = match is_ls {
                    true if !is_greedy && greedy_class == Some(Class::Ls) => {
                        self.delay.1.max(self.greedy_delay)
                    }
                    true => self.delay.1,
                    false => self.delay.0,
                };
                let harms = is_ls && (is_heavy || self.heavy.is_none());
                let part = if harms {
                    self.neighbour.1
                } else {
                    self.neighbour.0
                };
                let work = if is_heavy { 2 * self.work } else { self.work };
                let packets = match self.quiet == Some(vm.id.clone()) {
                    true => self.packets / 20,
                    false => self.packets,
                };
                self.spend(&vm.id, work, packets, delay);
                let part = (part * 100e6) as Nanos;
                self.spend(&neighbour.id, part, self.packets, 3 * MS);
                let advice = Some(Advice {
                    figure: Some(Figure::PacketDelay),
                    now: delay,
                    after: MS,
                    is_inside: !is_greedy,
                });
                let o = Observation {
                    vm,
                    setting,
                    sample: &sample(vm, self.packets, work),
                    at: self.now,
                    span: 100 * MS,
                    figures: &|| Figures {
                        packet_delay: Some(delay),
                        residual_wait: Some(delay / 4),
                        mean_wait: None,
                    },
                    advice,
                    near: &|| {
                        let near = self.seen.keys().cloned();
                        near.filter(|id| !self.apart || *id == vm.id).collect()
                    },
                    counters: &|| {
                        let mut seen = self.seen.clone();
                        seen.retain(|id, _| !self.apart || *id == vm.id);
                        seen
                    },
                    name: &|id| id.to_string(),
                };
                let change = self.classes.observe(&o).unwrap_or_default();
                said.extend(change.lines.iter().map(|(id, line)| {
                    let named = vms.iter().find(|vm| vm.id == *id).unwrap();
                    format!("{}: {line}", named.name)
                }));
            }
        }
        said
    }

    /// Counts 100 ms of a VM.
    fn spend(&mut self, id: &VmId, run: Nanos, packets: u64, delay: Nanos) {
        let blank = || VmCounters {
            at: 0,
            run: 0,
            packets: HistCounters::ZERO,
            waits: vec![HistCounters::ZERO],
        };
        let counters = self.seen.entry(id.clone()).or_insert_with(blank);
        counters.at = self.now;
        counters.run += run;
        let bucket = bucket_of(delay);
        counters.packets.counts[bucket] += packets as u32;
        counters.packets.sums[bucket] += packets * delay;
    }

    pub(super) fn class(&self, vm: &Vm) -> Class {
        self.classes.class(&vm.id, ClassSetting::Auto)
    }
}

/// Longer than a trial that ends at its first look, and the time before it in which others are gathered.
pub(super) const TRIAL_TIME: Nanos = 40 * S;
/// Longer than the time in which others are gathered.
pub(super) const GATHERING_TIME: Nanos = 5 * S;

pub(super) const AUTO: (ClassSetting, viola_proto::Source) =
    (ClassSetting::Auto, viola_proto::Source::Config);

pub(super) fn worth() -> Option<Advice> {
    Some(Advice {
        figure: Some(Figure::PacketDelay),
        now: 17 * MS,
        after: MS,
        is_inside: true,
    })
}

#[test]
fn the_operators_class_goes_before_the_classifiers() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    assert!(h.run(&[&a], ClassSetting::Batch, 60 * S).is_empty());
    assert_eq!(h.classes.class(&a.id, ClassSetting::Batch), Class::Batch);
    assert_eq!(h.classes.class(&a.id, ClassSetting::Ls), Class::Ls);
}

#[test]
fn a_server_that_waits_is_tried_and_stays_ls_if_its_delays_became_shorter() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    let said = h.run(&[&a], ClassSetting::Auto, GATHERING_TIME);
    assert_eq!(
        said,
        [
            "a: tries class ls (auto): 400 packets/s, and it waits 60 % of the time; \
          class ls would cut its packet delay p99 from 17 ms to about 1.0 ms"
        ]
    );
    let said = h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!(
        said,
        [
            "a: class ls (auto): the delay of its slowest packets is 0.06x (0.06x to 0.06x) that of class batch, \
             in 10 pairs of windows"
        ]
    );
    assert_eq!(h.class(&a), Class::Ls);
    // Nothing more happens for an hour; then it is proved again.
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 3500 * S), [""; 0]);
    let said = h.run(&[&a], ClassSetting::Auto, 100 * S + TRIAL_TIME);
    assert_eq!(said.len(), 2, "{said:?}");
    assert_eq!(h.class(&a), Class::Ls);
}

#[test]
fn a_trial_has_windows_of_both_classes() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, GATHERING_TIME);
    let mut classes = Vec::new();
    for _ in 0..53 {
        h.run(&[&a], ClassSetting::Auto, S / 2);
        classes.push(h.class(&a));
    }
    let ls = classes.iter().filter(|class| **class == Class::Ls).count();
    assert!(
        (24..=29).contains(&ls),
        "{ls} of 53 half seconds in class ls"
    );
}

#[test]
fn a_change_that_did_not_help_is_taken_back_for_ten_minutes() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.delay.1 = h.delay.0;
    let said = h.run(&[&a], ClassSetting::Auto, 40 * S);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said[1].starts_with(
            "a: class batch (auto): it did not help: the delay of its slowest packets is 1.00x"
        ),
        "{said:?}"
    );
    assert!(h.run(&[&a], ClassSetting::Auto, 550 * S).is_empty());
    assert_eq!(h.class(&a), Class::Batch);
    let said = h.run(&[&a], ClassSetting::Auto, 60 * S);
    assert_eq!(said.len(), 1, "{said:?}");
}

#[test]
fn a_change_by_which_a_neighbour_lost_is_taken_back() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.neighbour = (0.5, 0.45);
    let said = h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!(
        said[1..],
        [
            "a: class batch (auto): it harmed a neighbour: the CPU time of uml:neighbour is 0.90x (0.90x to 0.90x)"
        ]
    );
    assert_eq!(h.class(&a), Class::Batch);
}

#[test]
fn a_vm_that_stops_its_io_becomes_batch() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    h.packets = 0;
    let said = h.run(&[&a], ClassSetting::Auto, 11 * S);
    assert_eq!(
        said,
        ["a: class batch (auto, was ls): it computes (85 % of the time) and does little I/O"]
    );
}

#[test]
fn a_vm_that_serves_again_is_tried_again_at_once_a_few_times_an_hour() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    let mut trials = 0;
    for _ in 0..20 {
        h.packets = 40;
        let said = h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
        trials += said.iter().filter(|line| line.contains("tries")).count();
        h.packets = 0;
        h.run(&[&a], ClassSetting::Auto, 20 * S);
    }
    assert_eq!(trials, 1 + budget::MAX_REPEATED_TRIALS);
}

#[test]
fn a_neighbour_that_was_harmed_and_does_something_else_no_longer_stands_in_the_way() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.neighbour = (0.5, 0.45);
    h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    h.neighbour = (0.1, 0.1);
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 60 * S), [""; 0]);
    h.classes.end_role(&vm("neighbour", 90, &[&[1]]).id);
    let said = h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!((said.len(), h.class(&a)), (2, Class::Ls), "{said:?}");
}

#[test]
fn a_class_is_proved_again_when_the_vm_uses_more_of_its_core() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.work = 10 * MS;
    h.run(&[&a], ClassSetting::Auto, TRIAL_TIME + 30 * S);
    assert_eq!(h.class(&a), Class::Ls);
    h.work = 14 * MS;
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 60 * S), [""; 0]);
    h.work = 30 * MS;
    h.neighbour = (0.5, 0.45);
    let said = h.run(&[&a], ClassSetting::Auto, 60 * S);
    assert!(
        said.len() == 2
            && said[0].starts_with("a: tries class ls again (auto): it runs")
            && said[0].ends_with("and ran 10 % after its last trial")
            && said[1].contains("it harmed a neighbour"),
        "{said:?}"
    );
    // With less use it may be tried at once, and with the same not.
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 60 * S), [""; 0]);
    (h.work, h.neighbour) = (10 * MS, (0.5, 0.5));
    let said = h.run(&[&a], ClassSetting::Auto, 60 * S);
    assert_eq!((said.len(), h.class(&a)), (2, Class::Ls), "{said:?}");
}

#[test]
fn a_trial_that_is_suspended_leaves_the_class_from_before() {
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.run(&[&a], ClassSetting::Auto, 10 * S);
    h.classes.suspend();
    assert_eq!(h.class(&a), Class::Batch);
    h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!(h.class(&a), Class::Ls);
    // The delays have become longer than they were without class ls: it is tried again.
    h.run(&[&a], ClassSetting::Auto, 600 * S);
    h.delay = (20 * MS, 20 * MS);
    let said = h.run(&[&a], ClassSetting::Auto, 10 * S);
    assert_eq!(
        said,
        ["a: tries class ls again (auto): its packet delay p99 is 20 ms, and was 17 ms without"]
    );
    h.classes.suspend();
    assert_eq!(h.class(&a), Class::Ls);
    let said = h.run(&[&a], ClassSetting::Auto, 160 * S);
    assert!(
        said.last()
            .unwrap()
            .contains("class batch (auto): it did not help"),
        "{said:?}"
    );
}

#[test]
fn a_new_daemon_knows_what_was_found_and_a_trial_that_was_cut_short_left_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
    h.classes = Classes::new(dir.path());
    h.run(&[&a], ClassSetting::Auto, 15 * S);
    h.classes = Classes::new(dir.path());
    assert_eq!(h.class(&a), Class::Batch);
    h.run(&[&a], ClassSetting::Auto, TRIAL_TIME);
    assert_eq!(h.class(&a), Class::Ls);

    h.classes = Classes::new(dir.path());
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 100 * MS), [""; 0]);
    assert_eq!(h.class(&a), Class::Ls);
    assert_eq!(h.run(&[&a], ClassSetting::Auto, 500 * S), [""; 0]);
    // A VM whose I/O ended is tried anew when it begins again.
    h.packets = 0;
    h.run(&[&a], ClassSetting::Auto, 20 * S);
    h.classes = Classes::new(dir.path());
    h.run(&[&a], ClassSetting::Auto, 100 * MS);
    assert_eq!(h.class(&a), Class::Batch);
}

#[test]
fn advice_is_for_vms_set_to_batch_whose_waits_would_become_shorter() {
    let (mut h, a) = (Host::new(), vm("a b", 10, &[&[1]]));
    let advice = Some(Advice {
        figure: Some(Figure::ResidualWait),
        now: 17 * MS,
        after: MS,
        is_inside: true,
    });
    assert_eq!(
        h.classes.advice(&a, ClassSetting::Batch, 0.38, advice),
        None
    );
    h.run(&[&a], ClassSetting::Batch, S);
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
fn repeated_trials_of_a_core_have_a_budget() {
    let mut host = Host::new();
    host.delay = (17 * MS, 17 * MS);
    let vms = ["web", "db", "mail"].map(|name| vm(name, 7, &[&[1]]));
    let vms: Vec<&Vm> = vms.iter().collect();
    let begun = |said: &[String]| {
        let lines = said.iter().filter(|line| line.contains("tries class ls"));
        lines.count()
    };
    assert_eq!(begun(&host.run(&vms, ClassSetting::Auto, 600 * S)), 3);
    for _ in 0..budget::MAX_REPEATED_TRIALS - 1 {
        let near = vms.iter().map(|vm| vm.id.clone());
        host.classes.budget.spend(host.now, near.collect());
    }
    // All of them again, once, as one trial.
    assert_eq!(begun(&host.run(&vms, ClassSetting::Auto, 2000 * S)), 3);
    let why = host.classes.why(&vms[0].id, AUTO, worth());
    assert!(why.contains("6 repeated trials"), "{why}");
}

#[test]
fn a_class_that_no_longer_helps_ends_when_the_budget_is_spent() {
    let mut host = Host::new();
    let web = vm("web", 7, &[&[1]]);
    host.run(&[&web], ClassSetting::Auto, 400 * S);
    assert_eq!(host.classes.class(&web.id, ClassSetting::Auto), Class::Ls);
    for _ in 0..budget::MAX_REPEATED_TRIALS {
        host.classes.budget.spend(host.now, [web.id.clone()].into());
    }
    host.delay = (30 * MS, 30 * MS);
    let said = host.run(&[&web], ClassSetting::Auto, 700 * S);
    assert!(said[0].contains("too many trials"), "{said:?}");
    assert_eq!(
        host.classes.class(&web.id, ClassSetting::Auto),
        Class::Batch
    );
    assert!(host.classes.trials.is_empty());
}

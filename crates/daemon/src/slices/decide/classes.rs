// SPDX-License-Identifier: Apache-2.0
//! The class of each VM: what the operator says, or, for class auto, what the meter finds.
//!
//! A VM of class auto becomes latency-sensitive when its classifier says so and the model promises that it is worth
//! it; one VM at a time, so that what comes of it can be told apart. Then its waits are looked at: where they did not
//! become shorter it goes back, and is left alone for a while.

use std::collections::BTreeMap;

use viola_host::{Vm, VmId};
use viola_meter::{VmSample, WAIT_WINDOW_SECONDS};
use viola_policy::slices::classify::{Advice, Classifier, Thresholds, Verdict, Window};
use viola_policy::slices::{Class, MS, Nanos};
use viola_proto::ClassSetting;

use viola_cli::error::one_line;
use viola_cli::quantities::{percent, rounded};

/// Shortest time that is one window for the classifier.
const WINDOW: Nanos = 100 * MS;
/// How long a change is looked at: until all waits that are remembered come after it.
const TRIAL: Nanos = (WAIT_WINDOW_SECONDS as u64 + 2) * 1000 * MS;
/// A change that did not help is not tried again for this long.
const BAN: Nanos = 600_000 * MS;
/// A change has helped when the p99 wait is at most this part of what it was.
const HELPED: f64 = 0.75;
/// With fewer waits than this there is no p99 worth the name.
const WAITS: u64 = 100;

/// What is known of one VM.
#[derive(Debug)]
struct State {
    classifier: Classifier,
    verdict: Option<Verdict>,
    gathered: Gathered,
    /// Class while the setting is auto.
    chosen: Class,
    banned_until: Nanos,
}

/// Part of a window.
#[derive(Debug, Default)]
struct Gathered {
    span: Nanos,
    run: u64,
    wait: u64,
    wakes: u64,
    packets: u64,
}

/// A change that is being looked at.
#[derive(Debug)]
struct Trial {
    vm: VmId,
    since: Nanos,
    before: Nanos,
}

/// The classes of all VMs.
#[derive(Debug, Default)]
pub struct Classes {
    vms: BTreeMap<VmId, State>,
    trial: Option<Trial>,
}

/// What the loop knows of a VM at the end of a snapshot.
#[derive(Debug)]
pub struct Observation<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// What the operator wants.
    pub setting: ClassSetting,
    /// What it did.
    pub sample: &'a VmSample,
    /// End of the snapshot, ns.
    pub at: Nanos,
    /// Its length, ns.
    pub span: Nanos,
    /// Waits of the last 10 s, and how many they were.
    pub p99: Option<Nanos>,
    /// Their number.
    pub waits: u64,
    /// What class ls would bring; `None` where there is no mechanism to bring it about.
    pub advice: Option<Advice>,
}

impl Classes {
    /// Takes what a VM did in a snapshot; a line for the journal when its class is another one from now on.
    pub fn observe(&mut self, o: &Observation<'_>) -> Option<String> {
        let state = self.vms.entry(o.vm.id.clone()).or_insert_with(State::new);
        state.gather(o);
        if o.setting != ClassSetting::Auto {
            self.settle(&o.vm.id);
            return None;
        }
        if self
            .trial
            .as_ref()
            .is_some_and(|t| t.vm == o.vm.id && o.at >= t.since + TRIAL)
        {
            return self.judge(o);
        }
        let state = self.vms.get_mut(&o.vm.id)?;
        let verdict = state.verdict?;
        match (state.chosen, verdict.class) {
            (Class::Batch, Class::Ls) if self.trial.is_none() && o.at >= state.banned_until => {
                let advice = o.advice.filter(Advice::is_worth_it)?;
                let before = o.p99.filter(|_| o.waits >= WAITS)?;
                state.chosen = Class::Ls;
                self.trial = Some(Trial {
                    vm: o.vm.id.clone(),
                    since: o.at,
                    before,
                });
                Some(format!(
                    "class ls (auto, was batch): {}; {advice}",
                    verdict.why
                ))
            }
            (Class::Ls, Class::Batch) => {
                state.chosen = Class::Batch;
                self.end_trial(&o.vm.id);
                Some(format!("class batch (auto, was ls): {}", verdict.why))
            }
            _ => None,
        }
    }

    /// Whether a change has helped.
    fn judge(&mut self, o: &Observation<'_>) -> Option<String> {
        let trial = self.trial.take()?;
        let state = self.vms.get_mut(&o.vm.id)?;
        let before = rounded(trial.before);
        // A VM that fell silent meanwhile tells nothing; its classifier will.
        let after = o.p99.filter(|_| o.waits >= WAITS)?;
        if after as f64 <= trial.before as f64 * HELPED {
            return Some(format!(
                "stays class ls (auto): its p99 wait went from {before} to {}",
                rounded(after)
            ));
        }
        state.chosen = Class::Batch;
        state.banned_until = o.at + BAN;
        Some(format!(
            "class batch (auto, was ls): it did not help, its p99 wait went from {before} to {}",
            rounded(after)
        ))
    }

    /// The operator decides: nothing is tried any more.
    fn settle(&mut self, id: &VmId) {
        self.end_trial(id);
        if let Some(state) = self.vms.get_mut(id) {
            state.chosen = Class::Batch;
        }
    }

    fn end_trial(&mut self, id: &VmId) {
        if self.trial.as_ref().is_some_and(|t| t.vm == *id) {
            self.trial = None;
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.end_trial(id);
        self.vms.remove(id);
    }

    /// The class of a VM for which this was asked.
    pub fn class(&self, id: &VmId, setting: ClassSetting) -> Class {
        match setting {
            ClassSetting::Ls => Class::Ls,
            // Whether it has a turbo vCPU is another question.
            ClassSetting::Batch | ClassSetting::Turbo => Class::Batch,
            ClassSetting::Auto => self.vms.get(id).map_or(Class::Batch, |s| s.chosen),
        }
    }

    /// Advice to an operator about a VM that is batch by choice and would gain.
    pub fn advice(
        &self,
        vm: &Vm,
        setting: ClassSetting,
        wait: f64,
        advice: Option<Advice>,
    ) -> Option<String> {
        let verdict = self.vms.get(&vm.id)?.verdict?;
        let advice = advice.filter(Advice::is_worth_it)?;
        if setting != ClassSetting::Batch || verdict.class != Class::Ls {
            return None;
        }
        Some(format!(
            "{name} waits {} of the time it wants to run (p99 {}); class ls would cut that to about {}. \
             Try: viola set {} --class ls",
            percent(wait),
            rounded(advice.now),
            rounded(advice.after),
            shell_word(&vm.name),
            name = one_line(&vm.name),
        ))
    }
}

/// A name as it can be typed.
fn shell_word(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
    if !name.is_empty() && name.chars().all(plain) {
        name.to_owned()
    } else {
        format!("'{}'", name.replace('\'', "'\\''"))
    }
}

impl State {
    fn new() -> Self {
        Self {
            classifier: Classifier::new(Thresholds::default()),
            verdict: None,
            gathered: Gathered::default(),
            chosen: Class::Batch,
            banned_until: 0,
        }
    }

    /// Adds a snapshot to the window, and closes it when it is long enough.
    fn gather(&mut self, o: &Observation<'_>) {
        let (g, total) = (&mut self.gathered, o.sample.vcpu_total());
        g.span += o.span;
        g.run += total.run;
        g.wait += total.wait;
        g.wakes += total.wakes;
        g.packets += o.sample.traffic.rx_packets + o.sample.traffic.tx_packets;
        if g.span < WINDOW {
            return;
        }
        let time = g.span as f64 * o.sample.vcpus.len().max(1) as f64;
        let part = |ns: u64| (ns as f64 / time).min(1.0);
        let per_s = |n: u64| n as f64 * 1e9 / g.span as f64;
        let (run, wait) = (part(g.run), part(g.wait));
        let window = Window {
            run,
            wait,
            blocked: (1.0 - run - wait).max(0.0),
            wakes: per_s(g.wakes),
            packets: per_s(g.packets),
        };
        self.gathered = Gathered::default();
        self.verdict = Some(self.classifier.observe(o.at, &window));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;
    use viola_meter::{Times, Traffic};

    const S: Nanos = 1000 * MS;

    /// A server that waits, with as many packets per 100 ms.
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
    }

    impl Host {
        fn new() -> Self {
            Self {
                classes: Classes::default(),
                now: 0,
                p99: 17 * MS,
            }
        }

        /// Runs for a while, and answers what was said.
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
                        now: self.p99,
                        after: MS,
                    });
                    let o = Observation {
                        vm,
                        setting,
                        sample: &sample(vm, packets),
                        at: self.now,
                        span: 100 * MS,
                        p99: Some(self.p99),
                        waits: 1000,
                        advice,
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

        fn class(&self, vm: &Vm) -> Class {
            self.classes.class(&vm.id, ClassSetting::Auto)
        }
    }

    #[test]
    fn what_the_operator_says_goes_before_what_the_meter_finds() {
        let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
        assert!(h.run(&[&a], ClassSetting::Batch, 60 * S, 40).is_empty());
        assert_eq!(h.classes.class(&a.id, ClassSetting::Batch), Class::Batch);
        assert_eq!(h.classes.class(&a.id, ClassSetting::Ls), Class::Ls);
    }

    #[test]
    fn a_server_that_waits_is_tried_as_ls_and_stays_when_that_helped() {
        let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
        let said = h.run(&[&a], ClassSetting::Auto, S, 40);
        assert_eq!(
            said,
            [
                "a: class ls (auto, was batch): 400 packets/s, and it waits 60 % of the time; \
              class ls would cut the wait from 17 ms to about 1.0 ms"
            ]
        );
        h.p99 = MS;
        let said = h.run(&[&a], ClassSetting::Auto, 20 * S, 40);
        assert_eq!(
            said,
            ["a: stays class ls (auto): its p99 wait went from 17 ms to 1 ms"]
        );
        assert_eq!(h.class(&a), Class::Ls);
    }

    #[test]
    fn what_did_not_help_is_taken_back_and_not_tried_again_soon() {
        let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
        h.run(&[&a], ClassSetting::Auto, S, 40);
        assert_eq!(h.class(&a), Class::Ls);
        let said = h.run(&[&a], ClassSetting::Auto, 20 * S, 40);
        assert_eq!(
            said,
            [
                "a: class batch (auto, was ls): it did not help, its p99 wait went from 17 ms to 17 ms"
            ]
        );
        assert!(h.run(&[&a], ClassSetting::Auto, 500 * S, 40).is_empty());
        assert_eq!(h.class(&a), Class::Batch);
        assert_eq!(h.run(&[&a], ClassSetting::Auto, 120 * S, 40).len(), 2);
    }

    #[test]
    fn vms_are_tried_one_after_the_other() {
        let mut h = Host::new();
        let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
        h.run(&[&a, &b], ClassSetting::Auto, 5 * S, 40);
        assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Batch));
        h.p99 = 10 * MS;
        h.run(&[&a, &b], ClassSetting::Auto, 10 * S, 40);
        assert_eq!((h.class(&a), h.class(&b)), (Class::Ls, Class::Ls));
        // One that is gone does not keep others from being tried.
        h.classes.forget(&b.id);
        assert!(h.classes.trial.is_none());
    }

    #[test]
    fn a_vm_that_falls_silent_goes_back() {
        let (mut h, a) = (Host::new(), vm("a", 10, &[&[1]]));
        h.run(&[&a], ClassSetting::Auto, S, 40);
        let said = h.run(&[&a], ClassSetting::Auto, 11 * S, 0);
        assert_eq!(
            said,
            ["a: class batch (auto, was ls): it computes (85 % of the time) and does little I/O"]
        );
    }

    #[test]
    fn advice_is_for_vms_that_are_batch_by_choice_and_would_gain() {
        let (mut h, a) = (Host::new(), vm("a b", 10, &[&[1]]));
        let advice = Some(Advice {
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
            "a b waits 38 % of the time it wants to run (p99 17 ms); class ls would cut that to about 1 ms. \
             Try: viola set 'a b' --class ls"
        );
        assert_eq!(h.classes.advice(&a, ClassSetting::Auto, 0.38, advice), None);
        assert_eq!(
            h.classes.advice(
                &a,
                ClassSetting::Batch,
                0.38,
                Some(Advice { now: MS, after: MS })
            ),
            None
        );
        assert_eq!(h.classes.advice(&a, ClassSetting::Batch, 0.38, None), None);
    }
}

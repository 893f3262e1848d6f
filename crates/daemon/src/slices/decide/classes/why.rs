// SPDX-License-Identifier: Apache-2.0
//! Why a VM has its class, in a sentence for the operator (`viola why`).

use viola_host::VmId;
use viola_policy::slices::Class;
use viola_policy::slices::classify::Advice;
use viola_policy::trial::LOOKS;
use viola_proto::{ClassSetting, Source};

use super::budget::MAX_REPEATED_TRIALS;
use super::{Candidate, Classes, Running, State};
use viola_cli::quantities::rounded;

impl Classes {
    /// Why the VM has its class. `setting` is what was set, and where; `advice` what class ls would do for its waits, `None`
    /// if viola schedules none of its cores.
    pub fn why(
        &self,
        id: &VmId,
        setting: (ClassSetting, Source),
        advice: Option<Advice>,
    ) -> String {
        let by = match setting.1 {
            Source::Set => "viola set",
            Source::Kept => "viola set --keep",
            Source::Config => "the configuration",
            Source::Cgroup => "its control group",
            Source::Default => "default",
        };
        if setting.0 != ClassSetting::Auto {
            return format!("set by {by}");
        }
        let Some(state) = self.vms.get(id) else {
            return format!("auto by {by}: it has not been measured yet");
        };
        let own_trial = self.trials.iter().find_map(|trial| {
            let candidate = trial.tried.iter().find(|t| t.vm == *id)?;
            Some((trial, candidate))
        });
        let why = match (own_trial, state.chosen) {
            (Some((trial, candidate)), _) => trial.why(candidate),
            (None, Class::Ls) => state.last_change.clone(),
            (None, Class::Batch) => self.why_batch(id, state, advice),
        };
        format!("auto by {by}: {why}")
    }

    /// Why a VM of class auto is batch.
    fn why_batch(&self, id: &VmId, state: &State, advice: Option<Advice>) -> String {
        let left = state.time_to_trial(state.observed_at);
        if left > 0 && state.tried_at.is_none() {
            return format!(
                "another VM of its core has just got class ls; whether it needs the class, too, is measured for another {}",
                rounded(left)
            );
        }
        if left > 0 {
            let change = &state.last_change;
            return format!(
                "class ls was tried, and {change}; it is tried again in {}",
                rounded(left)
            );
        }
        match (state.verdict, advice) {
            (None, _) => "it has not been measured for long enough".into(),
            (Some(verdict), _) if verdict.class == Class::Batch => verdict.why.to_string(),
            (_, None) => "viola schedules none of its cores".into(),
            (_, Some(advice)) if !advice.is_worth_it() => format!(
                "{advice}, which is too little a gain: a trial needs 2 ms or more, and a cut to half"
            ),
            _ if state.turn > 0 => {
                let change = &state.last_change;
                format!("class ls was tried, and {change}; it is tried again in its turn")
            }
            _ if self.trials.iter().any(|t| t.concerned.contains(id)) => {
                "another VM of its core is being tried first".into()
            }
            _ if state.wish.is_some() => "class ls is tried in some seconds".into(),
            _ if state.tried_at.is_some() && !self.budget.has_room(id, state.observed_at) => {
                format!(
                    "its core had {MAX_REPEATED_TRIALS} repeated trials within an hour, which is the limit"
                )
            }
            _ => "too few of its packets and waits were measured to compare classes".into(),
        }
    }
}

impl Running {
    fn why(&self, candidate: &Candidate) -> String {
        let (figure, before) = candidate.before;
        format!(
            "class ls is being tried in windows with and without it, {} pairs so far, at least {}; in class batch its {figure} was {}",
            self.pairs(),
            LOOKS[0],
            rounded(before)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::decide::classes::trial::Measure;
    use crate::testing::vm;
    use viola_policy::slices::MS;
    use viola_policy::slices::classify::{Figure, Reason, Verdict};
    use viola_policy::trial::WINDOW;

    const AUTO: (ClassSetting, Source) = (ClassSetting::Auto, Source::Config);

    fn with(state: State) -> (Classes, VmId) {
        let mut classes = Classes::default();
        let id = vm("db01", 7, &[&[1]]).id;
        classes.vms.insert(id.clone(), state);
        (classes, id)
    }

    fn worth(now: u64) -> Option<Advice> {
        Some(Advice {
            figure: Some(Figure::PacketDelay),
            now,
            after: MS,
            is_inside: true,
        })
    }

    fn candidate(vm: VmId) -> Candidate {
        Candidate {
            vm,
            before: (Figure::PacketDelay, 9 * MS),
            measure: Measure {
                figure: Figure::PacketDelay,
                window: WINDOW,
                tail: 0.05,
            },
        }
    }

    fn looks_latency_sensitive() -> State {
        let mut state = State::new();
        state.verdict = Some(Verdict {
            class: Class::Ls,
            changed: true,
            why: Reason::StillBusy,
        });
        state
    }

    #[test]
    fn a_class_that_was_set_needs_no_measurement() {
        let (classes, id) = with(State::new());
        let why = classes.why(&id, (ClassSetting::Ls, Source::Kept), None);
        assert_eq!(why, "set by viola set --keep");
    }

    #[test]
    fn a_batch_vm_of_class_auto_says_what_it_lacks() {
        let (classes, id) = with(State::new());
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(why.contains("not been measured for long enough"), "{why}");

        let (mut classes, id) = with(looks_latency_sensitive());
        let why = classes.why(&id, AUTO, None);
        assert!(why.contains("schedules none of its cores"), "{why}");
        let why = classes.why(&id, AUTO, worth(MS));
        assert!(why.contains("too little a gain"), "{why}");
        let web = vm("web", 8, &[&[1]]).id;
        let both = [web.clone(), id.clone()].into();
        (classes.trials).push(Running::begin(vec![candidate(web)], both, true, 0));
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(why.contains("of its core is being tried first"), "{why}");
    }

    #[test]
    fn a_vm_that_was_not_tried_yet_says_what_it_waits_for() {
        let (mut classes, id) = with(looks_latency_sensitive());
        classes.vms.get_mut(&id).unwrap().next_trial = 10_000 * MS;
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(
            why.contains("another VM of its core has just got class ls") && why.ends_with("10 s"),
            "{why}"
        );
        let state = classes.vms.get_mut(&id).unwrap();
        (state.next_trial, state.turn) = (0, 2);
        state.last_change = "with 1 others it harmed a VM".into();
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(
            why.ends_with("harmed a VM; it is tried again in its turn"),
            "{why}"
        );
    }

    #[test]
    fn a_trial_and_what_came_of_it_are_said() {
        let (mut classes, id) = with(looks_latency_sensitive());
        let state = classes.vms.get_mut(&id).unwrap();
        state.chosen = Class::Ls;
        state.last_change = "the delay of its slowest packets is 0.20x".into();
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(why.ends_with("packets is 0.20x"), "{why}");
        let alone = [id.clone()].into();
        let trial = Running::begin(vec![candidate(id.clone())], alone, true, 0);
        classes.trials.push(trial);
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(
            why.contains("being tried") && why.ends_with("9 ms"),
            "{why}"
        );

        classes.trials.clear();
        let state = classes.vms.get_mut(&id).unwrap();
        state.chosen = Class::Batch;
        state.end_trial(100_000 * MS);
        state.observed_at = 400_000 * MS;
        let why = classes.why(&id, AUTO, worth(9 * MS));
        assert!(why.contains("was tried, and the delay"), "{why}");
        assert!(why.contains("tried again in 300 s"), "{why}");
    }
}

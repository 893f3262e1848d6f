// SPDX-License-Identifier: Apache-2.0
//! Which VMs are tried together: all VMs of a core that may gain within some seconds.
//!
//! The VM that may gain first gathers the others of its core. Those inside their share are tried first: they take little from others.
//! Those that get enough packets for short windows are tried before the others, which need twice the time. If a trial of several harms somebody, the half of them that runs least is tried next, and each
//! of the others alone after it (`State::turn`): what a VM takes from its neighbours grows with what it runs.

use std::collections::BTreeSet;

use viola_host::VmId;
use viola_policy::slices::classify::{Figure, Verdict};
use viola_policy::slices::{Class, MS, Nanos};

use super::trial::{Candidate, Counters, Measure, Running};
use super::{ClassChange, Classes, Observation, STAY_TIME};
use viola_cli::error::one_line;
use viola_cli::quantities::{percent, rounded};

/// Time for which a VM gathers others and counts their packets, ns.
const GATHERING: Nanos = 3_000 * MS;

/// A VM may gain by class ls, or may no longer need it.
#[derive(Debug)]
pub(super) struct Wish {
    /// The figure that says so, and its value without class ls, ns.
    before: (Figure, Nanos),
    /// Why, for `viola why`.
    reason: String,
    /// Why, for the log.
    line: String,
    /// The VM and the other VMs of its cores.
    near: BTreeSet<VmId>,
    /// Whether it has class ls, which is tried again.
    has_class: bool,
}

/// A VM that waits for others.
#[derive(Debug)]
pub(super) struct Gathering {
    leader: VmId,
    /// When it began, ns.
    begun: Nanos,
    /// The leader and the other VMs of its cores.
    near: BTreeSet<VmId>,
    /// Their counters at the begin.
    base: Counters,
}

/// What is to be done for a VM of class auto that is not on trial.
enum Next {
    Trial(Wish),
    /// Its class ends without a trial, for this reason.
    End(String),
}

impl Classes {
    /// Begins a trial of class ls if VMs may gain by it, or if the class that this VM has may no longer help.
    pub(super) fn begin_trial(
        &mut self,
        o: &Observation<'_>,
        verdict: Verdict,
    ) -> Option<ClassChange> {
        let wish = match self.next(o, verdict) {
            Some(Next::Trial(wish)) => wish,
            next => {
                self.end_gathering(&o.vm.id);
                return match next {
                    Some(Next::End(compared)) => self.end_unproved(&o.vm.id, &compared),
                    _ => None,
                };
            }
        };
        let near = wish.near.clone();
        self.vms.get_mut(&o.vm.id)?.wish = Some(wish);
        let gathering = self
            .gatherings
            .iter()
            .position(|g| !g.near.is_disjoint(&near));
        match gathering {
            None => {
                self.gatherings.push(Gathering {
                    leader: o.vm.id.clone(),
                    begun: o.at,
                    near,
                    base: (o.counters)(),
                });
                None
            }
            Some(i) if self.gatherings[i].leader == o.vm.id => {
                if o.at < self.gatherings[i].begun + GATHERING {
                    return None;
                }
                let gathering = self.gatherings.swap_remove(i);
                self.try_gathered(&gathering, o)
            }
            Some(_) => None,
        }
    }

    /// This VM no longer waits for others.
    pub(super) fn end_gathering(&mut self, id: &VmId) {
        self.gatherings.retain(|gathering| gathering.leader != *id);
    }

    /// Begins the trial of those that were gathered.
    fn try_gathered(&mut self, gathering: &Gathering, o: &Observation<'_>) -> Option<ClassChange> {
        let tried = self.choose_tried(gathering, &(o.counters)());
        // The VMs of the core are others now.
        if tried.is_empty() {
            return None;
        }
        if tried.iter().any(|t| self.is_repeated(&t.vm)) {
            self.budget.spend(o.at, gathering.near.clone());
        }
        let mut others = (gathering.near.iter()).filter(|id| tried.iter().all(|t| t.vm != **id));
        let from_stock = others.all(|id| self.known_class(id) == Class::Batch);
        let names: Vec<String> = tried.iter().map(|t| one_line(&(o.name)(&t.vm))).collect();
        let trial = Running::begin(tried, gathering.near.clone(), from_stock, o.at);
        let mut change = ClassChange::default();
        for (i, candidate) in trial.tried.iter().enumerate() {
            let Some(state) = self.vms.get_mut(&candidate.vm) else {
                continue;
            };
            let Some(wish) = state.wish.take() else {
                continue;
            };
            state.choose(trial.is_ls());
            state.last_change = wish.reason;
            let mut others = names.clone();
            others.remove(i);
            let with = match others.is_empty() {
                true => String::new(),
                false => format!("; it is tried together with {}", others.join(", ")),
            };
            let line = format!("{}{with}", wish.line);
            change.lines.push((candidate.vm.clone(), line));
        }
        self.trials.push(trial);
        Some(change)
    }

    /// The VMs that are tried of those that were gathered: those of the lowest turn, inside their share, for short windows. A VM that
    /// has class ls already is tried alone.
    fn choose_tried(&self, gathering: &Gathering, now: &Counters) -> Vec<Candidate> {
        let wishes = gathering.near.iter().filter_map(|id| {
            let state = self.vms.get(id)?;
            let wish = state.wish.as_ref()?;
            let measure = Measure::of(gathering.base.get(id)?, now.get(id)?);
            let candidate = Candidate {
                vm: id.clone(),
                before: wish.before,
                measure,
            };
            let order = (state.turn, !state.is_inside, measure.window);
            Some((order, wish, candidate))
        });
        let mut wishes: Vec<_> = wishes
            .filter(|(.., wish, _)| wish.near == gathering.near)
            .collect();
        let of_leader = |(.., candidate): &&(_, _, Candidate)| candidate.vm == gathering.leader;
        let alone = wishes
            .iter()
            .find(of_leader)
            .filter(|(.., wish, _)| wish.has_class);
        if let Some((.., candidate)) = alone {
            return vec![candidate.clone()];
        }
        wishes.retain(|(.., wish, _)| !wish.has_class);
        let first = wishes.iter().map(|(order, ..)| *order).min();
        wishes.retain(|(order, ..)| Some(*order) == first);
        wishes
            .into_iter()
            .map(|(.., candidate)| candidate)
            .collect()
    }

    /// Whether a trial of this VM would count for the limit.
    fn is_repeated(&self, id: &VmId) -> bool {
        self.vms
            .get(id)
            .is_some_and(|state| state.tried_at.is_some())
    }

    /// Ends class ls of a VM without a trial, since there were too many.
    fn end_unproved(&mut self, id: &VmId, compared: &str) -> Option<ClassChange> {
        let state = self.vms.get_mut(id)?;
        let found = format!("{compared} class ls");
        let line = format!(
            "class batch (auto, was ls): {found}; its core had too many trials for another one"
        );
        (state.chosen, state.without) = (Class::Batch, None);
        state.last_change = found;
        self.memory.forget(id);
        Some(ClassChange::logged(id, line))
    }

    /// What is to be done for a VM; `None` for nothing.
    fn next(&self, o: &Observation<'_>, verdict: Verdict) -> Option<Next> {
        let state = self.vms.get(&o.vm.id)?;
        let is_near = |trial: &Running| trial.concerned.contains(&o.vm.id);
        if state.time_to_trial(o.at) > 0 || self.trials.iter().any(is_near) {
            return None;
        }
        let is_first = state.tried_at.is_none();
        let has_room = |id: &VmId| is_first || self.budget.has_room(id, o.at);
        let advice = o.advice?;
        let proved = state.without.filter(|_| state.chosen == Class::Ls);
        let (before, reason, line) = match proved {
            None if !advice.is_worth_it() => return None,
            None => {
                let why = state.looked.unwrap_or(verdict.why);
                let line = format!("tries class ls (auto): {why}; {advice}");
                ((o.figures)().best()?, why.to_string(), line)
            }
            Some((figure, without)) => {
                let now = (o.figures)().get(figure)?;
                let is_due = state.tried_at.is_none_or(|at| o.at >= at + STAY_TIME);
                let grown = state.other_use(true);
                if now <= without && !is_due && grown.is_none() {
                    return None;
                }
                let compared = match grown {
                    Some((before, now)) => format!(
                        "it runs {} of the time, and ran {} after its last trial",
                        percent(now),
                        percent(before)
                    ),
                    None => format!(
                        "its {figure} is {}, and was {} without",
                        rounded(now),
                        rounded(without)
                    ),
                };
                if now > without && !has_room(&o.vm.id) {
                    return Some(Next::End(compared));
                }
                let line = format!("tries class ls again (auto): {compared}");
                ((figure, without), state.last_change.clone(), line)
            }
        };
        // Two trials on one core would disturb each other.
        let near = (o.near)();
        let mut trials = self.trials.iter();
        let is_free = trials.all(|t| t.concerned.is_disjoint(&near)) && near.iter().all(has_room);
        is_free.then(|| {
            Next::Trial(Wish {
                before,
                reason,
                line,
                near,
                has_class: proved.is_some(),
            })
        })
    }
}

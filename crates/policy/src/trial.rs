// SPDX-License-Identifier: Apache-2.0
//! A trial of a change for one VM: windows with and without the change in pairs, until a test decides.
//!
//! The order of each pair is drawn by lot, and [`Comparison`] tests the pairs. The test looks at 10, 14, 19 and 24 pairs
//! ([`LOOKS`]), each time with a quarter of [`ERROR`], so that all looks together are wrong with at most that probability
//! (Bonferroni's inequality). The change stays if the VM gains and no neighbour is found to lose: neither more than
//! [`MAX_WORK_LOSS`] of its CPU time nor more than [`MAX_DELAY_LOSS`] of its delay. Otherwise it is taken back.
//!
//! A neighbour that itself gained by an earlier change may lose a part of that gain again ([`Sample::tolerated`]): otherwise the
//! first VM of a core would keep out all others.

use std::collections::BTreeMap;

use crate::compare::{Comparison, Estimate};
use crate::slices::{MS, Nanos};

/// Length of a window, ns, of a VM to which enough requests come for a tail of delays.
pub const WINDOW: Nanos = 1_500 * MS;
/// Length of a window, ns, of a VM to which fewer come.
pub const LONG_WINDOW: Nanos = 2 * WINDOW;
/// The beginning of a window, ns, that is not measured: what waited before the change is served then.
pub const SETTLING: Nanos = 500 * MS;
/// Pairs after which the test looks.
pub const LOOKS: [usize; 4] = [10, 14, 19, 24];
/// Probability that a change without effect is found to gain, or one neighbour to lose, in a whole trial.
pub const ERROR: f64 = 0.01;
/// Largest part of its CPU time that a neighbour may lose.
pub const MAX_WORK_LOSS: f64 = 0.02;
/// Largest part by which a neighbour's delay may grow.
pub const MAX_DELAY_LOSS: f64 = 0.05;
/// The trial ends after so many pairs in which too few requests came to the VM.
const MAX_EMPTY_PAIRS: usize = 10;

/// What one VM got in a window.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sample {
    /// How long requests to it waited, ns; `None` if there were too few.
    pub delay: Option<f64>,
    /// Its CPU time, as a part of the window or in any other unit that is the same in all windows.
    pub work: f64,
    /// Delay up to which a neighbour does not lose, ns; 0 where each longer delay is a loss.
    pub tolerated: f64,
}

/// What all VMs got that the change may concern.
#[derive(Debug, Clone, PartialEq)]
pub struct WindowSample<K> {
    /// The VM that is tried.
    pub own: Sample,
    /// The other VMs of its core, by key.
    pub neighbours: Vec<(K, Sample)>,
}

/// What of a neighbour is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Good {
    /// Its CPU time.
    Work,
    /// The delay of requests to it.
    Delay,
}

/// What a trial found.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding<K> {
    /// The VM gains, and nobody is found to lose: the change stays.
    Gains,
    /// The VM is not found to gain.
    NoGain,
    /// A neighbour loses.
    Harms {
        /// The neighbour.
        who: K,
        /// Of what it gets less.
        of: Good,
        /// By how much.
        loss: Estimate,
    },
    /// Too few packets came, and the VM waited too rarely.
    TooFewEvents,
}

/// The end of a trial.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome<K> {
    /// What was found.
    pub finding: Finding<K>,
    /// The VM's delay with the change, as a multiple of that without; `None` if too few pairs had one.
    pub own: Option<Estimate>,
    /// Pairs of windows that were compared.
    pub pairs: usize,
    /// The median of the VM's delays without the change, ns.
    pub own_delay: Option<f64>,
    /// The same of its neighbours, as far as requests came to them.
    pub delays: Vec<(K, f64)>,
}

impl<K> Outcome<K> {
    /// Whether the change stays.
    pub fn stays(&self) -> bool {
        matches!(self.finding, Finding::Gains)
    }
}

/// The comparisons of one neighbour.
#[derive(Debug, Clone, Default)]
struct Neighbour {
    work: Comparison,
    delay: Comparison,
    /// Delays without the change, ns.
    delays: Vec<f64>,
}

/// A running trial. `K` identifies a neighbour.
#[derive(Debug, Clone)]
pub struct Trial<K> {
    lot: u64,
    /// Whether the present window is one with the change.
    with: bool,
    /// The first window of the present pair.
    first: Option<WindowSample<K>>,
    own: Comparison,
    /// The VM's delays without the change, ns.
    own_delays: Vec<f64>,
    neighbours: BTreeMap<K, Neighbour>,
    pairs: usize,
    empty: usize,
}

impl<K: Ord + Clone> Trial<K> {
    /// A trial whose first window begins now. `seed` decides the order of the windows in each pair.
    pub fn new(seed: u64) -> Self {
        let mut trial = Self {
            lot: seed | 1,
            with: false,
            first: None,
            own: Comparison::default(),
            own_delays: Vec::new(),
            neighbours: BTreeMap::new(),
            pairs: 0,
            empty: 0,
        };
        trial.with = trial.draw();
        trial
    }

    /// Whether the change is in force in the present window.
    pub fn with(&self) -> bool {
        self.with
    }

    /// Pairs of windows that were compared so far.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// Takes what was measured in the window that ends now, and begins the next one. Returns the outcome if the trial ends.
    pub fn end_window(&mut self, sample: WindowSample<K>) -> Option<Outcome<K>> {
        let Some(first) = self.first.take() else {
            self.first = Some(sample);
            self.with = !self.with;
            return None;
        };
        let (without, with) = match self.with {
            true => (first, sample),
            false => (sample, first),
        };
        self.with = self.draw();
        self.add(&without, &with);
        if self.empty == MAX_EMPTY_PAIRS {
            return Some(self.outcome(Finding::TooFewEvents));
        }
        let finding = LOOKS.contains(&self.pairs).then(|| self.look());
        finding.flatten().map(|finding| self.outcome(finding))
    }

    fn add(&mut self, without: &WindowSample<K>, with: &WindowSample<K>) {
        let (Some(before), Some(after)) = (without.own.delay, with.own.delay) else {
            self.empty += 1;
            return;
        };
        self.pairs += 1;
        self.own.add(before, after);
        self.own_delays.push(before);
        for (who, before) in &without.neighbours {
            let after = with.neighbours.iter().find(|(other, _)| other == who);
            let Some((_, after)) = after else { continue };
            let neighbour = self.neighbours.entry(who.clone()).or_default();
            neighbour.work.add(before.work, after.work);
            if let (Some(before), Some(delay)) = (before.delay, after.delay) {
                neighbour.delay.add(before.max(after.tolerated), delay);
                neighbour.delays.push(before);
            }
        }
    }

    /// What the pairs show so far; `None` if more are needed.
    fn look(&self) -> Option<Finding<K>> {
        if let Some(harm) = self.harm() {
            return Some(harm);
        }
        let gains = self.estimate(&self.own).is_some_and(|e| e.interval.1 < 1.0);
        match gains {
            true => Some(Finding::Gains),
            false if Some(&self.pairs) == LOOKS.last() => Some(Finding::NoGain),
            false => None,
        }
    }

    fn harm(&self) -> Option<Finding<K>> {
        self.neighbours.iter().find_map(|(who, neighbour)| {
            let harms = |of, loss| Finding::Harms {
                who: who.clone(),
                of,
                loss,
            };
            let work = self.estimate(&neighbour.work);
            let delay = self.estimate(&neighbour.delay);
            let lost = work.filter(|e| e.interval.1 < 1.0 - MAX_WORK_LOSS);
            let later = delay.filter(|e| e.interval.0 > 1.0 + MAX_DELAY_LOSS);
            let lost = lost.map(|loss| harms(Good::Work, loss));
            lost.or_else(|| later.map(|loss| harms(Good::Delay, loss)))
        })
    }

    fn estimate(&self, comparison: &Comparison) -> Option<Estimate> {
        comparison.estimate(ERROR / LOOKS.len() as f64)
    }

    fn outcome(&self, finding: Finding<K>) -> Outcome<K> {
        Outcome {
            finding,
            own: self.estimate(&self.own),
            pairs: self.pairs,
            own_delay: median(&self.own_delays),
            delays: (self.neighbours.iter())
                .filter_map(|(who, neighbour)| Some((who.clone(), median(&neighbour.delays)?)))
                .collect(),
        }
    }

    /// Draws a lot (xorshift64, Marsaglia, Xorshift RNGs, 2003).
    fn draw(&mut self) -> bool {
        self.lot ^= self.lot << 13;
        self.lot ^= self.lot >> 7;
        self.lot ^= self.lot << 17;
        self.lot >> 63 == 1
    }
}

/// The upper median; `None` of nothing.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests;

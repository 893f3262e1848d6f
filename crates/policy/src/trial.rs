// SPDX-License-Identifier: Apache-2.0
//! A trial of a change for one VM, or for several of a core at once: windows with and without the change in pairs, until a test
//! decides.
//!
//! The order of each pair is drawn by lot, and [`Comparison`] tests the pairs. The test looks at 10, 14, 19 and 24 pairs
//! ([`LOOKS`]), each time with a quarter of [`ERROR`], so that all looks together are wrong with at most that probability
//! (Bonferroni's inequality). The change stays for each VM that gains if nobody is found to lose: neither more than
//! [`MAX_WORK_LOSS`] of its CPU time nor more than [`MAX_DELAY_LOSS`] of its delay. Otherwise it is taken back. Of several VMs that are
//! tried together, each must not lose by the others either.
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
/// A VM that does not get its delay down to this part of it need not be tried any longer.
pub const MIN_GAIN: f64 = 0.5;
/// The trial ends after so many pairs in which too few requests came to the VMs.
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
    /// The VMs that are tried, by key.
    pub tried: Vec<(K, Sample)>,
    /// The other VMs of their core, by key.
    pub neighbours: Vec<(K, Sample)>,
}

/// What of a VM is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Good {
    /// Its CPU time.
    Work,
    /// The delay of requests to it.
    Delay,
}

/// A VM that loses by the change.
#[derive(Debug, Clone, PartialEq)]
pub struct Harm<K> {
    /// The VM.
    pub who: K,
    /// Of what it gets less.
    pub of: Good,
    /// By how much.
    pub loss: Estimate,
}

/// What a trial found about a VM that was tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// It gains. If nobody loses, it keeps the change.
    Gains,
    /// It is not found to gain.
    NoGain,
    /// Nothing yet: the trial ended earlier, since somebody loses.
    Open,
    /// Too few packets came, and the VM waited too rarely.
    TooFewEvents,
}

/// What became of a VM that was tried.
#[derive(Debug, Clone, PartialEq)]
pub struct Tried {
    /// What was found.
    pub finding: Finding,
    /// Its delay with the change, as a multiple of that without; `None` if too few pairs had one.
    pub ratio: Option<Estimate>,
    /// The median of its delays without the change, ns.
    pub delay: Option<f64>,
    /// Pairs of windows in which its delays were compared.
    pub pairs: usize,
}

/// The end of a trial.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome<K> {
    /// A VM that loses. Then nobody keeps the change.
    pub harm: Option<Harm<K>>,
    /// The VMs that were tried.
    pub tried: BTreeMap<K, Tried>,
    /// The medians of the other VMs' delays without the change, ns, as far as requests came to them.
    pub delays: BTreeMap<K, f64>,
}

impl<K: Ord> Outcome<K> {
    /// Whether this VM keeps the change.
    pub fn stays(&self, who: &K) -> bool {
        let gains = |tried: &Tried| tried.finding == Finding::Gains;
        self.harm.is_none() && self.tried.get(who).is_some_and(gains)
    }
}

/// The comparisons of one VM.
#[derive(Debug, Clone, Default)]
struct Compared {
    work: Comparison,
    delay: Comparison,
    /// Delays without the change, ns.
    delays: Vec<f64>,
}

impl Compared {
    /// Adds a pair of windows. Returns whether requests came in both.
    fn add(&mut self, without: &Sample, with: &Sample) -> bool {
        self.work.add(without.work, with.work);
        let (Some(before), Some(after)) = (without.delay, with.delay) else {
            return false;
        };
        self.delay.add(before.max(with.tolerated), after);
        self.delays.push(before);
        true
    }

    fn ratio(&self) -> Option<Estimate> {
        estimate(&self.delay)
    }

    fn gains(&self) -> bool {
        self.ratio().is_some_and(|e| e.interval.1 < 1.0)
    }

    /// Whether it is found to gain less than would be worth more windows.
    fn gains_little(&self) -> bool {
        self.ratio().is_some_and(|e| e.interval.0 > MIN_GAIN)
    }

    /// Of what this VM loses, and how much.
    fn loss(&self) -> Option<(Good, Estimate)> {
        let less = estimate(&self.work).filter(|e| e.interval.1 < 1.0 - MAX_WORK_LOSS);
        let later = (self.ratio()).filter(|e| e.interval.0 > 1.0 + MAX_DELAY_LOSS);
        let less = less.map(|loss| (Good::Work, loss));
        less.or_else(|| later.map(|loss| (Good::Delay, loss)))
    }
}

/// A running trial. `K` identifies a VM.
#[derive(Debug, Clone)]
pub struct Trial<K> {
    lot: u64,
    /// Whether the present window is one with the change.
    with: bool,
    /// The first window of the present pair.
    first: Option<WindowSample<K>>,
    tried: BTreeMap<K, Compared>,
    neighbours: BTreeMap<K, Compared>,
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
            tried: BTreeMap::new(),
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
        if !add(&mut self.tried, &without.tried, &with.tried) {
            self.empty += 1;
            return (self.empty == MAX_EMPTY_PAIRS).then(|| self.outcome(None, true));
        }
        self.pairs += 1;
        add(&mut self.neighbours, &without.neighbours, &with.neighbours);
        LOOKS.contains(&self.pairs).then(|| self.look()).flatten()
    }

    /// The outcome, if the pairs show enough.
    fn look(&self) -> Option<Outcome<K>> {
        let harm = self.harm();
        let is_decided = |compared: &Compared| compared.gains() || compared.gains_little();
        let is_last = Some(&self.pairs) == LOOKS.last() || self.tried.values().all(is_decided);
        (harm.is_some() || is_last).then(|| self.outcome(harm, is_last))
    }

    /// Who loses. A VM that is tried alone cannot lose by others.
    fn harm(&self) -> Option<Harm<K>> {
        let together = self.tried.iter().filter(|_| self.tried.len() > 1);
        self.neighbours
            .iter()
            .chain(together)
            .find_map(|(who, compared)| {
                let (of, loss) = compared.loss()?;
                let who = who.clone();
                Some(Harm { who, of, loss })
            })
    }

    fn outcome(&self, harm: Option<Harm<K>>, is_last: bool) -> Outcome<K> {
        let tried = |compared: &Compared| Tried {
            finding: match compared.ratio() {
                _ if self.empty == MAX_EMPTY_PAIRS => Finding::TooFewEvents,
                Some(_) if compared.gains() => Finding::Gains,
                _ if !is_last => Finding::Open,
                Some(_) => Finding::NoGain,
                None => Finding::TooFewEvents,
            },
            ratio: compared.ratio(),
            delay: median(&compared.delays),
            pairs: compared.delay.pairs(),
        };
        Outcome {
            harm,
            tried: (self.tried.iter())
                .map(|(who, compared)| (who.clone(), tried(compared)))
                .collect(),
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

/// Adds a pair of windows to the comparisons of the VMs that are in both. Returns whether requests came to one of them.
fn add<K: Ord + Clone>(
    compared: &mut BTreeMap<K, Compared>,
    without: &[(K, Sample)],
    with: &[(K, Sample)],
) -> bool {
    let mut has_requests = false;
    for (who, before) in without {
        if let Some((_, after)) = with.iter().find(|(other, _)| other == who) {
            let compared = compared.entry(who.clone()).or_default();
            has_requests |= compared.add(before, after);
        }
    }
    has_requests
}

fn estimate(comparison: &Comparison) -> Option<Estimate> {
    comparison.estimate(ERROR / LOOKS.len() as f64)
}

/// The upper median; `None` of nothing.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests;

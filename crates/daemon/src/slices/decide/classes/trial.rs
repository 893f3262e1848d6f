// SPDX-License-Identifier: Apache-2.0
//! Class ls on trial for one VM, or several of a core: the windows by the clock, and what is compared, from the meter's counters.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use viola_host::VmId;
use viola_meter::{Span, VmCounters};
use viola_policy::compare::Estimate;
use viola_policy::slices::Nanos;
use viola_policy::slices::classify::Figure;
use viola_policy::trial::{
    Finding, Good, Harm, LONG_WINDOW, Outcome, SETTLING, Sample, Trial, Tried, WINDOW, WindowSample,
};

use viola_cli::error::one_line;

/// Fewest packets of a window from which a delay is computed.
const MIN_PACKETS: u64 = 20;
/// The longest delays of this part of the packets are compared: requests that meet a busy core are among them.
const TAIL: f64 = 0.05;
/// Of few packets, so many are compared, on average.
const MIN_TAIL: f64 = 4.0;
/// Fewest packets of a window from which a delay of a neighbour is computed, whose rate is not known before.
const MIN_NEIGHBOUR_PACKETS: u64 = 40;
/// Shortest delay that is told from none, ns: the first bucket of the histograms ends there.
const MIN_DELAY: f64 = 1_024.0;

/// Counters of a VM and the other VMs of its core at a moment.
pub type Counters = BTreeMap<VmId, VmCounters>;

/// How a VM's windows are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Measure {
    /// What is compared: the packet delay if enough packets come in a window, else the residual wait.
    pub(super) figure: Figure,
    /// Length of the windows that it takes, ns.
    pub(super) window: Nanos,
    /// The part of the packets, those with the longest delays, that is compared.
    pub(super) tail: f64,
}

impl Measure {
    /// The measure for a VM of which `base` was counted first, and `now` later.
    pub(super) fn of(base: &VmCounters, now: &VmCounters) -> Self {
        let time = now.at.saturating_sub(base.at).max(1) as f64;
        let rate = now.since(base).packets.count() as f64 / time;
        let in_a = |window: Nanos| rate * (window - SETTLING) as f64;
        // Packets come in groups, and each window should have enough.
        let has_enough = |window: Nanos| in_a(window) >= 1.5 * MIN_PACKETS as f64;
        let (window, figure) = match has_enough(WINDOW) {
            true => (WINDOW, Figure::PacketDelay),
            false if has_enough(LONG_WINDOW) => (LONG_WINDOW, Figure::PacketDelay),
            false => (LONG_WINDOW, Figure::ResidualWait),
        };
        Self {
            figure,
            window,
            tail: TAIL.max(MIN_TAIL / in_a(window)),
        }
    }

    fn delay(self, span: &Span) -> Option<f64> {
        match self.figure {
            Figure::PacketDelay => packet_delay(span, self.tail, MIN_PACKETS),
            _ => residual_wait(span),
        }
    }
}

/// A VM that is on trial.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) vm: VmId,
    /// The figure by which the trial began, and its value before, ns.
    pub(super) before: (Figure, Nanos),
    pub(super) measure: Measure,
}

/// A trial that is running.
#[derive(Debug)]
pub(super) struct Running {
    /// The VMs that are tried, at least one. What the first one observes lets the trial go on.
    pub(super) tried: Vec<Candidate>,
    /// These VMs and the others of their core when the trial began.
    pub(super) concerned: BTreeSet<VmId>,
    /// Whether no other VM of the core had class ls when the trial began.
    pub(super) from_stock: bool,
    /// The class of a VM of the core has ended since, so earlier windows and later ones do not compare.
    pub(super) is_stale: bool,
    trial: Trial<VmId>,
    /// Length of a window, ns.
    window: Nanos,
    /// Begin of the window, ns.
    begun: Nanos,
    /// The counters since which the window is measured; `None` while the VMs settle.
    base: Option<Counters>,
}

impl Running {
    /// A trial of at least one VM, whose first window begins at `at` (ns).
    pub(super) fn begin(
        tried: Vec<Candidate>,
        concerned: BTreeSet<VmId>,
        from_stock: bool,
        at: Nanos,
    ) -> Self {
        let window = tried.iter().map(|candidate| candidate.measure.window).max();
        Self {
            trial: Trial::new(seed(tried.first().map(|first| &first.vm), at)),
            window: window.unwrap_or(WINDOW),
            tried,
            concerned,
            from_stock,
            is_stale: false,
            begun: at,
            base: None,
        }
    }

    /// Whether this VM is tried.
    pub(super) fn tries(&self, id: &VmId) -> bool {
        self.tried.iter().any(|candidate| candidate.vm == *id)
    }

    /// Whether what this VM observes lets the trial go on.
    pub(super) fn is_led_by(&self, id: &VmId) -> bool {
        self.tried.first().is_some_and(|first| first.vm == *id)
    }

    /// Whether the VMs have class ls in this window.
    pub(super) fn is_ls(&self) -> bool {
        self.trial.with()
    }

    /// Pairs of windows so far.
    pub(super) fn pairs(&self) -> usize {
        self.trial.pairs()
    }

    /// Lets the time be `at` (ns). Returns the outcome when the trial ends. `tolerated` tells the delay (ns) up to which a neighbour
    /// does not lose.
    pub(super) fn step(
        &mut self,
        at: Nanos,
        counters: &dyn Fn() -> Counters,
        tolerated: &dyn Fn(&VmId) -> f64,
    ) -> Option<Outcome<VmId>> {
        if at < self.begun + SETTLING {
            return None;
        }
        let Some(base) = &self.base else {
            self.base = Some(counters());
            return None;
        };
        if at < self.begun + self.window {
            return None;
        }
        let sample = self.sample(base, &counters(), tolerated);
        (self.begun, self.base) = (at, None);
        self.trial.end_window(sample)
    }

    fn sample(
        &self,
        base: &Counters,
        now: &Counters,
        tolerated: &dyn Fn(&VmId) -> f64,
    ) -> WindowSample<VmId> {
        let span = |id: &VmId| {
            let (now, base) = (now.get(id)?, base.get(id)?);
            let time = now.at.saturating_sub(base.at).max(1) as f64;
            let span = now.since(base);
            // The loop's ticks make windows of different lengths.
            let work = span.run as f64 / time;
            Some((span, work))
        };
        let tried = self.tried.iter().filter_map(|candidate| {
            let (span, work) = span(&candidate.vm)?;
            let sample = Sample {
                delay: candidate.measure.delay(&span),
                work,
                tolerated: 0.0,
            };
            Some((candidate.vm.clone(), sample))
        });
        let neighbours = now.keys().filter(|id| !self.tries(id));
        let neighbours = neighbours.filter_map(|id| {
            let (span, work) = span(id)?;
            let sample = Sample {
                delay: packet_delay(&span, TAIL, MIN_NEIGHBOUR_PACKETS),
                work,
                tolerated: tolerated(id),
            };
            Some((id.clone(), sample))
        });
        WindowSample {
            tried: tried.collect(),
            neighbours: neighbours.collect(),
        }
    }
}

/// A seed of a VM's own, so that trials that begin at the same moment have different lots.
fn seed(vm: Option<&VmId>, at: Nanos) -> u64 {
    let mut hasher = DefaultHasher::new();
    (vm, at).hash(&mut hasher);
    hasher.finish()
}

/// The mean of the longest part of the packet delays, ns; `None` of less than `min` packets.
fn packet_delay(span: &Span, tail: f64, min: u64) -> Option<f64> {
    let tail = span.packets.tail_mean(tail)?;
    (span.packets.count() >= min).then(|| tail.max(MIN_DELAY))
}

fn residual_wait(span: &Span) -> Option<f64> {
    let mean = span.waits.residual_mean()? as f64;
    (span.waits.histogram.count() >= MIN_PACKETS).then(|| mean.max(MIN_DELAY))
}

/// What a trial found about a VM, in words.
pub(super) fn found(tried: Option<&Tried>, compared: Figure) -> String {
    const TOO_FEW: &str = "too few packets came to it";
    let Some(tried) = tried else {
        return TOO_FEW.into();
    };
    let own = |text: &str| {
        let what = match compared {
            Figure::PacketDelay => "the delay of its slowest packets",
            _ => "its residual wait",
        };
        let by = tried.ratio.as_ref().map_or("unknown".into(), ratio);
        let pairs = tried.pairs;
        format!("{text}{what} is {by} that of class batch, in {pairs} pairs of windows")
    };
    match tried.finding {
        Finding::Gains => own(""),
        Finding::NoGain | Finding::Open => own("it did not help: "),
        Finding::TooFewEvents => TOO_FEW.into(),
    }
}

/// Who loses by a trial, in words. `name` tells the name of a VM.
pub(super) fn harmed(harm: &Harm<VmId>, name: &dyn Fn(&VmId) -> String) -> String {
    let what = match harm.of {
        Good::Work => "CPU time",
        Good::Delay => "packet delay",
    };
    let name = one_line(&name(&harm.who));
    format!("the {what} of {name} is {}", ratio(&harm.loss))
}

/// A ratio with its interval.
fn ratio(e: &Estimate) -> String {
    let (low, high) = e.interval;
    format!("{:.2}x ({low:.2}x to {high:.2}x)", e.ratio)
}

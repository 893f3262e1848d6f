// SPDX-License-Identifier: Apache-2.0
//! Class ls on trial for a VM: its windows by the clock, and what is compared, from the meter's counters.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use viola_host::VmId;
use viola_meter::{Span, VmCounters};
use viola_policy::compare::Estimate;
use viola_policy::slices::Nanos;
use viola_policy::slices::classify::Figure;
use viola_policy::trial::{
    Finding, Good, LONG_WINDOW, Outcome, SETTLING, Sample, Trial, WINDOW, WindowSample,
};

use viola_cli::error::one_line;

/// Fewest packets of a window from which a delay is computed.
const MIN_PACKETS: u64 = 40;
/// The longest delays of this part of the packets are compared: requests that meet a busy core are among them.
const TAIL: f64 = 0.05;
/// Shortest delay that is told from none, ns: the first bucket of the histograms ends there.
const MIN_DELAY: f64 = 1_024.0;

/// Counters of a VM and the other VMs of its core at a moment.
pub type Counters = BTreeMap<VmId, VmCounters>;

/// A trial that is running.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) vm: VmId,
    /// The VM and the others of its core when the trial began.
    pub(super) concerned: BTreeSet<VmId>,
    /// The figure by which the trial began, and its value before, ns.
    pub(super) before: (Figure, Nanos),
    /// What is compared: the packet delay if the first window has enough packets, else the residual wait.
    pub(super) compared: Option<Figure>,
    /// Whether no other VM of the core had class ls when the trial began.
    pub(super) from_stock: bool,
    /// The class of another VM of the core has ended since, so earlier windows and later ones do not compare.
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
    /// A trial whose first window begins at `at` (ns).
    pub(super) fn begin(
        vm: VmId,
        concerned: BTreeSet<VmId>,
        before: (Figure, Nanos),
        from_stock: bool,
        at: Nanos,
    ) -> Self {
        let seed = seed(&vm, at);
        Self {
            vm,
            concerned,
            before,
            compared: None,
            from_stock,
            is_stale: false,
            trial: Trial::new(seed),
            window: WINDOW,
            begun: at,
            base: None,
        }
    }

    /// Whether the VM has class ls in this window.
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
        let now = counters();
        if self.compared.is_none()
            && let (Some(now), Some(base)) = (now.get(&self.vm), base.get(&self.vm))
        {
            let span = now.since(base);
            // Of few packets, this window and all later ones have to be long.
            if self.window < LONG_WINDOW && span.packets.count() < 2 * MIN_PACKETS {
                self.window = LONG_WINDOW;
                return None;
            }
            self.compared = Some(match packet_delay(&span) {
                Some(_) => Figure::PacketDelay,
                None => Figure::ResidualWait,
            });
        }
        let sample = self.sample(base, &now, tolerated);
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
        let own = span(&self.vm).map_or(Sample::default(), |(span, work)| Sample {
            delay: match self.compared {
                Some(Figure::PacketDelay) => packet_delay(&span),
                _ => residual_wait(&span),
            },
            work,
            tolerated: 0.0,
        });
        let neighbours = now.keys().filter(|id| **id != self.vm);
        let neighbours = neighbours.filter_map(|id| {
            let (span, work) = span(id)?;
            let sample = Sample {
                delay: packet_delay(&span),
                work,
                tolerated: tolerated(id),
            };
            Some((id.clone(), sample))
        });
        WindowSample {
            own,
            neighbours: neighbours.collect(),
        }
    }
}

/// A seed of a VM's own, so that trials that begin at the same moment have different lots.
fn seed(vm: &VmId, at: Nanos) -> u64 {
    let mut hasher = DefaultHasher::new();
    (vm, at).hash(&mut hasher);
    hasher.finish()
}

fn packet_delay(span: &Span) -> Option<f64> {
    let tail = span.packets.tail_mean(TAIL)?;
    (span.packets.count() >= MIN_PACKETS).then(|| tail.max(MIN_DELAY))
}

fn residual_wait(span: &Span) -> Option<f64> {
    let mean = span.waits.residual_mean()? as f64;
    (span.waits.histogram.count() >= MIN_PACKETS).then(|| mean.max(MIN_DELAY))
}

/// What a trial found, in words. `name` tells the name of a VM.
pub(super) fn found(
    outcome: &Outcome<VmId>,
    compared: Option<Figure>,
    name: &dyn Fn(&VmId) -> String,
) -> String {
    let own = |text: &str| {
        let what = match compared {
            Some(Figure::PacketDelay) => "the delay of its slowest packets",
            _ => "its residual wait",
        };
        let by = outcome.own.as_ref().map_or("unknown".into(), ratio);
        let pairs = outcome.pairs;
        format!("{text}{what} is {by} that of class batch, in {pairs} pairs of windows")
    };
    match &outcome.finding {
        Finding::Gains => own(""),
        Finding::NoGain => own("it did not help: "),
        Finding::Harms { who, of, loss } => {
            let what = match of {
                Good::Work => "CPU time",
                Good::Delay => "packet delay",
            };
            let name = one_line(&name(who));
            format!(
                "it harmed a neighbour: the {what} of {name} is {}",
                ratio(loss)
            )
        }
        Finding::TooFewEvents => "too few packets came to it".into(),
    }
}

/// A ratio with its interval.
fn ratio(e: &Estimate) -> String {
    let (low, high) = e.interval;
    format!("{:.2}x ({low:.2}x to {high:.2}x)", e.ratio)
}

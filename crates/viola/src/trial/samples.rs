// SPDX-License-Identifier: Apache-2.0
//! Figures of windows, and how they differ with and without the class.

use std::collections::BTreeMap;

use serde::Serialize;
use viola_policy::compare::{Comparison, Estimate};
use viola_proto::{Delay, VmList, VmReport};
use viola_report::stats::Sorted;

use super::MIN_PAIRS;

/// Fewest packets or wake-ups from which percentiles of a window are taken.
const MIN_EVENTS: u64 = 100;
/// Probability that an interval misses the true ratio.
const ERROR: f64 = 0.01;

/// The p50 and p99 of the delays of one window, ns; `None` if fewer than [`MIN_EVENTS`] were measured.
type Delays = Option<(f64, f64)>;

/// Figures of one VM in one window.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WindowSample {
    packets: Delays,
    wakes: Delays,
    answers: Delays,
    connects: Delays,
    /// Part of its cores that the VM used.
    used: f64,
}

impl WindowSample {
    /// The delays that the daemon shows at the window's end, and the CPU time that it showed meanwhile.
    pub fn of(vm: &VmReport, used: &[f64]) -> Self {
        Self {
            packets: delays(vm.packet_delay.as_ref()),
            wakes: delays(vm.wake_delay.as_ref()),
            answers: delays(vm.answer_time.as_ref()),
            connects: delays(vm.connect_time.as_ref()),
            used: used.iter().sum::<f64>() / used.len().max(1) as f64,
        }
    }
}

fn delays(delay: Option<&Delay>) -> Delays {
    let delay = delay.filter(|d| d.count >= MIN_EVENTS)?;
    // A delay of 0 has no ratio. It counts as 1 us, the bound of the first bucket.
    let ns = |ns: u64| ns.max(1_000) as f64;
    Some((ns(delay.p50_ns?), ns(delay.p99_ns?)))
}

/// One figure of one VM, over all pairs.
#[derive(Debug, Default)]
struct Figure {
    without: Vec<f64>,
    with: Vec<f64>,
    comparison: Comparison,
}

impl Figure {
    fn add(&mut self, without: Option<f64>, with: Option<f64>) {
        if let (Some(without), Some(with)) = (without, with) {
            self.without.push(without);
            self.with.push(with);
            self.comparison.add(without, with);
        }
    }

    fn report(&self) -> Option<Compared> {
        let Estimate {
            ratio,
            interval: (low, high),
        } = self.comparison.estimate(ERROR)?;
        Some(Compared {
            without: median(&self.without)?,
            with: median(&self.with)?,
            ratio,
            low,
            high,
        })
    }
}

/// The delays of one kind of events of one VM, over all pairs.
#[derive(Debug, Default)]
struct DelayFigures {
    p50: Figure,
    p99: Figure,
}

impl DelayFigures {
    fn add(&mut self, without: Delays, with: Delays) {
        self.p50.add(without.map(|d| d.0), with.map(|d| d.0));
        self.p99.add(without.map(|d| d.1), with.map(|d| d.1));
    }
}

/// All figures of one VM.
#[derive(Debug)]
struct VmSamples {
    id: String,
    name: String,
    tried: bool,
    packets: DelayFigures,
    wakes: DelayFigures,
    answers: DelayFigures,
    connects: DelayFigures,
    work: Figure,
}

impl VmSamples {
    /// The delays of packets, or of wake-ups if too few pairs of windows had enough packets.
    fn delays(&self) -> &DelayFigures {
        let pairs = |of: &DelayFigures| of.p99.comparison.pairs();
        let (packets, wakes) = (pairs(&self.packets), pairs(&self.wakes));
        match packets >= MIN_PAIRS as usize || packets >= wakes {
            true => &self.packets,
            false => &self.wakes,
        }
    }
}

/// All figures of all VMs of the host.
#[derive(Debug)]
pub struct Samples {
    vms: Vec<VmSamples>,
    pairs: usize,
}

/// A figure without and with the class: medians of the windows, their ratio and its interval (99 %).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Compared {
    /// Class batch.
    pub without: f64,
    /// The class that was tried.
    pub with: f64,
    /// `with` as a multiple of `without`, pair by pair.
    pub ratio: f64,
    /// Lower bound of the ratio.
    pub low: f64,
    /// Upper bound of the ratio.
    pub high: f64,
}

/// What the class changed for one VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VmResult {
    /// Identity.
    pub id: String,
    /// Name.
    pub name: String,
    /// Whether its class was changed; otherwise it is a neighbour.
    pub tried: bool,
    /// Median delay of its packets (or wake-ups), ns; null if too few were measured.
    pub p50_ns: Option<Compared>,
    /// The p99 of the same.
    pub p99_ns: Option<Compared>,
    /// Median time from a TCP request to the first byte of its answer, at its NIC, ns; null if too few were measured.
    pub answer_p50_ns: Option<Compared>,
    /// The p99 of the same.
    pub answer_p99_ns: Option<Compared>,
    /// Median time from a TCP SYN to its SYN-ACK, at its NIC, ns; null if too few were measured.
    pub connect_p50_ns: Option<Compared>,
    /// The p99 of the same.
    pub connect_p99_ns: Option<Compared>,
    /// CPU time, as a part of its cores.
    pub used: Option<Compared>,
}

/// Result of a trial.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The class that was compared with batch.
    pub class: String,
    /// Pairs of windows.
    pub pairs: usize,
    /// All VMs of the host.
    pub vms: Vec<VmResult>,
}

impl Samples {
    /// No figures yet of the VMs in a list.
    pub fn new(list: &VmList, tried: &[&VmReport]) -> Self {
        let samples = |vm: &VmReport| VmSamples {
            id: vm.id.clone(),
            name: vm.name.clone(),
            tried: tried.iter().any(|t| t.id == vm.id),
            packets: DelayFigures::default(),
            wakes: DelayFigures::default(),
            answers: DelayFigures::default(),
            connects: DelayFigures::default(),
            work: Figure::default(),
        };
        Self {
            vms: list.vms.iter().map(samples).collect(),
            pairs: 0,
        }
    }

    /// Adds a pair of windows. Leaves out a VM that was missing in one of them.
    pub fn add(
        &mut self,
        without: &BTreeMap<String, WindowSample>,
        with: &BTreeMap<String, WindowSample>,
    ) {
        self.pairs += 1;
        for vm in &mut self.vms {
            if let (Some(a), Some(b)) = (without.get(&vm.id), with.get(&vm.id)) {
                vm.packets.add(a.packets, b.packets);
                vm.wakes.add(a.wakes, b.wakes);
                vm.answers.add(a.answers, b.answers);
                vm.connects.add(a.connects, b.connects);
                vm.work.add(Some(a.used), Some(b.used));
            }
        }
    }

    /// The ratios of the p99 delays of the VMs that are tried, for a line of progress.
    pub fn so_far(&self) -> String {
        let tried = self.vms.iter().filter(|vm| vm.tried);
        let one = |vm: &VmSamples| {
            let p99 = &vm.delays().p99;
            let ratio = match (median(&p99.without), median(&p99.with)) {
                (Some(without), Some(with)) => format!("p99 {:.2}x", with / without),
                _ => "too few packets".into(),
            };
            format!("{} {ratio}", vm.name)
        };
        tried.map(one).collect::<Vec<_>>().join(", ")
    }

    /// The result of the trial.
    pub fn report(&self, class: &str) -> Report {
        let result = |vm: &VmSamples| VmResult {
            id: vm.id.clone(),
            name: vm.name.clone(),
            tried: vm.tried,
            p50_ns: vm.delays().p50.report(),
            p99_ns: vm.delays().p99.report(),
            answer_p50_ns: vm.answers.p50.report(),
            answer_p99_ns: vm.answers.p99.report(),
            connect_p50_ns: vm.connects.p50.report(),
            connect_p99_ns: vm.connects.p99.report(),
            used: vm.work.report(),
        };
        Report {
            class: class.to_owned(),
            pairs: self.pairs,
            vms: self.vms.iter().map(result).collect(),
        }
    }
}

fn median(values: &[f64]) -> Option<f64> {
    Sorted::new(values.to_vec()).median()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use viola_daemon::testing::view;

    fn window(vms: &[(&str, f64, f64)]) -> BTreeMap<String, WindowSample> {
        let sample = |(id, p99, used): &(&str, f64, f64)| {
            let sample = WindowSample {
                packets: Some((p99 / 10.0, *p99)),
                answers: Some((p99 / 5.0, p99 * 2.0)),
                used: *used,
                ..WindowSample::default()
            };
            (format!("uml:{id}"), sample)
        };
        vms.iter().map(sample).collect()
    }

    /// `web` is tried, `batch` beside it keeps its work.
    pub fn samples() -> Samples {
        let list = view(&["web", "batch"]).vms;
        let mut samples = Samples::new(&list, &[&list.vms[0]]);
        for i in 0..10 {
            let noise = 1.0 + f64::from(i % 5) / 50.0;
            samples.add(
                &window(&[("web", 8e6 * noise, 0.2), ("batch", 4e6, 0.5 * noise)]),
                &window(&[("web", 2e6, 0.2 * noise), ("batch", 4e6 * noise, 0.5)]),
            );
        }
        samples
    }

    #[test]
    fn a_gain_of_the_vm_is_found_and_neighbours_are_compared_too() {
        let report = samples().report("ls");
        assert_eq!((report.pairs, report.vms.len()), (10, 2));
        let (web, batch) = (&report.vms[0], &report.vms[1]);
        assert!(web.tried && !batch.tried);
        let p99 = web.p99_ns.unwrap();
        assert!(
            (0.2..0.26).contains(&p99.ratio) && p99.high < 0.3,
            "{p99:?}"
        );
        assert_eq!(p99.with, 2e6);
        let work = batch.used.unwrap();
        assert!((0.9..1.0).contains(&work.ratio), "{work:?}");
        assert_eq!(
            samples().so_far(),
            "web p99 0.24x",
            "once there are enough pairs"
        );
    }

    #[test]
    fn windows_with_few_events_have_no_delays() {
        let mut vm = view(&["web"]).vms.vms.remove(0);
        let delay = vm.packet_delay.as_mut().unwrap();
        (delay.count, delay.p50_ns) = (99, Some(7));
        let sample = WindowSample::of(&vm, &[0.2, 0.4]);
        assert_eq!((sample.packets, sample.wakes), (None, Some((1280.0, 6e6))));
        assert!((sample.used - 0.3).abs() < 1e-9);
        vm.packet_delay.as_mut().unwrap().count = 100;
        assert_eq!(WindowSample::of(&vm, &[]).packets, Some((1000.0, 17e6)));
    }

    #[test]
    fn packets_are_compared_with_packets_and_wake_ups_with_wake_ups() {
        let list = view(&["web"]).vms;
        let mut samples = Samples::new(&list, &[&list.vms[0]]);
        let window = |packets: Delays, wakes: f64| {
            let sample = WindowSample {
                packets,
                wakes: Some((wakes, wakes)),
                used: 0.1,
                ..WindowSample::default()
            };
            BTreeMap::from([("uml:web".to_owned(), sample)])
        };
        for i in 0..9 {
            // Some windows have too few packets.
            let packets = (i > 3).then_some((9e6, 9e6));
            samples.add(&window(packets, 2e6), &window(Some((1e6, 1e6)), 1e6));
        }
        let p99 = samples.report("ls").vms[0].p99_ns.unwrap();
        assert!(
            (p99.ratio - 0.5).abs() < 1e-9,
            "nine pairs of wake-ups: {p99:?}"
        );
    }
}

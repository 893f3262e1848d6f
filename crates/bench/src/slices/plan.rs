// SPDX-License-Identifier: Apache-2.0
//! Plan of `bench slices`: the cells, their order and duration.

use std::time::Duration;

use crate::harness::cell::Times;
use crate::harness::side::Side;

/// Load of the neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// Number of guests on the core, including the latency-sensitive one.
    pub vms: usize,
    /// Duty cycle of the others, percent.
    pub duty: u32,
}

impl Group {
    /// Name in rows.
    pub fn name(self) -> String {
        format!("{} VMs, others {} %", self.vms, self.duty)
    }
}

/// All groups. Groups with the same number of guests share a lab.
pub const GROUPS: [Group; 3] = [
    Group { vms: 4, duty: 100 },
    Group { vms: 4, duty: 40 },
    Group { vms: 5, duty: 100 },
];

/// State of the latency-sensitive guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// It has its own work beside the requests.
    Busy,
    /// It sleeps between requests.
    Idle,
}

impl State {
    /// Name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Busy => "LSVM busy",
            Self::Idle => "LSVM idle",
        }
    }
}

/// Microslices, in microseconds.
pub const MICROSLICES: [u32; 3] = [1000, 300, 100];

/// All sides, in the order of the first round.
pub const SIDES: [Side; 6] = [
    Side::Stock,
    Side::StockTimes4,
    Side::Credit,
    Side::Viola(1000),
    Side::Viola(300),
    Side::Viola(100),
];

/// Order of sides in a round: over the rounds each side comes first once and each pair of sides is adjacent in both
/// orders.
pub fn order(round: usize) -> Vec<Side> {
    let mut sides = SIDES.to_vec();
    sides.rotate_left(round % SIDES.len());
    if (round / SIDES.len()) % 2 == 1 {
        sides.reverse();
    }
    sides
}

/// An extra cell beside the groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extra {
    /// Weights 2:1:1:1.
    Weights,
    /// One guest is capped to 20 %.
    Cap,
    /// Two latency-sensitive guests.
    TwoLs,
    /// A packet flood hits the latency-sensitive guest.
    Flood,
    /// All guests are idle.
    Quiet,
    /// The first 10,000 pings after viola starts.
    First,
}

/// All extra cells. The last one runs once, the others in each round.
pub const EXTRAS: [Extra; 6] = [
    Extra::Weights,
    Extra::Cap,
    Extra::TwoLs,
    Extra::Flood,
    Extra::Quiet,
    Extra::First,
];

impl Extra {
    /// Name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights 2:1:1:1",
            Self::Cap => "cap 20 %",
            Self::TwoLs => "two LSVMs",
            Self::Flood => "UDP flood",
            Self::Quiet => "nothing contends",
            Self::First => "first pings",
        }
    }
}

/// Durations in a full run.
pub const FULL: Times = Times::of(200, 1800, 1500, 500);
/// Durations in a quick run.
pub const QUICK: Times = Times::of(200, 1500, 600, 600);

/// Time to switch from one side to the next.
pub const SWITCH_TIME: Duration = Duration::from_millis(900);
/// Time to boot a lab and shut it down.
pub const BOOT_TIME: Duration = Duration::from_secs(4);

/// Cells of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Number of rounds.
    pub rounds: usize,
    /// Durations of a cell.
    pub times: Times,
    /// Groups with their measured states.
    pub groups: Vec<(Group, Vec<State>)>,
    /// Extra cells.
    pub extras: Vec<Extra>,
    /// Number of pings after viola starts, per state.
    pub pings: usize,
}

impl Plan {
    /// The full plan, or the cells whose name contains `only`.
    pub fn new(rounds: usize, quick: bool, only: Option<&str>) -> Self {
        let selected =
            |name: &str| only.is_none_or(|only| name.to_lowercase().contains(&only.to_lowercase()));
        let groups = GROUPS.iter().map(|group| {
            let states = [State::Busy, State::Idle];
            let named = |s: &State| selected(&format!("{}, {}", s.name(), group.name()));
            (*group, states.into_iter().filter(named).collect::<Vec<_>>())
        });
        Self {
            rounds,
            times: if quick { QUICK } else { FULL },
            groups: groups.filter(|(_, states)| !states.is_empty()).collect(),
            extras: EXTRAS.into_iter().filter(|e| selected(e.name())).collect(),
            pings: if quick { 2000 } else { 10_000 },
        }
    }

    /// Whether the plan has no cell.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.extras.is_empty()
    }

    /// Whether the plan has every cell.
    pub fn is_whole(&self) -> bool {
        let all = self.groups.len() == GROUPS.len()
            && self.groups.iter().all(|(_, states)| states.len() == 2);
        all && self.extras.len() == EXTRAS.len()
    }

    /// Guest counts; each needs its own lab.
    pub fn labs(&self) -> Vec<usize> {
        let mut labs: Vec<usize> = self.groups.iter().map(|(group, _)| group.vms).collect();
        if !self.extras.is_empty() {
            labs.push(4);
        }
        labs.sort_unstable();
        labs.dedup();
        labs
    }

    /// Groups and states of a lab.
    pub fn of_lab(&self, vms: usize) -> impl Iterator<Item = &(Group, Vec<State>)> {
        self.groups
            .iter()
            .filter(move |(group, _)| group.vms == vms)
    }

    /// Whether a lab also measures the guest alone on its core.
    pub fn alone(&self, vms: usize) -> bool {
        self.of_lab(vms)
            .any(|(_, states)| states.contains(&State::Idle))
    }

    /// Duration of the pings after viola starts, per state.
    pub fn first_time(&self) -> Duration {
        Duration::from_micros(7_500) * self.pings as u32
    }

    /// Duration of the plan.
    pub fn estimate(&self) -> Duration {
        let mut round = Duration::ZERO;
        for vms in self.labs() {
            let cells: usize = self.of_lab(vms).map(|(_, states)| states.len()).sum();
            round += BOOT_TIME;
            if cells > 0 {
                round += (SWITCH_TIME + self.times.cell() * cells as u32) * SIDES.len() as u32;
            }
            if self.alone(vms) {
                round += self.times.cell();
            }
        }
        let repeated = self.extras.iter().filter(|e| **e != Extra::First).count() as u32;
        round += (self.times.only_ping().cell() + SWITCH_TIME) * repeated;
        let first = if self.extras.contains(&Extra::First) {
            (self.first_time() + SWITCH_TIME) * 2
        } else {
            Duration::ZERO
        };
        round * self.rounds as u32 + first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_run_takes_some_twenty_minutes() {
        let plan = Plan::new(5, false, None);
        assert!(plan.is_whole());
        let minutes = plan.estimate().as_secs_f64() / 60.0;
        assert!((15.0..25.0).contains(&minutes), "{minutes}");
    }

    #[test]
    fn a_pattern_selects_cells_by_name() {
        let plan = Plan::new(5, false, Some("lsvm busy, 4 vms, others 100"));
        assert_eq!(plan.groups, [(GROUPS[0], vec![State::Busy])]);
        assert!(plan.extras.is_empty() && !plan.is_whole() && !plan.alone(4));
        let plan = Plan::new(5, false, Some("flood"));
        assert_eq!(
            (plan.groups.len(), plan.extras.as_slice(), plan.labs()),
            (0, &[Extra::Flood][..], vec![4])
        );
        assert!(Plan::new(5, false, Some("no such thing")).is_empty());
    }

    #[test]
    fn each_side_begins_a_round_once() {
        let first: Vec<Side> = (0..6).map(|round| order(round)[0]).collect();
        let mut sorted = first.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), 6);
        assert_ne!(order(0), order(6));
        assert_eq!(order(7).len(), 6);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Plan of `bench slices`: the cells, their order and duration.
//!
//! Three families: *groups* (pings, round trips, and HTTP in a closed loop of one connection),
//! *loads* (HTTP in open and closed loops, [`super::loads`]), and *extras*. The group of 4 VMs
//! whose neighbours never rest has all sides in a full run. 5 VMs have stock, the papers' slices
//! (for the model that predicts them) and viola with 0.3 ms. Neighbours that rest have stock and
//! viola with 0.3 ms.

use std::time::Duration;

use super::loads::{
    AROUND_TIME, Bed, CAPACITY_TIME, Cell, LOAD_TIME, SERVED_TIME, cells, with_rates,
};
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

    /// Its sides.
    pub fn sides(self, quick: bool) -> &'static [Side] {
        match (self.vms, self.duty) {
            (4, 100) if !quick => &ALL_SIDES,
            (_, 100) => &PAPERS_SIDES,
            _ => &TWO_SIDES,
        }
    }
}

/// Sides of the groups, in the order of the first round.
const ALL_SIDES: [Side; 6] = [
    Side::Stock,
    Side::StockTimes4,
    Side::Credit,
    Side::Viola(1000),
    Side::Viola(300),
    Side::Viola(100),
];
const PAPERS_SIDES: [Side; 3] = [Side::Stock, Side::Credit, Side::Viola(300)];
const TWO_SIDES: [Side; 2] = [Side::Stock, Side::Viola(300)];

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

/// Order of sides in a round: over the rounds each side comes first once and each pair of sides is adjacent in both
/// orders.
pub fn order(mut sides: Vec<Side>, round: usize) -> Vec<Side> {
    let number = sides.len().max(1);
    sides.rotate_left(round % number);
    if (round / number) % 2 == 1 {
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
pub const FULL: Times = Times::of(200, 1200, 900, 500);
/// Durations in a quick run.
pub const QUICK: Times = Times::of(200, 1000, 600, 400);

/// Time to switch from one side to the next.
pub const SWITCH_TIME: Duration = Duration::from_millis(900);
/// Time to boot a lab and shut it down.
pub const BOOT_TIME: Duration = Duration::from_secs(4);

/// Guests that run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lab {
    /// Whether they share two cores.
    pub has_two_cores: bool,
    /// Their number.
    pub vms: usize,
}

impl Lab {
    const fn on_one_core(vms: usize) -> Self {
        Self {
            has_two_cores: false,
            vms,
        }
    }

    fn of(bed: Bed) -> Self {
        Self {
            has_two_cores: bed.has_two_cores(),
            vms: bed.vms,
        }
    }
}

/// The lab of the extra cells.
const LAB_OF_EXTRAS: Lab = Lab::on_one_core(4);

/// Cells of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Number of rounds.
    pub rounds: usize,
    /// Whether it is a quick run.
    pub quick: bool,
    /// Durations of a group's cell.
    pub times: Times,
    /// Groups with their measured states.
    pub groups: Vec<(Group, Vec<State>)>,
    /// HTTP loads.
    pub loads: Vec<Cell>,
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
        // A quick run by name measures all cells of that name.
        let short = quick && only.is_none();
        let groups = GROUPS.iter().filter(|group| !short || **group == GROUPS[0]);
        let groups = groups.map(|group| {
            let states = [State::Busy, State::Idle];
            let named = |s: &State| selected(&format!("pings, {}, {}", s.name(), group.name()));
            (*group, states.into_iter().filter(named).collect::<Vec<_>>())
        });
        let loads = cells(short).into_iter();
        Self {
            rounds,
            quick,
            times: if quick { QUICK } else { FULL },
            groups: groups.filter(|(_, states)| !states.is_empty()).collect(),
            loads: loads.filter(|cell| selected(&cell.name())).collect(),
            extras: EXTRAS.into_iter().filter(|e| selected(e.name())).collect(),
            pings: if quick { 1000 } else { 10_000 },
        }
    }

    /// Whether the plan has no cell.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.loads.is_empty() && self.extras.is_empty()
    }

    /// Whether the plan has every cell.
    pub fn is_whole(&self) -> bool {
        let all = Self::new(self.rounds, false, None);
        (&self.groups, &self.loads, &self.extras) == (&all.groups, &all.loads, &all.extras)
    }

    /// Labs to boot.
    pub fn labs(&self) -> Vec<Lab> {
        let groups = self.groups.iter().map(|(g, _)| Lab::on_one_core(g.vms));
        let loads = self.loads.iter().map(|cell| Lab::of(cell.bed));
        let mut labs: Vec<Lab> = groups.chain(loads).collect();
        if !self.extras.is_empty() {
            labs.push(LAB_OF_EXTRAS);
        }
        labs.sort_unstable();
        labs.dedup();
        labs
    }

    /// Groups and states of a lab.
    pub fn groups_of(&self, lab: Lab) -> impl Iterator<Item = &(Group, Vec<State>)> {
        self.groups
            .iter()
            .filter(move |(group, _)| Lab::on_one_core(group.vms) == lab)
    }

    /// Sides of a lab's groups.
    pub fn sides_of(&self, lab: Lab) -> Vec<Side> {
        let of = |side: &Side| {
            let mut groups = self.groups_of(lab);
            groups.any(|(group, _)| group.sides(self.quick).contains(side))
        };
        ALL_SIDES.into_iter().filter(of).collect()
    }

    /// Load cells of a lab, by bed.
    pub fn loads_of(&self, lab: Lab) -> Vec<Vec<Cell>> {
        let of_lab = self.loads.iter().filter(|cell| Lab::of(cell.bed) == lab);
        let cells: Vec<Cell> = of_lab.copied().collect();
        let beds = cells.chunk_by(|a, b| a.bed == b.bed);
        beds.map(<[Cell]>::to_vec).collect()
    }

    /// Extra cells of a lab.
    pub fn extras_of(&self, lab: Lab) -> Vec<Extra> {
        match lab == LAB_OF_EXTRAS {
            true => self.extras.clone(),
            false => Vec::new(),
        }
    }

    /// Whether a lab also measures the guest alone on its core.
    pub fn alone(&self, lab: Lab) -> bool {
        self.groups_of(lab)
            .any(|(_, states)| states.contains(&State::Idle))
    }

    /// Duration of the pings after viola starts, per state.
    pub fn first_time(&self) -> Duration {
        Duration::from_micros(7_500) * self.pings as u32
    }

    /// Duration of an extra cell.
    pub fn extra_time(&self, extra: Extra) -> Duration {
        match extra {
            Extra::First => (self.first_time() + SWITCH_TIME) * 2,
            Extra::Quiet => self.times.only_ping().cell() + SWITCH_TIME,
            _ => (self.times.only_ping().cell() + SWITCH_TIME) * 2,
        }
    }

    /// Duration of the groups of a lab in a round.
    fn groups_time(&self, lab: Lab) -> Duration {
        let cells: usize = self
            .groups_of(lab)
            .map(|(group, states)| states.len() * group.sides(self.quick).len())
            .sum();
        let alone = usize::from(self.alone(lab));
        SWITCH_TIME * self.sides_of(lab).len() as u32 + self.times.cell() * (cells + alone) as u32
    }

    /// Duration of the loads of a lab in a round.
    fn loads_time(&self, lab: Lab) -> Duration {
        let bed = |cells: Vec<Cell>| {
            let alone = cells.iter().filter(|cell| cell.has_alone()).count();
            let switches = 2 + u32::from(alone > 0);
            let lead: Duration = cells.iter().map(|cell| 2 * cell.bed.lead()).sum();
            let measured = (LOAD_TIME + AROUND_TIME) * (2 * cells.len() + alone) as u32;
            let rates = SERVED_TIME * with_rates(&cells).len() as u32;
            SWITCH_TIME * switches + lead + rates + measured
        };
        self.loads_of(lab).into_iter().map(bed).sum()
    }

    /// Duration of the plan.
    pub fn estimate(&self) -> Duration {
        let labs = self.labs();
        let once = |extra: &&Extra| **extra == Extra::First;
        let (first, repeated): (Vec<&Extra>, Vec<&Extra>) = self.extras.iter().partition(once);
        let sum = |extras: Vec<&Extra>| extras.into_iter().map(|e| self.extra_time(*e)).sum();
        let mut round: Duration = sum(repeated);
        for lab in labs {
            round += BOOT_TIME + self.groups_time(lab) + self.loads_time(lab);
        }
        let capacity = match self.loads.is_empty() {
            true => Duration::ZERO,
            false => CAPACITY_TIME,
        };
        round * self.rounds as u32 + sum(first) + capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_run_takes_some_30_minutes_and_a_quick_one_some_two() {
        let minutes = |plan: &Plan| plan.estimate().as_secs_f64() / 60.0;
        let plan = Plan::new(5, false, None);
        assert!(plan.is_whole());
        let full = minutes(&plan);
        assert!((27.0..33.0).contains(&full), "{full}");
        let plan = Plan::new(1, true, None);
        assert!(!plan.is_whole());
        let quick = minutes(&plan);
        assert!((1.5..2.5).contains(&quick), "{quick}");
    }

    #[test]
    fn a_pattern_selects_cells_by_name() {
        let plan = Plan::new(5, false, Some("pings, lsvm busy, 4 vms, others 100"));
        assert_eq!(plan.groups, [(GROUPS[0], vec![State::Busy])]);
        assert!(plan.extras.is_empty() && plan.loads.is_empty() && !plan.is_whole());
        assert!(!plan.alone(LAB_OF_EXTRAS));
        let plan = Plan::new(5, false, Some("flood"));
        assert_eq!(
            (plan.groups.len(), plan.extras.as_slice(), plan.labs()),
            (0, &[Extra::Flood][..], vec![LAB_OF_EXTRAS])
        );
        let plan = Plan::new(1, true, Some("open loop 90"));
        assert!(plan.groups.is_empty() && plan.loads.len() > 3);
        assert!(plan.loads.iter().all(|cell| cell.name().contains("90 %")));
        let plan = Plan::new(1, true, Some("two cores"));
        assert_eq!(
            plan.labs(),
            [Lab {
                has_two_cores: true,
                vms: 5
            }]
        );
        assert!(Plan::new(5, false, Some("no such thing")).is_empty());
    }

    #[test]
    fn each_lab_measures_its_own_cells() {
        let plan = Plan::new(5, false, None);
        let labs = plan.labs();
        let vms: Vec<usize> = labs.iter().map(|lab| lab.vms).collect();
        assert_eq!(vms, [2, 4, 5, 6, 8, 5]);
        let cells: usize = labs
            .iter()
            .map(|lab| plan.loads_of(*lab).concat().len())
            .sum();
        assert_eq!(cells, plan.loads.len());
        assert_eq!(plan.sides_of(Lab::on_one_core(4)).len(), 6);
        assert_eq!(plan.sides_of(Lab::on_one_core(5)), PAPERS_SIDES);
        assert!(plan.sides_of(Lab::on_one_core(8)).is_empty());
        assert_eq!(plan.loads_of(Lab::on_one_core(4)).len(), 3);
    }

    #[test]
    fn each_side_begins_a_round_once() {
        for sides in [&ALL_SIDES[..], &PAPERS_SIDES[..], &TWO_SIDES[..]] {
            let order = |round| order(sides.to_vec(), round);
            let number = sides.len();
            let mut first: Vec<Side> = (0..number).map(|round| order(round)[0]).collect();
            first.sort();
            first.dedup();
            assert_eq!(first.len(), number);
            assert_ne!(order(0), order(number));
            assert_eq!(order(number + 1).len(), number);
        }
        assert!(order(Vec::new(), 3).is_empty());
    }
}

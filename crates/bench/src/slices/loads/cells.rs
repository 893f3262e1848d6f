// SPDX-License-Identifier: Apache-2.0
//! The cells of HTTP loads: which load on which guests.

use std::time::Duration;

use crate::harness::cell::fair_shares;
use crate::harness::guests::{OwnWork, WEB, names};
use crate::harness::load::Load;
use crate::harness::side::Guests as Settings;

/// Weights 3:1:1:2, in viola's scale.
const WEIGHTS: [u32; 4] = [768, 256, 256, 512];
/// Cap of the web server, percent of a core. With one neighbour its fair share would be 50 %.
const CAP: u32 = 35;
/// Duty cycle of the neighbours on two cores, percent. They leave gaps for the host's own threads, which share these
/// cores on a machine with two.
const DUTY_ON_TWO: u32 = 40;

/// What differs from equal guests on one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Setting {
    /// Nothing: one LSVM, neighbours that never rest.
    Equal,
    /// The first two guests are LSVMs, and both are asked.
    TwoLs,
    /// Weights 3:1:1:2; the LSVM has the first one.
    Weights,
    /// The LSVM is capped to 35 %.
    Cap,
    /// Two cores, on which the kernel and viola may move the vCPUs.
    TwoCores,
}

/// Guests of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bed {
    /// Number of guests.
    pub vms: usize,
    /// Their setting.
    pub setting: Setting,
}

impl Bed {
    /// Equal guests.
    pub const fn equal(vms: usize) -> Self {
        Self {
            vms,
            setting: Setting::Equal,
        }
    }

    /// Name in rows.
    pub fn name(self) -> String {
        let what = match self.setting {
            Setting::Equal => "",
            Setting::TwoLs => ", two LSVMs",
            Setting::Weights => ", weights 3:1:1:2",
            Setting::Cap => ", cap 35 %",
            Setting::TwoCores => " on two cores",
        };
        format!("{} VMs{what}, others {} %", self.vms, self.duty())
    }

    /// Duty cycle of the neighbours, percent.
    pub fn duty(self) -> u32 {
        match self.setting {
            Setting::TwoCores => DUTY_ON_TWO,
            _ => 100,
        }
    }

    /// Number of guests that are asked.
    pub fn servers(self) -> usize {
        match self.setting {
            Setting::TwoLs => 2,
            _ => 1,
        }
    }

    /// Whether it needs guests on two cores.
    pub fn has_two_cores(self) -> bool {
        self.setting == Setting::TwoCores
    }

    /// Time for which each load runs before it is measured.
    pub fn lead(self) -> Duration {
        match self.has_two_cores() {
            true => super::LEAD_TIME,
            false => Duration::ZERO,
        }
    }

    /// Fair share of each guest, in cores, when all want to run.
    pub fn fair_shares(self) -> Vec<f64> {
        let mut weights = vec![1.0; self.vms];
        let mut caps = vec![None; self.vms];
        match self.setting {
            Setting::Weights => weights = WEIGHTS.map(f64::from).to_vec(),
            Setting::Cap => caps[0] = Some(f64::from(CAP) / 100.0),
            _ => {}
        }
        let cores = if self.has_two_cores() { 2.0 } else { 1.0 };
        let shares = fair_shares(&weights, &caps);
        shares.into_iter().map(|share| share * cores).collect()
    }

    /// Settings of both sides.
    pub fn settings(self, core: usize, other: usize) -> Settings {
        let mut settings = Settings::equal(core, WEB);
        let names = names(self.vms);
        match self.setting {
            Setting::Equal => {}
            Setting::TwoLs => settings.ls.push(names[1].clone()),
            Setting::Weights => {
                settings.weights = names.into_iter().zip(WEIGHTS).collect();
            }
            Setting::Cap => settings.caps.push((WEB.into(), CAP)),
            Setting::TwoCores => settings.cores = vec![other.min(core), other.max(core)],
        }
        settings
    }
}

/// Name of an LSVM's own work in rows.
pub fn state(own: OwnWork) -> &'static str {
    match own {
        OwnWork::Nothing => "LSVM idle",
        OwnWork::Kernel => "LSVM busy",
        OwnWork::Program => "LSVM busy in user space",
    }
}

/// A load on some guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// The guests.
    pub bed: Bed,
    /// Own work of the LSVMs.
    pub own: OwnWork,
    /// The load.
    pub load: Load,
}

impl Cell {
    /// Name in rows.
    pub fn name(&self) -> String {
        let (load, state) = (self.load.name(), state(self.own));
        format!("{load}, {state}, {}", self.bed.name())
    }

    /// Whether the guests are also measured with resting neighbours, which shows what no scheduler can better. Of those that work
    /// in their kernel only the usual bed is.
    pub fn has_alone(&self) -> bool {
        let own = match self.own {
            OwnWork::Nothing => false,
            OwnWork::Kernel => self.bed.setting == Setting::Equal && self.bed.vms == 4,
            OwnWork::Program => true,
        };
        own && self.load.is_inside()
    }

    /// Whether figures near those with resting neighbours are good too: a program in a User Mode Linux guest runs on until the
    /// guest's next tick.
    pub fn is_limited_by_guest(&self) -> bool {
        self.own == OwnWork::Program
    }

    /// Whether the LSVMs want their share all the time.
    pub fn is_saturated(&self) -> bool {
        match self.load {
            Load::Open(_) => self.own != OwnWork::Nothing,
            Load::Closed { connections, .. } => self.own != OwnWork::Nothing || connections > 1,
        }
    }

    /// Whether a quick run measures it.
    fn is_quick(&self) -> bool {
        let Bed { vms, setting } = self.bed;
        match (setting, vms, self.own) {
            (Setting::Equal, 4, OwnWork::Nothing) => {
                !matches!(self.load, Load::Closed { connections, keep_alive }
                    if !keep_alive || !matches!(connections, 1 | 16))
            }
            (Setting::Equal, 4, OwnWork::Kernel) => {
                matches!(self.load, Load::Open(50)) || self.load == kept(16)
            }
            (Setting::Equal, 4, OwnWork::Program) => self.load == Load::Open(50),
            (Setting::Equal, 2, _) | (Setting::TwoLs, 4 | 8, _) => false,
            (_, _, own) => self.load == Load::Open(50) && own == OwnWork::Nothing,
        }
    }
}

/// A closed loop with keep-alive.
const fn kept(connections: usize) -> Load {
    Load::Closed {
        connections,
        keep_alive: true,
    }
}

/// A closed loop without.
const fn new_each(connections: usize) -> Load {
    Load::Closed {
        connections,
        keep_alive: false,
    }
}

/// All cells of a full or a quick run, in the order of measurement.
///
/// They are not the full product of loads, own work and guests, which would take two hours. Four equal guests have all
/// loads while the LSVM is idle, and the loads that differ most while it is busy. (A closed loop of one connection
/// without keep-alive is part of the ping cells, on all sides.) Every other bed has the load of half its share, the
/// most ordinary one, with each kind of own work that its setting can change, and the closed loop of 16, which takes the
/// whole share. Load near the share (90 %) comes again where the share is not 1/4 of a core. Closed loops beside a
/// program in user space show the guest's tick only, so there are two.
pub fn cells(is_quick: bool) -> Vec<Cell> {
    use OwnWork::{Kernel, Nothing, Program};
    use Setting::{Cap, Equal, TwoCores, TwoLs, Weights};
    const OPEN: [Load; 3] = [Load::Open(20), Load::Open(50), Load::Open(90)];
    const HALF: Load = OPEN[1];
    const NEAR: Load = OPEN[2];
    let table: [(usize, Setting, OwnWork, Vec<Load>); 26] = [
        (
            4,
            Equal,
            Nothing,
            [
                &OPEN[..],
                &[kept(1), kept(4), kept(16), kept(64)],
                &[new_each(4), new_each(16), new_each(64)],
            ]
            .concat(),
        ),
        (
            4,
            Equal,
            Kernel,
            [&OPEN[..], &[kept(1), kept(4), kept(16), kept(64)]].concat(),
        ),
        (
            4,
            Equal,
            Program,
            [&OPEN[..], &[kept(1), kept(16)]].concat(),
        ),
        (2, Equal, Nothing, vec![HALF, NEAR, kept(16)]),
        (2, Equal, Kernel, vec![HALF]),
        (6, Equal, Nothing, vec![HALF, kept(16)]),
        (6, Equal, Kernel, vec![HALF]),
        (6, Equal, Program, vec![HALF]),
        (8, Equal, Nothing, vec![HALF, NEAR, kept(16)]),
        (8, Equal, Kernel, vec![HALF]),
        (8, Equal, Program, vec![HALF]),
        (4, TwoLs, Nothing, vec![HALF]),
        (4, TwoLs, Kernel, vec![HALF]),
        (4, TwoLs, Program, vec![HALF]),
        (6, TwoLs, Nothing, vec![HALF, kept(16)]),
        (6, TwoLs, Kernel, vec![HALF]),
        (6, TwoLs, Program, vec![HALF]),
        (8, TwoLs, Nothing, vec![HALF]),
        (8, TwoLs, Kernel, vec![HALF]),
        (8, TwoLs, Program, vec![HALF]),
        (4, Weights, Nothing, vec![HALF, NEAR, kept(16)]),
        (4, Weights, Kernel, vec![HALF]),
        (2, Cap, Nothing, vec![HALF, NEAR, kept(16)]),
        (2, Cap, Kernel, vec![HALF]),
        (5, TwoCores, Nothing, vec![HALF, kept(16)]),
        (5, TwoCores, Kernel, vec![HALF]),
    ];
    let cells = table.into_iter().flat_map(|(vms, setting, own, loads)| {
        let bed = Bed { vms, setting };
        loads.into_iter().map(move |load| Cell { bed, own, load })
    });
    cells.filter(|cell| !is_quick || cell.is_quick()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_cell_has_its_own_name_and_beds_come_in_one_piece() {
        let cells = cells(false);
        let names: BTreeSet<String> = cells.iter().map(Cell::name).collect();
        assert_eq!(names.len(), cells.len());
        let mut beds: Vec<Bed> = cells.iter().map(|cell| cell.bed).collect();
        beds.dedup();
        let number = beds.len();
        beds.sort();
        beds.dedup();
        assert_eq!(
            beds.len(),
            number,
            "a bed would be switched to more than once"
        );
    }

    #[test]
    fn the_loads_and_guests_of_issue_23_are_there() {
        let names: Vec<String> = cells(false).iter().map(Cell::name).collect();
        let has = |part: &str| names.iter().any(|name| name.contains(part));
        for vms in [2, 4, 6, 8] {
            assert!(has(&format!(
                "open loop 50 %, LSVM idle, {vms} VMs, others 100 %"
            )));
        }
        for vms in [4, 6, 8] {
            for state in ["LSVM busy,", "LSVM busy in user space,"] {
                assert!(has(&format!("{state} {vms} VMs, others")), "{state} {vms}");
                assert!(
                    has(&format!("{state} {vms} VMs, two LSVMs")),
                    "{state} {vms}"
                );
            }
        }
        for load in [
            "open loop 20",
            "open loop 90",
            "loop 64, keep",
            "loop 64, no",
        ] {
            assert!(has(load), "{load}");
        }
        for bed in ["weights 3:1:1:2", "cap 35 %", "on two cores"] {
            assert!(has(bed), "{bed}");
        }
    }

    #[test]
    fn a_quick_run_has_a_cell_of_each_kind_of_guests() {
        let quick = cells(true);
        assert!(quick.len() < 16, "{}", quick.len());
        let settings: BTreeSet<Setting> = quick.iter().map(|cell| cell.bed.setting).collect();
        assert_eq!(settings.len(), 5);
        assert!(quick.iter().any(|cell| cell.load == kept(16)));
    }

    #[test]
    fn shares_follow_weights_caps_and_cores() {
        let share = |vms, setting| Bed { vms, setting }.fair_shares()[0];
        assert_eq!(share(8, Setting::TwoLs), 0.125);
        assert!((share(4, Setting::Weights) - 3.0 / 7.0).abs() < 1e-9);
        assert_eq!(share(2, Setting::Cap), 0.35);
        assert_eq!(share(5, Setting::TwoCores), 0.4);
        let bed = Bed {
            vms: 4,
            setting: Setting::Weights,
        };
        let settings = bed.settings(1, 0);
        assert_eq!(settings.weights[3], ("vm4".to_owned(), 512));
        assert_eq!(settings.cores, [1]);
    }
}

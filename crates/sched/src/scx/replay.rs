// SPDX-License-Identifier: Apache-2.0
//! Compares the kernel's copy of the algorithms (bpf/slices.h, bpf/turbo.h) with `policy`: both get the same random histories and
//! must take the same decisions.

use std::sync::Mutex;

use proptest::prelude::*;
use viola_bpf_build::replay;
use viola_policy::slices::simulate::{Behaviour, Core, Driver, SimVm};
use viola_policy::slices::{
    Activity, Class, CoreScheduler, Decision, Interleaved, InterleavedConfig, MS, Nanos, Params,
    Rank, US,
};
use viola_policy::turbo::{
    OtherCoreUsage, PoolScheduler, RegularConfig, RegularCore, TurboConfig, TurboCore,
};

use super::layout::{Kind, ROWS, VmParams};

type Configure = unsafe extern "C" fn(u64, u32, u64, u64, u64, u32, *const VmParams);
type AddOtherCores = unsafe extern "C" fn(u32, u64, u64, u64, u32);
type Due = unsafe extern "C" fn(u32, *mut u32) -> u64;
type Decide =
    unsafe extern "C" fn(u64, *const u64, *const u32, *mut u32, *mut u64, *mut u32) -> u64;

/// The compiled headers. They hold one core's state, so one test uses them at a time.
struct Library {
    reset: unsafe extern "C" fn(),
    configure: Configure,
    add_other_cores: AddOtherCores,
    due: Due,
    decide: Decide,
}

static LIBRARY: Mutex<Option<Library>> = Mutex::new(None);

fn load() -> Library {
    let library = replay::Library::compile("replay.c", &["-fwrapv", "-Wno-unused"]);
    // SAFETY: the functions have these types in replay.c.
    unsafe {
        Library {
            reset: library.function(c"replay_reset"),
            configure: library.function(c"replay_configure"),
            add_other_cores: library.function(c"replay_add_other_cores"),
            due: library.function(c"replay_due"),
            decide: library.function(c"replay_decide"),
        }
    }
}

fn with_library<T>(f: impl FnOnce(&Library) -> T) -> T {
    let mut guard = LIBRARY.lock().unwrap_or_else(|e| e.into_inner());
    let library = guard.get_or_insert_with(load);
    // SAFETY: the lock is held.
    unsafe { (library.reset)() };
    f(library)
}

/// The machine in `policy`.
enum PolicyCore {
    Interleaved(Interleaved),
    Regular(RegularCore),
    Turbo(Box<TurboCore>),
}

impl PolicyCore {
    fn new(kind: Kind, slice: Nanos, reserve: u32) -> Self {
        match kind {
            Kind::Interleaved => {
                let mut machine = Interleaved::default();
                machine.set_batch_slice(slice);
                Self::Interleaved(machine)
            }
            Kind::Regular => Self::Regular(RegularCore::new(RegularConfig {
                slice,
                ..RegularConfig::default()
            })),
            Kind::Turbo => Self::Turbo(Box::new(TurboCore::new(TurboConfig {
                slice,
                reserve,
                ..TurboConfig::default()
            }))),
        }
    }

    fn machine(&mut self) -> &mut dyn CoreScheduler {
        match self {
            Self::Interleaved(m) => m,
            Self::Regular(m) => m,
            Self::Turbo(m) => m,
        }
    }

    fn pooled(&mut self) -> Option<&mut dyn PoolScheduler> {
        match self {
            Self::Interleaved(_) => None,
            Self::Regular(m) => Some(m),
            Self::Turbo(m) => Some(m),
        }
    }
}

/// Both copies; panics at the first difference.
struct Both<'a> {
    library: &'a Library,
    policy: PolicyCore,
    kind: Kind,
    slice: Nanos,
    reserve: u32,
    /// Ids by row, 0 for a vacant one.
    rows: [VmParams; ROWS],
    /// Rows in the order that policy has them.
    order: Vec<usize>,
    decisions: usize,
}

impl<'a> Both<'a> {
    fn new(library: &'a Library, kind: Kind, slice: Nanos, reserve: u32) -> Self {
        Self {
            library,
            policy: PolicyCore::new(kind, slice, reserve),
            kind,
            slice,
            reserve,
            rows: [VmParams::default(); ROWS],
            order: Vec::new(),
            decisions: 0,
        }
    }

    /// Changes the algorithm of the core; the new one starts without history.
    fn set_kind(&mut self, kind: Kind, now: Nanos) {
        if kind != self.kind {
            self.kind = kind;
            self.policy = PolicyCore::new(kind, self.slice, self.reserve);
        }
        self.configured(now);
    }

    /// Reports to both what the VMs ran on other cores, by row.
    fn add_other_cores(&mut self, of: impl Fn(usize) -> OtherCoreUsage) {
        let usage: Vec<OtherCoreUsage> = self.order.iter().map(|row| of(*row)).collect();
        let Some(pooled) = self.policy.pooled() else {
            return;
        };
        pooled.add_other_cores(&usage);
        for (row, e) in self.order.iter().zip(&usage) {
            // SAFETY: a row that is in use.
            unsafe {
                (self.library.add_other_cores)(
                    *row as u32,
                    e.turbo,
                    e.total,
                    e.due,
                    u32::from(e.waits),
                );
            }
        }
    }

    /// Asserts that both say the same of what each VM is due.
    fn assert_same_dues(&mut self) {
        let PolicyCore::Regular(policy) = &self.policy else {
            return;
        };
        for (i, row) in self.order.iter().enumerate() {
            let mut waits = 9;
            // SAFETY: a row that is in use, and a live number.
            let due = unsafe { (self.library.due)(*row as u32, &raw mut waits) };
            assert_eq!((due, waits != 0), policy.due(i), "row {row}");
        }
    }

    fn params(&self, row: usize) -> Params {
        let v = &self.rows[row];
        Params {
            id: v.id,
            class: if v.ls == 1 { Class::Ls } else { Class::Batch },
            weight: v.weight,
            cap_permille: (v.cap_permille > 0).then_some(v.cap_permille),
            microslice: v.microslice,
        }
    }

    fn configured(&mut self, now: Nanos) {
        self.order = (0..ROWS).filter(|r| self.rows[*r].id != 0).collect();
        let params: Vec<Params> = self.order.iter().map(|r| self.params(*r)).collect();
        self.policy.machine().configure(now, &params);
        let config = InterleavedConfig::default();
        // SAFETY: ROWS rows.
        unsafe {
            (self.library.configure)(
                now,
                self.kind as u32,
                self.slice,
                config.credit_ls,
                config.credit_batch,
                self.reserve,
                self.rows.as_ptr(),
            );
        }
    }

    fn row_of(&self, id: u32) -> Option<usize> {
        self.rows.iter().position(|v| v.id == id)
    }
}

impl CoreScheduler for Both<'_> {
    /// Gives rows as the mechanism does: a VM keeps its row, so the order differs from policy's.
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        for row in 0..ROWS {
            if !vms.iter().any(|p| p.id == self.rows[row].id) {
                self.rows[row] = VmParams::default();
            }
        }
        for p in vms {
            let row = self.row_of(p.id).or_else(|| self.row_of(0)).unwrap();
            self.rows[row] = row_for(p, p.id);
        }
        self.configured(now);
    }

    /// `seen` is in the order of the rows.
    fn decide(&mut self, now: Nanos, seen: &[Activity], out: &mut Decision) {
        self.policy.machine().decide(now, seen, out);
        let (mut used, mut runnable) = ([0; ROWS], [0; ROWS]);
        for (row, seen) in self.order.iter().zip(seen) {
            (used[*row], runnable[*row]) = (seen.used, u32::from(seen.runnable));
        }
        let (mut ranks, mut budgets, mut notify) = ([0; ROWS], [0; ROWS], [9; 2]);
        // SAFETY: arrays of the lengths that replay.c says.
        let until = unsafe {
            (self.library.decide)(
                now,
                used.as_ptr(),
                runnable.as_ptr(),
                ranks.as_mut_ptr(),
                budgets.as_mut_ptr(),
                notify.as_mut_ptr(),
            )
        };
        self.decisions += 1;
        let at = format!("decision {} at {now} ns", self.decisions);
        for (i, row) in self.order.iter().enumerate() {
            let who = format!("{at}, {:?}", self.params(*row));
            let rank = [
                Rank::Capped,
                Rank::Background,
                Rank::Waiting,
                Rank::Owner,
                Rank::Preempt,
                Rank::Boost,
            ][ranks[*row] as usize];
            assert_eq!(
                (rank, budgets[*row]),
                (out.ranks[i], out.budgets[i]),
                "{who}"
            );
        }
        assert_eq!(until, out.until, "{at}");
        let notify = notify.map(|n| n != 0);
        assert_eq!(notify, [out.notify_wake, out.notify_block], "{at}");
        self.assert_same_dues();
    }
}

fn row_for(p: &Params, id: u32) -> VmParams {
    VmParams {
        id,
        ls: u32::from(p.class == Class::Ls),
        weight: p.weight,
        cap_permille: p.cap_permille.unwrap_or(0),
        microslice: p.microslice,
        here: 1,
        of: 1,
    }
}

fn params() -> impl Strategy<Value = Params> {
    let weight = prop_oneof![Just(256), 1..65_536u32];
    let cap = prop_oneof![3 => Just(None), 1 => (1..2_000u32).prop_map(Some)];
    let micro = prop_oneof![Just(300 * US), 10 * US..5 * MS];
    (any::<bool>(), weight, cap, micro).prop_map(|(ls, weight, cap_permille, microslice)| Params {
        id: 0,
        class: if ls { Class::Ls } else { Class::Batch },
        weight,
        cap_permille,
        microslice,
    })
}

fn behaviour() -> impl Strategy<Value = Behaviour> {
    prop_oneof![
        3 => Just(Behaviour::Busy),
        1 => Just(Behaviour::Idle),
        2 => (MS..20 * MS, 10 * US..2 * MS).prop_map(|(period, on)| Behaviour::Duty { period, on }),
        2 => (1..5 * MS, 1..5 * MS).prop_map(|(sleep, run)| Behaviour::Bursts {
            sleep: (sleep / 2, sleep),
            run: (run / 2, run),
        }),
        1 => Just(Behaviour::Evade { margin: 20 * US, sleep: 50 * US }),
    ]
}

/// One step of a history.
#[derive(Debug, Clone)]
enum Step {
    /// Time passes. For each VM: the share of it that the VM ran, and whether the VM is runnable now.
    Decide(Nanos, Vec<(u16, bool)>),
    /// A VM arrives, in the place of the one in this row.
    Arrive(usize, Params),
    /// The parameters of a VM change.
    Change(usize, Params),
    Leave(usize),
    /// VMs ran on other cores: each a part of this time, by row.
    OtherCores(Nanos, Vec<(u16, bool)>),
    /// The algorithm of the core changes.
    SetKind(Kind),
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Interleaved),
        Just(Kind::Regular),
        Just(Kind::Turbo)
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let seen = proptest::collection::vec((0..1_000u16, any::<bool>()), 8);
    let usage = proptest::collection::vec((0..1_000u16, any::<bool>()), 8);
    let span = prop_oneof![5 => 1..5 * MS, 1 => 1..100 * US, 1 => 1..2_000 * MS];
    prop_oneof![
        20 => (span, seen).prop_map(|(span, seen)| Step::Decide(span, seen)),
        1 => (0..8usize, params()).prop_map(|(row, p)| Step::Arrive(row, p)),
        1 => (0..8usize, params()).prop_map(|(row, p)| Step::Change(row, p)),
        1 => (0..8usize).prop_map(Step::Leave),
        6 => (prop_oneof![9 => 1..2 * MS, 1 => 1..100 * MS], usage).prop_map(|(span, usage)| Step::OtherCores(span, usage)),
        1 => kind().prop_map(Step::SetKind),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Histories that no core can have: all VMs run at once, for more time than passes.
    #[test]
    fn any_history_gives_equal_decisions(
        first in proptest::collection::vec(params(), 1..6),
        steps in proptest::collection::vec(step(), 1..300),
        (kind, slice, reserve) in (
            kind(),
            prop_oneof![Just(4 * MS), 10 * US..40 * MS],
            prop_oneof![Just(0), Just(400), 0..1_100u32],
        ),
    ) {
        with_library(|library| {
            let mut both = Both::new(library, kind, slice, reserve);
            let (mut now, mut ids) = (5 * MS, 0);
            let mut put = |both: &mut Both<'_>, row: usize, p: Params, id: Option<u32>| {
                let id = id.unwrap_or_else(|| { ids += 1; ids });
                both.rows[row] = row_for(&p, id);
            };
            for (row, p) in first.into_iter().enumerate() {
                put(&mut both, row, p, None);
            }
            both.configured(now);
            let mut out = Decision::default();
            for step in steps {
                match step {
                    Step::Decide(span, seen) => {
                        now += span;
                        let seen: Vec<Activity> = both.order.iter().map(|row| {
                            let (part, runnable) = seen[*row % seen.len()];
                            // most VMs did not run
                            let used = if part < 600 { 0 } else { span * u64::from(part) / 1_000 };
                            Activity { used, runnable, ..Activity::default() }
                        }).collect();
                        both.decide(now, &seen, &mut out);
                    }
                    Step::Arrive(row, p) => {
                        put(&mut both, row, p, None);
                        both.configured(now);
                    }
                    Step::Change(row, p) if both.rows[row].id != 0 => {
                        let id = both.rows[row].id;
                        put(&mut both, row, p, Some(id));
                        both.configured(now);
                    }
                    Step::Change(..) => {}
                    Step::OtherCores(span, usage) => both.add_other_cores(|row| {
                        let (part, waits) = usage[row % usage.len()];
                        let total = if part < 300 { 0 } else { span * u64::from(part) / 1_000 };
                        OtherCoreUsage { turbo: total / 2, total, due: total * 3 / 2, waits }
                    }),
                    Step::SetKind(kind) => both.set_kind(kind, now),
                    Step::Leave(row) => {
                        both.rows[row] = VmParams::default();
                        both.configured(now);
                    }
                }
            }
        });
    }

    /// Histories of a simulated core that follows the decisions, and that shares VMs with other cores.
    #[test]
    fn a_simulated_core_gets_equal_decisions(
        vms in proptest::collection::vec((params(), behaviour()), 1..9),
        late in 0..50 * US,
        seed in any::<u64>(),
        (kind, reserve) in (kind(), prop_oneof![Just(0), Just(400)]),
        usage in proptest::collection::vec((0..1_000u16, any::<bool>()), 8),
    ) {
        with_library(|library| {
            let vms: Vec<SimVm> = vms.into_iter().enumerate().map(|(i, (params, behaviour))| SimVm {
                params: Params { id: i as u32 + 1, ..params },
                behaviour,
            }).collect();
            let driver = Driver { late, ..Driver::default() };
            let mut core = Core::new(Both::new(library, kind, 4 * MS, reserve), &vms, driver, seed);
            for at in 1..=200 {
                core.run_until(at * MS).unwrap();
                core.scheduler_mut().add_other_cores(|row| {
                    let (part, waits) = usage[(row + at as usize) % usage.len()];
                    let turbo = u64::from(part) * US / 3;
                    OtherCoreUsage { turbo, total: 2 * turbo, due: turbo * 2, waits }
                });
            }
            assert!(core.scheduler().decisions > 0);
        });
    }
}

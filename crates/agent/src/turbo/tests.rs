// SPDX-License-Identifier: Apache-2.0
//! Properties of every plan, and plans of a small guest.

mod model;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use model::carry_out;

use super::cpus::Cpus;
use super::knob::{Knob, MEMBER, Step, TURBO_GROUP};
use super::plan::{Goal, Kind, PARTITION_TYPE, Skips, kind, plan, serves_io};
use super::settings::{Applications, Settings};
use super::snapshot::{Cgroup, Irq, Irqbalance, Nic, Snapshot, Task, TurboGroup};

fn set(last: u32) -> impl Strategy<Value = Cpus> {
    prop::collection::btree_set(0..=last, 1..=last as usize + 1)
        .prop_map(|cpus| cpus.into_iter().collect())
}

/// A set of CPUs, or none, as a queue may have.
fn any_set(last: u32) -> impl Strategy<Value = Cpus> {
    prop::collection::btree_set(0..=last, 0..=last as usize + 1)
        .prop_map(|cpus| cpus.into_iter().collect())
}

fn irq(last: u32) -> impl Strategy<Value = Irq> {
    let names = [
        "virtio0-input.0",
        "virtio1-req.0",
        "virtio2-input",
        "virtio3-requests",
        "virtio4-inflate",
        "i8042",
        "timer",
        "eth0-rx-0",
        "nvme0q1",
        "ahci[0000:00:1f.2]",
        "",
    ];
    let class = prop::option::of(prop::sample::select(vec![0x01_0601, 0x02_0000, 0x0c_0330]));
    (
        prop::sample::select(names.to_vec()),
        class,
        set(last),
        prop::option::of(set(last)),
        any_set(last),
        any::<bool>(),
    )
        .prop_map(|(name, class, cpus, effective, seen, settable)| Irq {
            actions: Vec::from_iter((!name.is_empty()).then(|| name.to_owned())),
            class,
            device: None,
            cpus,
            effective,
            seen,
            settable,
        })
}

fn nic(last: u32) -> impl Strategy<Value = Nic> {
    let masks = || prop::collection::vec(any_set(last), 0..4);
    (masks(), masks(), prop::option::of(0..200_000_u32)).prop_map(|(rps, xps, mbit)| Nic {
        index: 2,
        device: "/pci0/virtio0".into(),
        mbit,
        rfs: rps.iter().map(|cpus| cpus.len() as u32 * 4).collect(),
        rps,
        xps,
    })
}

fn task(last: u32) -> impl Strategy<Value = Task> {
    let names = [
        "jbd2/vda1-8",
        "kswapd0",
        "napi/eth0-1",
        "sshd",
        "ksoftirqd/0",
    ];
    let groups = ["/", "/system.slice", "/viola.turbo"];
    (
        prop::sample::select(names.to_vec()),
        any::<bool>(),
        any::<bool>(),
        set(last),
        prop::sample::select(groups.to_vec()),
    )
        .prop_map(|(name, kernel, fixed, cpus, group)| Task {
            pid: 7,
            parent: 1,
            start: 9,
            name: name.into(),
            kernel,
            fixed,
            cpus,
            cgroup: group.into(),
        })
}

fn cgroup(last: u32) -> impl Strategy<Value = Cgroup> {
    let cpus = || any_set(last).prop_map(|cpus| cpus.to_string());
    let kind = prop::sample::select(vec![
        MEMBER,
        PARTITION_TYPE,
        "isolated invalid (no exclusive CPU)",
    ]);
    let turbo_group = (cpus(), kind).prop_map(|(cpus, kind)| TurboGroup {
        cpus,
        partition: kind.into(),
    });
    let slices = prop::collection::btree_map("[a-c]\\.slice", cpus(), 0..3);
    (any::<bool>(), prop::option::of(turbo_group), slices).prop_map(
        |(enabled, turbo_group, slices)| Cgroup {
            enabled,
            turbo_group,
            slices,
        },
    )
}

fn snapshot() -> impl Strategy<Value = Snapshot> {
    (1_u32..6).prop_flat_map(|last| {
        let irqs = prop::collection::btree_map(1..30_u32, irq(last), 0..8);
        let nics = prop::collection::btree_map("eth[0-1]", nic(last), 0..2);
        let tasks = prop::collection::btree_map(2..50_i32, task(last), 0..8);
        let banned = prop::option::of(prop::collection::btree_set(1..30_u32, 0..4));
        let daemon = prop::option::of(banned.prop_map(|banned| Irqbalance { pid: 5, banned }));
        let buffer = (0..100_000_000_u32).prop_map(|n| n.to_string());
        (
            irqs,
            nics,
            tasks,
            prop::option::of(cgroup(last)),
            daemon,
            prop::option::of(set(last)),
            buffer,
            set(last),
            1..64_u64,
        )
            .prop_map(
                move |(irqs, nics, tasks, cgroup, irqbalance, workqueues, buffer, online, mib)| {
                    Snapshot {
                        online,
                        possible: (0..=last).collect(),
                        irqs,
                        nics,
                        disks: BTreeMap::from([("vda".into(), "1".into())]),
                        virtio: (0..5).map(|n| (format!("virtio{n}"), n + 1)).collect(),
                        workqueues,
                        tasks,
                        cgroup,
                        irqbalance,
                        sysctls: BTreeMap::from([
                            ("net/core/rmem_max".into(), buffer.clone()),
                            ("net/core/rmem_default".into(), buffer.clone()),
                            ("net/ipv4/tcp_rmem".into(), format!("4096 131072 {buffer}")),
                        ]),
                        memory: mib << 24,
                    }
                },
            )
    })
}

fn goal() -> impl Strategy<Value = Goal> {
    let applications = prop::sample::select(vec![Applications::Move, Applications::Leave]);
    (0..7_u32, applications, 0..200_u32, any::<bool>()).prop_map(
        |(turbo, applications, delay_ms, default_buffers)| Goal {
            turbo,
            applications,
            delay_ms,
            default_buffers,
            ..Goal::from(&Settings::default())
        },
    )
}

/// Refusals of some of the settings in a first plan.
fn refusals(now: &Snapshot, goal: &Goal, which: &[bool]) -> Skips {
    let mut skips = Skips::default();
    for _ in 0..8 {
        let Ok(plan) = plan(now, goal, &skips) else {
            break;
        };
        let steps = plan.steps.iter().zip(which.iter().cycle());
        let refused = steps.filter(|(_, refused)| **refused);
        skips
            .refused
            .extend(refused.map(|(step, _)| step.knob.clone()));
    }
    skips
}

/// Whether a setting is about I/O, or about an application's thread.
fn is_io(now: &Snapshot, knob: &Knob) -> bool {
    match knob {
        Knob::Irq { irq } => kind(&now.irqs[irq], now) != Kind::Other && now.irqs[irq].settable,
        Knob::Member { tid } => {
            let task = &now.tasks[tid];
            task.kernel && !task.fixed && serves_io(&task.name)
        }
        Knob::Thread { tid } => {
            let task = &now.tasks[tid];
            !task.fixed && (!task.kernel || serves_io(&task.name))
        }
        _ => true,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_plan_that_is_carried_out_leaves_no_step_and_its_inverse_restores(
        before in snapshot(),
        goal in goal(),
        refused in prop::collection::vec(prop::bool::weighted(0.2), 1..9),
    ) {
        let skips = refusals(&before, &goal, &refused);
        let Ok(first) = plan(&before, &goal, &skips) else {
            prop_assert!(before.online.len() < 2 || !before.online.has(goal.turbo));
            return Ok(());
        };
        let mut now = before.clone();
        for step in &first.steps {
            prop_assert_eq!(now.get(&step.knob), Some(step.old.clone()), "{}", step.knob);
            prop_assert_ne!(&step.old, &step.new);
            prop_assert!(!skips.refused.contains(&step.knob));
            carry_out(&mut now, &step.knob, &step.new);
            prop_assert_eq!(now.get(&step.knob), Some(step.new.clone()));
        }
        let again = plan(&now, &goal, &skips).unwrap();
        prop_assert_eq!(again.steps, Vec::new());
        for step in first.steps.iter().rev() {
            let (old, new) = (step.new.clone(), step.old.clone());
            let back = Step { old, new, ..step.clone() };
            carry_out(&mut now, &back.knob, &back.new);
        }
        prop_assert_eq!(now, before);
    }

    #[test]
    fn nothing_else_is_touched_no_mask_is_empty_and_no_buffer_lowered(
        now in snapshot(),
        goal in goal(),
        refused in prop::collection::vec(prop::bool::weighted(0.2), 1..9),
    ) {
        let skips = refusals(&now, &goal, &refused);
        let plan = plan(&now, &goal, &skips);
        let turbo = goal.turbo.to_string();
        for step in plan.iter().flat_map(|plan| &plan.steps) {
            prop_assert!(is_io(&now, &step.knob), "{} {}", step.knob, step.identity);
            match &step.knob {
                Knob::Irq { .. } | Knob::Rps { .. } | Knob::Workqueues | Knob::GroupCpus => {
                    prop_assert_eq!(&step.new, &turbo);
                }
                Knob::Xps { .. } | Knob::Slice { .. } => {
                    prop_assert!(!Cpus::parse_list(&step.new).unwrap().is_empty());
                }
                Knob::Thread { tid } => {
                    let cpus = Cpus::parse_list(&step.new).unwrap();
                    prop_assert!(!cpus.intersection(&now.online).is_empty());
                    prop_assert_eq!(cpus.has(goal.turbo), now.tasks[tid].kernel);
                }
                Knob::Sysctl { .. } => {
                    let words = |text: &str| -> Vec<u64> {
                        text.split(' ').map(|w| w.parse().unwrap()).collect()
                    };
                    for (old, new) in words(&step.old).iter().zip(words(&step.new)) {
                        prop_assert!(*old <= new);
                    }
                }
                _ => {}
            }
            prop_assert!(!step.knob.to_string().contains('\n'));
        }
    }
}

/// Two vCPUs, a network interface, a disk whose interrupts are managed, and a keyboard.
fn guest() -> Snapshot {
    let irq = |name: &str, settable| Irq {
        actions: vec![name.into()],
        cpus: Cpus::parse_list("0-1").unwrap(),
        settable,
        ..Irq::default()
    };
    Snapshot {
        online: Cpus::parse_list("0-1").unwrap(),
        possible: Cpus::parse_list("0-1").unwrap(),
        irqs: BTreeMap::from([
            (1, irq("i8042", true)),
            (24, irq("virtio0-input.0", true)),
            (25, irq("virtio1-req.0", false)),
        ]),
        virtio: BTreeMap::from([("virtio0".into(), 1), ("virtio1".into(), 2)]),
        nics: BTreeMap::from([(
            "eth0".into(),
            Nic {
                index: 2,
                device: "/pci0/virtio0".into(),
                mbit: Some(1000),
                rps: vec![Cpus::default()],
                rfs: vec![0],
                ..Nic::default()
            },
        )]),
        sysctls: BTreeMap::from([("net/core/rmem_max".into(), "212992".into())]),
        memory: 1 << 30,
        cgroup: Some(Cgroup {
            enabled: true,
            slices: BTreeMap::from([("user.slice".into(), String::new())]),
            ..Cgroup::default()
        }),
        ..Snapshot::default()
    }
}

fn shown(now: &Snapshot, goal: &Goal, skips: &Skips) -> (Vec<String>, String) {
    let plan = plan(now, goal, skips).unwrap();
    let steps = plan.steps.iter();
    let steps = steps.map(|s| format!("{}: {} -> {}", s.knob, s.old, s.new));
    let notes: Vec<String> = plan.notes.into_iter().map(|note| note.text).collect();
    (steps.collect(), notes.join("; "))
}

#[test]
fn a_small_guest_is_planned_as_the_paper_has_it() {
    let goal = Goal::from(&Settings::default());
    let (steps, notes) = shown(&guest(), &goal, &Skips::default());
    assert_eq!(
        steps,
        [
            "cgroup viola.turbo: absent -> there",
            "cpuset.cpus of viola.turbo:  -> 0",
            "partition viola.turbo: member -> isolated",
            "interrupt 24: 0-1 -> 0",
            // 000 section 3.2: 11.25 MB, of which the authors needed 40 MB
            "net.core.rmem_max: 212992 -> 45000000",
        ]
    );
    assert!(
        notes.contains("interrupt 25 (virtio1-req.0): the kernel does not let"),
        "{notes}"
    );
}

#[test]
fn an_interrupt_that_is_refused_is_followed_by_rps() {
    let goal = Goal::from(&Settings::default());
    let skips = Skips {
        refused: BTreeSet::from([Knob::Irq { irq: 24 }]),
        ..Skips::default()
    };
    let (steps, _) = shown(&guest(), &goal, &skips);
    assert!(
        steps.contains(&"RPS of eth0 rx-0:  -> 0".to_owned()),
        "{steps:?}"
    );
    // but not where it has arrived at the turbo vCPU only
    let mut guest = guest();
    guest.irqs.get_mut(&24).unwrap().seen = Cpus::one(0);
    let (steps, _) = shown(&guest, &goal, &skips);
    assert!(!steps.iter().any(|s| s.starts_with("RPS")), "{steps:?}");
}

#[test]
fn where_there_is_no_partition_cpusets_are_set_and_without_those_threads() {
    let goal = Goal::from(&Settings::default());
    let mut guest = guest();
    let thread = |group: &str| Task {
        cpus: Cpus::parse_list("0-1").unwrap(),
        cgroup: group.into(),
        ..Task::default()
    };
    guest.tasks.insert(1, thread("/"));
    guest.tasks.insert(9, thread("/user.slice"));
    let skips = Skips {
        refused: BTreeSet::from([Knob::Partition]),
        ..Skips::default()
    };
    let (steps, notes) = shown(&guest, &goal, &skips);
    assert!(
        steps.contains(&"cpuset.cpus of user.slice:  -> 1".to_owned()),
        "{steps:?}"
    );
    assert!(
        steps.contains(&"CPUs of thread 1: 0-1 -> 1".to_owned()),
        "{steps:?}"
    );
    assert!(
        !steps
            .iter()
            .any(|s| s.contains(TURBO_GROUP) || s.contains("thread 9")),
        "{steps:?}"
    );
    assert!(notes.contains("there can be no partition"), "{notes}");
    guest.cgroup = None;
    let (steps, notes) = shown(&guest, &goal, &skips);
    assert!(
        steps.contains(&"CPUs of thread 9: 0-1 -> 1".to_owned()),
        "{steps:?}"
    );
    assert!(notes.contains("no cpuset of cgroup v2"), "{notes}");
}

#[test]
fn interrupts_move_only_if_irqbalance_accepts_the_ban() {
    let goal = Goal::from(&Settings::default());
    let mut guest = guest();
    let daemon = |banned: Option<&[u32]>| {
        let banned = banned.map(|b| b.iter().copied().collect());
        Some(Irqbalance { pid: 5, banned })
    };
    guest.irqbalance = daemon(Some(&[7]));
    let (steps, _) = shown(&guest, &goal, &Skips::default());
    let ban = "interrupts banned in irqbalance (5): 7 -> 7 24".to_owned();
    let at = |text: &str| steps.iter().position(|s| s.starts_with(text));
    assert!(
        at(&ban) < at("interrupt 24") && at(&ban).is_some(),
        "{steps:?}"
    );
    guest.irqbalance = daemon(None);
    let (steps, notes) = shown(&guest, &goal, &Skips::default());
    assert!(
        !steps.iter().any(|s| s.starts_with("interrupt")),
        "{steps:?}"
    );
    assert!(
        notes.contains("irqbalance (process 5) does not leave I/O interrupts alone"),
        "{notes}"
    );
}

#[test]
fn a_vm_with_one_vcpu_and_a_wrong_number_are_refused_with_a_sentence() {
    for (online, cpu, says) in [
        ("0", 0, "this VM has one vCPU"),
        ("0-1", 2, "there is no vCPU 2 in this VM; the last one is 1"),
        ("0,2", 1, "vCPU 1 is offline"),
    ] {
        let mut guest = guest();
        guest.online = Cpus::parse_list(online).unwrap();
        guest.possible = guest.possible.union(&guest.online);
        let goal = Goal {
            turbo: cpu,
            ..Goal::from(&Settings::default())
        };
        let off = plan(&guest, &goal, &Skips::default()).unwrap_err();
        assert!(off.to_string().starts_with(says), "{off}");
    }
}

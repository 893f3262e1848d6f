// SPDX-License-Identifier: Apache-2.0
//! Compares bpf/delay.h with a list of all packets: the header is compiled as a library and gets the same random histories.

use std::sync::OnceLock;

use proptest::prelude::*;
use viola_bpf_build::replay;

use super::layout::{DELAY_STEPS, HistCounters, VmDelay, bucket_of};

type OnVm = unsafe extern "C" fn(*mut VmDelay, u64);

struct Library {
    packet: OnVm,
    wake: OnVm,
    run: OnVm,
    stop: unsafe extern "C" fn(*mut VmDelay, u32),
    bucket: unsafe extern "C" fn(u64) -> u32,
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(load)
}

fn load() -> Library {
    let library = replay::Library::compile("delay_replay.c", &["-Werror"]);
    // SAFETY: the functions have these types in delay_replay.c.
    unsafe {
        Library {
            packet: library.function(c"replay_packet"),
            wake: library.function(c"replay_wake"),
            run: library.function(c"replay_run"),
            stop: library.function(c"replay_stop"),
            bucket: library.function(c"replay_bucket"),
        }
    }
}

const NEW: VmDelay = VmDelay {
    oldest: 0,
    woken: 0,
    running: 0,
    runnable: 0,
    shift: 0,
    _pad: 0,
    steps: [0; DELAY_STEPS],
    packets: HistCounters::ZERO,
    wakes: HistCounters::ZERO,
};

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Sleeps,
    Queued,
    Runs,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Packets(u32),
    Wake,
    Run,
    Preempt,
    Sleep,
}

/// Time before the action (ns), vCPU, action.
type Step = (u64, usize, Action);

fn steps(vcpus: usize) -> impl Strategy<Value = Vec<Step>> {
    // From a microsecond to seconds: a VM may be paused.
    let pause = (0..32_u32).prop_flat_map(|octave| 0..(1_u64 << octave));
    let action = prop_oneof![
        6 => (1..5_u32).prop_map(Action::Packets),
        2 => Just(Action::Wake),
        2 => Just(Action::Run),
        1 => Just(Action::Preempt),
        1 => Just(Action::Sleep),
    ];
    prop::collection::vec((pause, 0..vcpus, action), 1..300)
}

/// The buckets of what was counted from `before` on, ascending.
fn counted(before: &HistCounters, now: &HistCounters) -> Vec<usize> {
    let new = now.counts.iter().zip(&before.counts).enumerate();
    new.flat_map(|(b, (n, o))| std::iter::repeat_n(b, (n - o) as usize))
        .collect()
}

/// A VM in the library, and what its delays should be.
struct Twin {
    vm: VmDelay,
    now: u64,
    vcpus: Vec<State>,
    waiting: Vec<u64>,
    woken: Option<u64>,
}

impl Twin {
    fn has(&self, state: State) -> bool {
        self.vcpus.contains(&state)
    }

    fn take(&mut self, (pause, vcpu, action): Step) {
        let (lib, before) = (library(), self.vm);
        self.now += pause;
        let (now, vm, state) = (self.now, &raw mut self.vm, self.vcpus[vcpu]);
        // SAFETY: functions of the library on a VM that nobody else uses.
        unsafe {
            match (action, state) {
                (Action::Packets(n), _) => (0..n).for_each(|_| (lib.packet)(vm, now)),
                (Action::Wake, State::Sleeps) => (lib.wake)(vm, now),
                (Action::Run, State::Queued) => (lib.run)(vm, now),
                (Action::Preempt, State::Runs) => (lib.stop)(vm, 0),
                (Action::Sleep, State::Runs) => (lib.stop)(vm, 1),
                _ => return,
            }
        }
        let (mut exact, mut slack) = (Vec::new(), 0);
        match action {
            Action::Packets(n) if self.has(State::Runs) => exact = vec![0; n as usize],
            Action::Packets(n) => self.waiting.extend((0..n).map(|_| now)),
            Action::Wake => {
                if self.vcpus.iter().all(|s| *s == State::Sleeps) {
                    self.woken = Some(now);
                }
                self.vcpus[vcpu] = State::Queued;
            }
            Action::Run => {
                exact = self.waiting.drain(..).rev().map(|at| now - at).collect();
                slack = exact.last().map_or(0, |longest| (longest / 16).max(4096));
                self.vcpus[vcpu] = State::Runs;
                let woken = self.woken.take().map(|at| bucket_of(now - at));
                assert_eq!(
                    counted(&before.wakes, &self.vm.wakes),
                    Vec::from_iter(woken)
                );
            }
            Action::Preempt => self.vcpus[vcpu] = State::Queued,
            Action::Sleep => self.vcpus[vcpu] = State::Sleeps,
        }
        let got = counted(&before.packets, &self.vm.packets);
        assert_eq!(got.len(), exact.len(), "packets that were counted");
        for (got, exact) in got.into_iter().zip(&exact) {
            let right = bucket_of(*exact)..=bucket_of(exact + slack);
            assert!(
                right.contains(&got),
                "bucket {got}, exact {exact} ns is {right:?}"
            );
        }
        // The oldest packet's wait is exact.
        if let Some(longest) = exact.last() {
            let last = counted(&before.packets, &self.vm.packets).pop();
            assert_eq!(last, Some(bucket_of(*longest)));
        }
        let is = |state| self.vcpus.iter().filter(|s| **s == state).count() as i32;
        assert_eq!(self.vm.running, is(State::Runs));
        assert_eq!(self.vm.runnable, is(State::Runs) + is(State::Queued));
    }
}

proptest! {
    #[test]
    fn each_packet_counts_with_its_own_wait(
        (vcpus, steps) in (1..4_usize).prop_flat_map(|n| (Just(n), steps(n))),
        now in 1..1_u64 << 60,
    ) {
        let mut twin = Twin {
            vm: NEW,
            now,
            vcpus: vec![State::Sleeps; vcpus],
            waiting: Vec::new(),
            woken: None,
        };
        steps.into_iter().for_each(|step| twin.take(step));
    }

    #[test]
    fn the_bucket_of_a_time_is_the_same_in_both_languages(ns in any::<u64>(), shift in 0..64_u32) {
        // SAFETY: a function of the library.
        let there = unsafe { (library().bucket)(ns >> shift) };
        prop_assert_eq!(there as usize, bucket_of(ns >> shift));
    }
}

/// A pointer that several threads use, as several CPUs use the kernel's.
#[derive(Clone, Copy)]
struct Everywhere(*mut VmDelay);
// SAFETY: the library changes the VM by atomic operations and single words, as the kernel's CPUs do.
unsafe impl Send for Everywhere {}

impl Everywhere {
    fn on(self, f: OnVm, now: u64) {
        // SAFETY: the VM outlives the threads.
        unsafe { f(self.0, now) }
    }
}

#[test]
fn packets_and_switches_on_several_cpus_lose_and_double_nothing() {
    const PACKETS: u64 = 300_000;
    let lib = library();
    let mut vm = Box::new(NEW);
    let shared = Everywhere(&raw mut *vm);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || (1..=PACKETS).for_each(|i| shared.on(lib.packet, i * 700)));
        }
        scope.spawn(move || {
            for i in 1..=PACKETS / 10 {
                let now = i * 7_000;
                shared.on(lib.wake, now);
                shared.on(lib.run, now + 3_000);
                // SAFETY: the VM outlives the threads.
                unsafe { (lib.stop)({ shared }.0, 1) };
            }
        });
    });
    let waiting: u32 = vm.steps.iter().sum();
    let counted: u32 = vm.packets.counts.iter().sum();
    assert_eq!(u64::from(waiting + counted), 2 * PACKETS);
    let wakes: u32 = vm.wakes.counts.iter().sum();
    assert_eq!(u64::from(wakes), PACKETS / 10);
    assert_eq!((vm.running, vm.runnable), (0, 0));
}

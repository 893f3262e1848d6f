// SPDX-License-Identifier: Apache-2.0
//! Which VMs of class auto get a turbo vCPU, or the advice to get one: those that do steady I/O and wait for a core.

use std::collections::BTreeMap;

use viola_host::{Hypervisor, Vm, VmId};
use viola_meter::VmSample;
use viola_policy::slices::{MS, Nanos};
use viola_policy::turbo::choose::{Obstacle, Reason, Setting, Thresholds, TurboChooser, Window};
use viola_proto::ClassSetting;

/// Shortest window, ns.
const WINDOW: Nanos = 100 * MS;

/// Sums of the current window of one VM.
#[derive(Debug)]
struct State {
    chooser: TurboChooser,
    /// The choice for a VM without a turbo vCPU if viola could give it one.
    advised: TurboChooser,
    last: Window,
    span: Nanos,
    packets: u64,
    disk: u64,
    run: u64,
    wait: u64,
    /// Time that its first vCPU ran, ns.
    interrupts: u64,
}

/// The choice for each VM of class auto.
#[derive(Debug, Default)]
pub struct TurboVms(BTreeMap<VmId, State>);

/// What keeps a VM from a turbo vCPU. Only in User Mode Linux all interrupts come to the first vCPU; in other guests an agent has
/// to move them there.
fn obstacle(vm: &Vm) -> Option<Obstacle> {
    if vm.vcpus.len() < 2 {
        Some(Obstacle::OneVcpu)
    } else if vm.hypervisor != Hypervisor::Uml {
        Some(Obstacle::NoAgent)
    } else {
        None
    }
}

impl TurboVms {
    /// Takes what a VM did in the `span` that ended `at`. Returns a line for the log when class auto gives it a turbo vCPU or takes
    /// it away. `reserve` is the part of its share that a VM keeps for its other vCPUs, thousandths; `None` where there can be no
    /// turbo core.
    pub fn observe(
        &mut self,
        vm: &Vm,
        setting: ClassSetting,
        reserve: Option<u32>,
        sample: &VmSample,
        (at, span): (Nanos, Nanos),
    ) -> Option<String> {
        let state = self.0.entry(vm.id.clone()).or_insert_with(|| State {
            chooser: TurboChooser::new(Thresholds::default()),
            advised: TurboChooser::new(Thresholds::default()),
            last: Window::default(),
            span: 0,
            packets: 0,
            disk: 0,
            run: 0,
            wait: 0,
            interrupts: 0,
        });
        let (total, traffic) = (sample.vcpu_total(), &sample.traffic);
        state.span += span;
        state.packets += traffic.rx_packets + traffic.tx_packets;
        state.disk += traffic.disk_read + traffic.disk_written;
        state.run += total.run;
        state.wait += total.wait;
        state.interrupts += sample.vcpus.first().map_or(0, |first| first.run);
        let is_auto = setting == ClassSetting::Auto;
        if state.span < WINDOW && is_auto {
            return None;
        }
        let setting = match is_auto && reserve.is_some() {
            true => Setting::Auto,
            false => Setting::Never,
        };
        let per_s = |n: u64| n as f64 * 1e9 / state.span.max(1) as f64;
        let window = Window {
            packets: per_s(state.packets),
            disk: per_s(state.disk),
            wait: state.wait as f64 / (state.run + state.wait).max(1) as f64,
            interrupt_load: match (state.chooser.turbo(), reserve) {
                // Time in interrupts, as a part of what the reserve leaves for them.
                (true, Some(reserve)) => {
                    let may = state.run as f64 * f64::from(1000 - reserve.min(999)) / 1000.0;
                    state.interrupts as f64 / may.max(1.0)
                }
                _ => 0.0,
            },
        };
        (state.span, state.packets, state.disk) = (0, 0, 0);
        (state.run, state.wait, state.interrupts) = (0, 0, 0);
        let verdict = state.chooser.observe(at, &window, setting, obstacle(vm));
        let (wish, obstacle) = match is_auto && !verdict.turbo {
            true => (
                Setting::Auto,
                (vm.vcpus.len() < 2).then_some(Obstacle::OneVcpu),
            ),
            false => (Setting::Never, None),
        };
        state.advised.observe(at, &window, wish, obstacle);
        state.last = window;
        let (is, was) = match verdict.turbo {
            true => ("a", "none"),
            false => ("no", "one"),
        };
        (verdict.changed && setting == Setting::Auto)
            .then(|| format!("{is} turbo vCPU (auto, had {was}): {}", verdict.why))
    }

    /// Whether a VM of this class setting gets a turbo vCPU.
    pub fn wants(&self, id: &VmId, setting: ClassSetting) -> bool {
        match setting {
            ClassSetting::Turbo => true,
            ClassSetting::Auto => self.0.get(id).is_some_and(|s| s.chooser.turbo()),
            ClassSetting::Ls | ClassSetting::Batch => false,
        }
    }

    /// What a VM does that a turbo vCPU could help, and that viola does not give one to by itself.
    pub fn advice(&self, id: &VmId) -> Option<Reason> {
        let state = self.0.get(id).filter(|s| s.advised.turbo())?;
        Some(Reason::Waits {
            packets: state.last.packets,
            disk: state.last.disk,
            wait: state.last.wait,
        })
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.0.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;
    use viola_meter::{Times, Traffic};

    /// What a VM that gets so many packets a second does in 100 ms, with 5 ms of interrupts.
    fn sample(vm: &Vm, packets: u64) -> VmSample {
        sample_of(vm, packets, 5)
    }

    fn sample_of(vm: &Vm, packets: u64, interrupts: u64) -> VmSample {
        let times = |run: u64| Times {
            run: run * MS,
            wait: 25 * MS,
            ..Times::default()
        };
        VmSample {
            id: vm.id.clone(),
            vcpus: vec![times(interrupts), times(25 - interrupts)],
            service: Times::default(),
            traffic: Traffic {
                rx_packets: packets / 10,
                ..Traffic::default()
            },
        }
    }

    fn run(t: &mut TurboVms, vm: &Vm, setting: ClassSetting, packets: u64) -> Vec<String> {
        let sample = sample(vm, packets);
        (1..20)
            .filter_map(|k| t.observe(vm, setting, Some(300), &sample, (k * WINDOW, WINDOW)))
            .collect()
    }

    #[test]
    fn a_vm_with_steady_io_and_waits_gets_a_turbo_vcpu_unless_the_operator_sets_its_class() {
        let (mut t, a) = (TurboVms::default(), vm("a", 10, &[&[1], &[1]]));
        let said = run(&mut t, &a, ClassSetting::Auto, 20_000);
        assert_eq!(
            said,
            [
                "a turbo vCPU (auto, had none): 20000 packets/s and 0.0 MiB/s of disk, and it waits 67 % of the time it wants to run"
            ]
        );
        assert!(t.wants(&a.id, ClassSetting::Auto) && !t.wants(&a.id, ClassSetting::Ls));
        assert!(run(&mut t, &a, ClassSetting::Batch, 20_000).is_empty());
        assert!(!t.wants(&a.id, ClassSetting::Auto));
        assert!(t.wants(&a.id, ClassSetting::Turbo));
    }

    #[test]
    fn a_vm_flooded_with_interrupts_loses_its_turbo_vcpu() {
        let (mut t, a) = (TurboVms::default(), vm("a", 10, &[&[1], &[1]]));
        assert_eq!(run(&mut t, &a, ClassSetting::Auto, 20_000).len(), 1);
        let sample = sample_of(&a, 20_000, 17);
        let said: Vec<_> = (20..60)
            .filter_map(|k| {
                t.observe(
                    &a,
                    ClassSetting::Auto,
                    Some(300),
                    &sample,
                    (k * WINDOW, WINDOW),
                )
            })
            .collect();
        assert_eq!(said.len(), 1);
        assert!(
            said[0].starts_with("no turbo vCPU (auto, had one): it is flooded"),
            "{said:?}"
        );
        // Class turbo keeps it.
        assert!(t.wants(&a.id, ClassSetting::Turbo) && !t.wants(&a.id, ClassSetting::Auto));
    }

    #[test]
    fn a_vm_with_one_vcpu_or_without_agent_gets_no_turbo_vcpu() {
        let (mut t, one) = (TurboVms::default(), vm("a", 10, &[&[1]]));
        assert!(run(&mut t, &one, ClassSetting::Auto, 20_000).is_empty());
        let mut kvm = vm("b", 20, &[&[1], &[1]]);
        kvm.hypervisor = Hypervisor::Qemu;
        assert!(run(&mut t, &kvm, ClassSetting::Auto, 20_000).is_empty());
        assert!(!t.wants(&one.id, ClassSetting::Auto) && !t.wants(&kvm.id, ClassSetting::Auto));
        // The operator can give one to the second VM.
        assert_eq!(t.advice(&one.id), None);
        assert_eq!(
            t.advice(&kvm.id).unwrap().to_string(),
            "20000 packets/s and 0.0 MiB/s of disk, and it waits 67 % of the time it wants to run"
        );
        run(&mut t, &kvm, ClassSetting::Turbo, 20_000);
        assert_eq!(t.advice(&kvm.id), None);
    }

    #[test]
    fn a_vm_that_viola_gives_a_turbo_vcpu_needs_no_advice() {
        let (mut t, a) = (TurboVms::default(), vm("a", 10, &[&[1], &[1]]));
        run(&mut t, &a, ClassSetting::Auto, 20_000);
        assert_eq!(t.advice(&a.id), None);
        // Without turbo cores it does.
        let sample = sample(&a, 20_000);
        for k in 20..40 {
            let said = t.observe(&a, ClassSetting::Auto, None, &sample, (k * WINDOW, WINDOW));
            assert_eq!(said, None);
        }
        assert!(t.advice(&a.id).is_some());
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Which VMs of class auto have a turbo vCPU: those that do steady I/O and wait for it.

use std::collections::BTreeMap;

use viola_host::{Hypervisor, Vm, VmId};
use viola_meter::VmSample;
use viola_policy::slices::{MS, Nanos};
use viola_policy::turbo::choose::{Obstacle, Setting, Thresholds, TurboChooser, Window};
use viola_proto::ClassSetting;

/// Shortest time that is one window.
const WINDOW: Nanos = 100 * MS;

#[derive(Debug)]
struct State {
    chooser: TurboChooser,
    span: Nanos,
    packets: u64,
    disk: u64,
    run: u64,
    wait: u64,
    /// What its first vCPU ran.
    interrupts: u64,
}

/// The choice for each VM.
#[derive(Debug, Default)]
pub struct Turbos(BTreeMap<VmId, State>);

/// What stands in the way of a turbo vCPU. Whose interrupts come to the first vCPU is known of User Mode Linux only; in
/// other guests an agent would have to see to it.
fn obstacle(vm: &Vm) -> Option<Obstacle> {
    if vm.vcpus.len() < 2 {
        Some(Obstacle::OneVcpu)
    } else if vm.hypervisor != Hypervisor::Uml {
        Some(Obstacle::NoAgent)
    } else {
        None
    }
}

impl Turbos {
    /// Takes what a VM did in a span that ended at `at`; a line for the journal when class auto changes its mind.
    /// `possible` is whether there are turbo cores at all, with what a VM keeps for its other vCPUs (thousandths).
    pub fn observe(
        &mut self,
        vm: &Vm,
        setting: ClassSetting,
        possible: Option<u32>,
        sample: &VmSample,
        (at, span): (Nanos, Nanos),
    ) -> Option<String> {
        let state = self.0.entry(vm.id.clone()).or_insert_with(|| State {
            chooser: TurboChooser::new(Thresholds::default()),
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
        let setting = match setting {
            ClassSetting::Auto if possible.is_some() => Setting::Auto,
            _ => Setting::Never,
        };
        if state.span < WINDOW && setting == Setting::Auto {
            return None;
        }
        let per_s = |n: u64| n as f64 * 1e9 / state.span.max(1) as f64;
        let window = Window {
            packets: per_s(state.packets),
            disk: per_s(state.disk),
            wait: state.wait as f64 / (state.run + state.wait).max(1) as f64,
            interrupt_load: match (state.chooser.turbo(), possible) {
                // Without a reserve there is no bound, and all is a flood that leaves programs a tenth.
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
        let (is, was) = match verdict.turbo {
            true => ("a", "none"),
            false => ("no", "one"),
        };
        (verdict.changed && setting == Setting::Auto)
            .then(|| format!("{is} turbo vCPU (auto, had {was}): {}", verdict.why))
    }

    /// Whether a VM for which this was asked is to have one.
    pub fn has(&self, id: &VmId, setting: ClassSetting) -> bool {
        match setting {
            ClassSetting::Turbo => true,
            ClassSetting::Auto => self.0.get(id).is_some_and(|s| s.chooser.turbo()),
            ClassSetting::Ls | ClassSetting::Batch => false,
        }
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

    fn run(t: &mut Turbos, vm: &Vm, setting: ClassSetting, packets: u64) -> Vec<String> {
        let sample = sample(vm, packets);
        (1..20)
            .filter_map(|k| t.observe(vm, setting, Some(300), &sample, (k * WINDOW, WINDOW)))
            .collect()
    }

    #[test]
    fn a_vm_that_streams_and_waits_has_one_and_one_that_the_operator_speaks_of_has_what_he_says() {
        let (mut t, a) = (Turbos::default(), vm("a", 10, &[&[1], &[1]]));
        let said = run(&mut t, &a, ClassSetting::Auto, 20_000);
        assert_eq!(
            said,
            [
                "a turbo vCPU (auto, had none): 20000 packets/s and 0.0 MiB/s of disk, and it waits 67 % of the time it wants to run"
            ]
        );
        assert!(t.has(&a.id, ClassSetting::Auto) && !t.has(&a.id, ClassSetting::Ls));
        assert!(run(&mut t, &a, ClassSetting::Batch, 20_000).is_empty());
        assert!(!t.has(&a.id, ClassSetting::Auto));
        assert!(t.has(&a.id, ClassSetting::Turbo));
    }

    #[test]
    fn one_whose_interrupts_take_all_that_they_may_loses_it_again() {
        let (mut t, a) = (Turbos::default(), vm("a", 10, &[&[1], &[1]]));
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
        // The operator may want it all the same.
        assert!(t.has(&a.id, ClassSetting::Turbo) && !t.has(&a.id, ClassSetting::Auto));
    }

    #[test]
    fn one_vcpu_or_a_guest_of_which_nothing_is_known_is_left_alone() {
        let (mut t, one) = (Turbos::default(), vm("a", 10, &[&[1]]));
        assert!(run(&mut t, &one, ClassSetting::Auto, 20_000).is_empty());
        let mut kvm = vm("b", 20, &[&[1], &[1]]);
        kvm.hypervisor = Hypervisor::Qemu;
        assert!(run(&mut t, &kvm, ClassSetting::Auto, 20_000).is_empty());
        assert!(!t.has(&one.id, ClassSetting::Auto) && !t.has(&kvm.id, ClassSetting::Auto));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! How long requests to a VM wait for its core, by the best measurement there is.

use viola_host::VmId;
use viola_meter::{Meter, Snapshot, WAIT_WINDOW_SECONDS};
use viola_policy::slices::Nanos;
use viola_policy::slices::classify::{Figure, Figures};

/// Fewest packets or waits from which a figure is computed.
const MIN_COUNT: u64 = 100;

/// All figures of a VM.
pub(super) fn all(meter: &Meter, id: &VmId) -> Figures {
    Figures {
        packet_delay: packet_delay(meter, id),
        residual_wait: residual_wait(meter, id),
        // Where single waits are known, the mean says less than they do.
        mean_wait: match meter.is_exact() {
            true => None,
            false => mean_wait(meter.history().iter(), id),
        },
    }
}

/// The best figure that is known of a VM.
pub(super) fn best(meter: &Meter, id: &VmId) -> Option<(Figure, Nanos)> {
    let delay = packet_delay(meter, id).map(|ns| (Figure::PacketDelay, ns));
    delay.or_else(|| all(meter, id).best())
}

fn packet_delay(meter: &Meter, id: &VmId) -> Option<Nanos> {
    let packets = meter.packet_delays(id)?;
    packets
        .quantile(0.99)
        .filter(|_| packets.count() >= MIN_COUNT)
}

fn residual_wait(meter: &Meter, id: &VmId) -> Option<Nanos> {
    let waits = meter.vm_waits(id)?;
    let enough = waits.histogram.count() >= MIN_COUNT;
    waits.residual_quantile(0.99).filter(|_| enough)
}

/// The mean wait in the last ten seconds, as schedstat counts: waiting time for each time that a vCPU got a core.
fn mean_wait<'a>(
    history: impl DoubleEndedIterator<Item = &'a Snapshot>,
    id: &VmId,
) -> Option<Nanos> {
    let window = WAIT_WINDOW_SECONDS as u64 * 1_000_000_000;
    let (mut span, mut wait, mut switches) = (0, 0, 0);
    for snapshot in history.rev() {
        if span >= window {
            break;
        }
        span += snapshot.span;
        if let Some(vm) = snapshot.vms.iter().find(|vm| vm.id == *id) {
            let total = vm.vcpu_total();
            wait += total.wait;
            switches += total.switches;
        }
    }
    (switches >= MIN_COUNT).then(|| wait / switches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_host::Hypervisor;
    use viola_meter::{Times, Traffic, VmSample};

    #[test]
    fn the_mean_wait_is_of_the_last_ten_seconds() {
        let id = VmId::new(Hypervisor::Qemu, "a");
        let snapshot = |i: u64| Snapshot {
            at: i,
            span: 1_000_000_000,
            with_disks: false,
            vms: vec![VmSample {
                id: id.clone(),
                vcpus: vec![Times {
                    wait: if i < 10 { 700_000_000 } else { 50_000_000 },
                    switches: 25,
                    ..Times::default()
                }],
                service: Times::default(),
                traffic: Traffic::default(),
            }],
        };
        let history: Vec<Snapshot> = (0..20).map(snapshot).collect();
        assert_eq!(mean_wait(history.iter(), &id), Some(2_000_000));
        let few = &history[..3];
        assert_eq!(mean_wait(few.iter(), &id), None, "75 switches are too few");
        let other = VmId::new(Hypervisor::Qemu, "b");
        assert_eq!(mean_wait(history.iter(), &other), None);
    }

    #[test]
    fn without_bpf_only_the_mean_is_known() {
        let (meter, id) = (Meter::sampled(), VmId::new(Hypervisor::Qemu, "a"));
        assert_eq!(all(&meter, &id), Figures::default());
        assert_eq!(best(&meter, &id), None);
    }
}

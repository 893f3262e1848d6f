// SPDX-License-Identifier: Apache-2.0
//! What the lab measured of slices, predicted.

use viola_policy::slices::{Class, MS, Nanos};

use super::vslicer::first;
use super::{Bed, Claim, LAB, Papers, figure};
use crate::cpu::Hog;
use crate::sched::EevdfConfig;
use crate::setup::{HostSetup, Policy, VmSetup};
use crate::work::Ping;

const SECOND: Nanos = 1_000 * MS;

pub(super) fn run(all: &mut Papers) {
    let bed = Bed::lab();
    let slots = Policy::Credit {
        slice: bed.ms("slice_ms"),
        boost: false,
    };
    let viola = Policy::Interleaved {
        batch_slice: 4 * MS,
    };
    let stock_linux = Policy::Linux(EevdfConfig {
        packets_wake: true,
        own_tick: bed.ms("guest_tick_ms"),
        ..EevdfConfig::default()
    });
    // VMs, LSVM busy, side, measured median and 99th percentile (ms).
    let cells = [
        (4, true, "stock", stock_linux, 1.8865, 11.2929),
        (4, true, "30 ms slices", slots, 30.0345, 103.2816),
        (4, true, "viola", viola, 0.0648, 0.1664),
        (4, false, "stock", stock_linux, 0.045, 3.8365),
        (4, false, "viola", viola, 0.034, 0.0864),
        (5, true, "stock", stock_linux, 2.967, 11.7102),
        (5, true, "30 ms slices", slots, 50.1517, 144.9502),
        (5, true, "viola", viola, 0.0578, 0.1778),
    ];
    let stock = "guests are several threads in a control group each, on a host with a second core for its own work; in the model a \
                 guest is one task, to which its own timer and its packets are wake-ups";
    let exact = "the model's controller is never late: what is left is costs";
    let slots_why = "slots that end late, as they do in the lab, lengthen every turn";
    for (vms, busy, side, policy, median, p99) in cells {
        let vm = |k| VmSetup {
            class: if k == 0 { Class::Ls } else { Class::Batch },
            microslice: bed.us("microslice_us"),
            hog: if k > 0 || busy { Hog::Busy } else { Hog::None },
            ..VmSetup::default()
        };
        let mut setup = HostSetup {
            policy,
            vms: (0..vms).map(vm).collect(),
            ..bed.host()
        };
        if busy {
            setup.nic.interrupt += bed.get("exit_ns") as Nanos;
        }
        setup.nic.slow = Some((
            bed.get("slow_one_of") as u32,
            bed.get("slow_percent") as u32,
        ));
        let pause = (bed.ms("pause_low_ms"), bed.ms("pause_high_ms"));
        let mut ping = Ping::new(0, pause, 0, bed.costs());
        ping.waits = false;
        let of = first(&setup, vec![Box::new(ping)], 300 * SECOND);
        let state = if busy { "busy" } else { "idle" };
        for (what, name, measured) in [("median", "p50", median), ("99th percentile", "p99", p99)] {
            let what = format!("ping, LSVM {state} of {vms}, {side}, {what}");
            let ours = figure(&of, &format!("round trip {name} ms"));
            all.row(LAB, "slices", what, "ms", Claim::Value(measured), ours)
                .because(match policy {
                    Policy::Linux(_) => stock,
                    Policy::Interleaved { .. } => exact,
                    _ => slots_why,
                });
        }
    }
}

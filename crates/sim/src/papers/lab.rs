// SPDX-License-Identifier: Apache-2.0
//! Predictions of what the lab measured of slices and vpipe.

use viola_policy::slices::{Class, DEFAULT_WEIGHT, MS, Nanos};

use super::vslicer::figures_of_first;
use super::{LAB, Papers, SECOND, Testbed, figure};
use crate::cpu::CpuLoad;
use crate::setup::{HostSetup, Policy, VmSetup};
use crate::work::{Files, GuestCosts, Ping};

pub(super) fn run(all: &mut Papers) {
    let bed = Testbed::lab();
    slices(all, &bed);
    files(all, &bed);
}

fn slices(all: &mut Papers, bed: &Testbed) {
    let slots = Policy::Credit {
        slice: bed.ms("slice_ms"),
        boost: false,
    };
    let viola = Policy::Interleaved {
        batch_slice: 4 * MS,
    };
    let stock_linux = bed.stock_linux();
    let four = GuestMix {
        vms: 4,
        busy: true,
        variation: Variation::Nothing,
    };
    let idle = GuestMix {
        busy: false,
        ..four
    };
    let of_five = |cell: GuestMix| GuestMix { vms: 5, ..cell };
    let with = |variation| GuestMix { variation, ..four };
    // Guests, scheduler, median and 99th percentile (ms) as measured with revision 09eb658.
    let cells = [
        (four, "stock", stock_linux, 1.8865, 11.2929),
        (four, "30 ms slices", slots, 30.0345, 103.2816),
        (four, "viola", viola, 0.0648, 0.1664),
        (idle, "stock", stock_linux, 0.045, 3.8365),
        (idle, "viola", viola, 0.034, 0.0864),
        (of_five(four), "stock", stock_linux, 2.967, 11.7102),
        (of_five(four), "30 ms slices", slots, 50.1517, 144.9502),
        (of_five(four), "viola", viola, 0.0578, 0.1778),
        (of_five(idle), "stock", stock_linux, 0.043, 3.715),
        (of_five(idle), "viola", viola, 0.035, 0.107),
        (with(Variation::Weight), "viola", viola, 0.058, 0.142),
        (with(Variation::Cap), "viola", viola, 0.063, 0.191),
        (with(Variation::TwoLs), "viola", viola, 0.076, 4.086),
    ];
    let stock = "In the lab a guest is several threads in a control group, and the host has a second core \
                 for its own work. In the model a guest is one task, which its own timer and its packets \
                 wake.";
    let exact = "The model's controller is never late, so only costs remain.";
    let capped = "In the model a little more than one ping in a hundred finds the VM over its cap, in the \
                 lab a little less than one.";
    let slow = "How often work is slow is one constant here; the lab's 99th percentiles of busy guests \
                 range from 0.14 to 0.19 ms.";
    let slots_why = "In the lab slots end late, which lengthens every turn.";
    for (cell, side, policy, median, p99) in cells {
        let GuestMix {
            vms,
            busy,
            variation,
        } = cell;
        let vm = |k| {
            let ls = k == 0 || k == 1 && variation == Variation::TwoLs;
            let is_first_with = |this| k == 0 && variation == this;
            VmSetup {
                class: if ls { Class::Ls } else { Class::Batch },
                weight: DEFAULT_WEIGHT << u32::from(is_first_with(Variation::Weight)),
                cap_permille: is_first_with(Variation::Cap).then_some(200),
                microslice: bed.us("microslice_us"),
                load: if k > 0 || busy {
                    CpuLoad::Busy
                } else {
                    CpuLoad::None
                },
                ..VmSetup::default()
            }
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
        ping.waits_for_answer = false;
        let of = figures_of_first(&setup, vec![Box::new(ping)], 300 * SECOND);
        let state = if busy { "busy" } else { "idle" };
        for (what, name, measured) in [("median", "p50", median), ("99th percentile", "p99", p99)] {
            let with = variation.text();
            let what = format!("ping, LSVM {state} of {vms}{with}, {side}, {what}");
            let ours = figure(&of, &format!("round trip {name} ms"));
            all.value(LAB, "slices", what, "ms", measured, ours)
                .explain(match policy {
                    Policy::Linux(_) => stock,
                    Policy::Interleaved { .. } if variation == Variation::Cap => capped,
                    Policy::Interleaved { .. } if variation == Variation::Weight => slow,
                    Policy::Interleaved { .. } => exact,
                    _ => slots_why,
                });
        }
    }
}

/// Guests of a row.
#[derive(Clone, Copy)]
struct GuestMix {
    vms: usize,
    /// Whether the LSVM computes too.
    busy: bool,
    variation: Variation,
}

/// What differs from the base case.
#[derive(Clone, Copy, PartialEq)]
enum Variation {
    Nothing,
    /// The LSVM has twice the others' weight.
    Weight,
    /// The LSVM has a cap of 20 %.
    Cap,
    /// There are two LSVMs.
    TwoLs,
}

impl Variation {
    fn text(self) -> &'static str {
        match self {
            Variation::Nothing => "",
            Variation::Weight => ", weights 2:1:1:1",
            Variation::Cap => ", cap 20 %",
            Variation::TwoLs => ", two LSVMs",
        }
    }
}

/// Rate at which a guest itself sends a large file, alone on its core and beside three VMs that compute
/// (bench/results/vpipe.json). Its CPU time per GiB was measured too, and is an input here.
fn files(all: &mut Papers, bed: &Testbed) {
    const MIB: f64 = (1 << 20) as f64;
    // Server, guest's CPU time (s/GiB), MiB/s alone and beside three VMs.
    let cells = [
        ("nginx, 256 MiB", 0.599, 1659.363, 400.126),
        ("nginx, 256 MiB, read and written", 1.464, 693.434, 163.875),
        ("lighttpd, 256 MiB", 0.873, 1141.11, 263.86),
        ("haproxy, 256 MiB", 2.168, 465.826, 111.939),
    ];
    for (server, cpu, alone, beside) in cells {
        for (others, state, measured) in [(0, "alone", alone), (3, "beside three", beside)] {
            let mut setup = HostSetup {
                policy: bed.stock_linux(),
                vms: vec![VmSetup::default(); 1 + others],
                ..bed.host()
            };
            for vm in &mut setup.vms[1..] {
                vm.load = CpuLoad::Busy;
            }
            // The measured CPU time includes interrupts; a tap takes 64 KiB at once.
            setup.bits = (bed.get("tap_mbit") * 1e6) as u64;
            (setup.nic.interrupt, setup.nic.packet, setup.nic.host_packet) = (0, 0, 0);
            let chunk = cpu * 1e9 / 16_384.0;
            let costs = GuestCosts {
                send: (chunk / 46.0) as Nanos,
                ..bed.costs()
            };
            let files = Files::new(0, 256 << 20, 1, None, costs);
            let of = figures_of_first(&setup, vec![Box::new(files)], 20 * SECOND);
            let ours = figure(&of, "served MB/s") * 1e6 / MIB;
            let what = format!("{server}, guest itself, {state}");
            all.value(LAB, "vpipe", what, "MiB/s", measured, ours)
                .explain(
                    "The guest's CPU time is an input. The model has none of its other waits.",
                );
        }
    }
}

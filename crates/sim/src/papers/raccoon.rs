// SPDX-License-Identifier: Apache-2.0
//! Raccoon: `policy::lanes` on the paper's tables, and a cost model of the driver domain.

use viola_policy::lanes::{
    Action, Config, Nic, NicObservation, Pool, Setting, TABLE_2, Traffic, VfScheduler,
};
use viola_policy::slices::{MS, Nanos};
use viola_policy::turbo::model::longest_wait;

use super::{Claim, Papers, Plot, Testbed};

const P: &str = "004";
const MINUTE: Nanos = 60_000 * MS;

pub(super) fn run(all: &mut Papers) {
    let bed = Testbed::xen_4_2();
    netperf(all, &bed);
    factors(all, &bed);
    walk(all, &bed);
    let unknown = "The paper does not state the work of a request, nor where the driver domain's own vCPUs \
                 run, on which all of this depends.";
    let missing = |all: &mut Papers, place, what: &str| {
        all.row(P, place, what, "", Claim::Missing, f64::NAN)
            .explain(unknown);
    };
    missing(all, "fig 8", "ApacheBench, 114.1 to 192.5 Mbit/s at 56 VMs");
    missing(all, "fig 9", "latency at 50 requests/s, up to 8.7 % lower");
    missing(
        all,
        "fig 10",
        "connection and response times, 60 to 80 % shorter",
    );
    let three = longest_wait(3, bed.ms("slice_ms")) as f64 / 1e6;
    let statement = "three VMs wait for two others' slices at most, less than 100 ms";
    all.statement(
        P,
        "fig 11",
        "ping, mostly below 100 ms",
        statement,
        three < 100.0,
    )
    .explain(unknown);
    missing(all, "fig 12, 13", "OLTP, 10 % each");
}

fn netperf(all: &mut Papers, bed: &Testbed) {
    let (segment, frame) = (bed.get("segment"), bed.get("frame"));
    let line = bed.get("nic_mbit") * segment / frame;
    let driver_domain = segment * 8.0 * 1e3 / bed.get("host_packet_ns");
    let before = line.min(driver_domain);
    let fig = "fig 7";
    all.value(
        P,
        fig,
        "netperf, 63 VMs, driver domain (an input)",
        "Mbit/s",
        5_799.92,
        before,
    );
    all.value(P, fig, "netperf, 63 VMs, lanes", "Mbit/s", 9_329.78, line);
    all.plots.push(Plot {
        title: "004 fig 7: netperf, 63 VMs",
        axes: ("0 driver domain, 1 lanes", "Mbit/s"),
        curves: vec![("model".into(), vec![(0.0, before), (1.0, line)])],
        paper: vec![("before", 0.0, 5_799.92), ("after", 1.0, 9_329.78)],
    });
}

/// Table 2: IF by eq 2 from the table's own columns.
fn factors(all: &mut Papers, bed: &Testbed) {
    for (vm, traffic, printed) in TABLE_2 {
        let ours = traffic.intensity(bed.get("alpha"));
        // Off by more than rounding.
        let claim = match (ours / printed - 1.0).abs() < 0.01 {
            true => Claim::Value(printed),
            false => Claim::Contradicted(printed),
        };
        all.row(P, "table 2", format!("IF of VM{vm}"), "", claim, ours)
            .explain("Eq 2 with alpha 0.8 gives another IF for the printed frequency and mean.");
    }
}

/// Figure 14 with the printed IFs; the text implies that those not printed are higher.
fn walk(all: &mut Papers, bed: &Testbed) {
    let sends = |vm: u32, intensity: f64| NicObservation {
        nic: Nic { vm, network: 0 },
        di2: if intensity > 0.0 { 1000.0 } else { 0.0 },
        traffic: Traffic {
            freq: if intensity > 0.0 { 50.0 } else { 0.0 },
            avg: ((intensity - 0.8 * 50.0) / 0.2).max(0.0),
        },
        setting: Setting::Auto,
        max_vfs: 1,
        attach_time: 0,
    };
    let pool = [Pool {
        id: 0,
        network: 0,
        vfs: bed.get("vfs") as u32,
    }];
    let mut lanes = VfScheduler::new(Config::paper());
    let mut ifs = [0.0; 16];
    let mut step = |at: Nanos, ifs: &[f64; 16]| {
        let seen: Vec<NicObservation> = (1..).zip(ifs).map(|(vm, &i)| sends(vm, i)).collect();
        let d = lanes.decide(at, &pool, &seen);
        let (mut lost, mut got) = (Vec::new(), Vec::new());
        for action in d.actions {
            match action {
                Action::Revoke { nic, .. } => lost.push(nic.vm),
                Action::Grant { nic, .. } => got.push(nic.vm),
            }
        }
        lost.sort_unstable();
        got.sort_unstable();
        (lost, got)
    };
    ifs[..8].fill(100_000.0);
    step(0, &ifs);
    (ifs[0], ifs[8]) = (58_319.6, 79_027.4);
    let first = step(20 * MINUTE, &ifs) == (vec![1], vec![9]);
    (ifs[3], ifs[8], ifs[6], ifs[0]) = (0.0, 0.0, 16_037.4, 16_000.0);
    (ifs[9], ifs[12], ifs[13]) = (79_205.8, 128_303.2, 90_251.4);
    let second = step(40 * MINUTE, &ifs) == (vec![4, 7, 9], vec![10, 13, 14]);
    let shape = "at minute 20 VM1's VF goes to VM9";
    all.statement(P, "fig 14", "walk, minute 20", shape, first);
    let shape = "at minute 40 the VFs of VM4, VM7 and VM9 go to VM10, VM13 and VM14";
    all.statement(P, "fig 14", "walk, minute 40", shape, second);
}

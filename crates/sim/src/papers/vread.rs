// SPDX-License-Identifier: Apache-2.0
//! vRead: a cost model. The time of a read is the disk's, and that of the path through the guests, which grows as clocks
//! fall and as VMs wait for each other's threads.

use super::{Bed, Claim, Papers, Plot};

const P: &str = "001";

/// Clock of the processors at which the costs are stated, GHz.
const CLOCK: f64 = 3.2;

/// Time of a read in units of the disk's.
fn time(path: f64, ghz: f64, slower: f64) -> f64 {
    1.0 + path * slower * CLOCK / ghz
}

pub(super) fn run(all: &mut Papers) {
    let bed = Bed::kvm();
    let (guest, vread) = (bed.get("guest_path_of_disk"), bed.get("vread_path_of_disk"));
    let slower = bed.get("hop_slower");
    // Without other VMs, and with two more that compute; vRead has no inter-VM hop to be slowed.
    let gain = |ghz, slower| 100.0 * (time(guest, ghz, slower) / time(vread, ghz, 1.0) - 1.0);
    let fig = "fig 11";
    all.row(
        P,
        fig,
        "read, 2 VMs, 3.2 GHz, gain",
        "%",
        Claim::Value(20.0),
        gain(3.2, 1.0),
    );
    all.row(
        P,
        fig,
        "read, 2 VMs, 1.6 GHz, gain",
        "%",
        Claim::Value(41.0),
        gain(1.6, 1.0),
    );
    let drop = 100.0 * (1.0 - time(guest, 1.6, 1.0) / time(guest, 1.6, slower));
    let why = "slower hops as figure 3 has them explain a third of it: a read of HDFS has more hops in a row than a netperf \
               transaction, and the text does not count them";
    all.row(
        P,
        fig,
        "read, vanilla, 4 VMs against 2, lower by up to",
        "%",
        Claim::Value(22.0),
        drop,
    )
    .because(why);
    all.row(
        P,
        fig,
        "read, 4 VMs, most gain",
        "%",
        Claim::Value(65.0),
        gain(1.6, slower),
    )
    .because(why);
    all.row(P, fig, "re-read, most gain of 150 %", "", Claim::Missing, f64::NAN).because(
        "a re-read has no disk in it; the client's own work, which is on both sides and bounds the gain, is not stated",
    );
    let delay = |slower| 100.0 * (1.0 - time(vread, 2.0, 1.0) / time(guest, 2.0, slower));
    let why = "of a single read the path is a larger part than of TestDFSIO's throughput, from which the constant is";
    all.row(
        P,
        "fig 9",
        "delay, 2 VMs, lower by up to",
        "%",
        Claim::Value(40.0),
        delay(1.0),
    )
    .because(why);
    all.row(
        P,
        "fig 9",
        "delay, 4 VMs, lower by up to",
        "%",
        Claim::Value(50.0),
        delay(slower),
    )
    .because(why);
    let saved = |of: &str| {
        100.0 * (1.0 - bed.get(&format!("{of}_steps_vread")) / bed.get(&format!("{of}_steps")))
    };
    all.row(
        P,
        "fig 6",
        "client's CPU, lower by",
        "%",
        Claim::Value(40.0),
        saved("client"),
    );
    all.row(
        P,
        "fig 6",
        "DataNode's CPU, lower by",
        "%",
        Claim::Value(65.0),
        saved("datanode"),
    );
    for (place, what) in [
        ("fig 2", "delay of HDFS against local files"),
        ("fig 3", "transactions with busy neighbours (an input here)"),
        ("fig 7", "CPU, remote read with RDMA"),
        ("fig 8", "CPU, remote read with TCP"),
        ("fig 12", "CPU time of TestDFSIO"),
        ("fig 13", "writing"),
        ("table 2", "HBase"),
        ("table 3", "Hive and Sqoop"),
    ] {
        all.row(P, place, what, "", Claim::Missing, f64::NAN)
            .because("the applications' own work, of which reading is a part, is not stated");
    }
    let clocks = [1.6, 2.0, 2.4, 2.8, 3.2];
    let curve = |slower: f64| clocks.iter().map(|&g| (g, gain(g, slower))).collect();
    all.plots.push(Plot {
        title: "001 fig 11: gain in read throughput",
        axes: ("GHz", "%"),
        curves: vec![
            ("2 VMs".into(), curve(1.0)),
            ("4 VMs".into(), curve(slower)),
        ],
        paper: vec![("2 VMs", 3.2, 20.0), ("2 VMs", 1.6, 41.0)],
    });
}

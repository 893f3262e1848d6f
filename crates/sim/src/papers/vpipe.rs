// SPDX-License-Identifier: Apache-2.0
//! vPipe: a cost model. A guest sends in its own turns and from what its ring still holds after them; the host always.

use super::{Bed, Claim, Papers, Plot};

const P: &str = "003";

pub(super) fn run(all: &mut Papers) {
    let bed = Bed::xen_4_1();
    let (turn, line) = (bed.get("slice_ms") / 1e3, bed.get("nic_mbit") * 1e6);
    let ring = 256.0 * 1514.0 * 8.0;
    let gain = |vms: f64| {
        let round = vms * turn;
        line / ((turn * line + ring) / round).min(line)
    };
    all.row(P, "fig 3", "lighttpd beside two VMs, most gain", "x", Claim::Value(3.4), gain(3.0)).because(
        "a third of the time and a ring's worth after it give 2.7; that the guest also falls short of the line in its own \
         turn, by reading the disk there, is not quantified in the text",
    );
    let shape = "read and write cost the guest most, sendfile less, the pipe least, and the pipe costs the host least too";
    let costs = bed.costs();
    let (copy, send) = (costs.copy * 1448.0, costs.send as f64);
    let guest = [2.0 * copy + send, send, 0.0];
    let device = bed.get("host_packet_ns");
    let host = [2.0 * device, 2.0 * device, device];
    let ordered = guest[0] > guest[1] && guest[1] > guest[2] && host[2] < host[1];
    all.row(
        P,
        "fig 4",
        "CPU",
        "",
        Claim::Shape(shape),
        f64::from(u8::from(ordered)),
    );
    // Either way a request waits for the VM's turn; then the guest sends in its turns, or hands over once.
    let wait = 2.0 * turn * (2.0 * turn) / 2.0 / (3.0 * turn);
    let small = |bytes: f64| {
        let wire = bytes * 8.0 / line;
        let turns = (wire / turn).ceil() - 1.0;
        (wait + wire + turns * 2.0 * turn) / (wait + bed.get("handover_ms") / 1e3 + wire)
    };
    let sizes = [1e5, 1e6, 1e7, 1e8, 1e9];
    let grows = sizes.windows(2).all(|w| small(w[1]) > small(w[0]));
    let shape = "the larger the file, the more is gained";
    all.row(
        P,
        "fig 3",
        "small files gain less",
        "",
        Claim::Shape(shape),
        f64::from(u8::from(grows)),
    );
    all.plots.push(Plot {
        title: "003 fig 3: gain of a pipe at the host, large files",
        axes: ("VMs on the core", "x"),
        curves: vec![(
            "model".into(),
            (1..=5)
                .map(|n| (f64::from(n), gain(f64::from(n))))
                .collect(),
        )],
        paper: vec![("3 VMs", 3.0, 3.4)],
    });
}

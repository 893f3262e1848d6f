// SPDX-License-Identifier: Apache-2.0
//! vPipe: files sent by a guest in its turns, or by the host at any time; and a cost model of their CPU time.

use viola_policy::slices::{MS, Nanos};

use super::vslicer::figures_of_first;
use super::{Papers, Plot, Testbed, figure, vturbo_host};
use crate::work::Files;

const P: &str = "003";
const MINUTE: Nanos = 60_000 * MS;

pub(super) fn run(all: &mut Papers) {
    let bed = Testbed::xen_4_1();
    // Gain over the size of a file, on one connection, which is httperf's default.
    let disk = bed.get("disk_mb_per_s") * 1e6;
    let gain = |vms: usize, bytes: u64| {
        let [guest, host] = [false, true].map(|vpipe| {
            let mut setup = vturbo_host::host(&bed, vms, false, "load_percent");
            setup.paths.vpipe = vpipe;
            let files = Files::new(0, bytes, 1, Some(disk), bed.costs());
            let of = figures_of_first(&setup, vec![Box::new(files)], MINUTE);
            figure(&of, "served MB/s")
        });
        host / guest
    };
    let sizes = [1e5, 1e6, 1e7, 1e8_f64];
    let gains = sizes.map(|bytes| gain(3, bytes as u64));
    let most = gains.iter().copied().fold(0.0, f64::max);
    all.value(
        P,
        "fig 3",
        "lighttpd beside two VMs, most gain",
        "x",
        3.4,
        most,
    )
    .explain("The text names neither the disk nor the load of the other VMs.");
    let shape = "read and write cost the guest most, sendfile less, the pipe least, and the pipe costs the host least too";
    let costs = bed.costs();
    let (copy, send) = (costs.copy * 1448.0, costs.send as f64);
    let guest = [2.0 * copy + send, send, 0.0];
    let device = bed.get("host_packet_ns");
    let host = [2.0 * device, 2.0 * device, device];
    let ordered = guest[0] > guest[1] && guest[1] > guest[2] && host[2] < host[1];
    all.statement(P, "fig 4", "CPU", shape, ordered);
    let grows = gains.windows(2).all(|w| w[1] > w[0]);
    let shape = "the larger the file, the more is gained";
    all.statement(P, "fig 3", "small files gain less", shape, grows);
    let curve = sizes.iter().map(|b| b.log10()).zip(gains).collect();
    all.plots.push(Plot {
        title: "003 fig 3: lighttpd beside two VMs, gain of a pipe at the host",
        axes: ("log10 of the file's bytes", "x"),
        curves: vec![("model".into(), curve)],
        paper: vec![("most", 8.0, 3.4)],
    });
}

// SPDX-License-Identifier: Apache-2.0
//! vTurbo, section 5.2: applications under stock Xen and with turbo cores.

use super::vslicer::figures_of_first;
use super::vturbo_host::{host, tcp};
use super::{Claim, Papers, SECOND, Testbed, figure};
use crate::cpu::CpuLoad;
use crate::work::Files;

const P: &str = "002";

/// SCP, NFS and Olio.
pub(super) fn run(all: &mut Papers, bed: &Testbed) {
    let mut gains = Vec::new();
    for others in [2, 3, 4_usize] {
        let of = [false, true].map(|turbo| {
            let mut setup = host(bed, others + 1, turbo, "load_percent");
            // sshd deciphers what it reads.
            setup.costs.copy += bed.get("cipher_ns_per_kb") / 1000.0;
            tcp(&setup, bed, turbo, 1_000.0)
        });
        gains.push(100.0 * (of[1] / of[0] - 1.0));
    }
    let why = "The cipher and its speed are not stated. At the assumed 100 MB/s sshd needs more than \
                 its share of the core on both sides, and a VM that computes all it may gains nothing \
                 from fair pools. Only a reader that is faster than the wire (125 MB/s) would gain.";
    let low = gains.iter().copied().fold(f64::INFINITY, f64::min);
    let high = gains.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    all.value(P, "fig 9b", "SCP, least gain", "%", 53.0, low)
        .explain(why);
    all.value(P, "fig 9b", "SCP, most gain", "%", 66.0, high)
        .explain(why);
    nfs(all, bed);
    for what in ["one instance", "instance 1 of two", "instance 2 of two"] {
        all.row(
            P,
            "table 2",
            format!("Olio, {what}"),
            "%",
            Claim::Missing,
            f64::NAN,
        )
        .explain("The paper states neither the work of an operation nor the calls between its three VMs.");
    }
}

/// A file written through nfsd: TCP into the VM, whose kernel threads copy it to the page cache. The other VMs have a
/// load of 30 %.
fn nfs(all: &mut Papers, bed: &Testbed) {
    let of = [false, true].map(|turbo| {
        let mut setup = host(bed, 4, turbo, "nfs_load_percent");
        setup.vms[0].load = CpuLoad::None;
        tcp(&setup, bed, turbo, 1_000.0)
    });
    let shape = "vTurbo carries more, and not more than twice as much";
    let gain = of[1] / of[0];
    all.statement(P, "fig 9a", "NFS, writing", shape, gain > 1.0 && gain < 2.3)
        .explain(
            "A server without other computing wakes in BOOST, so Xen serves it as well as a turbo \
                 core does.",
        );
    // Read: nfsd handles the requests, of which the client has many in flight. The kernel, on the turbo vCPU, sends
    // what nfsd writes to its socket.
    let of = [false, true].map(|turbo| {
        let mut setup = host(bed, 4, turbo, "nfs_load_percent");
        setup.vms[0].load = CpuLoad::None;
        let bytes = (bed.get("nfs_request_kb") * 1024.0) as u64;
        let requests = bed.get("nfs_requests") as u64;
        let files = Files::new(0, bytes, requests, None, bed.costs());
        let of = figures_of_first(&setup, vec![Box::new(files)], 10 * SECOND);
        figure(&of, "served MB/s")
    });
    let gain = of[1] / of[0];
    all.statement(P, "fig 9a", "NFS, reading", shape, gain > 1.0 && gain < 2.3)
        .explain(
            "A server without other computing wakes in BOOST, so Xen serves it as well as a turbo \
                 core does.",
        );
}

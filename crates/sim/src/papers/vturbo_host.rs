// SPDX-License-Identifier: Apache-2.0
//! The hosts of vTurbo's experiments, and a TCP stream to one of their VMs.

use viola_policy::slices::Class;

use super::vslicer::figures_of_first;
use super::{SECOND, Testbed, figure};
use crate::setup::{HostSetup, Policy, VmSetup, lookbusy};
use crate::work::{Tcp, TcpConfig};

/// Number of times within a VM's turns at which a stream begins.
const STARTS: u64 = 5;

/// `vms` VMs on one regular core, with one turbo core or under stock Xen.
pub(super) fn host(bed: &Testbed, vms: usize, turbo: bool, load: &str) -> HostSetup {
    let slice = bed.ms("slice_ms");
    let vm = VmSetup {
        class: Class::Batch,
        load: lookbusy(bed.get(load) as u64),
        ..VmSetup::default()
    };
    HostSetup {
        policy: if turbo {
            Policy::Turbo {
                slice,
                slot: bed.us("slot_us"),
                floor: 0,
                reserve: 0,
            }
        } else {
            bed.xen(slice)
        },
        turbo_cores: usize::from(turbo),
        vms: vec![vm; vms],
        ..bed.host()
    }
}

pub(super) fn tcp_config(
    setup: &HostSetup,
    bed: &Testbed,
    turbo: bool,
    megabytes: f64,
) -> TcpConfig {
    // Section 3.2: buffers in proportion to the bandwidth.
    let faster = setup.bits as f64 / (bed.get("nic_mbit") * 1e6);
    let buffer = if turbo {
        bed.get("tcp_buffer_mb") * 1e6 * faster
    } else {
        bed.get("tcp_plain_buffer_kb") * 1024.0
    };
    let config = TcpConfig {
        buffer: buffer as u64,
        beta: bed.get("beta"),
        early_ack: turbo,
        ..TcpConfig::default()
    };
    TcpConfig {
        total: (megabytes * 1e6 / f64::from(config.segment)) as u64,
        ..config
    }
}

/// Mean over streams that begin at different times of the VM's turns.
pub(super) fn tcp(setup: &HostSetup, bed: &Testbed, turbo: bool, megabytes: f64) -> f64 {
    let round = bed.ms("slice_ms") * setup.vms.len() as u64;
    let of = (0..STARTS).map(|k| {
        let mut config = tcp_config(setup, bed, turbo, megabytes);
        config.start = SECOND + round * k / STARTS;
        let tcp = Tcp::new(0, config, setup.costs);
        let of = figures_of_first(setup, vec![Box::new(tcp)], 60 * SECOND);
        figure(&of, "throughput Mbit/s")
    });
    of.sum::<f64>() / STARTS as f64
}

// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::cpu::CpuLoad;
use crate::sched::XenConfig;
use crate::setup::{HostSetup, Policy, VmSetup};

/// Mbit/s and timeouts of a stream into the first of `vms` busy VMs on one core.
fn stream(policy: Policy, vms: usize, ring: usize, config: TcpConfig) -> (f64, u64) {
    let vm = VmSetup {
        load: CpuLoad::Busy,
        ..VmSetup::default()
    };
    let mut setup = HostSetup {
        policy,
        turbo_cores: 1,
        vms: vec![vm; vms],
        ..HostSetup::default()
    };
    setup.nic.ring = ring;
    let tcp = Tcp::new(0, config, setup.costs);
    let mut sim = setup.simulation(vec![Box::new(tcp)], 1);
    sim.run(10_000 * MS);
    let figures = sim.workloads[0].figures(&sim.world);
    (figures[0].1, figures[2].1 as u64)
}

#[test]
fn a_ring_that_overflows_in_each_turn_costs_a_stream_no_timeouts() {
    // Retransmissions are lost again when the VM's turn ends, and the buffer holds the segments behind them.
    let xen = Policy::Xen(XenConfig {
        slice: 30 * MS,
        cores: 2,
        by_tick: true,
        domain_0: true,
    });
    let config = TcpConfig {
        buffer: 256 << 10,
        beta: 0.5,
        ..TcpConfig::default()
    };
    let (rate, timeouts) = stream(xen, 4, 96, config);
    assert!(rate > 200.0 && timeouts <= 2, "{rate} {timeouts}");
}

#[test]
fn a_transfer_ends_when_it_is_read_not_when_it_is_acknowledged() {
    // 8 MB take 68 ms on the wire and begin when the VM's turn ends; its process runs again 90 ms later.
    let config = TcpConfig {
        buffer: 40_000_000,
        early_ack: true,
        total: 5_524,
        start: 31 * MS,
        ..TcpConfig::default()
    };
    let rate = stream(Policy::VTURBO, 4, 256, config).0;
    assert!((300.0..850.0).contains(&rate), "{rate}");
}

#[test]
fn a_single_last_segment_is_acknowledged() {
    let config = TcpConfig {
        buffer: 40_000_000,
        early_ack: true,
        total: 138_121,
        ..TcpConfig::default()
    };
    for vms in [3, 4, 5] {
        assert_eq!(stream(Policy::VTURBO, vms, 256, config).1, 0, "{vms}");
    }
}

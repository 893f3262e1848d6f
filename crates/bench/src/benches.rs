// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench NAME`. Every benchmark runs all sides on real guests in one interleaved run and reports medians
//! over the rounds with their spread.

use clap::Subcommand;
use viola_cli::error::Outcome;
use viola_cli::interrupt;

use crate::options::{GuestOptions, Options, need_root};
use crate::{
    auto, backlog, copies, daemon, deceivers, lanes, mixed, papers, scx, sim, slices, turbo, vpipe,
    vread,
};

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Measure response times of a guest that shares its core, and what they cost the other guests.
    ///
    /// HTTP requests come in an open loop, at moments fixed beforehand, inside the guest's share, and in a closed loop
    /// above it. Needs root, two cores and the lab's guest image (make build). Takes about 30 minutes, with --quick
    /// about two. A full run writes bench/results/slices.json, a partial run build/bench/slices.json.
    Slices(GuestOptions),
    /// Measure what guests gain when viola chooses their classes itself, against classes set by hand and stock scheduling.
    ///
    /// Two web servers are asked in an open loop, three guests beside them compute. Needs root, two cores and the lab's guest
    /// image (make build). Takes about half an hour, with --quick about five minutes. A full run writes
    /// bench/results/auto.json, a partial run build/bench/auto.json.
    Auto(GuestOptions),
    /// Measure nine guests with different roles that change, when viola chooses their classes itself.
    ///
    /// A web server, a file server, a web application with its database, voice calls, a DataNode of HDFS and its client, two guests
    /// that compute and an idle one share a core. The roles change twice. Needs root, two cores, the lab's guest image (make build)
    /// and Hadoop (scripts/hadoop.sh). Takes about 100 minutes, 20 minutes a round. A full run writes bench/results/mixed.json, a
    /// partial run build/bench/mixed.json.
    Mixed(GuestOptions),
    /// Measure what guests gain that look latency-sensitive and compute, when viola chooses their classes itself, and what the others
    /// lose.
    ///
    /// A guest causes packets to itself, floods, or changes each second between packets and work; three guests beside it compute.
    /// Needs root, two cores and the lab's guest image (make build). Takes about 40 minutes, with --quick about four. A full run
    /// writes bench/results/deceivers.json, a partial run build/bench/deceivers.json.
    Deceivers(GuestOptions),
    /// Measure replies of one of four VMs on a core under sched_ext, slots and stock scheduling, in an emulated host.
    ///
    /// The host is a QEMU guest whose kernel has sched_ext (scripts/qemu-image.sh --new). Processes in it stand in for
    /// VMs. Its clock counts instructions, so the figures compare mechanisms and do not describe this machine. scx_lavd
    /// and scx_bpfland take part if scripts/other-schedulers.sh has built them. Takes about half an hour. A full run
    /// writes bench/results/scx.json, a partial run build/bench/scx.json.
    Scx(Options),
    /// Measure I/O of a busy guest with two vCPUs on shared cores, without and with a turbo core.
    ///
    /// Needs root, two cores, the lab's guest image (make build) and, for User Mode Linux, its kernel for several vCPUs
    /// (scripts/uml-smp.sh).
    /// Takes about ten minutes. A full run writes bench/results/turbo.json, a partial run build/bench/turbo.json.
    Turbo(GuestOptions),
    /// Measure HDFS reads from a guest: over TCP, through the host, and from the guest's own disk.
    ///
    /// Needs root, two cores, the lab's guest image (make build), and Hadoop with HBase and Spark (scripts/hadoop.sh
    /// --bench). Takes about half an hour. A full run writes bench/results/vread.json, a partial run
    /// build/bench/vread.json.
    Vread(vread::Vread),
    /// Measure web servers, a proxy, uploads and copies in a guest, without and with the host moving the bytes.
    ///
    /// Needs root, two cores and the lab's guest image (make build). Takes about 25 minutes. A full run writes
    /// bench/results/vpipe.json, a partial run build/bench/vpipe.json.
    Vpipe(vpipe::Vpipe),
    /// Measure file copies in emulated PCs with NVMe and virtio disks, by the guest and by the host.
    ///
    /// Needs root, two cores, the lab's guest image (make build) and QEMU with its kernel (scripts/qemu-image.sh
    /// --new). Takes about 25 minutes. A full run writes bench/results/copies.json, a partial run
    /// build/bench/copies.json.
    Copies(Options),
    /// Compare ways to assign VFs: static, in rotation, by viola, and by an oracle that knows the load in advance.
    ///
    /// Runs in the simulator with 16 and 63 VMs, and in an emulated host with an SR-IOV NIC (scripts/qemu-image.sh
    /// --lanes) whose clock counts instructions. The emulated host also gives the cost of one switch. Takes about
    /// twenty minutes. A full run writes bench/results/lanes.json, a partial run build/bench/lanes.json.
    Lanes(Options),
    /// Measure how long TCP segments wait on the socket backlog while the receiver waits for its vCPU, without and with
    /// early acknowledgements.
    ///
    /// Needs root, two cores, QEMU with its kernel (scripts/qemu-image.sh --new) and the guest module
    /// (scripts/guest-kmod.sh). Takes about twenty minutes. A full run writes bench/results/backlog.json, a partial run
    /// build/bench/backlog.json.
    Backlog(Options),
    /// Repeat the experiments of dissertation 000, section 2.5, under 30 ms slices, stock scheduling and viola.
    ///
    /// Measures ping, UDP jitter, TCP on the LAN and over a long line, STREAM, Apache, VoIP and streaming video. Needs
    /// root, two cores and the lab's guest image (make build). Takes about forty minutes. A full run writes
    /// bench/results/papers.json, a partial run build/bench/papers.json.
    Papers(papers::Papers),
    /// Measure the CPU time and memory of the daemon with 64 to 512 VMs.
    ///
    /// Threads stand in for vCPUs. Needs root. Takes about eleven minutes. A full run writes bench/results/daemon.json,
    /// a partial run build/bench/daemon.json.
    Daemon(Options),
    /// Measure the speed of the simulator: one host by events, and fleets of 100, 1,000 and 10,000 hosts.
    ///
    /// Takes about four minutes. A full run writes bench/results/sim.json, a partial run build/bench/sim.json.
    Sim(Options),
}

/// Runs the selected benchmark.
pub fn run(bench: &Bench) -> Outcome {
    interrupt::watch()?;
    match bench {
        Bench::Slices(options) => {
            need_root()?;
            slices::run(options)
        }
        Bench::Scx(options) => scx::run(options),
        Bench::Auto(options) => {
            need_root()?;
            auto::run(options)
        }
        Bench::Mixed(options) => {
            need_root()?;
            mixed::run(options)
        }
        Bench::Deceivers(options) => {
            need_root()?;
            deceivers::run(options)
        }
        Bench::Turbo(options) => {
            need_root()?;
            turbo::run(options)
        }
        Bench::Vread(vread) => vread::run(vread),
        Bench::Vpipe(options) => vpipe::run(options),
        Bench::Copies(options) => copies::run(options),
        Bench::Lanes(options) => lanes::run(options),
        Bench::Backlog(options) => backlog::run(options),
        Bench::Papers(options) => papers::run(options),
        Bench::Daemon(options) => {
            need_root()?;
            daemon::run(options)
        }
        Bench::Sim(options) => sim::run(options),
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench NAME`: real guests, all sides in one run, interleaved; medians over the rounds with their spread.

use clap::Subcommand;
use viola_cli::error::Outcome;
use viola_cli::interrupt;

use crate::options::{Options, need_root};
use crate::{backlog, copies, daemon, lanes, papers, scx, sim, slices, turbo, vpipe, vread};

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Response times of a guest whose core others want too, and what they cost the others.
    ///
    /// Needs root, two cores and the lab's guest image (make build). About twenty minutes; the result is written to
    /// bench/results/slices.json when everything was measured, else to build/bench/slices.json.
    Slices(Options),
    /// Answers of one of four VMs on a core under sched_ext, slots and stock scheduling, in an emulated host.
    ///
    /// The host is a QEMU guest whose kernel has sched_ext (scripts/qemu-image.sh --new), processes in it stand for
    /// VMs, and its time is counted in instructions: figures compare mechanisms, they are not those of this machine.
    /// scx_lavd and scx_bpfland take part where scripts/other-schedulers.sh has built them. About half an hour; the
    /// result is written to bench/results/scx.json when everything was measured, else to build/bench/scx.json.
    Scx(Options),
    /// I/O of a busy guest with two vCPUs whose core others want too: as it is, and with a vCPU on a turbo core.
    ///
    /// Needs root, two cores, the lab's guest image (make build) and its kernel for several vCPUs
    /// (scripts/uml-smp.sh). About ten minutes; the result is written to bench/results/turbo.json when everything was
    /// measured, else to build/bench/turbo.json.
    Turbo(Options),
    /// Reading HDFS from a guest: over TCP and through the host, beside the guest's own disk.
    ///
    /// Needs root, two cores, the lab's guest image (make build) and Hadoop with what is built on it
    /// (scripts/hadoop.sh --bench). About half an hour;
    /// the result is written to bench/results/vread.json when everything was measured, else to build/bench/vread.json.
    Vread(vread::Vread),
    /// Web servers, a proxy, uploads and copies in a guest: as they are, and with their bytes moved by the host.
    ///
    /// Needs root, two cores and the lab's guest image (make build). About 25 minutes; the result is written to
    /// bench/results/vpipe.json when everything was measured, else to build/bench/vpipe.json.
    Vpipe(vpipe::Vpipe),
    /// Copies of files in emulated PCs with NVMe and virtio disks: by the guest, and by the host.
    ///
    /// Needs root, two cores, the lab's guest image (make build) and QEMU with its kernel (scripts/qemu-image.sh --new). About
    /// 25 minutes; the result is written to bench/results/copies.json when everything was measured, else to
    /// build/bench/copies.json.
    Copies(Options),
    /// What is served when VFs go out once and for all, in turns, by viola, or by one who knows what comes.
    ///
    /// In the simulator with 16 and 63 VMs, and in an emulated host with an SR-IOV NIC (scripts/qemu-image.sh --lanes) whose
    /// time is counted in instructions; there what a switch costs, too. About twenty minutes; the result is written to
    /// bench/results/lanes.json when everything was measured, else to build/bench/lanes.json.
    Lanes(Options),
    /// How long TCP segments wait on the backlog of a socket whose owner waits for its vCPU: as it is, and acknowledged early.
    ///
    /// Needs root, two cores, QEMU with its kernel (scripts/qemu-image.sh --new) and the guest's module
    /// (scripts/guest-kmod.sh). About twenty minutes; the result is written to bench/results/backlog.json when everything
    /// was measured, else to build/bench/backlog.json.
    Backlog(Options),
    /// The experiments of dissertation 000, section 2.5: under its 30 ms slices, stock scheduling and viola.
    ///
    /// Ping, UDP jitter, TCP near and far, STREAM, Apache, VoIP and streaming video. Needs root, two cores and the lab's guest
    /// image (make build). About forty minutes; the result is written to bench/results/papers.json when everything was
    /// measured, else to build/bench/papers.json.
    Papers(papers::Papers),
    /// What the daemon itself takes, with 64 to 512 VMs.
    ///
    /// Threads stand for vCPUs. Needs root. About eleven minutes; the result is written to bench/results/daemon.json when
    /// everything was measured, else to build/bench/daemon.json.
    Daemon(Options),
    /// The speed of the simulator: one host by events, and fleets of 100, 1,000 and 10,000 hosts.
    ///
    /// About four minutes; the result is written to bench/results/sim.json when everything was measured, else to
    /// build/bench/sim.json.
    Sim(Options),
}

/// Runs one.
pub fn run(bench: &Bench) -> Outcome {
    interrupt::watch()?;
    match bench {
        Bench::Slices(options) => {
            need_root()?;
            slices::run(options)
        }
        Bench::Scx(options) => scx::run(options),
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

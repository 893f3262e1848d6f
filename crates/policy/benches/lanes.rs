// SPDX-License-Identifier: Apache-2.0
//! Duration of a decision: 512 VMs with changing traffic on 64 VFs. It must be below 1 ms.

use std::process::ExitCode;
use std::time::Instant;

use viola_policy::lanes::{Config, Nic, NicObservation, Pool, Setting, Traffic, VfScheduler};

const VMS: u32 = 512;
const ROUNDS: u32 = 2000;

fn seen(round: u32) -> Vec<NicObservation> {
    let observed = |vm: u32| {
        // Traffic that changes in each round.
        let x = f64::from((vm * 7919 + round * 104_729) % 1009);
        NicObservation {
            nic: Nic {
                vm,
                network: vm % 2,
            },
            di2: x / 100.0,
            traffic: Traffic {
                freq: x / 10.09,
                avg: x * 10.0,
            },
            setting: Setting::Auto,
            max_vfs: 2,
            attach_time: 0,
        }
    };
    (0..VMS).map(observed).collect()
}

fn main() -> ExitCode {
    let pools = [0, 1].map(|network| Pool {
        id: network,
        network,
        vfs: 32,
    });
    let mut lanes = VfScheduler::new(Config::paper());
    let (mut times, mut switches) = (Vec::new(), 0);
    for round in 0..ROUNDS {
        let seen = seen(round);
        let begun = Instant::now();
        let decision = lanes.decide(u64::from(round), &pools, &seen);
        times.push(begun.elapsed());
        switches += decision.actions.len();
    }
    times.sort_unstable();
    let (median, worst) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!(
        "lanes, {VMS} VMs, 64 VFs: median {:.3} ms, p99 {:.3} ms, {:.1} actions each",
        median.as_secs_f64() * 1e3,
        worst.as_secs_f64() * 1e3,
        switches as f64 / f64::from(ROUNDS)
    );
    if median.as_micros() < 1000 {
        ExitCode::SUCCESS
    } else {
        eprintln!("a decision takes longer than 1 ms");
        ExitCode::FAILURE
    }
}

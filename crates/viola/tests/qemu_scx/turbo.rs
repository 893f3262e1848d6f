// SPDX-License-Identifier: Apache-2.0
//! A turbo core in the scheduler: four VMs with two vCPUs each. The second vCPUs run on core 2, the first ones on core 1 in
//! slots of 0.1 ms.

use super::host::Host;

/// The equal share of each VM over both cores: interrupts take `turbo` percent of a core, and the regular core is always busy.
fn fair(turbo: f64) -> f64 {
    (100.0 + turbo) / 4.0
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn interrupts_run_at_once_and_their_time_is_deducted_on_the_regular_core() {
    let host = Host::boot_with("scx-turbo", 3, &[]);
    let one = "turbo:idle turbo:idle turbo:idle turbo:idle";
    let [stock, ours] = ["stock", "sched_ext"].map(|m| host.run_turbo(m, 2, one));
    let both = format!("{ours:?}, stock {stock:?}");
    assert!(ours.p99_us < stock.p99_us / 3.0, "{both}");
    assert!(ours.p50_us < stock.p50_us / 3.0, "{both}");
    // A sleeping turbo vCPU costs no decisions: only giving it the core and the end of its answer do.
    assert!(ours.decisions[1] < 4 * ours.answers + 20, "{both}");

    // The turbo vCPUs of the three others are always runnable: each runs for a slot, and a decision costs as much again here.
    let flooded = "turbo:idle turbo:spin turbo:spin turbo:spin";
    let [stock, ours] = ["stock", "sched_ext"].map(|m| host.run_turbo(m, 2, flooded));
    let both = format!("{ours:?}, stock {stock:?}");
    assert!(ours.p50_us < stock.p50_us / 2.0, "{both}");
    // The p99 is the second longest of some 150 answers; `make bench-scx` measures the gain.
    assert!(ours.p99_us < stock.p99_us, "{both}");

    // A VM's use of the turbo core reduces its share of the regular one: FS^R = FS - td. Its interrupts take 15 % of a core,
    // less what its sleep overruns, and in this guest the decisions for them take as much again.
    let ours = host.run_turbo("sched_ext", 8, "turbo:150 turbo:idle turbo:idle turbo:idle");
    assert!((10.0..30.0).contains(&ours.turbo[0]), "{ours:?}");
    ours.assert_shares(&[fair(ours.turbo[0]); 4]);

    // Weights apply to both cores.
    let weights = "turbo:spin,reserve=0,weight=512 turbo:spin turbo:spin turbo:spin";
    let ours = host.run_turbo("sched_ext", 3, weights);
    ours.assert_shares(&[80.0, 40.0, 40.0, 40.0]);

    // One VM always wants the turbo core and no other does. By the papers' rule it gets the turbo core and 1 ms in each 150 ms
    // of the regular one. With a reserve of 40 % it gets 60 % of its share on the turbo core and the rest on the core of its
    // programs.
    let greedy = "turbo:spin,reserve=0 turbo:idle turbo:idle turbo:idle";
    let ours = host.run_turbo("sched_ext", 3, greedy);
    assert!(ours.turbo[0] > 90.0, "{ours:?}");
    assert!(ours.shares[0] - ours.turbo[0] < 3.0, "{ours:?}");
    let kept = "turbo:spin,reserve=400 turbo:idle turbo:idle turbo:idle";
    let ours = host.run_turbo("sched_ext", 3, kept);
    let part = 0.6 * fair(ours.turbo[0]);
    assert!((ours.turbo[0] - part).abs() < 2.0, "{ours:?}");
    ours.assert_shares(&[fair(ours.turbo[0]); 4]);

    // A cap applies to the sum over both cores.
    let capped = "turbo:spin,reserve=0,cap=300 turbo:idle";
    let ours = host.run_turbo("sched_ext", 3, capped);
    assert!((ours.shares[0] - 30.0).abs() < 3.0, "{ours:?}");
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn turbo_cores_end_with_the_scheduler() {
    let host = Host::boot_with("scx-turbo-end", 3, &[]);
    // The loader is killed: all threads are in the fair class at once, also those on the turbo core.
    let killed = host.sh(
        "/viola/bin/viola-lab internal stand run sched_ext 2,1 600 turbo:spin turbo:spin </dev/null >/tmp/k 2>&1 & \
         echo $! >/tmp/pid; while ! grep -q enabled /sys/kernel/sched_ext/state; do sleep 0.2; done; sleep 1; \
         P=$(sed -n 's/pids //p' /tmp/k); e() { for p in $P; do cat /proc/$p/task/*/sched; done | grep -c 'ext.enabled.* 1$'; }; \
         e; kill -9 $(cat /tmp/pid); sleep 1; cat /sys/kernel/sched_ext/state; e; \
         /viola/bin/viola-lab internal stand policies $P; sleep 2; /viola/bin/viola-lab internal stand policies $P; kill $P",
    );
    let lines: Vec<&str> = killed.lines().collect();
    assert_eq!(&lines[..3], ["4", "disabled", "0"], "{killed}");
    let ran = |line: &str| line.split(' ').nth(2).unwrap().parse::<u64>().unwrap();
    for vm in 0..2 {
        let span = ran(lines[5 + vm]) - ran(lines[3 + vm]);
        assert!(
            span > 1_500_000_000,
            "a VM did not get half of two cores for 2 s: {killed}"
        );
    }
    // A turbo core goes offline: the kernel ends the scheduler and logs that.
    let gone = host.sh(
        "/viola/bin/viola-lab internal stand run sched_ext 2,1 8 turbo:spin turbo:spin </dev/null >/tmp/k 2>&1 & \
         P=$!; while ! grep -q enabled /sys/kernel/sched_ext/state; do sleep 0.2; done; sleep 1; \
         echo 0 >/sys/devices/system/cpu/cpu1/online; wait $P; cat /sys/kernel/sched_ext/state; cat /tmp/k; \
         echo 1 >/sys/devices/system/cpu/cpu1/online",
    );
    assert!(gone.starts_with("disabled"), "{gone}");
    // The share until then and afterwards in the fair class.
    assert!(gone.contains("shares_percent"), "{gone}");
    let again = host.run_turbo("sched_ext", 2, "turbo:spin,reserve=0 turbo:spin");
    again.assert_shares(&[100.0; 2]);
}

// SPDX-License-Identifier: Apache-2.0
//! The scheduler itself, with processes that stand for VMs.

use super::host::Host;

/// A table without the blanks that align it.
fn words(table: &str) -> String {
    table.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn the_accounting_program_loads() {
    let host = Host::boot("scx-accounting", &[]);
    let check = host.sh("viola check");
    let line = check.lines().find(|l| l.starts_with("accounting (BPF)"));
    assert!(line.is_some_and(|l| l.contains(" yes ")), "{check}");
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn the_latency_sensitive_vm_answers_sooner_and_all_have_their_shares() {
    let host = Host::boot("scx-share", &[]);
    let probed = host.stand("probe");
    println!("{probed}");
    assert!(probed.starts_with("yes\n"), "{probed}");
    let busy = "ls:busy batch:spin batch:spin batch:spin";
    let idle = "ls:idle batch:spin batch:spin batch:spin";
    let [stock, ours] = ["stock", "sched_ext"].map(|m| host.run(m, 4, busy));
    ours.assert_shares(&[25.0; 4]);
    let both = format!("{ours:?}, stock {stock:?}");
    assert!(ours.p99_us < stock.p99_us / 2.0, "{both}");
    assert!(ours.p50_us < stock.p50_us / 2.0, "{both}");
    // Without the scheduler's timers a slice ends only at the kernel's tick.
    let tick = host.run("tick", 3, busy);
    assert!(ours.p99_us < tick.p99_us, "{ours:?}, {tick:?}");
    let [stock, ours] = ["stock", "sched_ext"].map(|m| host.run(m, 4, idle));
    // The VM has micro credit at each wake-up.
    let both = format!("{ours:?}, stock {stock:?}");
    assert!(
        ours.p99_us < 1_000.0 && ours.p99_us < stock.p99_us * 1.25,
        "{both}"
    );

    let weights = "batch:spin,weight=256 batch:spin,weight=512 ls:spin,weight=1024";
    let weights = host.run("sched_ext", 4, weights);
    weights.assert_shares(&[100.0 / 7.0, 200.0 / 7.0, 400.0 / 7.0]);
    let capped = host.run("sched_ext", 3, "batch:spin,cap=200 batch:spin");
    capped.assert_shares(&[20.0, 80.0]);
    let alone = host.run("sched_ext", 3, "batch:spin,cap=300");
    alone.assert_shares(&[30.0]);
    let threads = host.run("sched_ext", 3, "batch:spin,threads=3 batch:spin");
    threads.assert_shares(&[50.0, 50.0]);
    // A tiny weight. The kernel ends a scheduler that lets a thread wait for 5 s.
    let light = host.run(
        "sched_ext",
        8,
        "batch:spin,weight=1 batch:spin,weight=65535",
    );
    assert!(light.shares[0] < 1.0, "{light:?}");
    assert_eq!(host.state(), "disabled", "{}", host.messages());
}

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn however_the_scheduler_ends_the_vms_continue_in_the_fair_class() {
    let host = Host::boot("scx-end", &[]);
    // The loader is killed.
    let started = host.sh(
        "/viola/bin/viola-lab internal stand run sched_ext 1 600 batch:spin batch:spin </dev/null >/tmp/k 2>&1 & \
         echo $! >/tmp/pid; while ! grep -q enabled /sys/kernel/sched_ext/state; do sleep 0.2; done; sleep 1; \
         /viola/bin/viola-lab internal stand policies $(sed -n 's/pids //p' /tmp/k); cat /sys/kernel/sched_ext/root/ops",
    );
    let policies = |text: &str| -> Vec<(String, u64)> {
        let line = |l: &str| {
            let words: Vec<&str> = l.split(' ').collect();
            words[0].parse::<u32>().ok()?;
            Some((words.get(1)?.to_string(), words.get(2)?.parse().ok()?))
        };
        text.lines().filter_map(line).collect()
    };
    assert_eq!(policies(&started).len(), 2, "{started}");
    assert!(
        policies(&started).iter().all(|(p, _)| p == "Ext"),
        "{started}"
    );
    assert!(started.contains("viola"), "{started}");
    let second = host.stand("run sched_ext 1 1 batch:spin");
    assert!(second.contains("another viola manages core 1"), "{second}");
    let second = host.sh(
        "rm /run/viola-cpu1.lock; /viola/bin/viola-lab internal stand run sched_ext 1 1 batch:spin",
    );
    assert!(
        second.contains("viola is loaded, and there can be only one"),
        "{second}"
    );
    // When a VM's thread moves to a core without a plan, the other VM gets its share of the old core.
    let moved = host.sh(
        "set -- $(sed -n 's/pids //p' /tmp/k); taskset -p 1 $1; sleep 0.2; /viola/bin/viola-lab internal stand policies $2; \
         sleep 2; /viola/bin/viola-lab internal stand policies $2; taskset -p 2 $1",
    );
    let seen = policies(&moved);
    assert!(seen[1].1 - seen[0].1 > 1_900_000_000, "{moved}");
    // A loader that is stopped for long keeps the scheduler: the kernel has all that it needs.
    let stopped = host.sh(
        "kill -STOP $(cat /tmp/pid); sleep 7; cat /sys/kernel/sched_ext/state; kill -CONT $(cat /tmp/pid)",
    );
    assert_eq!(stopped.trim(), "enabled", "{}", host.messages());
    let killed = host.sh(
        "kill -9 $(cat /tmp/pid); sleep 1; cat /sys/kernel/sched_ext/state; \
         P=$(sed -n 's/pids //p' /tmp/k); /viola/bin/viola-lab internal stand policies $P; sleep 2; /viola/bin/viola-lab internal stand policies $P",
    );
    assert!(killed.starts_with("disabled"), "{killed}");
    let seen = policies(&killed);
    for (before, after) in seen.iter().zip(&seen[2..]) {
        assert!(
            after.1 - before.1 > 700_000_000,
            "a VM did not get half of two seconds: {killed}"
        );
    }
    let restored = host.sh(
        "mkdir /tmp/r; cp /tmp/scx-saved-*.json /tmp/r/sched_ext.json; viola restore --run-dir /tmp/r; \
         P=$(sed -n 's/pids //p' /tmp/k); /viola/bin/viola-lab internal stand policies $P; kill $P",
    );
    assert!(
        restored.contains("put back 2 threads of 2 VMs"),
        "{restored}"
    );
    assert!(
        policies(&restored).iter().all(|(p, _)| p == "Normal"),
        "{restored}"
    );

    // The scheduler never runs one VM: the kernel's watchdog ends it.
    let ejected = host.stand("eject 1");
    println!("{ejected}");
    assert!(ejected.contains("a thread had waited for 5 s"), "{ejected}");
    assert!(ejected.contains("then Some(Normal)"), "{ejected}");
    let ran = ejected
        .split("ran ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap();
    assert!(ran.parse::<u32>().unwrap() > 700, "{ejected}");

    // The output of `viola check` with a kernel that accepts the scheduler and with one that has begun to refuse it.
    let check =
        "printf '[slices]\\ncores = \"1\"\\n' >/tmp/v.toml; viola check --config /tmp/v.toml";
    let said = host.sh(check);
    assert!(
        words(&said).contains("slices: sched_ext yes core 1 is kept for VMs"),
        "{said}"
    );
    let said = host.sh(&format!(
        "mount -t securityfs s /sys/kernel/security; echo confidentiality >/sys/kernel/security/lockdown; {check}"
    ));
    assert!(
        words(&said)
            .contains("slices: sched_ext no the kernel refused viola's sched_ext scheduler"),
        "{said}"
    );
    assert!(said.contains("slices: eevdf      yes"), "{said}");
}

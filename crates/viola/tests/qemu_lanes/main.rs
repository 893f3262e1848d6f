// SPDX-License-Identifier: Apache-2.0
//! Lanes on an SR-IOV NIC. A QEMU VM is the host; its igb has seven VFs. The guests are ten network namespaces in it, each with
//! a bond, or a nested QEMU VM to which a VF is passed through. It is emulated: part of `make test-beds`.
#![allow(clippy::unwrap_used)]

mod host;
mod nested;

use std::time::{Duration, Instant};

use viola_proto::lanes::Nic;

use host::{CHANGE_TIMEOUT, GUESTS, Host, holders, names};

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn vfs_follow_the_load_and_no_connection_breaks() {
    let host = Host::boot("lanes-load", GUESTS);
    host.configure("");
    host.start();
    // The guests with high rates in each phase. As in fig. 14, some stay the same and some change places.
    let heavy: [&[u32]; 3] = [
        &[1, 2, 3, 4, 5, 6, 7],
        &[2, 3, 5, 6, 7, 8, 9],
        &[1, 3, 4, 6, 8, 9, 10],
    ];
    let phase = Duration::from_secs(30);
    let rates: Vec<Vec<u32>> = (1..=GUESTS)
        .map(|i| {
            heavy
                .iter()
                .map(|h| if h.contains(&i) { 40 } else { 1 })
                .collect()
        })
        .collect();
    let begin = Instant::now();
    host.traffic(phase, &rates);
    for (k, heavy) in (1..).zip(heavy) {
        let wanted = names(heavy);
        let lanes = host.wait("the VFs at the guests with the highest rates", |l| {
            holders(l) == wanted
        });
        let at = begin.elapsed().as_secs_f32();
        println!(
            "phase {k}: at {at:.0} s the right guests have the VFs; {:?}",
            lanes.counts
        );
        let left = (phase * k).saturating_sub(begin.elapsed());
        std::thread::sleep(left + Duration::from_secs(1));
    }
    let seen = host.seen();
    let lanes = host.lanes().unwrap();
    println!("{}", host.sh("grep -E 'VF [0-9]' /tmp/viola.log"));
    let sum = |key: &str| seen.iter().filter_map(|s| s[key].as_u64()).sum::<u64>();
    let worst = |key: &str| {
        seen.iter()
            .filter_map(|s| s[key].as_f64())
            .fold(0.0, f64::max)
    };
    let switches = lanes.counts.granted + lanes.counts.revoked;
    let mut took: Vec<u64> = lanes.switches.iter().map(|s| s.took_ns / 1000).collect();
    took.sort_unstable();
    println!(
        "{switches} switches: {} of {} packets lost, longest gap {:.0} ms, worst stall of a stream {:.0} ms; \
         a switch took {} us at the median, {} at most",
        sum("lost"),
        sum("sent"),
        worst("longest_gap_ms"),
        worst("worst_stall_ms"),
        took[took.len() / 2],
        took.last().unwrap()
    );
    assert_eq!(
        (lanes.counts.failed, lanes.counts.kept),
        (0, 0),
        "{}",
        host.log()
    );
    // 7 grants, then 2 and 3 VFs that are revoked and granted again
    assert!(switches >= 17, "{:?}", lanes.counts);
    // Most guests have used both paths.
    let used = |n: &&Nic| n.vf_packets > 100 && n.packets > 100;
    assert!(
        lanes.nics.iter().filter(used).count() >= 5,
        "{:?}",
        lanes.nics
    );
    // Each switch loses at most one packet.
    assert!(sum("lost") <= switches, "{}", host.log());
    println!("{}", host.sh(&format!("viola stop --all; {BARE}")));
}

/// The PF replaces the bridge's uplink. Guests on the bridge, guests with VFs and the outside world reach each other, also when
/// a guest changes sides. The NIC's switch has to know the MAC addresses behind the PF.
fn the_pf_is_the_bridges_way_out(host: &Host) {
    host.sh("ip link set eth2 nomaster; ip link set eth0 master br0");
    let end = Instant::now() + CHANGE_TIMEOUT;
    let behind = |n: u32| {
        let known = host.sh("/usr/sbin/bridge fdb show dev eth0 || bridge fdb show dev eth0");
        let mac = format!("52:54:00:00:20:{n:02x} self");
        known.lines().any(|l| l.starts_with(&mac))
    };
    while ![8, 9, 10].into_iter().all(behind) {
        assert!(Instant::now() < end, "not behind the PF: {}", host.log());
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(!behind(1), "n1 has a VF");
    let reaches = |from: u32, to: &str| {
        let ping =
            format!("ip netns exec n{from} busybox ping -c 3 -W 3 {to} | grep -c 'bytes from'");
        let answers = host.sh(&ping);
        assert!(
            answers.trim() != "0",
            "n{from} does not reach {to}: {}",
            host.log()
        );
    };
    // The address of n1 is 10.9.0.11.
    let all = || {
        for (from, to) in [(1, "10.9.0.18"), (8, "10.9.0.11"), (1, "10.9.0.12")] {
            reaches(from, to);
        }
        for from in [1, 8] {
            reaches(from, "10.9.0.1");
        }
    };
    all();
    host.sh("viola set n1 --lane never; viola set n8 --lane pin");
    host.wait("n8 in n1's place", |l| {
        let with = holders(l);
        with.contains("n8") && !with.contains("n1")
    });
    assert!(behind(1) && !behind(8));
    all();
    host.sh("viola set n1 --lane auto; viola set n8 --lane auto; ip link set eth0 nomaster; ip link set eth2 master br0");
    host.sh(
        "/usr/sbin/bridge link set dev eth2 learning off || bridge link set dev eth2 learning off",
    );
}

/// Asserts that `guest` cannot give its VF another MAC address, and that the NIC is to drop what is sent from another one.
fn a_vf_keeps_its_address(host: &Host, guest: u32) {
    let name = host.sh(&format!(
        "ip -n n{guest} -o link show | sed -n 's/^[0-9]*: \\(vf[^:@]*\\).*/\\1/p'"
    ));
    let name = name.trim();
    let address = |of: &str| {
        let shown = host.sh(&format!("ip -n n{guest} -o link show {of}"));
        let mut words = shown
            .split_whitespace()
            .skip_while(|word| *word != "link/ether");
        words
            .nth(1)
            .map(str::to_owned)
            .unwrap_or_else(|| panic!("{of}: {shown}"))
    };
    let before = address(name);
    assert_eq!(before, format!("52:54:00:00:20:{guest:02x}"));
    for other in ["52:54:00:00:66:66", "52:54:00:00:20:09"] {
        let said = host.sh(&format!("ip -n n{guest} link set {name} address {other}"));
        assert!(!said.trim().is_empty(), "{name} takes {other}");
        assert_eq!(address(name), before);
    }
    let shown = host.sh("ip link show eth0");
    let vf = shown.lines().find(|line| line.contains(&before)).unwrap();
    assert!(vf.contains("spoof checking on"), "{vf}");
    assert!(vf.contains("trust off"), "{vf}");
}

/// Measures the NIC and its driver without viola: a VF's interface goes up, gets its link, goes down, and moves to a namespace
/// and back, five times. Each figure includes the time of `ip`.
const BARE: &str = r#"
    v=$(ls /sys/class/net | grep ^vf | head -n 1); echo "bare $v, s:"
    t() { read T rest </proc/uptime; printf ' %s' $T; }
    for i in 1 2 3 4 5; do
        t; ip link set lo up; t; printf ' (ip alone)'; ip link set $v up; t; printf ' (up)'
        until read c </sys/class/net/$v/carrier && [ $c = 1 ]; do :; done 2>/dev/null; t; printf ' (link)'
        ip link set $v down; t; printf ' (down)'; ip link set $v netns n1; t; printf ' (away)'
        ip -n n1 link set $v netns 1; t; echo ' (back)'
    done"#;

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn guests_survive_every_fault_and_vfs_are_recovered() {
    let host = Host::boot("lanes-faults", GUESTS);
    host.configure("");
    host.start();
    let all = |rate: u32| vec![vec![rate]; GUESTS as usize];
    // The traffic runs until `enough`: the duration of the steps depends on the machine.
    let long = Duration::from_secs(3600);
    let mut rates = all(1);
    for guest in &mut rates[..7] {
        guest[0] = 20;
    }
    host.traffic(long, &rates);
    let first = names(&[1, 2, 3, 4, 5, 6, 7]);
    host.wait("seven VFs with seven guests", |l| holders(l) == first);
    let wait_logged = |what: &str| {
        let end = Instant::now() + CHANGE_TIMEOUT;
        while !host.sh("cat /tmp/viola.log").contains(what) {
            assert!(
                Instant::now() < end,
                "`{what}` is not in the log: {}",
                host.log()
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    };

    // The operator changes lanes by hand.
    let said = host.sh("viola set n2 --lane never; viola set n9 --lane pin");
    assert!(
        said.contains("netns:n2: lane never") && said.contains("netns:n9: lane pin"),
        "{said}"
    );
    let word = names(&[1, 3, 4, 5, 6, 7, 9]);
    host.wait("n9 in n2's place", |l| holders(l) == word);
    host.sh("viola set n2 --lane auto; viola set n9 --lane never");
    host.wait("n2 back", |l| holders(l) == first);
    a_vf_keeps_its_address(&host, 1);

    // The daemon is killed. The VFs stay, and the next daemon adopts them.
    host.sh("kill -9 $(cat /tmp/pid); sleep 1");
    let there = host.sh("for i in $(seq 10); do ip -n n$i -o link show | grep -c ': vf'; done");
    assert_eq!(there.matches('1').count(), 7, "{there}");
    host.start();
    let lanes = host.wait("adopted", |l| holders(l) == first);
    assert_eq!(
        (lanes.counts.adopted, lanes.counts.granted),
        (7, 0),
        "{}",
        host.log()
    );

    // The daemon is killed between failover and unplug. The guest sends by its paravirtual path and still has its VF.
    host.sh(
        r#"kill -9 $(cat /tmp/pid); sleep 0.5; ip -n n4 link set bond0 type bond active_slave eth0
        sed -i 's/\("guest":"netns:n4"[^]]*\],"stage":"\)held/\1revoking/' /run/viola/lanes.json"#,
    );
    assert!(host.sh("cat /run/viola/lanes.json").contains("revoking"));
    host.start();
    wait_logged("netns:n4: VF");
    let lanes = host.wait("n4 with a VF again", |l| holders(l) == first);
    assert_eq!(
        (lanes.counts.adopted, lanes.counts.recovered),
        (6, 1),
        "{}",
        host.log()
    );

    // The journal is lost as well. The daemon finds the VFs in the guests.
    host.sh("kill -9 $(cat /tmp/pid); sleep 0.5; rm /run/viola/lanes.json");
    host.start();
    let lanes = host.wait("VFs found in their guests", |l| holders(l) == first);
    assert_eq!(lanes.counts.adopted, 7, "{}", host.log());

    // The NIC's VFs disappear while guests hold them. The guests continue by the bridge and get VFs again once they exist
    // again.
    host.sh("echo 0 >/sys/class/net/eth0/device/sriov_numvfs");
    wait_logged("its VFs were taken off");
    host.wait("VFs created again", |l| holders(l) == first);

    // The PF goes down and up.
    host.sh("ip link set eth0 down; sleep 1; ip link set eth0 up");
    let end = Instant::now() + CHANGE_TIMEOUT;
    let active =
        "for i in 1 2 3 4 5 6 7; do ip -n n$i -d link show bond0; done | grep -c 'active_slave vf'";
    while host.sh(active).trim() != "7" {
        assert!(
            Instant::now() < end,
            "not on their VFs again: {}",
            host.log()
        );
        std::thread::sleep(Duration::from_secs(1));
    }

    // The operator stops lanes and starts them again.
    let said = host.sh("viola stop --all");
    assert!(said.contains("stock"), "{said}");
    let lanes = host.wait("no guest with a VF", |l| holders(l).is_empty());
    assert!(
        !lanes.on && lanes.why.contains("viola stop --all"),
        "{lanes:?}"
    );
    let macs = host.sh("ip link show eth0 | grep -c 'link/ether 00:00:00:00:00:00'");
    assert_eq!(macs.trim(), "7", "{}", host.sh("ip link show eth0"));
    host.sh("viola start");
    host.wait("VFs again", |l| holders(l) == first);

    the_pf_is_the_bridges_way_out(&host);

    // Two guests have the same address: neither may have a VF.
    host.sh("ip -n n10 link set bond0 address 52:54:00:00:20:07");
    wait_logged("n7 and n10 have the same address 52:54:00:00:20:07 at br0");
    host.wait("n7 without a VF", |l| {
        l.nics.iter().all(|n| n.name != "n7" && n.name != "n10")
    });
    host.sh("ip -n n10 link set bond0 address 52:54:00:00:20:0a");

    host.enough();
    host.seen();
    // A guest dies with its VF.
    let lanes = host.lanes().unwrap();
    let one = holders(&lanes).into_iter().next().unwrap();
    host.sh(&format!("ip netns del {one}"));
    host.wait("its VF free and the guest forgotten", |l| {
        !holders(l).contains(&one) && l.nics.iter().all(|n| n.name != one)
    });
    let said = host.sh("viola stop --all; sleep 1; viola restore");
    assert!(!said.contains("not taken back"), "{said}");
}

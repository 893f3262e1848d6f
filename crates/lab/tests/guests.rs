// SPDX-License-Identifier: Apache-2.0
//! Behaviour of guests. Needs root and the image that `scripts/lab-image.sh` makes.
#![allow(clippy::unwrap_used)]

mod support;

use std::net::Ipv4Addr;
use std::time::Duration;

use support::{Bench, ONE, TWO, boot, core, gone, interfaces, paths, session, turn, wait_for};
use viola_lab::load::{
    Arrivals, Http, Ping, TcpBulk, TcpRr, UdpFlood, http, ping, tcp_rr, tcp_stream, udp_flood,
};
use viola_lab::wire::{Pattern, Workload};
use viola_lab::{Error, Lab, Spec};

#[test]
fn guests_run_commands_and_answer_pings_in_a_network_of_their_own() {
    let before = interfaces();
    let bench = boot("t-net", TWO);
    let lab = &bench.lab;

    let output = lab
        .guest("a")
        .unwrap()
        .exec(&["sh", "-c", "hostname; echo oops >&2; exit 3"])
        .unwrap();
    assert_eq!(
        (
            output.status,
            output.stdout.as_str(),
            output.stderr.as_str()
        ),
        (3, "a\n", "oops\n")
    );
    let output = lab
        .guest("b")
        .unwrap()
        .exec_for(&["cat"], "from the host", Duration::from_secs(20))
        .unwrap();
    assert_eq!(output.stdout, "from the host");
    let output = lab
        .guest("b")
        .unwrap()
        .exec_for(&["sleep", "60"], "", Duration::from_millis(50))
        .unwrap();
    assert!(output.timed_out);
    assert_eq!(output.status, 128 + 9);

    let options = Ping {
        count: 20,
        ..Ping::default()
    };
    for guest in lab.guests() {
        let times = ping(lab, guest.address().unwrap(), &options).unwrap();
        assert_eq!((times.sent, times.lost, times.us.len()), (20, 0, 20));
        assert!(times.us.iter().all(|us| *us > 0.0), "{:?}", times.us);
    }
    let other = lab.guest("b").unwrap().address().unwrap().to_string();
    assert_eq!(
        lab.guest("a")
            .unwrap()
            .exec(&["ping", "-c", "1", &other])
            .unwrap()
            .status,
        0
    );

    let new: Vec<String> = interfaces().difference(&before).cloned().collect();
    assert!(
        !new.iter().any(|n| n == "br0" || n.starts_with("nic")),
        "the host's own network has {new:?}"
    );
    let inside = lab.in_netns(interfaces).unwrap();
    assert!(
        ["br0", "nic0.0", "nic1.0", "port0.0", "port1.0"]
            .iter()
            .all(|n| inside.contains(*n)),
        "{inside:?}"
    );

    let pids: Vec<u32> = lab.guests().iter().map(|g| g.pid()).collect();
    let Bench {
        lab,
        run,
        _folder,
        _turn,
    } = bench;
    lab.down().unwrap();
    assert!(
        pids.iter()
            .all(|pid| gone(*pid) && session(*pid).is_empty())
    );
    assert!(
        std::fs::read_dir(run).unwrap().next().is_none(),
        "the run folder is not empty"
    );
}

#[test]
fn a_load_never_leaves_the_lab() {
    let bench = boot("t-foreign", ONE);
    for foreign in [
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::new(10, 76, 0, 11),
        Ipv4Addr::new(192, 0, 2, 1),
    ] {
        let error = udp_flood(&bench.lab, foreign, &UdpFlood::default()).unwrap_err();
        assert!(matches!(error, Error::OutsideLab { .. }), "{error}");
        assert!(ping(&bench.lab, foreign, &Ping::default()).is_err());
        assert!(http(&bench.lab, foreign, &Http::default()).is_err());
        assert!(tcp_rr(&bench.lab, foreign, &TcpRr::default()).is_err());
    }
    let guest = bench.lab.guest("a").unwrap().address().unwrap();
    let endless = UdpFlood {
        time: Duration::from_secs(100_000),
        rate: 1,
        ..UdpFlood::default()
    };
    assert!(udp_flood(&bench.lab, guest, &endless).is_err());
}

#[test]
fn nginx_echo_and_sink_serve_the_host() {
    let bench = boot(
        "t-serve",
        &format!("{ONE}workloads=[{{kind='nginx'}},{{kind='echo'}},{{kind='sink'}}]\n"),
    );
    let guest = bench.lab.guest("a").unwrap();
    let address = guest.address().unwrap();

    let options = Http {
        requests: 30,
        connections: 3,
        ..Http::default()
    };
    let result = http(&bench.lab, address, &options).unwrap();
    assert_eq!(
        (result.sent, result.answered, result.first_failure),
        (30, 30, None)
    );
    assert_eq!(result.connect_us.len(), 30);
    assert!(
        result
            .connect_us
            .iter()
            .zip(&result.us)
            .all(|(connect, all)| connect < all)
    );
    assert!(guest.stat("nginx").unwrap().units >= 30);
    let open = Http {
        arrivals: Arrivals::poisson(200.0),
        connections: 16,
        keep_alive: true,
        limit: Duration::from_millis(500),
        ..Http::default()
    };
    let result = http(&bench.lab, address, &open).unwrap();
    assert!(
        (50..=160).contains(&result.planned),
        "{} requests",
        result.planned
    );
    assert_eq!(
        (result.answered, result.open, result.first_failure),
        (result.planned, 0, None)
    );
    assert!(result.connect_us.len() < result.planned, "kept connections");
    let wrong = http(
        &bench.lab,
        address,
        &Http {
            bytes: 5121,
            requests: 1,
            ..Http::default()
        },
    )
    .unwrap();
    assert_eq!(
        wrong.first_failure.unwrap(),
        "a body of 5120 bytes where 5121 were expected"
    );
    let missing = Http {
        path: "/none".into(),
        requests: 1,
        ..Http::default()
    };
    assert_eq!(
        http(&bench.lab, address, &missing)
            .unwrap()
            .first_failure
            .unwrap(),
        "status 404"
    );

    let times = tcp_rr(
        &bench.lab,
        address,
        &TcpRr {
            count: 50,
            ..TcpRr::default()
        },
    )
    .unwrap();
    assert_eq!((times.us.len(), times.lost), (50, 0));
    assert_eq!(guest.stat("echo").unwrap().units, 50);

    let flood = UdpFlood {
        rate: 200,
        time: Duration::from_millis(500),
        ..UdpFlood::default()
    };
    let sent = udp_flood(&bench.lab, address, &flood).unwrap();
    assert_eq!(sent.sent + sent.refused, 100);
    wait_for("the packets", Duration::from_secs(20), || {
        guest.stat("sink").unwrap().units == sent.sent
    });
    assert_eq!(guest.stop("sink").unwrap().bytes, sent.sent * 64);

    guest.start("sink", Workload::sink()).unwrap();
    let time = Duration::from_millis(300);
    let stream = |pace| {
        let options = TcpBulk {
            time,
            pace,
            ..TcpBulk::default()
        };
        tcp_stream(&bench.lab, address, &options).unwrap()
    };
    let paced = stream(Some(1_000_000));
    // the first bytes may wait in the socket's buffer
    assert!(
        paced.bytes <= 8_000_000 && paced.window_full < 0.5,
        "{paced:?}"
    );
    guest.stop("sink").unwrap();
    guest.start("sink", Workload::sink()).unwrap();
    let bulk = stream(None);
    assert!(
        bulk.bytes > 0 && (0.0..=1.0).contains(&bulk.window_full),
        "{bulk:?}"
    );
    wait_for("the stream", Duration::from_secs(20), || {
        guest.stat("sink").unwrap().bytes == bulk.bytes
    });
}

#[test]
fn workloads_count_their_units_and_stop() {
    let bench = boot("t-work", ONE);
    let guest = bench.lab.guest("a").unwrap();
    let copy = Workload::Hog {
        pattern: Pattern::Copy,
        footprint_kib: 64,
        procs: 2,
        duty: 50,
        period_ms: 10,
        nice: 5,
    };
    for (name, workload) in [
        ("burn", Workload::hog()),
        ("copy", copy),
        ("fork", Workload::forker(0)),
    ] {
        guest.start(name, workload).unwrap();
        let first = guest.stat(name).unwrap();
        wait_for(name, Duration::from_secs(20), || {
            guest.stat(name).unwrap().units > first.units
        });
    }
    assert_eq!(guest.workloads().unwrap(), ["burn", "copy", "fork"]);
    let copied = guest.stop("copy").unwrap();
    assert_eq!((copied.alive, copied.bytes), (2, copied.units * 64 * 1024));
    let error = guest
        .start("burn", Workload::hog())
        .unwrap_err()
        .to_string();
    assert!(error.contains("runs already"), "{error}");
    guest.stop("burn").unwrap();
    guest.stop("fork").unwrap();
    let error = guest.stat("burn").unwrap_err().to_string();
    assert_eq!(error, "guest a: no workload `burn` runs here");
    let left = guest
        .exec(&["sh", "-c", "ps | grep -c '[i]nit work'"])
        .unwrap();
    assert_eq!(
        left.stdout, "0\n",
        "processes of stopped workloads are left"
    );
}

#[test]
fn data_on_a_disk_survives_a_reboot() {
    let bench = boot(
        "t-disk",
        &format!("{ONE}disks=[{{image='d.img',size='16M'}}]\nworkloads=[{{kind='echo'}}]\n"),
    );
    let guest = bench.lab.guest("a").unwrap();
    let pid = guest.pid();
    let sh = |script: &str| {
        let output = guest.exec(&["sh", "-ec", script]).unwrap();
        assert_eq!(output.status, 0, "{script}: {}", output.stderr);
        output.stdout
    };
    assert_eq!(
        sh("blockdev --getsize64 /dev/ubda"),
        format!("{}\n", 16 << 20)
    );
    sh(
        "mke2fs -q /dev/ubda && mount -t ext4 /dev/ubda /mnt && echo kept > /mnt/file && touch /tmp/lost",
    );
    guest.reboot().unwrap();
    assert_eq!(
        sh("mount -t ext4 /dev/ubda /mnt && cat /mnt/file && ls /tmp"),
        "kept\n"
    );
    assert_eq!(guest.pid(), pid);
    assert_eq!(
        guest.workloads().unwrap(),
        ["echo"],
        "the workloads of its description start again"
    );
    guest.shutdown().unwrap();
    assert!(!guest.alive());
    assert!(guest.ping().is_err());
}

#[test]
fn a_killed_guest_leaves_no_process_and_others_keep_running() {
    let bench = boot("t-kill", TWO);
    let victim = bench.lab.guest("a").unwrap();
    let pid = victim.pid();
    assert!(
        session(pid).len() > 1,
        "a guest has processes beside its kernel"
    );
    victim.kill();
    assert!(gone(pid) && session(pid).is_empty(), "{:?}", session(pid));
    bench.lab.guest("b").unwrap().ping().unwrap();
}

#[test]
fn guests_are_ordinary_processes_on_their_core_in_their_own_session() {
    let weighted = format!("{ONE}weight=200\n[[guest]]\nname='b'\ncores=[CORE]\n");
    let bench = boot("t-place", &weighted);
    let group = bench
        .lab
        .guest("a")
        .unwrap()
        .cgroup()
        .unwrap()
        .to_path_buf();
    for guest in bench.lab.guests() {
        let pid = guest.pid();
        assert!(session(pid).contains(&pid));
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(
            status.contains(&format!("Cpus_allowed_list:\t{}\n", core())),
            "{status}"
        );
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        assert_eq!(
            (fields[16], fields[38]),
            ("0", "0"),
            "nice and policy (does a daemon manage these guests?)"
        );
    }
    let members = std::fs::read_to_string(group.join("cgroup.procs")).unwrap();
    assert!(
        members
            .lines()
            .any(|l| l == bench.lab.guest("a").unwrap().pid().to_string())
    );
    let other = std::fs::read_to_string(format!(
        "/proc/{}/cgroup",
        bench.lab.guest("b").unwrap().pid()
    ))
    .unwrap();
    assert!(
        !other.contains("viola-lab"),
        "a guest without a weight is in a group of the lab: {other}"
    );
    let Bench { lab, .. } = bench;
    drop(lab);
    assert!(!group.exists() && !group.parent().unwrap().exists());
}

#[test]
fn a_guest_that_cannot_boot_is_reported_and_removed() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let mut spec = Spec::of_guests("t-noboot", 1, &[core()]).unwrap();
    spec.guests[0].kernel_args = vec!["init=/none".into(), "panic=1".into()];
    let error = Lab::up(&spec, &paths(folder.path()))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("guest vm1: its kernel ended while booting"),
        "{error}"
    );
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
}

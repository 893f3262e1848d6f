// SPDX-License-Identifier: Apache-2.0
//! Network paths between a VM and its clients.

use std::io::Read;
use std::net::{Ipv6Addr, SocketAddr, TcpStream};

use rustix::net::{bind, connect};
use viola_netdev::tcp_socket;

use crate::client::Client;
use crate::common::Daemon;
use crate::common::guests::within;
use crate::rig::{CHANGE_TIMEOUT, GUEST, HOST, MIB, NGINX, Rig, Web, WebSpec, senders, sh};
use crate::rig::{guest_permit, vm, wait_until_served};
use crate::ways::{ROUTER, RemoteClient, behind_a_router, disturb};

/// Requests six large files and asserts that the host sends each of them.
fn six_by_the_host(rig: &Rig) {
    let work = rig.settled(6);
    assert_eq!(
        (work.begun, work.refused, work.broken),
        (6, 0, 0),
        "{work:?}"
    );
    assert!(work.bytes > (6 * 38 * MIB) as u64, "{work:?}");
}

#[test]
fn over_ipv6() {
    let spec = WebSpec {
        name: "pi-six",
        ..WebSpec::default()
    };
    let rig = Rig::with(&spec);
    rig.ip("-6 address add fd77::1/64 dev br0 nodad");
    rig.sh("/usr/bin/ip -6 address add fd77::11/64 dev vec0 nodad");
    rig.start_nginx();
    let to = SocketAddr::from((Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x11), 80));
    let connect = || TcpStream::connect_timeout(&to, CHANGE_TIMEOUT).unwrap();
    let mut six = Client::of(rig.lab.in_netns(connect).unwrap());
    let mut four = rig.client();
    for _ in 0..3 {
        six.fetch("/f1", &rig.files[1]);
        four.fetch("/f1", &rig.files[1]);
    }
    six.fetch("/f0", &rig.files[0]);
    six_by_the_host(&rig);
}

/// A connection to the first VM from this port of the host.
fn from_port(web: &Web, port: u16) -> Client {
    let connected = web.lab.in_netns(|| {
        let socket = tcp_socket(HOST.into()).unwrap();
        bind(&socket, &SocketAddr::from((HOST, port))).unwrap();
        connect(&socket, &SocketAddr::from((GUEST, 80))).unwrap();
        TcpStream::from(socket)
    });
    Client::of(connected.unwrap())
}

#[test]
fn two_tenants_with_the_same_addresses_and_ports() {
    let _permit = guest_permit();
    let spec = |name, seed| WebSpec {
        name,
        seed,
        ..WebSpec::default()
    };
    let mut daemon = Daemon::start(&format!(
        "[slices]\nenabled = false\n{}{}",
        vm("pi-ten1"),
        vm("pi-ten2")
    ));
    let tenants = [
        Web::boot(&spec("pi-ten1", 1)),
        Web::boot(&spec("pi-ten2", 2)),
    ];
    wait_until_served(&mut daemon, 2);
    assert!(tenants[0].files[1] != tenants[1].files[1]);
    for web in &tenants {
        web.start(&NGINX, "");
    }
    for port in [40_001, 40_002] {
        let mut clients: Vec<(Client, Vec<u8>)> = Vec::new();
        for web in &tenants {
            let mut client = from_port(web, port);
            client.ask("/f1", "");
            assert_eq!(client.head().unwrap(), (200, 40 * MIB));
            let mut some = vec![0; MIB];
            client.0.read_exact(&mut some).unwrap();
            clients.push((client, some));
        }
        // Both transfers run at once, between equal addresses and ports.
        within(CHANGE_TIMEOUT, "the host has both connections", || {
            let under_way: Vec<_> = (senders(&daemon).iter())
                .flat_map(|vm| vm.work.transfers.clone())
                .map(|t| (t.local.unwrap().to_string(), t.peer.unwrap().to_string()))
                .collect();
            let ends = (format!("{GUEST}:80"), format!("{HOST}:{port}"));
            under_way == [ends.clone(), ends]
        });
        std::thread::scope(|scope| {
            for ((mut client, mut body), web) in clients.into_iter().zip(&tenants) {
                scope.spawn(move || {
                    let mut rest = vec![0; 39 * MIB];
                    client.0.read_exact(&mut rest).unwrap();
                    body.extend(rest);
                    assert!(body == web.files[1]);
                    client.fetch("/f0", &web.files[0]);
                    client.fetch("/f1", &web.files[1]);
                });
            }
        });
    }
    within(CHANGE_TIMEOUT, "both transfers are counted", || {
        let all = senders(&daemon);
        all.iter()
            .all(|vm| vm.work.begun == 4 && vm.work.returned == 4 && vm.work.refused == 0)
    });
}

#[test]
#[ignore = "it waits for much that is sent again: make test-beds"]
fn with_packet_loss_and_delay() {
    let sizes = [MIB, 2 * MIB, 3 * MIB];
    let rig = Rig::with(&WebSpec {
        name: "pi-loss",
        sizes: &sizes,
        more: ROUTER,
        ..WebSpec::default()
    });
    let far = behind_a_router(&rig);
    let router = &rig.lab.guests()[1];
    disturb(router);
    rig.web.start(&NGINX, "VIOLA_PIPE_MIN=500000");
    std::thread::scope(|scope| {
        for first in 0..6 {
            let (rig, far) = (&rig, &far);
            scope.spawn(move || {
                let mut client = far.client();
                for number in 0..3 {
                    let number = (first + number) % 3;
                    client.fetch(&format!("/f{number}"), &rig.files[number]);
                }
            });
        }
    });
    let work = rig.settled(18);
    assert_eq!((work.begun, work.broken), (18, 0), "{work:?}");
    let lost = sh(router, "/usr/sbin/tc -s qdisc show dev vec1");
    let dropped = lost.split("dropped ").nth(1).unwrap();
    let dropped: u32 = dropped.split(',').next().unwrap().parse().unwrap();
    assert!(dropped > 10, "{lost}");
}

#[test]
fn the_path_mtu_shrinks_during_a_transfer() {
    let rig = Rig::with(&WebSpec {
        name: "pi-mtu",
        more: ROUTER,
        ..WebSpec::default()
    });
    let far = behind_a_router(&rig);
    rig.start_nginx();
    let mut client = far.client();
    client.ask("/f1", "");
    assert_eq!(client.head().unwrap(), (200, 40 * MIB));
    let mut body = vec![0; MIB];
    client.0.read_exact(&mut body).unwrap();
    within(CHANGE_TIMEOUT, "the transfer has begun", || {
        !rig.work().transfers.is_empty()
    });
    let router = &rig.lab.guests()[1];
    sh(
        router,
        "/usr/bin/ip route add 10.78.0.50 dev vec1 mtu lock 1300",
    );
    let mut rest = vec![0; 39 * MIB];
    client.0.read_exact(&mut rest).unwrap();
    body.extend(rest);
    assert!(body == rig.files[1]);
    let refused = sh(
        router,
        "grep Ip: /proc/net/snmp; grep ^IcmpMsg: /proc/net/snmp",
    );
    assert!(refused.contains("OutType3"), "{refused}");
    // The VM itself detects the smaller MTU.
    client.fetch("/f0", &rig.files[0]);
    client.fetch("/f1", &rig.files[1]);
    let work = rig.settled(2);
    assert_eq!((work.begun, work.broken), (2, 0), "{work:?}");
}

#[test]
fn a_routed_tap() {
    let rig = Rig::boot("pi-route");
    let far = RemoteClient::new(&rig, "10.79.0.2/24", "10.79.0.1");
    for words in [
        "address del 10.77.0.1/24 dev br0",
        "link set port0.0 nomaster",
        "address add 10.77.0.1/24 dev port0.0",
        "address add 10.79.0.1/24 dev far",
        "link set far up",
    ] {
        rig.ip(words);
    }
    let forward = || std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    rig.lab.in_netns(forward).unwrap();
    rig.sh("/usr/bin/ip route add default via 10.77.0.1");
    rig.start_nginx();
    // From a client behind the host and from the host itself.
    let (mut behind, mut host) = (far.client(), rig.client());
    for _ in 0..3 {
        behind.fetch("/f1", &rig.files[1]);
        behind.fetch("/f0", &rig.files[0]);
        host.fetch("/f1", &rig.files[1]);
    }
    six_by_the_host(&rig);
}

// SPDX-License-Identifier: Apache-2.0
//! Host sockets serve connections of a bridged VM (a network namespace behind its tap) and return them.
#![allow(clippy::unwrap_used)]

mod tenant;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::thread::JoinHandle;
use std::time::Duration;

use tenant::{CLIENT, Tenant, noise};
use viola_handover::{disconnect_silently, extract, restore, unacknowledged_bytes};
use viola_netdev::Netns;
use viola_vpipe::{Flow, Steering};

/// Moves the connection from one socket to another; `then` redirects its packets to the new owner.
fn hand_over(
    steering: &Steering,
    flow: &Flow,
    from: impl AsFd,
    to: impl AsFd,
    then: impl FnOnce(),
) {
    steering.flows().hold(flow, Some(CLIENT), None).unwrap();
    let state = extract(from.as_fd()).unwrap().detach();
    disconnect_silently(from.as_fd()).unwrap();
    let ready = restore(to.as_fd(), &state).unwrap();
    then();
    ready.activate().unwrap();
}

/// On one connection the VM serves small responses and the host large ones.
fn serve(steering: &Steering, tenant: &Tenant, ipv4: bool, rounds: u32, size: usize) {
    let (mut client, mut guest, flow) = tenant.connect(ipv4);
    let reader: JoinHandle<TcpStream> = std::thread::spawn(move || {
        for round in 0..rounds {
            client.write_all(b"large?").unwrap();
            let mut got = vec![0; size];
            client.read_exact(&mut got).unwrap();
            assert!(got == noise(size, round), "other bytes in round {round}");
            client.write_all(b"small?").unwrap();
            let mut small = [0; 5];
            client.read_exact(&mut small).unwrap();
            assert_eq!(&small, b"small");
        }
        client
    });
    let mut six = [0; 6];
    for round in 0..rounds {
        guest.read_exact(&mut six).unwrap();
        assert_eq!(&six, b"large?");
        let mut there = TcpStream::from(tenant.vm_netns.socket(flow.guest).unwrap());
        hand_over(steering, &flow, &guest, &there, || {
            steering
                .flows()
                .redirect(&flow, tenant.vm_netns.veth())
                .unwrap()
        });
        there.write_all(&noise(size, round)).unwrap();
        let counts = steering.flows().counts(&flow).unwrap().unwrap();
        while unacknowledged_bytes(there.as_fd()).unwrap() > 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(counts.redirected > 0 && counts.from_host > 0, "{counts:?}");
        hand_over(steering, &flow, &there, &guest, || {
            steering.flows().release(&flow).unwrap()
        });
        assert_eq!(steering.flows().counts(&flow).unwrap(), None);
        guest.read_exact(&mut six).unwrap();
        assert_eq!(&six, b"small?");
        guest.write_all(b"small").unwrap();
    }
    reader.join().unwrap();
}

#[test]
fn the_host_sends_for_a_vm_repeatedly() {
    let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
    let tenant = Tenant::new(&host, &steering, "0");
    serve(&steering, &tenant, true, 20, 4 << 20);
    serve(&steering, &tenant, false, 5, 4 << 20);
}

#[test]
fn two_tenants_may_have_the_same_addresses() {
    let host = Netns::new().unwrap();
    let tenants = ["1", "2"].map(|name| {
        let steering = Steering::load().unwrap();
        (Tenant::new(&host, &steering, name), steering)
    });
    std::thread::scope(|scope| {
        for (tenant, steering) in &tenants {
            scope.spawn(|| serve(steering, tenant, true, 8, 2 << 20));
        }
    });
}

#[test]
fn a_vms_packets_are_dropped_while_its_connection_is_held() {
    let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
    let tenant = Tenant::new(&host, &steering, "3");
    let (mut client, mut guest, flow) = tenant.connect(true);
    steering.flows().hold(&flow, None, None).unwrap();
    guest.write_all(b"later").unwrap();
    client.write_all(b"too").unwrap();
    client
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut five = [0; 5];
    assert!(client.read(&mut five).is_err(), "bytes arrived");
    let counts = steering.flows().counts(&flow).unwrap().unwrap();
    assert!(counts.vm_dropped > 0 && counts.held > 0, "{counts:?}");
    // Another connection of the same VM is not affected.
    let (mut other, mut at_guest, _) = tenant.connect(false);
    other.write_all(b"hello").unwrap();
    at_guest.read_exact(&mut five).unwrap();
    steering.flows().release(&flow).unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    client.read_exact(&mut five).unwrap();
    assert_eq!(&five, b"later");
    guest.read_exact(&mut five[..3]).unwrap();
    assert_eq!(&five[..3], b"too");
}

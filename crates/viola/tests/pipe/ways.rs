// SPDX-License-Identifier: Apache-2.0
//! Clients that are not on the VM's own bridge.
#![allow(dead_code)]

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;

use viola_lab::Guest;
use viola_netdev::{Netns, add_veth};

use crate::client::Client;
use crate::rig::{CHANGE_TIMEOUT, GUEST, Rig, Web, ip, sh};

/// A host behind others, as a network namespace.
pub struct RemoteClient {
    netns: Netns,
}

impl RemoteClient {
    /// Connects it to the lab by a veth pair. The end on the lab's side is named `far`; the other end has this address and
    /// gateway.
    pub fn new(web: &Web, address: &str, gateway: &str) -> Self {
        let netns = Netns::new().unwrap();
        let cable = || add_veth("far", "eth0", Some(netns.as_fd()));
        web.lab.in_netns(cable).unwrap().unwrap();
        let set = || {
            ip("link set eth0 up");
            ip(&format!("address add {address} dev eth0"));
            ip(&format!("route add default via {gateway}"));
        };
        netns.run(set).unwrap();
        Self { netns }
    }

    pub fn client(&self) -> Client {
        let to = SocketAddr::from((GUEST, 80));
        let connect = || TcpStream::connect_timeout(&to, CHANGE_TIMEOUT).unwrap();
        Client::of(self.netns.run(connect).unwrap())
    }
}

/// A second VM that routes between the server's bridge and one with a host at `10.78.0.50`.
pub const ROUTER: &str = "[[guest]]\nname = 'pi-router'\ncores = [1]\ntaps = [{ bridge = 'br0', address = '10.77.0.12/24' }, \
     { bridge = 'br1', address = '10.78.0.12/24' }]\n\
     [[bridge]]\nname = 'br0'\naddress = '10.77.0.1/24'\n[[bridge]]\nname = 'br1'\naddress = '10.78.0.1/24'\n";

/// Creates that host and the route to it.
pub fn behind_a_router(rig: &Rig) -> RemoteClient {
    let far = RemoteClient::new(rig, "10.78.0.50/24", "10.78.0.12");
    rig.ip("link set far master br1");
    rig.ip("link set far up");
    // The router's packet sockets hold 208 KiB; larger windows would lose more packets than the test intends.
    let small = || std::fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 65536 65536").unwrap();
    far.netns.run(small).unwrap();
    sh(
        &rig.lab.guests()[1],
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
    );
    rig.sh("/usr/bin/ip route add 10.78.0.0/24 via 10.77.0.12");
    far
}

/// Makes a router drop 1 % of the packets and delay the others by 5 ms, in both directions.
pub fn disturb(router: &Guest) {
    for nic in ["vec0", "vec1"] {
        let netem = "root netem limit 10000 delay 5ms loss 1%";
        sh(router, &format!("/usr/sbin/tc qdisc add dev {nic} {netem}"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A VM (a network namespace) behind its tap on a bridge, and a client on the same bridge.
#![allow(dead_code)]

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use viola_netdev::{Netns, add_address, add_veth, device};
use viola_vpipe::pipes::{PipeResources, Pipes, congestion_controls};
use viola_vpipe::{AttachedPrograms, Flow, HoldQueue, Steering, VmNetns};

const GUEST: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
pub const CLIENT: [u8; 6] = [0x52, 0x54, 0, 0, 0, 3];
const PORT: u16 = 8080;

/// A tool of iproute2. It acts on the caller's network namespace.
pub const BRIDGE: &str = "/usr/sbin/bridge";
pub const IP: &str = "/usr/sbin/ip";
pub const TC: &str = "/usr/sbin/tc";

/// Runs a tool and asserts that it succeeds.
pub fn tool(tool: &str, words: &str) {
    let output = Command::new(tool).args(words.split(' ')).output().unwrap();
    assert!(output.status.success(), "{tool} {words}: {output:?}");
}

/// A host's bridge with a VM and a client on it.
pub struct Tenant {
    pub guest: Netns,
    pub client: Netns,
    pub vm_netns: VmNetns,
    pub hold_queue: Option<HoldQueue>,
    pub tap: u32,
    /// Cap in bytes per second.
    pub max_bytes_per_s: Option<u64>,
    pub receive_limit: Option<String>,
    _programs: AttachedPrograms,
}

impl Tenant {
    pub fn new(host: &Netns, steering: &Steering, name: &str) -> Self {
        let bridge = format!("br{name}");
        host.run(|| {
            device::add_bridge(&bridge).unwrap();
            device::up(&bridge).unwrap();
        })
        .unwrap();
        Self::on(&bridge, None, host, steering, name)
    }

    /// Uses an existing bridge. In a VLAN of it the VM's frames are untagged and the client's are tagged.
    pub fn on(
        bridge: &str,
        vlan: Option<u16>,
        host: &Netns,
        steering: &Steering,
        name: &str,
    ) -> Self {
        let (guest, client) = (Netns::new().unwrap(), Netns::new().unwrap());
        let [tap, client_port, veth] = ["tap", "cl", "vs"].map(|what| format!("{what}{name}"));
        let (vm_netns, hold_queue, tap, programs) = host
            .run(|| {
                for (port, netns) in [(&tap, &guest), (&client_port, &client)] {
                    add_veth(port, "eth0", Some(netns.as_fd())).unwrap();
                    device::add_port(bridge, port).unwrap();
                    device::up(port).unwrap();
                }
                if let Some(vlan) = vlan {
                    for port in [&tap, &client_port] {
                        tool(BRIDGE, &format!("vlan del dev {port} vid 1"));
                    }
                    tool(
                        BRIDGE,
                        &format!("vlan add dev {tap} vid {vlan} pvid untagged"),
                    );
                    tool(BRIDGE, &format!("vlan add dev {client_port} vid {vlan}"));
                }
                let vm_netns = VmNetns::new(&veth, GUEST, 1500).unwrap();
                let tap = device::index(&tap).unwrap();
                let programs = steering.attach(tap, &vm_netns).unwrap();
                let hold_queue = HoldQueue::new(&vm_netns).unwrap();
                (vm_netns, hold_queue, tap, programs)
            })
            .unwrap();
        for (netns, mac, last, tag) in [(&guest, GUEST, 2, None), (&client, CLIENT, 3, vlan)] {
            netns
                .run(|| {
                    device::up("lo").unwrap();
                    device::set_mac("eth0", mac).unwrap();
                    let interface = match tag {
                        None => "eth0",
                        Some(vlan) => {
                            device::up("eth0").unwrap();
                            tool(
                                IP,
                                &format!("link add link eth0 name tagged type vlan id {vlan}"),
                            );
                            "tagged"
                        }
                    };
                    device::set_address(interface, [10, 66, 0, last].into(), 24).unwrap();
                    let v6 = [0xfd66, 0, 0, 0, 0, 0, 0, u16::from(last)];
                    add_address(device::index(interface).unwrap(), IpAddr::from(v6), 64).unwrap();
                })
                .unwrap();
        }
        Self {
            guest,
            client,
            vm_netns,
            hold_queue: Some(hold_queue),
            tap,
            max_bytes_per_s: None,
            receive_limit: None,
            _programs: programs,
        }
    }

    /// The transfer engine for this VM. A VM can have only one.
    pub fn pipes(&mut self, steering: &Steering) -> Pipes {
        let resources = PipeResources {
            flows: steering.flows().descriptor().unwrap().into(),
            gate: steering.gate().descriptor().unwrap().into(),
            hold_queue: self.hold_queue.take().unwrap(),
            tap: self.tap,
            veth: self.vm_netns.veth(),
            hold_veth: self.vm_netns.hold_veth(),
            addresses: vec![[10, 66, 0, 2].into(), [0xfd66, 0, 0, 0, 0, 0, 0, 2].into()],
            congestion_controls: congestion_controls().unwrap(),
            max_pipes: 8,
            max_bytes_per_s: self.max_bytes_per_s,
            receive_limit: self.receive_limit.clone(),
        };
        let netns = self.vm_netns.netns();
        netns.run(|| Pipes::spawn(resources).unwrap()).unwrap()
    }

    /// A connection of a client to the VM: the client's socket, the VM's socket, and the flow.
    pub fn connect(&self, ipv4: bool) -> (TcpStream, TcpStream, Flow) {
        let server: IpAddr = match ipv4 {
            true => [10, 66, 0, 2].into(),
            false => [0xfd66, 0, 0, 0, 0, 0, 0, 2].into(),
        };
        let address = SocketAddr::new(server, PORT);
        let listener = self
            .guest
            .run(|| TcpListener::bind(address).unwrap())
            .unwrap();
        let client = self
            .client
            .run(|| TcpStream::connect_timeout(&address, Duration::from_secs(20)).unwrap())
            .unwrap();
        client
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let (guest, peer) = listener.accept().unwrap();
        let flow = Flow {
            tap: self.tap,
            guest: address,
            peer,
        };
        (client, guest, flow)
    }
}

/// Pseudo-random bytes; the seed determines them.
pub fn noise(size: usize, seed: u32) -> Vec<u8> {
    let mut word = seed | 1;
    (0..size)
        .map(|_| {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (word >> 24) as u8
        })
        .collect()
}

// SPDX-License-Identifier: Apache-2.0
//! Bytes of HDFS blocks on the running kernel: two threads in network namespaces of their own stand for VMs behind veth pairs at a
//! bridge. Needs root and a kernel with BTF.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};

use support::netns::{interface, ip, tid, unshare_network};
use viola_host::Tid;
use viola_meter::acct::{Acct, BlockMeter, Flow, GuestPackets};

const READER: u32 = 3;
const DATANODE: u32 = 4;
/// Ports of HDFS 3 and of HDFS 2, and another one.
const PORTS: [u16; 3] = [9866, 50010, 9867];
/// Bytes from each of them.
const BYTES: usize = 300_000;

/// A VM: a thread in a namespace of its own, with this address.
struct Vm {
    thread: std::thread::JoinHandle<()>,
    from: Receiver<Tid>,
    go: Sender<()>,
}

impl Vm {
    fn start(address: &'static str, run: impl FnOnce(&dyn Fn()) + Send + 'static) -> Self {
        let (say, from) = channel();
        let (go, begin) = channel();
        let thread = std::thread::spawn(move || {
            unshare_network();
            say.send(tid()).unwrap();
            begin.recv().unwrap();
            ip(&format!("address add {address}/24 dev eth0"));
            ip("link set eth0 up");
            run(&|| {
                say.send(0).unwrap();
                begin.recv().unwrap();
            });
        });
        Self { thread, from, go }
    }

    /// Gives it a NIC, and waits until it says that it is ready.
    fn plug(&self, tap: &str) {
        let netns = self.from.recv().unwrap();
        ip(&format!(
            "link add {tap} type veth peer name eth0 netns {netns}"
        ));
        ip(&format!("link set {tap} master br0"));
        ip(&format!("link set {tap} up"));
        self.go.send(()).unwrap();
        self.from.recv().unwrap();
    }
}

#[test]
fn bytes_from_the_ports_of_datanodes_count_for_both_vms_and_others_do_not() {
    unshare_network();
    ip("link add br0 type bridge");
    ip("link set br0 up");
    let datanode = Vm::start("10.9.1.2", |ready| {
        let listeners = PORTS.map(|port| TcpListener::bind(("10.9.1.2", port)).unwrap());
        ready();
        for listener in listeners {
            let (mut client, _) = listener.accept().unwrap();
            client.write_all(&vec![7; BYTES]).unwrap();
        }
    });
    let reader = Vm::start("10.9.1.3", |ready| {
        ready();
        for port in PORTS {
            let mut bytes = Vec::new();
            let mut stream = TcpStream::connect(("10.9.1.2", port)).unwrap();
            stream.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes.len(), BYTES);
        }
    });
    datanode.plug("tap0");
    reader.plug("tap1");
    let mut acct = Acct::load().unwrap();
    for (tap, vm) in [("tap0", DATANODE), ("tap1", READER)] {
        let to_guest = GuestPackets::Transmitted;
        let (index, netns) = interface(tap);
        acct.watch_nic(index, netns, to_guest, vm, None).unwrap();
    }
    let meter = BlockMeter::load(&acct).unwrap();
    let vms = [datanode, reader];
    for vm in &vms {
        vm.go.send(()).unwrap();
    }
    for vm in vms {
        vm.thread.join().unwrap();
    }
    let mut flows = meter.end().unwrap();
    flows.sort_by_key(|flow| flow.vm);
    let mut sender = [0; 16];
    sender[..4].copy_from_slice(&[10, 9, 1, 2]);
    let seen = |flow: &Flow| (flow.vm, flow.to_guest, flow.sender);
    let expected = [(READER, true, sender), (DATANODE, false, sender)];
    assert_eq!(flows.iter().map(seen).collect::<Vec<_>>(), expected);
    // Of two of the three ports, with headers.
    let bytes = 2 * BYTES as u64;
    for flow in flows {
        assert!((bytes..bytes * 5 / 4).contains(&flow.bytes), "{flow:?}");
    }
}

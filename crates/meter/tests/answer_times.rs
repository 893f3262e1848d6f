// SPDX-License-Identifier: Apache-2.0
//! Answer times on the running kernel: a thread in a network namespace of its own stands for a VM behind a veth pair, which stands
//! for its NIC. Needs root and a kernel with BTF.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use support::netns::{interface, ip, tid, unshare_network};
use viola_meter::Histogram;
use viola_meter::acct::{Acct, AnswerMeter, GuestPackets, HistCounters};

const VM: u32 = 3;
const PORT: u16 = 80;
const REQUESTS: u64 = 5;
/// How long the server thinks.
const THINK: Duration = Duration::from_millis(30);

fn histogram(counters: &HistCounters) -> Histogram {
    let mut h = Histogram::default();
    h.add_difference(counters, &HistCounters::ZERO);
    h
}

/// Answers each request of 3 bytes after [`THINK`], in two parts.
fn serve(listener: &TcpListener) {
    let (mut client, _) = listener.accept().unwrap();
    client.set_nodelay(true).unwrap();
    let mut request = [0; 3];
    while client.read_exact(&mut request).is_ok() {
        std::thread::sleep(THINK);
        client.write_all(b"begin").unwrap();
        client.write_all(b"end").unwrap();
    }
}

fn ask(to: (&str, u16)) {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_nodelay(true).unwrap();
    for _ in 0..REQUESTS {
        stream.write_all(b"hey").unwrap();
        stream.read_exact(&mut [0; 8]).unwrap();
    }
}

#[test]
fn clients_of_a_vm_wait_for_its_answers_and_those_of_others_do_not_count() {
    unshare_network();
    let (say, guest) = channel();
    let (go, begin) = channel();
    let vm = std::thread::spawn(move || {
        unshare_network();
        say.send(tid()).unwrap();
        begin.recv().unwrap();
        for words in [
            "link set lo up",
            "address add 10.9.0.2/24 dev eth0",
            "link set eth0 up",
        ] {
            ip(words);
        }
        let listener = TcpListener::bind(("10.9.0.2", PORT)).unwrap();
        say.send(0).unwrap();
        serve(&listener);
        // The VM is a client itself now, of a server with a higher port.
        begin.recv().unwrap();
        ask(("10.9.0.1", 8080));
    });
    ip(&format!(
        "link add tap0 type veth peer name eth0 netns {}",
        guest.recv().unwrap()
    ));
    go.send(()).unwrap();
    ip("address add 10.9.0.1/24 dev tap0");
    ip("link set tap0 up");
    guest.recv().unwrap();

    let mut acct = Acct::load().unwrap();
    let (index, netns) = interface("tap0");
    let to_guest = GuestPackets::Transmitted;
    acct.watch_nic(index, netns, to_guest, VM, None).unwrap();
    let meter = AnswerMeter::load(&acct).unwrap();
    ask(("10.9.0.2", PORT));
    let times = meter.vm(VM);
    let (connects, answers) = (histogram(&times.connects), histogram(&times.answers));
    assert_eq!((connects.count(), answers.count()), (1, REQUESTS));
    let think = THINK.as_nanos() as u64;
    let p50 = answers.quantile(0.5).unwrap();
    // The bound of a bucket, a quarter octave wide, on a busy machine.
    assert!((think..10 * think).contains(&p50), "{p50} ns");
    assert!(connects.quantile(1.0).unwrap() < think, "{connects:?}");

    let listener = TcpListener::bind(("10.9.0.1", 8080)).unwrap();
    go.send(()).unwrap();
    serve(&listener);
    vm.join().unwrap();
    assert_eq!(meter.vm(VM), times, "answers to the VM are not its own");
    assert_eq!(histogram(&meter.vm(VM + 1).answers).count(), 0);
}

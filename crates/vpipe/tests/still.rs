// SPDX-License-Identifier: Apache-2.0
//! While a VM is paused, no byte of its transfers moves, whatever the sockets hold; afterwards all transfers continue.
#![allow(clippy::unwrap_used)]

mod bed;
mod tenant;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use bed::{Bed, SIZE, restore};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use tenant::noise;
use viola_proto::pipe::PipeReply;
use viola_vpipe::Flow;
use viola_vpipe::pipes::{PauseProbe, PipeSpec};

const MIB: u64 = 1 << 20;
/// Longer than any timeout of a socket that must stay silent.
const SILENCE: Duration = Duration::from_millis(1500);

/// The state of a vCPU thread, as the host reads it.
struct Vcpu(File);

impl Vcpu {
    fn of(bed: &Bed) -> Self {
        let file = tempfile::tempfile().unwrap();
        let its = OwnedFd::from(file.try_clone().unwrap());
        bed.pipes.watch_pause(PauseProbe::new(vec![its], None));
        let vcpu = Self(file);
        vcpu.is('S');
        vcpu
    }

    fn is(&self, state: char) {
        let line = format!("7 (vcpu) {state} 1 7");
        self.0.write_all_at(line.as_bytes(), 0).unwrap();
    }

    fn pause(&self, bed: &Bed) {
        self.is('T');
        wait_until("the pause is detected", || bed.pipes.is_paused());
        // Lets a turn that had begun end.
        std::thread::sleep(Duration::from_millis(50));
    }

    fn resume(&self, bed: &Bed) {
        self.is('S');
        wait_until("the resume is detected", || !bed.pipes.is_paused());
    }
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads until no byte has arrived for `quiet`.
fn drain(client: &mut TcpStream, got: &mut Vec<u8>, quiet: Duration) {
    client.set_read_timeout(Some(quiet)).unwrap();
    let mut some = vec![0; 64 << 10];
    loop {
        match client.read(&mut some) {
            Ok(0) => panic!("the connection ended after {} bytes", got.len()),
            Ok(count) => got.extend_from_slice(&some[..count]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => panic!("after {} bytes: {e}", got.len()),
        }
    }
    client.set_read_timeout(None).unwrap();
}

/// Sends the file as pipe 1 and returns once the client has received the first MiB.
fn under_way(bed: &Bed, ipv4: bool) -> (TcpStream, TcpStream, Flow, Vec<u8>) {
    let (mut client, guest, flow) = bed.tenant.connect(ipv4);
    // A small buffer, so that most of the file waits at the host.
    set_socket_recv_buffer_size(&client, 128 << 10).unwrap();
    bed.start(1, &guest);
    let mut got = vec![0; 1 << 20];
    client.read_exact(&mut got).unwrap();
    (client, guest, flow, got)
}

#[test]
fn bytes_in_the_hosts_socket_wait_until_the_vm_resumes() {
    let bed = Bed::new("s");
    let vcpu = Vcpu::of(&bed);
    for ipv4 in [true, false] {
        let (mut client, guest, flow, mut got) = under_way(&bed, ipv4);
        vcpu.pause(&bed);
        let before = got.len();
        drain(&mut client, &mut got, Duration::from_millis(200));
        let rest = got.len() - before;
        assert!(
            rest < 1 << 20,
            "{rest} bytes had reached the client already"
        );
        // From now on no byte may arrive: neither a timeout nor a window update of the client may trigger one.
        let before = got.len();
        drain(&mut client, &mut got, SILENCE);
        assert_eq!(got.len(), before);
        assert!(bed.pipes.stats().paused);
        vcpu.resume(&bed);
        let mut rest = vec![0; SIZE as usize - got.len()];
        client.read_exact(&mut rest).unwrap();
        got.extend(rest);
        assert!(got == bed.file);
        assert_eq!(bed.restore_and_confirm(1, &guest), SIZE);
        bed.wait_until_released(&flow);
    }
}

#[test]
fn a_disk_of_a_vm_that_is_paused_is_not_written_to() {
    let bed = Bed::new("t");
    let vcpu = Vcpu::of(&bed);
    let (mut client, source, from) = bed.tenant.connect(true);
    bed.pipes.hold(1, from.guest, from.peer);
    assert_eq!(bed.reply(), PipeReply::Held { pipe: 1 });
    let spec = PipeSpec {
        pipe: 1,
        source: bed.extracted(&source),
        sink: bed.part(0..2 * MIB, 0),
        length: 2 * MIB,
    };
    bed.pipes.start(spec).unwrap();
    let bytes = noise(2 << 20, 21);
    client.write_all(&bytes[..100_000]).unwrap();
    wait_until("the first bytes are written", || {
        bed.disk(0..100_000) == bytes[..100_000]
    });
    vcpu.pause(&bed);
    let sent = bytes.clone();
    let sender = std::thread::spawn(move || {
        client.write_all(&sent[100_000..]).unwrap();
        client
    });
    // Neither a connection nor a copy may write.
    let copy = PipeSpec {
        pipe: 2,
        source: bed.part(2 * MIB..3 * MIB, 0),
        sink: bed.part(5 * MIB..6 * MIB, 0),
        length: MIB,
    };
    bed.pipes.start(copy).unwrap();
    std::thread::sleep(SILENCE);
    assert!(
        bed.disk(100_000..SIZE) == bed.file[100_000..],
        "the disk was written to"
    );
    assert!(bed.pipes.replies().next().is_none());
    vcpu.resume(&bed);
    let mut over = Vec::new();
    while over.len() < 2 {
        match bed.reply() {
            PipeReply::Finished {
                pipe,
                source: back,
                errno: 0,
                ..
            } => {
                if let Some(back) = back {
                    restore(&source, *back);
                    bed.pipes.restored(pipe);
                }
                over.push(pipe);
            }
            other => panic!("{other:?}"),
        }
    }
    sender.join().unwrap();
    assert!(bed.disk(0..2 * MIB) == bytes);
    assert!(bed.disk(5 * MIB..6 * MIB) == bed.file[2 << 20..3 << 20]);
}

#[test]
fn a_vm_that_ends_while_it_is_paused_causes_a_reset() {
    let mut bed = Bed::new("q");
    let vcpu = Vcpu::of(&bed);
    let (mut client, _guest, flow, mut got) = under_way(&bed, true);
    vcpu.pause(&bed);
    drain(&mut client, &mut got, Duration::from_millis(200));
    bed.pipes.reset_all();
    client
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let error = client.read_to_end(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(bed.is_released(&flow));
}

#[test]
fn timeouts_do_not_count_the_time_of_a_pause() {
    let bed = Bed::new("p");
    let vcpu = Vcpu::of(&bed);
    let (mut client, guest, flow, mut got) = under_way(&bed, true);
    // Requests that the VM sent just before the pause wait until it resumes.
    vcpu.pause(&bed);
    bed.pipes.stop(1);
    bed.pipes.hold(2, flow.guest, flow.peer);
    drain(&mut client, &mut got, SILENCE);
    assert!(bed.pipes.replies().next().is_none());
    vcpu.resume(&bed);
    assert!(matches!(bed.reply(), PipeReply::Refused { pipe: 2, .. }));
    let reader = std::thread::spawn(move || {
        let end = client.read_to_end(&mut got);
        (got, end)
    });
    let sent = bed.restore_and_confirm(1, &guest) as usize;
    drop(guest);
    let (got, end) = reader.join().unwrap();
    end.unwrap();
    assert!(got == bed.file[..sent], "{} {sent}", got.len());
}

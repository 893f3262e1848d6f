// SPDX-License-Identifier: Apache-2.0
//! Transfers from a connection into a file or another connection, and from a file into a file.
#![allow(clippy::unwrap_used)]

mod bed;
mod tenant;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bed::{Bed, SIZE, restore, retransmitted_segments};
use tenant::noise;
use viola_proto::pipe::{PipeId, PipeReply};
use viola_vpipe::Flow;
use viola_vpipe::pipes::{Endpoint, PipeSpec};

const MIB: u64 = 1 << 20;

/// Makes the host hold the connection's packets from now on, and empties the VM's socket.
fn hold(bed: &Bed, pipe: PipeId, flow: &Flow, source: &TcpStream) -> Vec<u8> {
    bed.pipes.hold(pipe, flow.guest, flow.peer);
    assert_eq!(bed.reply(), PipeReply::Held { pipe });
    let mut got = Vec::new();
    source.set_nonblocking(true).unwrap();
    let mut some = vec![0; 1 << 20];
    loop {
        match (&*source).read(&mut some) {
            Ok(0) => break,
            Ok(n) => got.extend_from_slice(&some[..n]),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::WouldBlock);
                // A packet may still be on its way through the VM.
                std::thread::sleep(Duration::from_millis(5));
                if rustix::io::ioctl_fionread(source).unwrap() == 0 {
                    break;
                }
            }
        }
    }
    source.set_nonblocking(false).unwrap();
    got
}

/// Sends all bytes without a pause.
fn sender(mut from: TcpStream, bytes: Vec<u8>) -> JoinHandle<TcpStream> {
    std::thread::spawn(move || {
        from.write_all(&bytes).unwrap();
        from
    })
}

/// Waits until the host has moved this many bytes.
fn moved(bed: &Bed, bytes: u64) {
    let begun = Instant::now();
    let has = || {
        let stats = bed.pipes.stats();
        stats.transfers.first().is_some_and(|t| t.sent >= bytes)
    };
    while !has() {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "the bytes are not moved"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads this many bytes.
fn reader(mut to: TcpStream, size: usize) -> JoinHandle<(TcpStream, Vec<u8>)> {
    std::thread::spawn(move || {
        let mut got = vec![0; size];
        to.read_exact(&mut got).unwrap();
        (to, got)
    })
}

/// Asserts that a connection carries bytes in both directions.
fn talk(one: &mut TcpStream, other: &mut TcpStream) {
    let mut five = [0; 5];
    one.write_all(b"hello").unwrap();
    other.read_exact(&mut five).unwrap();
    other.write_all(&five).unwrap();
    one.read_exact(&mut five).unwrap();
    assert_eq!(&five, b"hello");
}

/// Has the host move `length` bytes from the held source to the sink.
fn relay(bed: &Bed, pipe: u64, from: &Flow, ends: (&TcpStream, &TcpStream), length: u64) {
    bed.pipes.hold(pipe, from.guest, from.peer);
    assert_eq!(bed.reply(), PipeReply::Held { pipe });
    let spec = PipeSpec {
        pipe,
        source: bed.extracted(ends.0),
        sink: bed.extracted(ends.1),
        length,
    };
    bed.pipes.start(spec).unwrap();
}

#[test]
fn a_stream_is_relayed_and_both_connections_continue() {
    let bed = Bed::new("r");
    let mut again = 0;
    for ipv4 in [true, false] {
        let (backend, mut source, from) = bed.tenant.connect(ipv4);
        let (client, mut sink, to) = bed.tenant.connect(ipv4);
        let all = noise(96 << 20, 5);
        let sending = sender(backend, all.clone());
        let receiving = reader(client, all.len());
        let mut early = vec![0; 4 << 20];
        source.read_exact(&mut early).unwrap();
        sink.write_all(&early).unwrap();
        let rest = hold(&bed, 1, &from, &source);
        sink.write_all(&rest).unwrap();
        while viola_handover::unacknowledged_bytes(std::os::fd::AsFd::as_fd(&sink)).unwrap() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let length = (all.len() - early.len() - rest.len()) as u64;
        let spec = PipeSpec {
            pipe: 1,
            source: bed.extracted(&source),
            sink: bed.extracted(&sink),
            length,
        };
        bed.pipes.start(spec).unwrap();
        let PipeReply::Finished {
            pipe: 1,
            source: Some(source_back),
            sink: Some(sink_back),
            sent,
            errno: 0,
            ..
        } = bed.reply()
        else {
            panic!("the connections are not returned");
        };
        assert_eq!(sent, length);
        restore(&source, *source_back);
        restore(&sink, *sink_back);
        bed.pipes.restored(1);
        let mut backend = sending.join().unwrap();
        let (mut client, got) = receiving.join().unwrap();
        assert!(got == all, "other bytes");
        for flow in [from, to] {
            bed.wait_until_released(&flow);
        }
        talk(&mut backend, &mut source);
        talk(&mut client, &mut sink);
        again += retransmitted_segments(&backend);
    }
    // The peer retransmits segments that were overtaken during the redirection. If the held segments were lost, it would
    // retransmit more than a thousand.
    assert!(again <= 1000, "{again} segments were sent again");
    let stats = bed.wait_for_ended(2);
    assert_eq!((stats.begun, stats.returned, stats.broken), (2, 2, 0));
}

#[test]
fn a_peer_is_promised_no_more_than_the_vm_has_room_for() {
    let bed = Bed::new("w");
    let (backend, mut source, from) = bed.tenant.connect(true);
    let (client, sink, _) = bed.tenant.connect(true);
    let all = noise(128 << 20, 6);
    let sending = sender(backend, all.clone());
    let receiving = reader(client, all.len());
    let mut early = vec![0; 1 << 20];
    source.read_exact(&mut early).unwrap();
    let rest = hold(&bed, 1, &from, &source);
    let given = bed.extracted(&source);
    let Endpoint::Connection { connection, .. } = &given else {
        panic!("no connection");
    };
    let own = connection.window[3].max(connection.buffers[1] / 2);
    let length = (all.len() - early.len() - rest.len()) as u64;
    let mut writer = sink.try_clone().unwrap();
    writer.write_all(&early).unwrap();
    writer.write_all(&rest).unwrap();
    while viola_handover::unacknowledged_bytes(std::os::fd::AsFd::as_fd(&sink)).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let spec = PipeSpec {
        pipe: 1,
        source: given,
        sink: bed.extracted(&sink),
        length,
    };
    bed.pipes.start(spec).unwrap();
    let PipeReply::Finished {
        source: Some(back), ..
    } = bed.reply()
    else {
        panic!("the connection is not returned");
    };
    let [.., promised, from] = back.window;
    let promised = from.wrapping_add(promised).wrapping_sub(back.rcv_nxt);
    assert!(promised <= own, "{promised} of {own}");
    let [_, room, locked] = back.buffers;
    assert!(promised <= room && locked == 0, "{promised}, {room}");
    drop(sending.join().unwrap());
    let (_client, got) = receiving.join().unwrap();
    assert!(got == all, "other bytes");
}

#[test]
fn the_end_and_the_reset_of_a_source_are_reported() {
    let bed = Bed::new("s");
    // The source ends.
    let (mut backend, source, from) = bed.tenant.connect(true);
    let (client, sink, _) = bed.tenant.connect(true);
    relay(&bed, 1, &from, (&source, &sink), u64::MAX);
    let receiving = reader(client, 3 << 20);
    let bytes = noise(3 << 20, 8);
    backend.write_all(&bytes).unwrap();
    backend.shutdown(Shutdown::Write).unwrap();
    let (_client, got) = receiving.join().unwrap();
    assert!(got == bytes);
    match bed.reply() {
        PipeReply::Finished {
            source: Some(source),
            sink: Some(sink),
            sent,
            errno: 0,
            ..
        } => assert_eq!(
            (source.peer_finished, sink.peer_finished, sent),
            (true, false, 3 * MIB)
        ),
        other => panic!("{other:?}"),
    }
    // The source is reset: only the client's connection comes back.
    let (backend, source, from) = bed.tenant.connect(true);
    let (mut client, mut sink, _) = bed.tenant.connect(true);
    relay(&bed, 2, &from, (&source, &sink), u64::MAX);
    rustix::net::sockopt::set_socket_linger(&backend, Some(Duration::ZERO)).unwrap();
    drop(backend);
    let PipeReply::Finished {
        source: None,
        sink: Some(connection),
        sent: 0,
        errno: libc::ECONNRESET,
        ..
    } = bed.reply()
    else {
        panic!("the end is not reported");
    };
    assert!(bed.is_released(&from));
    restore(&sink, *connection);
    bed.pipes.restored(2);
    talk(&mut client, &mut sink);
}

/// The serial line to the VM may be slow, and unread bytes of a connection would delay every other message on it.
#[test]
fn a_source_with_megabytes_unread_is_reset_when_the_sink_is_gone() {
    // The cap limits the transfer, so received bytes queue up at the host.
    let bed = Bed::capped("m", Some(MIB));
    let (backend, source, from) = bed.tenant.connect(true);
    let (client, sink, _) = bed.tenant.connect(true);
    relay(&bed, 1, &from, (&source, &sink), u64::MAX);
    backend.set_nonblocking(true).unwrap();
    let piece = noise(1 << 20, 3);
    let (mut said, mut taken) = (0, 0);
    let mut client = client;
    client.set_nonblocking(true).unwrap();
    let mut got = vec![0; 1 << 20];
    // Until the host holds more than a megabyte.
    let begun = Instant::now();
    loop {
        said += (&backend).write(&piece).unwrap_or(0);
        taken += client.read(&mut got).unwrap_or(0);
        let under_way =
            viola_handover::unacknowledged_bytes(std::os::fd::AsFd::as_fd(&backend)).unwrap();
        let kept = said - under_way - taken;
        if kept > 1 << 20 {
            break;
        }
        let timeout = Duration::from_secs(60);
        assert!(
            begun.elapsed() < timeout,
            "the host holds only {kept} of {said} bytes"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    match bed.reply() {
        PipeReply::Finished {
            source: None,
            sink: None,
            errno: libc::ECONNRESET,
            ..
        } => {}
        other => panic!("{other:?}"),
    }
    bed.wait_until_released(&from);
    backend.set_nonblocking(false).unwrap();
    let error = (&backend).read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn a_held_connection_continues_when_its_pipe_is_stopped() {
    let bed = Bed::new("h");
    let (mut backend, mut source, from) = bed.tenant.connect(true);
    bed.pipes.hold(1, from.guest, from.peer);
    assert_eq!(bed.reply(), PipeReply::Held { pipe: 1 });
    backend.write_all(b"kept").unwrap();
    source
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut four = [0; 4];
    assert!(
        source.read_exact(&mut four).is_err(),
        "the connection was not held"
    );
    source.set_read_timeout(None).unwrap();
    // A connection can be held only once.
    bed.pipes.hold(2, from.guest, from.peer);
    assert!(matches!(bed.reply(), PipeReply::Refused { pipe: 2, .. }));
    bed.pipes.stop(1);
    assert!(matches!(bed.reply(), PipeReply::Refused { pipe: 1, .. }));
    source.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"kept");
    bed.wait_until_released(&from);
    talk(&mut backend, &mut source);
}

#[test]
fn an_upload_goes_into_the_files_blocks_and_stops_at_its_length() {
    let bed = Bed::new("e");
    let before = bed.disk(0..SIZE);
    let (client, mut source, from) = bed.tenant.connect(true);
    let bytes = noise(6 << 20, 11);
    let sending = sender(client, bytes.clone());
    let kept = hold(&bed, 1, &from, &source);
    // The file lies on the disk from 1 MiB to 7.5 MiB.
    let (disk, offset) = (MIB..MIB * 15 / 2, 4321);
    let length = (bytes.len() - kept.len()) as u64;
    let spec = PipeSpec {
        pipe: 1,
        source: bed.extracted(&source),
        sink: bed.part(disk.clone(), offset),
        length,
    };
    bed.pipes.start(spec).unwrap();
    let PipeReply::Finished {
        source: Some(connection),
        sink: None,
        sent,
        errno: 0,
        ..
    } = bed.reply()
    else {
        panic!("the connection is not returned");
    };
    assert_eq!(sent, length);
    restore(&source, *connection);
    bed.pipes.restored(1);
    let mut client = sending.join().unwrap();
    talk(&mut client, &mut source);
    let after = bed.disk(0..SIZE);
    let (begin, end) = (
        (disk.start + offset) as usize,
        (disk.start + offset + length) as usize,
    );
    assert!(after[begin..end] == bytes[kept.len()..], "other bytes");
    assert!(after[..begin] == before[..begin] && after[end..] == before[end..]);

    // While a client pauses, the agent learns how far the upload came.
    client.write_all(&bytes[..100_000]).unwrap();
    let kept = hold(&bed, 2, &from, &source);
    let spec = PipeSpec {
        pipe: 2,
        source: bed.extracted(&source),
        sink: bed.part(0..2 * MIB, 0),
        length: 2 * MIB,
    };
    bed.pipes.start(spec).unwrap();
    client.write_all(&bytes[100_000..200_000]).unwrap();
    let wanted = (200_000 - kept.len()) as u64;
    moved(&bed, wanted);
    bed.pipes.stop(2);
    let PipeReply::Finished {
        source: back,
        sent,
        errno: 0,
        ..
    } = bed.reply()
    else {
        panic!("the connection is not returned");
    };
    assert_eq!(sent, wanted);
    assert!(bed.disk(0..wanted) == bytes[kept.len()..200_000]);
    restore(&source, *back.unwrap());
    bed.pipes.restored(2);
    talk(&mut client, &mut source);
}

#[test]
fn a_cap_holds_for_copies_and_connections_together() {
    let rate = 8 * MIB;
    let mut bed = Bed::capped("k", Some(rate));
    let (client, guest, _) = bed.tenant.connect(true);
    let begun = Instant::now();
    let receiving = reader(client, SIZE as usize);
    bed.start(1, &guest);
    let spec = PipeSpec {
        pipe: 2,
        source: bed.part(0..3 * MIB, 0),
        sink: bed.part(4 * MIB..8 * MIB, 0),
        length: 3 * MIB,
    };
    bed.pipes.start(spec).unwrap();
    for _ in 0..2 {
        match bed.reply() {
            PipeReply::Finished { errno: 0, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    receiving.join().unwrap();
    // Except for the initial burst of a tenth of a second, and for the excess of the last turn of each transfer: a tenth of a
    // second, or a pipe buffer.
    let beyond = rate / 10 * 2 + (256 << 10);
    let least = (SIZE + 3 * MIB - beyond) as f64 / rate as f64;
    let took = begun.elapsed().as_secs_f64();
    assert!(
        took > least,
        "the transfers took {took} s; the cap demands {least} s"
    );
    bed.pipes.reset_all();
}

#[test]
fn a_copy_is_made_on_the_disk_and_refused_into_a_hole() {
    let bed = Bed::new("c");
    let copy = |pipe, from, to, length| {
        bed.pipes.start(PipeSpec {
            pipe,
            source: from,
            sink: to,
            length,
        })
    };
    let (from, to) = (0..3 * MIB, 4 * MIB..8 * MIB);
    copy(
        1,
        bed.part(from.clone(), 10),
        bed.part(to.clone(), 77),
        2 * MIB,
    )
    .unwrap();
    let back = PipeReply::Finished {
        pipe: 1,
        source: None,
        sink: None,
        sent: 2 * MIB,
        errno: 0,
        host_us: 0,
    };
    assert_eq!(bed.reply(), back);
    let (begin, end) = (4 * MIB + 77, 6 * MIB + 77);
    assert!(bed.disk(begin..end) == bed.disk(10..2 * MIB + 10));
    assert!(bed.disk(end..8 * MIB) == bed.file[end as usize..8 << 20]);
    let why = copy(2, bed.part(from, 10), bed.part(to, 3 * MIB), 2 * MIB).unwrap_err();
    assert!(why.contains("blocks"), "{why}");
    let stats = bed.wait_for_ended(1);
    assert_eq!((stats.begun, stats.returned, stats.bytes), (1, 1, 2 * MIB));
}

/// The limit holds for what the VM receives, and not for what it sends.
#[test]
fn a_limit_of_the_nic_leaves_what_the_vm_receives_to_the_vm() {
    let bed = Bed::limited("l", None, Some("htb"));
    let (mut client, mut server, flow) = bed.tenant.connect(true);
    let refused = |pipe| match bed.reply() {
        PipeReply::Refused { pipe: id, why } => {
            assert_eq!(id, pipe);
            assert!(why.contains("a limit for what it receives (htb)"), "{why}");
        }
        other => panic!("{other:?}"),
    };
    bed.pipes.hold(1, flow.guest, flow.peer);
    refused(1);
    talk(&mut client, &mut server);

    // A source that was not held before is refused too, and the VM goes on with it.
    let (_backend, from, _) = bed.tenant.connect(true);
    let spec = PipeSpec {
        pipe: 2,
        source: bed.extracted(&from),
        sink: bed.extracted(&server),
        length: MIB,
    };
    bed.pipes.start(spec).unwrap();
    refused(2);
}

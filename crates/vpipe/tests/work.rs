// SPDX-License-Identifier: Apache-2.0
//! The host fulfils an agent's requests: it sends files, returns connections, and loses no byte that a client sends meanwhile.
#![allow(clippy::unwrap_used)]

mod bed;
mod tenant;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use bed::{Bed, SIZE, retransmitted_segments};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use viola_handover::{extract, to_wire};
use viola_proto::agent::{SERIAL_LINE_BYTES, ToAgent, encode};
use viola_proto::pipe::PipeReply;
use viola_vpipe::Flow;

#[test]
fn a_client_that_asks_again_at_once_is_served_without_loss() {
    let bed = Bed::new("w");
    for ipv4 in [true, false] {
        let (mut client, mut guest, flow) = bed.tenant.connect(ipv4);
        let file = bed.file.clone();
        let reader = std::thread::spawn(move || {
            for _ in 0..10 {
                // This request arrives while the connection is on its way back.
                client.write_all(b"GET").unwrap();
                let mut got = vec![0; SIZE as usize];
                client.read_exact(&mut got).unwrap();
                assert!(got == file);
            }
            retransmitted_segments(&client)
        });
        for pipe in 0..10 {
            let mut get = [0; 3];
            guest.read_exact(&mut get).unwrap();
            assert_eq!(&get, b"GET");
            bed.start(pipe, &guest);
            assert_eq!(bed.restore_and_confirm(pipe, &guest), SIZE);
            bed.wait_until_released(&flow);
        }
        assert_eq!(reader.join().unwrap(), 0, "packets were lost");
    }
}

#[test]
fn bytes_that_a_client_sends_meanwhile_are_kept() {
    let bed = Bed::new("m");
    let (mut client, mut guest, flow) = bed.tenant.connect(true);
    bed.start(1, &guest);
    client
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut got = vec![0; SIZE as usize];
    // The host has the connection.
    client.read_exact(&mut got[..1000]).unwrap();
    // More bytes than one message holds.
    let said = tenant::noise(50_000, 3);
    client.write_all(&said).unwrap();
    client.read_exact(&mut got[1000..]).unwrap();
    assert!(got == bed.file);
    let mut unread = Vec::new();
    let mut connection = loop {
        let heard = bed.reply();
        let frame = encode(&ToAgent::Pipe(heard.clone())).unwrap();
        assert!(frame.len() <= SERIAL_LINE_BYTES as usize, "{}", frame.len());
        match heard {
            PipeReply::Unread {
                pipe: 1,
                source: false,
                bytes,
            } => unread.extend(bytes.0),
            PipeReply::Finished {
                sink: Some(connection),
                sent: SIZE,
                errno: 0,
                ..
            } => break connection,
            other => panic!("{other:?}"),
        }
    };
    unread.append(&mut connection.unread.0);
    connection.unread.0 = unread;
    bed::restore(&guest, *connection);
    bed.pipes.restored(1);
    let mut heard = vec![0; said.len()];
    guest.read_exact(&mut heard).unwrap();
    assert!(heard == said, "other bytes");
    bed.wait_until_released(&flow);
    assert_eq!(retransmitted_segments(&client), 0, "packets were lost");
}

#[test]
fn transfers_share_the_host_and_one_too_many_is_refused() {
    let bed = Bed::new("x");
    let (clients, guests): (Vec<_>, Vec<_>) = (0..9)
        .map(|_| {
            let (client, guest, _) = bed.tenant.connect(true);
            (client, guest)
        })
        .unzip();
    for (pipe, guest) in guests.iter().enumerate() {
        bed.start(pipe as u64, guest);
    }
    let PipeReply::Refused { pipe: 8, why } = bed.reply() else {
        panic!("not refused");
    };
    assert!(why.contains("8 pipes"), "{why}");
    let readers: Vec<_> = (clients.into_iter().take(8))
        .map(|mut client| {
            std::thread::spawn(move || {
                let mut got = vec![0; SIZE as usize];
                client.read_exact(&mut got).unwrap();
                (client, got)
            })
        })
        .collect();
    let mut back = Vec::new();
    while back.len() < 8 {
        match bed.reply() {
            PipeReply::Finished { pipe, sent, .. } => {
                assert_eq!(sent, SIZE);
                back.push(pipe);
                bed.pipes.restored(pipe);
            }
            other => panic!("{other:?}"),
        }
    }
    for reader in readers {
        assert!(reader.join().unwrap().1 == bed.file);
    }
}

#[test]
fn a_connection_that_is_not_the_vms_is_refused() {
    let bed = Bed::new("y");
    let (_client, guest, flow) = bed.tenant.connect(true);
    let mut connection = to_wire(extract(guest.as_fd()).unwrap().detach()).unwrap();
    connection.local.set_ip([10, 66, 0, 99].into());
    bed.start_with(1, connection.clone());
    let PipeReply::Refused { pipe: 1, why } = bed.reply() else {
        panic!("not refused");
    };
    assert!(why.contains("10.66.0.99"), "{why}");
    // A connection can be handed over only once.
    connection.local = flow.guest;
    bed.start_with(2, connection.clone());
    bed.start_with(3, connection);
    assert!(matches!(bed.reply(), PipeReply::Refused { pipe: 3, .. }));
}

/// Name of a socket's congestion control algorithm.
fn congestion(socket: i32) -> String {
    let (mut name, mut size) = ([0u8; 16], 16);
    let (level, what) = (libc::IPPROTO_TCP, libc::TCP_CONGESTION);
    // SAFETY: the buffer is ours and has the given size.
    unsafe { libc::getsockopt(socket, level, what, name.as_mut_ptr().cast(), &raw mut size) };
    let name = name.split(|&byte| byte == 0).next().unwrap();
    String::from_utf8(name.to_vec()).unwrap()
}

/// This process's sockets, except the VM's own, that have the VM's end of a connection.
fn of_the_host(flow: &Flow, guest: &TcpStream) -> Vec<i32> {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let has = |fd: &i32| {
        // SAFETY: if another thread closes the descriptor meanwhile, the calls fail or inspect another descriptor of this
        // process.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        let local = rustix::net::getsockname(fd)
            .ok()
            .and_then(|a| SocketAddr::try_from(a).ok());
        let peer = rustix::net::getpeername(fd).ok().flatten();
        let peer = peer.and_then(|a| SocketAddr::try_from(a).ok());
        local == Some(flow.guest) && peer == Some(flow.peer)
    };
    numbers
        .filter(has)
        .filter(|fd| *fd != guest.as_raw_fd())
        .collect()
}

#[test]
fn the_host_uses_the_vms_congestion_control_if_available() {
    let bed = Bed::new("n");
    // Connects all before the first hand-over: afterwards its port is not available for others.
    let all = [0; 3].map(|_| bed.tenant.connect(true));
    let flow = all[0].2;
    let own = congestion(bed.tenant.vm_netns.socket(flow.guest).unwrap().as_raw_fd());
    let other = if own == "reno" { "cubic" } else { "reno" };
    let cases = [
        (1, other, other, 0),
        (2, own.as_str(), own.as_str(), 0),
        // The kernel would look for a module of this name.
        (3, "viola_no_such", own.as_str(), 1),
    ];
    for ((pipe, told, used, counted), (client, guest, flow)) in cases.into_iter().zip(all) {
        let mut connection = to_wire(extract(guest.as_fd()).unwrap().detach()).unwrap();
        connection.congestion = told.into();
        bed.start_with(pipe, connection);
        let begun = Instant::now();
        let mut seen = Vec::new();
        while seen.is_empty() {
            seen = of_the_host(&flow, &guest);
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "the host has no socket of the connection"
            );
        }
        assert_eq!(congestion(seen[0]), used);
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; SIZE as usize];
            (&client).read_exact(&mut got).unwrap();
            got
        });
        assert_eq!(bed.restore_and_confirm(pipe, &guest), SIZE);
        assert!(reader.join().unwrap() == bed.file);
        let begun = Instant::now();
        while bed.pipes.stats().begun < pipe {
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "the transfer is not counted"
            );
        }
        assert_eq!(bed.pipes.stats().other_congestion, counted);
    }
}

#[test]
fn without_its_agent_clients_see_a_reset_and_never_an_end() {
    let mut bed = Bed::new("z");
    let (mut client, guest, flow) = bed.tenant.connect(true);
    // A dropped segment would make the client reject the following reset as out of sequence (RFC 5961).
    set_socket_recv_buffer_size_force(&client, 2 << 20).unwrap();
    bed.start(1, &guest);
    let mut some = vec![0; 1 << 20];
    client.read_exact(&mut some).unwrap();
    assert!(some == bed.file[..1 << 20]);
    bed.pipes.reset_all();
    let begun = Instant::now();
    let mut rest = Vec::new();
    let error = client.read_to_end(&mut rest).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(bed.is_released(&flow));
    // The host serves the next agent, which receives no message for the previous one.
    let (mut client, guest, _) = bed.tenant.connect(true);
    bed.start(1, &guest);
    let file = bed.file.clone();
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; SIZE as usize];
        client.read_exact(&mut got).unwrap();
        assert!(got == file);
        client
    });
    assert_eq!(bed.restore_and_confirm(1, &guest), SIZE);
    reader.join().unwrap();
}

#[test]
fn a_closed_client_is_reported_and_a_stopped_pipe_is_returned() {
    let bed = Bed::new("v");
    let (client, guest, flow) = bed.tenant.connect(true);
    bed.start(1, &guest);
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let said = bed.reply();
    let is_reset = matches!(
        said,
        PipeReply::Finished { pipe: 1, sink: None, errno, .. } if errno != 0
    );
    assert!(is_reset, "{said:?}");
    assert!(bed.is_released(&flow));

    let (mut client, guest, _) = bed.tenant.connect(true);
    bed.start(2, &guest);
    let mut got = vec![0; 1 << 20];
    client.read_exact(&mut got).unwrap();
    bed.pipes.stop(2);
    let reader = std::thread::spawn(move || {
        let mut rest = Vec::new();
        let end = client.read_to_end(&mut rest);
        (got, rest, end)
    });
    let sent = bed.restore_and_confirm(2, &guest);
    assert!((1 << 20..=SIZE).contains(&sent), "{sent}");
    drop(guest);
    let (mut got, rest, end) = reader.join().unwrap();
    end.unwrap();
    got.extend(rest);
    assert!(got == bed.file[..sent as usize], "{} {sent}", got.len());
}

#[test]
fn a_connection_that_is_not_taken_back_is_reset() {
    let mut bed = Bed::new("u");
    let (mut client, guest, flow) = bed.tenant.connect(true);
    bed.start(1, &guest);
    let mut got = vec![0; SIZE as usize];
    client.read_exact(&mut got).unwrap();
    assert!(got == bed.file);
    assert!(matches!(
        bed.reply(),
        PipeReply::Finished {
            pipe: 1,
            sink: Some(_),
            ..
        }
    ));
    // The agent dies while it has the connection.
    bed.pipes.reset_all();
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    bed.wait_until_released(&flow);
}

// SPDX-License-Identifier: Apache-2.0
//! A hand-over drops segments that a connection has received out of order behind a gap.
#![allow(clippy::unwrap_used)]

mod wire;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use viola_handover::{disconnect_silently, extract, restore};
use wire::{Route, Wire};

/// Attaches a classic BPF filter to a socket that drops the segment with this sequence number. The kernel runs it in
/// tcp_filter(), on the segment from the TCP header on.
fn drop_segment(stream: &TcpStream, number: u32) {
    let code = [
        // The word at offset 4 is the sequence number. The filter drops the segment on a match and passes all of it otherwise.
        (0x20, 0, 0, 4),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0),
        (0x06, 0, 0, u32::MAX),
    ];
    let mut code = code.map(|(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k });
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program during the call.
    let done = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of_val(&program) as u32,
        )
    };
    assert_eq!(done, 0);
}

/// The number of segments that the peer has acknowledged selectively (SACK) behind a gap.
fn segments_behind_gap(stream: &TcpStream) -> u32 {
    let (mut info, mut size) = ([0_u32; 10], 40);
    // SAFETY: the kernel writes at most 40 bytes of tcp_info, for which there is room, and the size.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    assert_eq!(done, 0);
    // tcpi_sacked follows eight bytes and five words.
    info[7]
}

#[test]
fn data_behind_a_gap_is_dropped_and_retransmitted() {
    let server: IpAddr = "10.99.0.2".parse().unwrap();
    let wire = Wire::new("10.99.0.1".parse().unwrap(), server);
    let address = SocketAddr::new(server, 8080);
    let listener = wire.old.run(|| TcpListener::bind(address).unwrap());
    let client = wire.client.run(|| TcpStream::connect(address).unwrap());
    let (old, _) = listener.accept().unwrap();
    // Extracting and dropping the state only inspects the connection.
    let number = {
        let taken = extract(old.as_fd()).unwrap();
        taken.state().rcv_nxt
    };
    drop_segment(&old, number);
    let bytes: Vec<u8> = (0..200_000_u32).map(|at| (at * 7 / 3) as u8).collect();
    let sent = bytes.clone();
    let mut writer = client.try_clone().unwrap();
    let writing = std::thread::spawn(move || writer.write_all(&sent).unwrap());
    let begun = Instant::now();
    while segments_behind_gap(&client) < 3 {
        assert!(begun.elapsed() < Duration::from_secs(20), "there is no gap");
        std::thread::sleep(Duration::from_millis(1));
    }
    wire.route_to(Route::Nowhere);
    let state = extract(old.as_fd()).unwrap().detach();
    assert_eq!((state.rcv_nxt, state.unread.len()), (number, 0));
    let ahead = state.window.snd_wl1.wrapping_sub(number);
    assert!(
        ahead == 0 || ahead > 1 << 31,
        "snd_wl1 is {ahead} bytes behind the gap"
    );
    wire.settle();
    disconnect_silently(old.as_fd()).unwrap();
    let new = wire.new.socket(state.local);
    let ready = restore(new.as_fd(), &state).unwrap();
    wire.route_to(Route::New);
    ready.activate().unwrap();
    let mut got = vec![0; bytes.len()];
    let mut new = TcpStream::from(new);
    new.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    new.read_exact(&mut got).unwrap();
    assert!(got == bytes);
    writing.join().unwrap();
}

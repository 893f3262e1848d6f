// SPDX-License-Identifier: Apache-2.0
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::net::SendFlags;
use viola_proto::agent::Extent;

use super::*;
use crate::control::socket_pair;

const LIMIT: Duration = Duration::from_secs(20);

fn key(id: i64) -> BlockKey {
    BlockKey::new("BP-1-10.0.0.1-1", id, 1001).unwrap()
}

fn found(extents: u64) -> Found {
    let file = |size: u64| FileMap {
        size,
        extents: (0..extents)
            .map(|i| Extent {
                logical: i << 20,
                physical: u64::MAX - i,
                length: 1 << 20,
                zero: i % 2 == 0,
            })
            .collect(),
    };
    Found {
        lease: Lease {
            slot: 3,
            generation: 4,
            epoch: 5,
        },
        image: 1,
        data: file(extents << 20),
        meta: file(7),
    }
}

/// Serves until the reader is gone; knows even blocks only.
fn serve(socket: OwnedFd, extents: u64) {
    let mut server = Server::new(socket);
    loop {
        match server.receive() {
            Incoming::Closed => return,
            Incoming::Empty => std::thread::sleep(Duration::from_millis(1)),
            Incoming::Question(number, question) => {
                let known = question.key.id() % 2 == 0;
                let answer = known.then(|| found(extents));
                // a short socket buffer is the reader's loss; here it must arrive
                server.answer(number, answer.as_ref()).unwrap();
            }
        }
    }
}

#[test]
fn a_known_block_is_found_and_an_unknown_one_is_not() {
    let (here, there) = socket_pair().unwrap();
    let thread = std::thread::spawn(move || serve(there, 1000));
    let client = Client::new(here);
    assert_eq!(ask_all(&[&client], &key(2), LIMIT), Some((0, found(1000))));
    assert_eq!(ask_all(&[&client], &key(3), LIMIT), None);
    assert_eq!(ask_all(&[&client], &key(4), LIMIT), Some((0, found(1000))));
    drop(client);
    thread.join().unwrap();
}

#[test]
fn of_several_agent_workers_the_one_that_knows_is_named() {
    let (one, there) = socket_pair().unwrap();
    let (two, other) = socket_pair().unwrap();
    let mut mute = Server::new(there);
    let thread = std::thread::spawn(move || serve(other, 1));
    let (one, two) = (Client::new(one), Client::new(two));
    let clients = [&one, &two];
    assert_eq!(ask_all(&clients, &key(2), LIMIT), Some((1, found(1))));
    assert!(matches!(mute.receive(), Incoming::Question(1, _)));
    // The late answer of the first worker must not count for the next question.
    mute.answer(1, Some(&found(9))).unwrap();
    let begun = Instant::now();
    assert_eq!(ask_all(&clients, &key(3), Duration::from_millis(50)), None);
    assert!(begun.elapsed() < LIMIT / 2);
    // it is left alone for a while after that
    let begun = Instant::now();
    assert_eq!(ask_all(&clients, &key(3), LIMIT), None);
    assert!(begun.elapsed() < LIMIT / 2);
    drop(two);
    thread.join().unwrap();
}

#[test]
fn an_agent_worker_that_hangs_up_knows_nothing() {
    let (here, there) = socket_pair().unwrap();
    let client = Client::new(here);
    drop(there);
    assert_eq!(ask_all(&[&client], &key(2), LIMIT), None);
    assert!(client.gone());
}

proptest! {
    #[test]
    fn arbitrary_datagrams_only_end_the_connection(datagrams in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 1..20)) {
        let (here, there) = socket_pair().unwrap();
        let (left, right) = socket_pair().unwrap();
        for datagram in &datagrams {
            rustix::net::send(&there, datagram, SendFlags::DONTWAIT).unwrap();
            rustix::net::send(&left, datagram, SendFlags::DONTWAIT).unwrap();
        }
        drop(left);
        let client = Client::new(here);
        prop_assert_eq!(ask_all(&[&client], &key(2), Duration::from_millis(1)), None);
        let mut server = Server::new(right);
        for _ in &datagrams {
            server.receive();
        }
    }

    #[test]
    fn a_message_of_any_length_arrives_whole(length in 1usize..200_000) {
        let (here, there) = socket_pair().unwrap();
        let text: Vec<u8> = (0..length).map(|i| i as u8).collect();
        let mut parts = Reassembly::new(datagrams::MAX_ANSWER_BYTES);
        let sent = datagrams::send(&there, 7, &text);
        prop_assume!(sent.is_ok());
        match parts.receive(&here).unwrap() {
            Received::Message(7, got) => prop_assert_eq!(got, text),
            other => prop_assert!(false, "{:?}", other),
        }
    }
}

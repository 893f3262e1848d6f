// SPDX-License-Identifier: Apache-2.0
//! The host sends files of a VM's disk image on the VM's connections.
#![allow(clippy::unwrap_used)]

mod tenant;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenant::{CLIENT, Tenant, noise};
use viola_extents::Extent;
use viola_extents::host::{Image, Layer};
use viola_handover::{TcpState, disconnect_silently, extract, restore};
use viola_netdev::Netns;
use viola_vpipe::transfer::{FileToSocket, StepOutcome};
use viola_vpipe::{Error, Flow, HostConnection, Steering};

const SIZE: u64 = 12 << 20;

/// A connection at the host and the file part that it sends.
struct Pipe {
    end: HostConnection,
    sending: FileToSocket,
    whole: u64,
}

/// The state that goes back to the VM.
#[derive(Debug)]
struct Returned {
    state: Option<TcpState>,
    sent: u64,
}

impl Pipe {
    fn step(&mut self, budget: u64) -> std::io::Result<(u64, StepOutcome)> {
        self.sending.step(self.end.socket(), budget)
    }

    fn sent(&self) -> u64 {
        self.whole - self.sending.left()
    }

    fn is_drained(&self) -> Result<bool, Error> {
        self.end.unacknowledged_bytes().map(|bytes| bytes == 0)
    }

    fn extract(
        self,
        flows: &viola_vpipe::FlowTable,
        hold_veth: Option<u32>,
    ) -> Result<Returned, Error> {
        let sent = self.sent();
        let state = self.end.extract(flows, hold_veth)?;
        Ok(Returned { state, sent })
    }
}

/// A VM with a disk on which one file lies in three extents, the last one first; and the file's bytes.
struct Bed {
    steering: Steering,
    tenant: Tenant,
    image: Arc<Image>,
    file: Vec<u8>,
    _host: Netns,
}

const EXTENTS: [Extent; 3] = [
    Extent {
        logical: 0,
        physical: 8 << 20,
        length: 4 << 20,
        zero: false,
    },
    Extent {
        logical: 4 << 20,
        physical: 1 << 20,
        length: 4 << 20,
        zero: false,
    },
    Extent {
        logical: 9 << 20,
        physical: 5 << 20,
        length: 3 << 20,
        zero: false,
    },
];

impl Bed {
    fn new(name: &str) -> Self {
        let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
        let tenant = Tenant::new(&host, &steering, name);
        let disk = noise(SIZE as usize, 9);
        let mut image = tempfile::tempfile().unwrap();
        image.write_all(&disk).unwrap();
        let mut file = vec![0; SIZE as usize];
        for extent in EXTENTS {
            let [from, to, length] =
                [extent.physical, extent.logical, extent.length].map(|n| n as usize);
            file[to..to + length].copy_from_slice(&disk[from..from + length]);
        }
        Self {
            steering,
            tenant,
            image: Arc::new(Image::open(vec![Layer::raw(image)]).unwrap()),
            file,
            _host: host,
        }
    }

    fn sending(&self, offset: u64, length: u64) -> FileToSocket {
        let map = self.image.check(&EXTENTS, SIZE).unwrap();
        FileToSocket::new(self.image.clone(), map, offset, length)
    }

    /// Hands the VM's connection over for these bytes of the file.
    fn give(&self, guest: &TcpStream, flow: Flow, offset: u64, length: u64) -> Pipe {
        let flows = self.steering.flows();
        flows.hold(&flow, Some(CLIENT), None).unwrap();
        let state = extract(guest.as_fd()).unwrap().detach();
        let (vm_netns, sending) = (&self.tenant.vm_netns, self.sending(offset, length));
        let socket = vm_netns.socket(flow.guest).unwrap();
        Pipe {
            end: HostConnection::restore(flows, vm_netns.veth(), socket, flow, &state, None)
                .unwrap(),
            whole: sending.left(),
            sending,
        }
    }

    /// Restores the connection in the VM.
    fn restore_in_place(&self, guest: &TcpStream, flow: &Flow, state: &TcpState) {
        disconnect_silently(guest.as_fd()).unwrap();
        let ready = restore(guest.as_fd(), state).unwrap();
        self.steering.flows().release(flow).unwrap();
        ready.activate().unwrap();
    }
}

/// Sends all bytes and waits until the peer has acknowledged them.
fn finish(pipe: &mut Pipe) {
    let begun = Instant::now();
    loop {
        let (_, turn) = pipe.step(1 << 20).unwrap();
        if turn == StepOutcome::Done && pipe.is_drained().unwrap() {
            return;
        }
        if turn != StepOutcome::BudgetUsed {
            std::thread::sleep(Duration::from_micros(200));
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "the pipe does not end"
        );
    }
}

#[test]
fn a_file_goes_from_the_image_to_the_client_and_the_vm_continues() {
    let bed = Bed::new("p");
    let (mut client, mut guest, flow) = bed.tenant.connect(true);
    let ranges = [
        (0, SIZE),
        (1, 100_000),
        (5 << 20, 6 << 20),
        (SIZE - 3, 3),
        (0, SIZE),
    ];
    let file = bed.file.clone();
    let reader = std::thread::spawn(move || {
        for (offset, length) in ranges {
            client.write_all(b"GET").unwrap();
            let mut got = vec![0; 4 + length as usize + 4];
            client.read_exact(&mut got).unwrap();
            assert_eq!(&got[..4], b"head");
            let body = &got[4..4 + length as usize];
            assert!(
                body == &file[offset as usize..(offset + length) as usize],
                "{offset} {length}"
            );
            assert_eq!(&got[got.len() - 4..], b"tail");
        }
    });
    for (offset, length) in ranges {
        let mut get = [0; 3];
        guest.read_exact(&mut get).unwrap();
        // The VM's bytes before and after the transfer are in order with the host's bytes.
        guest.write_all(b"head").unwrap();
        let mut pipe = bed.give(&guest, flow, offset, length);
        finish(&mut pipe);
        let Returned { state, sent } = pipe.extract(bed.steering.flows(), None).unwrap();
        assert_eq!(sent, length);
        bed.restore_in_place(&guest, &flow, &state.unwrap());
        guest.write_all(b"tail").unwrap();
    }
    reader.join().unwrap();
}

#[test]
fn a_transfer_that_is_stopped_in_the_middle_continues_in_the_vm() {
    let bed = Bed::new("q");
    let (mut client, mut guest, flow) = bed.tenant.connect(true);
    // The client does not read, so the pipe is stopped with full queues.
    let mut pipe = bed.give(&guest, flow, 0, SIZE);
    while pipe.step(1 << 20).unwrap().1 != StepOutcome::SinkFull {}
    let Returned { state, sent } = pipe.extract(bed.steering.flows(), None).unwrap();
    assert!(sent > 0 && sent < SIZE, "{sent}");
    bed.restore_in_place(&guest, &flow, &state.unwrap());
    let rest = bed.file[sent as usize..].to_vec();
    let writer = std::thread::spawn(move || guest.write_all(&rest).unwrap());
    let mut got = vec![0; SIZE as usize];
    client.read_exact(&mut got).unwrap();
    assert!(got == bed.file);
    writer.join().unwrap();
}

#[test]
fn a_pipe_that_dies_causes_a_reset_and_not_an_end_of_file() {
    let bed = Bed::new("r");
    let (mut client, guest, flow) = bed.tenant.connect(true);
    let mut pipe = bed.give(&guest, flow, 0, SIZE);
    pipe.step(1 << 20).unwrap();
    drop(pipe);
    let mut got = Vec::new();
    let error = client.read_to_end(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(got == bed.file[..got.len()]);
}

#[test]
fn a_connection_that_the_peer_reset_is_not_returned() {
    let bed = Bed::new("s");
    let (client, guest, flow) = bed.tenant.connect(true);
    let mut pipe = bed.give(&guest, flow, 0, SIZE);
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let begun = Instant::now();
    let error = loop {
        match pipe.step(1 << 20) {
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(e) => break e,
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "the pipe continues"
        );
    };
    assert!(
        matches!(
            error.kind(),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
        ),
        "{error}"
    );
    assert!(
        pipe.extract(bed.steering.flows(), None)
            .unwrap()
            .state
            .is_none()
    );
}

#[test]
fn a_peer_that_closed_its_sending_side_still_gets_the_file() {
    let bed = Bed::new("t");
    let (mut client, guest, flow) = bed.tenant.connect(false);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!((&guest).read(&mut [0; 1]).unwrap(), 0);
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; SIZE as usize];
        client.read_exact(&mut got).unwrap();
        (client, got)
    });
    let mut pipe = bed.give(&guest, flow, 0, SIZE);
    finish(&mut pipe);
    let state = pipe
        .extract(bed.steering.flows(), None)
        .unwrap()
        .state
        .unwrap();
    assert!(state.peer_finished);
    let (_client, got) = reader.join().unwrap();
    assert!(got == bed.file);
}

// SPDX-License-Identifier: Apache-2.0
//! A QMP server that says what a fuzzer makes up.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::disk_watch::DiskWatch;
use super::qmp::{Answer, Connection, QmpFailure, questions};

/// Bytes that a socket takes before anybody reads.
const MOST: usize = 100 << 10;

fn server(says: &[u8]) -> (UnixStream, UnixStream) {
    let (here, mut there) = UnixStream::pair().expect("sockets");
    let says = &says[..says.len().min(MOST)];
    there.write_all(says).expect("room in the socket");
    there.shutdown(Shutdown::Write).expect("an end");
    (here, there)
}

/// What the inventory makes of a server that says this and hangs up.
pub(crate) fn inventory(says: &[u8]) -> Result<Answer, QmpFailure> {
    let (here, _there) = server(says);
    questions(&mut Connection::over(here)?)
}

/// What the watch over a VM's disks makes of it.
pub(crate) fn watch(says: &[u8]) -> Result<(), QmpFailure> {
    let (here, _there) = server(says);
    let mut watch = DiskWatch::over(Connection::over(here)?);
    for chain in watch.chains()? {
        assert!(!chain.device.chars().any(char::is_control));
        assert!(chain.layers.len() <= 64);
    }
    watch.changes().map(drop)
}

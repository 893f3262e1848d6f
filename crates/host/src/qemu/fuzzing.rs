// SPDX-License-Identifier: Apache-2.0
//! A QMP server whose output a fuzzer chooses.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use super::disk_watch::chains;
use super::qmp::{ANSWER_TIMEOUT, Connection, QmpFailure};
use super::state::{QemuState, query_all};

/// Most bytes that fit into the socket's buffer before a read.
const MAX_BUFFER_BYTES: usize = 100 << 10;

fn server(output: &[u8]) -> (UnixStream, UnixStream) {
    let (here, mut there) = UnixStream::pair().expect("sockets");
    let output = &output[..output.len().min(MAX_BUFFER_BYTES)];
    there.write_all(output).expect("room in the socket");
    there.shutdown(Shutdown::Write).expect("an end");
    (here, there)
}

/// Runs the inventory's queries against a server that sends `output` and closes.
pub(crate) fn inventory(output: &[u8]) -> Result<QemuState, QmpFailure> {
    let (here, _there) = server(output);
    query_all(&mut Connection::start(here, ANSWER_TIMEOUT)?)
}

/// Runs the disk watch against it.
pub(crate) fn watch(output: &[u8]) -> Result<(), QmpFailure> {
    let (here, _there) = server(output);
    let mut connection = Connection::start(here, ANSWER_TIMEOUT)?;
    for chain in chains(&mut connection)? {
        assert!(!chain.device.chars().any(char::is_control));
        assert!(chain.layers.len() <= 64);
    }
    connection.read_events()
}

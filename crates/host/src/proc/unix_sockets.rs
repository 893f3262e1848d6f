// SPDX-License-Identifier: Apache-2.0
//! `/proc/PID/net/unix`: the unix sockets in a process's network namespace.

use std::fs;
use std::io;
use std::path::Path;

use super::read::{read_link, read_text};
use crate::error::HostError;
use crate::thread::Tid;

/// Splits a line into its seven columns (address, references, protocol, flags, type, state, inode) and the path, which
/// may contain spaces. Missing columns are empty.
fn columns(line: &str) -> ([&str; 7], &str) {
    let mut rest = line;
    let mut fields = [""; 7];
    for field in &mut fields {
        rest = rest.trim_start();
        let (now, after) = rest.split_once(' ').unwrap_or((rest, ""));
        (*field, rest) = (now, after);
    }
    (fields, rest)
}

/// Inode numbers and paths of all listening sockets in the network namespace of `pid`.
pub(crate) fn listening(pid: Tid) -> Result<Vec<(u64, String)>, HostError> {
    let list = read_text(format!("/proc/{pid}/net/unix"))?.unwrap_or_default();
    Ok(list.lines().filter_map(listener).collect())
}

/// Parses the line of a listening socket with a path.
fn listener(line: &str) -> Option<(u64, String)> {
    let ([_, _, _, flags, _, _, inode], path) = columns(line);
    (flags == "00010000" && path.starts_with('/')).then_some((inode.parse().ok()?, path.to_owned()))
}

/// The inode number of the socket behind descriptor `fd`.
pub(crate) fn socket_inode(pid: Tid, fd: u32) -> Result<Option<u64>, HostError> {
    let target = read_link(format!("/proc/{pid}/fd/{fd}"))?;
    Ok(target.and_then(|t| inode_of(&t)))
}

fn inode_of(target: &Path) -> Option<u64> {
    let text = target.to_str()?;
    text.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

/// The inode numbers of all sockets that a process has open.
pub(crate) fn socket_inodes(pid: Tid) -> io::Result<Vec<u64>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    Ok(entries
        .filter_map(|e| inode_of(&fs::read_link(e.path()).ok()?))
        .collect())
}

/// Whether a client is connected to the listening socket at this path.
pub(crate) fn has_client(pid: Tid, socket: &str) -> Result<bool, HostError> {
    let list = match read_text(format!("/proc/{pid}/net/unix")) {
        Ok(list) => list.unwrap_or_default(),
        Err(HostError::Read { .. }) => return Ok(false),
        Err(e) => return Err(e),
    };
    Ok(list.lines().any(|line| is_client_line(line, socket)))
}

/// Whether the line is a connection that the owner of `socket` has accepted: state 3, the listener's path, without the
/// listener's flag.
fn is_client_line(line: &str, socket: &str) -> bool {
    let ([_, _, _, flags, _, state, _], path) = columns(line);
    path == socket && state == "03" && flags != "00010000"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_with_a_path_are_listeners() {
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 4711 /run/a b";
        assert_eq!(listener(line), Some((4711, "/run/a b".into())));
        assert_eq!(listener(&line.replace("00010000", "00000000")), None);
        assert_eq!(listener(&line.replace("/run", "@run")), None);
        assert_eq!(
            listener("Num RefCount Protocol Flags Type St Inode Path"),
            None
        );
        assert_eq!(inode_of(Path::new("socket:[12]")), Some(12));
        assert_eq!(inode_of(Path::new("/dev/null")), None);
    }

    #[test]
    fn an_accepted_connection_is_a_client() {
        let client = "0000000092d66bc1: 00000003 00000000 00000000 0001 03 36112 /run/a b.sock";
        assert!(is_client_line(client, "/run/a b.sock"));
        assert!(!is_client_line(client, "/run/a"));
        let listener = "00000000a347a7f4: 00000002 00000000 00010000 0001 01 35337 /run/a b.sock";
        assert!(!is_client_line(listener, "/run/a b.sock"));
        for other in [
            "",
            "Num       RefCount Protocol Flags    Type St Inode Path",
            "a b",
        ] {
            assert!(!is_client_line(other, "/run/a b.sock"));
        }
    }
}

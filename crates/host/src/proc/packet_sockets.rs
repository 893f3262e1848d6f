// SPDX-License-Identifier: Apache-2.0
//! `/proc/PID/net/packet`: the packet sockets in a process's network namespace, packet(7).

use super::read::read_text;
use super::unix_sockets::socket_inodes;
use crate::error::HostError;
use crate::thread::Tid;

/// Numbers of the interfaces to which the process's packet sockets are bound; empty when it has ended.
///
/// # Errors
/// As [`super::read`].
pub(crate) fn packet_interfaces(pid: Tid) -> Result<Vec<u32>, HostError> {
    let list = read_text(format!("/proc/{pid}/net/packet"))?.unwrap_or_default();
    let sockets: Vec<(u64, u32)> = list.lines().filter_map(bound).collect();
    if sockets.is_empty() {
        return Ok(Vec::new());
    }
    let own = socket_inodes(pid).unwrap_or_default();
    let is_own = |(inode, _): &(u64, u32)| own.contains(inode);
    let own = sockets.into_iter().filter(is_own);
    Ok(own.map(|(_, interface)| interface).collect())
}

/// Inode number and interface of a line: address, references, type, protocol, interface, running, memory, user, inode.
fn bound(line: &str) -> Option<(u64, u32)> {
    let columns: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, _, _, _, interface, _, _, _, inode] = columns[..] else {
        return None;
    };
    Some((inode.parse().ok()?, interface.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_interface_and_the_socket() {
        let line = "0000000000000000 3      3    0003   7     1 0      0      36112";
        assert_eq!(bound(line), Some((36112, 7)));
        assert_eq!(
            bound("sk               RefCnt Type Proto  Iface R Rmem   User   Inode"),
            None
        );
        assert_eq!(bound(""), None);
        // This process has none.
        assert!(packet_interfaces(std::process::id()).unwrap().is_empty());
    }
}

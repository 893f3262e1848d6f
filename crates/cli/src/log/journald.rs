// SPDX-License-Identifier: Apache-2.0
//! journald's native protocol: a datagram of `FIELD=value` lines (systemd.io/JOURNAL_NATIVE_PROTOCOL).
//!
//! Values are single lines, so the length-prefixed form is not needed.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;

use super::Level;

/// Socket of journald.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Sends a line; `false` when journald did not take it.
pub fn send(level: Level, vm: Option<&str>, what: &str) -> bool {
    static JOURNALD: OnceLock<Option<UnixDatagram>> = OnceLock::new();
    let socket = JOURNALD.get_or_init(|| unbound().ok());
    let Some(socket) = socket else {
        return false;
    };
    send_to(socket, Path::new(SOCKET), level, vm, what)
}

/// The socket is not connected, because journald may restart, and does not block, because a full queue of journald must
/// not stop the control loop.
fn unbound() -> std::io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn send_to(socket: &UnixDatagram, path: &Path, level: Level, vm: Option<&str>, what: &str) -> bool {
    let text = fields(level, vm, what);
    socket
        .send_to(text.as_bytes(), path)
        .is_ok_and(|n| n == text.len())
}

/// `VIOLA_KIND` and `VIOLA_VM` are for `journalctl VIOLA_VM=qemu:db01`.
fn fields(level: Level, vm: Option<&str>, what: &str) -> String {
    let kind = match level {
        Level::Error => "error",
        Level::Warning => "warning",
        Level::Notice => "change",
        Level::Info => "info",
    };
    let priority = level as u8;
    let mut text = format!("PRIORITY={priority}\nSYSLOG_IDENTIFIER=viola\nVIOLA_KIND={kind}\n");
    match vm {
        Some(vm) => text.push_str(&format!("VIOLA_VM={vm}\nMESSAGE={vm}: {what}\n")),
        None => text.push_str(&format!("MESSAGE={what}\n")),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_one_datagram_with_its_vm_and_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let journald = UnixDatagram::bind(&path).unwrap();
        let what = "class ls (was batch): viola set by root";
        let sender = unbound().unwrap();
        let vm = Some("qemu:db01");
        assert!(send_to(&sender, &path, Level::Notice, vm, what));
        let mut datagram = [0; 1000];
        let n = journald.recv(&mut datagram).unwrap();
        assert_eq!(
            std::str::from_utf8(&datagram[..n]).unwrap(),
            "PRIORITY=5\nSYSLOG_IDENTIFIER=viola\nVIOLA_KIND=change\nVIOLA_VM=qemu:db01\n\
             MESSAGE=qemu:db01: class ls (was batch): viola set by root\n"
        );
        drop(journald);
        assert!(!send_to(&sender, &path, Level::Error, None, "x"));
    }

    #[test]
    fn a_journald_that_does_not_read_does_not_block_the_sender() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _journald = UnixDatagram::bind(&path).unwrap();
        let sender = unbound().unwrap();
        let sent = (0..100_000).take_while(|_| send_to(&sender, &path, Level::Info, None, "x"));
        assert!(sent.count() < 100_000);
    }
}

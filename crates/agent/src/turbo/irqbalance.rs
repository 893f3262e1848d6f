// SPDX-License-Identifier: Apache-2.0
//! irqbalance's socket. It takes one message per connection, from root, with credentials: `setup` returns its state;
//! `settings ban irqs N...` sets the interrupts that it leaves alone, in place of the earlier ones.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType, UCred, connect, recv, sendmsg, socket, sockopt,
};
use rustix::process::{getgid, getpid, getuid};

/// Time limit of each send and receive: irqbalance serves its socket between two rounds of work.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections without an answer. irqbalance dies of SIGPIPE when it answers a closed connection, so they stay open
/// until it has answered.
static PENDING: Mutex<Vec<(PathBuf, OwnedFd)>> = Mutex::new(Vec::new());

/// Whether there is an answer, or irqbalance is gone.
fn is_answered(connection: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(connection, PollFlags::IN)];
    poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
}

/// Sends a message and returns the answer, which is empty when there is none.
///
/// # Errors
/// When irqbalance does not listen at its socket below `folder` nor at the abstract one, or has not answered the last
/// message yet.
pub fn ask(folder: &Path, pid: i32, words: &str) -> io::Result<String> {
    let name = format!("irqbalance{pid}.sock");
    let at = folder.join(&name);
    let mut pending = PENDING.lock().unwrap_or_else(PoisonError::into_inner);
    pending.retain(|(_, connection)| !is_answered(connection));
    if pending.iter().any(|(of, _)| *of == at) {
        return Err(ErrorKind::TimedOut.into());
    }
    let by_path = SocketAddrUnix::new(&at)?;
    let by_name = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let open = |address: &SocketAddrUnix| {
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
        // before connect: a daemon that hangs accepts few connections
        for timeout in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&socket, timeout, Some(SOCKET_TIMEOUT))?;
        }
        connect(&socket, address).map(|()| socket)
    };
    let socket = open(&by_path).or_else(|_| open(&by_name))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let (pid, uid, gid) = (getpid(), getuid(), getgid());
    control.push(SendAncillaryMessage::ScmCredentials(UCred {
        pid,
        uid,
        gid,
    }));
    let flags = SendFlags::NOSIGNAL;
    sendmsg(
        &socket,
        &[IoSlice::new(words.as_bytes())],
        &mut control,
        flags,
    )?;
    let mut answer = Vec::new();
    loop {
        let mut part = [0; 4096];
        match recv(&socket, &mut part, rustix::net::RecvFlags::empty()) {
            Ok((0, _)) => return Ok(String::from_utf8_lossy(&answer).into_owned()),
            Ok((count, _)) => answer.extend_from_slice(&part[..count]),
            Err(e) => {
                pending.push((at, socket));
                return Err(e.into());
            }
        }
    }
}

/// Parses the answer to `setup`: the interrupts that irqbalance leaves alone.
pub fn banned(setup: &str) -> Option<BTreeSet<u32>> {
    let mut words = setup.split_whitespace();
    // an answer always begins with the sleep time
    if words.next()? != "SLEEP" {
        return None;
    }
    let mut all = BTreeSet::new();
    while let Some(word) = words.next() {
        if word == "IRQ" {
            all.insert(words.next()?.parse().ok()?);
        }
    }
    Some(all)
}

/// The message that makes irqbalance leave these interrupts alone.
pub fn ban_command(irqs: &str) -> String {
    match irqs.is_empty() {
        true => "settings ban irqs NONE".into(),
        false => format!("settings ban irqs {irqs}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, accept, bind, listen, recvmsg,
    };

    #[test]
    fn a_message_carries_credentials_and_the_answer_ends_with_the_connection() {
        let folder = tempfile::tempdir().unwrap();
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = SocketAddrUnix::new(folder.path().join("irqbalance7.sock")).unwrap();
        bind(&listener, &address).unwrap();
        // as irqbalance does: on the listening socket
        sockopt::set_socket_passcred(&listener, true).unwrap();
        listen(&listener, 1).unwrap();
        let daemon = std::thread::spawn(move || {
            let client = accept(&listener).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut words = [0; 64];
            let parts = &mut [std::io::IoSliceMut::new(&mut words)];
            let count = recvmsg(&client, parts, &mut control, RecvFlags::empty())
                .unwrap()
                .bytes;
            let who = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmCredentials(who) => Some(who),
                _ => None,
            });
            rustix::io::write(&client, b"SLEEP 10 IRQ 4 ").unwrap();
            rustix::io::write(&client, b"BANNED 0").unwrap();
            (words[..count].to_vec(), who.unwrap())
        });
        let answer = ask(folder.path(), 7, "setup").unwrap();
        assert_eq!(banned(&answer), Some(BTreeSet::from([4])));
        let (words, who) = daemon.join().unwrap();
        assert_eq!((words.as_slice(), who.uid), (b"setup".as_slice(), getuid()));
        assert!(ask(folder.path(), 8, "setup").is_err());
        assert_eq!(ban_command("4 5"), "settings ban irqs 4 5");
        assert_eq!(ban_command(""), "settings ban irqs NONE");
    }

    #[test]
    fn a_hanging_irqbalance_is_waited_for_once_and_its_connection_stays_open() {
        let folder = tempfile::tempdir().unwrap();
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = SocketAddrUnix::new(folder.path().join("irqbalance7.sock")).unwrap();
        bind(&listener, &address).unwrap();
        listen(&listener, 1).unwrap();
        let begun = std::time::Instant::now();
        for _ in 0..4 {
            assert!(ask(folder.path(), 7, "setup").is_err());
        }
        let waited = begun.elapsed();
        assert!(
            waited >= SOCKET_TIMEOUT && waited < SOCKET_TIMEOUT * 2,
            "{waited:?}"
        );
        // at last
        let client = accept(&listener).unwrap();
        let words = rustix::net::SendFlags::NOSIGNAL;
        rustix::net::send(&client, b"SLEEP 10 BANNED 0", words).unwrap();
        drop(client);
        assert!(ask(folder.path(), 7, "setup").is_err());
        assert!(begun.elapsed() >= SOCKET_TIMEOUT * 2, "it was asked again");
    }

    #[test]
    fn banned_interrupts_are_read_from_the_answer() {
        let setup = "SLEEP 10 IRQ 24 LOAD 0 DIFF 0 CLASS 0 IRQ 9 LOAD 1 DIFF 2 CLASS 4 BANNED 00000000,00000001";
        assert_eq!(banned(setup), Some(BTreeSet::from([9, 24])));
        assert_eq!(banned("SLEEP 10 BANNED 0"), Some(BTreeSet::new()));
        assert_eq!(banned(""), None);
    }
}

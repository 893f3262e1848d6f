// SPDX-License-Identifier: Apache-2.0
//! Requests to viola-agent in a guest that has the VF and its paravirtual NIC in a bond
//! ([`viola_proto::lanes::guest`]).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, major};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use viola_host::{Tid, unix_connect};
use viola_netdev::Mac;
use viola_proto::agent::{FrameReader, encode};
use viola_proto::lanes::guest::{LaneReply, LaneRequest, VfAction};

use crate::answers;

/// Time limit for the agent's reply. The agent checks its port five times a second, and a guest may
/// be slow. If it fails over later than this, its packets go to the VF until that is unplugged, and
/// the VF works until then.
const AGENT_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest reason of an agent that counts, in characters.
const MAX_REASON_CHARS: usize = 200;

/// Numbers of the kernel's pseudo-terminals (Documentation/admin-guide/devices.txt).
const TERMINAL_MAJORS: std::ops::RangeInclusive<u32> = 136..=143;

/// Asks the agent behind a unix socket or a terminal to use or to leave the VF. Another process reads its reply
/// ([`answers`]). `owner` is the process that has to listen on the socket, if one has to.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::TimedOut`] without a reply, [`io::ErrorKind::Other`] with the
/// agent's reason.
pub fn ask(path: &Path, owner: Option<Tid>, mac: Mac, action: VfAction) -> io::Result<()> {
    let mut way = open(path, owner)?;
    let number = send(&mut way, mac, action)?;
    answers::of_agent(way.into(), number, AGENT_REPLY_TIMEOUT)
}

/// Sends a request, and returns its number.
fn send(way: &mut File, mac: Mac, action: VfAction) -> io::Result<u64> {
    let asked = LaneRequest {
        n: number(),
        mac,
        action,
    };
    let frame = encode(&asked).map_err(io::Error::other)?;
    way.write_all(&frame)?;
    Ok(asked.n)
}

/// Reads the reply to request `number`: done, or the agent's reason.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::TimedOut`] without a reply, [`io::ErrorKind::UnexpectedEof`] if the guest has closed
/// the port.
pub(crate) fn read_reply(
    way: &mut File,
    number: u64,
    timeout: Duration,
) -> io::Result<Result<(), String>> {
    let end = Instant::now() + timeout;
    let mut reader = FrameReader::new();
    loop {
        if let Some(reply) = reply_to(number, &mut reader) {
            return Ok(reply);
        }
        if !answers::is_readable(way.as_fd(), end)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if reader.fill(way)? == Some(0) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// The reply to request `number` among the received ones: done, or the agent's reason. Drops replies to earlier requests and
/// those that are not valid.
pub(crate) fn reply_to(number: u64, reader: &mut FrameReader) -> Option<Result<(), String>> {
    while let Some(reply) = reader.next::<LaneReply>() {
        if let Ok(LaneReply { n, failed }) = reply
            && n == number
        {
            return Some(failed.map_or(Ok(()), |why| Err(printable(&why, MAX_REASON_CHARS))));
        }
    }
    None
}

/// A guest's text without control characters, of its first `max_chars` characters: it goes to the log.
pub(crate) fn printable(text: &str, max_chars: usize) -> String {
    let is_control = |c: char| c.is_control();
    text.chars()
        .take(max_chars)
        .filter(|c| !is_control(*c))
        .collect()
}

/// A number for a request that differs from those of earlier requests by the same port.
fn number() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| d.as_nanos() as u64)
}

fn open(path: &Path, owner: Option<Tid>) -> io::Result<File> {
    let file = std::fs::metadata(path)?;
    if file.file_type().is_char_device() {
        if !TERMINAL_MAJORS.contains(&major(file.rdev())) {
            let what = "it is a device, but no terminal";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let mut modes = tcgetattr(&file)?;
        modes.make_raw();
        tcsetattr(&file, OptionalActions::Now, &modes)?;
        return Ok(file);
    }
    let stream = unix_connect::connect(path, owner)?;
    let flags = fcntl_getfl(&stream)?;
    fcntl_setfl(&stream, flags | OFlags::NONBLOCK)?;
    Ok(File::from(OwnedFd::from(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    const MAC: Mac = [2, 0, 0, 0, 0, 1];

    /// An agent that takes one request and sends these replies.
    fn agent(path: &Path, answer: impl Fn(u64) -> Vec<LaneReply> + Send + 'static) {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = FrameReader::new();
            let asked = reader
                .wait::<LaneRequest>(&mut stream)
                .unwrap()
                .unwrap()
                .unwrap();
            assert_eq!((asked.mac, asked.action), (MAC, VfAction::Release));
            for answer in answer(asked.n) {
                stream.write_all(&encode(&answer).unwrap()).unwrap();
            }
            // stays open until the other end closes
            let _ = stream.read(&mut [0; 8]);
        });
    }

    /// As [`ask`], with the reply read here.
    fn ask_here(path: &Path, timeout: Duration) -> io::Result<Result<(), String>> {
        let mut way = open(path, None)?;
        let number = send(&mut way, MAC, VfAction::Release)?;
        read_reply(&mut way, number, timeout)
    }

    #[test]
    fn only_the_reply_to_this_request_counts() {
        let folder = tempfile::tempdir().unwrap();
        let failed = |n, text: Option<&str>| LaneReply {
            n,
            failed: text.map(str::to_owned),
        };
        let done = folder.path().join("done");
        agent(&done, move |n| {
            vec![failed(n - 1, Some("an old one")), failed(n, None)]
        });
        ask_here(&done, AGENT_REPLY_TIMEOUT).unwrap().unwrap();
        let not = folder.path().join("not");
        agent(&not, move |n| vec![failed(n, Some("no bond\n here"))]);
        let refused = ask_here(&not, AGENT_REPLY_TIMEOUT).unwrap();
        assert_eq!(refused, Err("no bond here".into()));
    }

    #[test]
    fn a_silent_agent_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("silent");
        agent(&path, |_| Vec::new());
        let short = Duration::from_millis(50);
        let error = ask_here(&path, short).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let error = ask_here(&folder.path().join("none"), short).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_device_that_is_no_terminal_is_not_opened() {
        let error = open(Path::new("/dev/zero"), None).unwrap_err();
        assert!(error.to_string().contains("no terminal"), "{error}");
    }
}

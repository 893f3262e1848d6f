// SPDX-License-Identifier: Apache-2.0
//! Requests to viola-agent in a guest that has the VF and its paravirtual NIC in a bond
//! ([`viola_proto::lanes::guest`]).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use viola_host::unix_connect;
use viola_netdev::Mac;
use viola_proto::agent::{FrameReader, encode};
use viola_proto::lanes::guest::{LaneReply, LaneRequest, VfAction};

/// Time limit for the agent's reply. The agent checks its port five times a second, and a guest may
/// be slow. If it fails over later than this, its packets go to the VF until that is unplugged, and
/// the VF works until then.
const AGENT_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the agent behind a unix socket or a terminal to use or to leave the VF.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::TimedOut`] without a reply, [`io::ErrorKind::Other`] with the
/// agent's reason.
pub fn ask(path: &Path, mac: Mac, action: VfAction) -> io::Result<()> {
    ask_within(path, mac, action, AGENT_REPLY_TIMEOUT)
}

fn ask_within(path: &Path, mac: Mac, action: VfAction, timeout: Duration) -> io::Result<()> {
    let mut stream = open(path)?;
    let end = Instant::now() + timeout;
    let asked = LaneRequest {
        n: number(),
        mac,
        action,
    };
    let frame = encode(&asked).map_err(io::Error::other)?;
    stream.write_all(&frame)?;
    let mut reader = FrameReader::new();
    loop {
        if let Some(reply) = reply_to(asked.n, &mut reader) {
            return reply.map_err(io::Error::other);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let what = "viola-agent in the guest does not reply";
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        // the loop checks the time after an interrupted wait
        let _ = poll(&mut fds, Some(&left));
        if reader.fill(&mut stream)? == Some(0) {
            let what = "the guest has closed its agent's port";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
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
            return Some(failed.map_or(Ok(()), |why| Err(printable(&why))));
        }
    }
    None
}

/// The agent's reason without control characters, at most 200 characters: it goes to the log.
fn printable(text: &str) -> String {
    let is_control = |c: char| c.is_control();
    text.chars().take(200).filter(|c| !is_control(*c)).collect()
}

/// A number for a request that differs from those of earlier requests by the same port.
fn number() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| d.as_nanos() as u64)
}

trait Stream: Read + Write + AsFd {}
impl<T: Read + Write + AsFd> Stream for T {}

fn open(path: &Path) -> io::Result<Box<dyn Stream>> {
    if std::fs::metadata(path)?.file_type().is_char_device() {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let mut modes = tcgetattr(&file)?;
        modes.make_raw();
        tcsetattr(&file, OptionalActions::Now, &modes)?;
        return Ok(Box::new(file));
    }
    let stream = unix_connect::connect(path)?;
    let flags = fcntl_getfl(&stream)?;
    fcntl_setfl(&stream, flags | OFlags::NONBLOCK)?;
    Ok(Box::new(stream))
}

#[cfg(test)]
mod tests {
    use super::*;
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
        ask(&done, MAC, VfAction::Release).unwrap();
        let not = folder.path().join("not");
        agent(&not, move |n| vec![failed(n, Some("no bond\n here"))]);
        let error = ask(&not, MAC, VfAction::Release).unwrap_err();
        assert_eq!(error.to_string(), "no bond here");
    }

    #[test]
    fn a_silent_agent_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("silent");
        agent(&path, |_| Vec::new());
        let short = Duration::from_millis(50);
        let error = ask_within(&path, MAC, VfAction::Release, short).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let error = ask(&folder.path().join("none"), MAC, VfAction::Use).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

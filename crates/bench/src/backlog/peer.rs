// SPDX-License-Identifier: Apache-2.0
//! Both ends of a TCP stream for the benchmark and the test bed of early acknowledgements. As
//! `viola-lab internal backlog WORDS`:
//! ```text
//!     recv PORT SIZE RCVBUF PAUSE_US STOP   receives one stream in reads of SIZE bytes with a receive buffer of RCVBUF bytes
//!                                           (0: default) and a pause after each read; closes after STOP bytes (0: at the
//!                                           end of the stream); prints JSON
//!     send ADDRESS PORT SECONDS             sends for SECONDS, then waits until the other end closes; prints JSON
//!     echo PORT SIZE                        replies with one byte to each SIZE bytes of one stream
//!     ask ADDRESS PORT SECONDS SIZE         sends requests of SIZE bytes, each after the reply to the last; prints JSON
//!     waits FILE                            evaluates backlog waits in a tracefs trace; prints JSON
//!     spin                                  keeps its CPU busy
//! ```

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

use super::trace;
use viola_cli::error::{Failure, chain};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Timeout for any action of the other end.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// Period of the stream's contents, bytes; it is no multiple of any segment or buffer size.
const PATTERN_BYTES: usize = 65_521;
/// Bytes per send().
const SEND_BYTES: usize = 64 << 10;

/// Result of a receiver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Received {
    pub bytes: u64,
    pub seconds: f64,
    /// Whether every byte had the expected value.
    pub right: bool,
    /// End of the stream: `end`, `stopped` or an error.
    pub ended: String,
}

/// Result of a sender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sent {
    pub bytes: u64,
    pub seconds: f64,
    /// Smoothed round trip of TCP, mean over all sends; for `ask`, mean reply time. In microseconds.
    pub round_trip_us: f64,
    pub retransmits: u32,
    /// End of the stream: `end` when the other end closed it, otherwise an error.
    pub ended: String,
}

/// Runs a subcommand; `words` are the arguments after `backlog`.
pub fn backlog(words: &[String]) -> viola_cli::error::Outcome {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    run_words(&words).map_err(|e| Failure::run(chain(e.as_ref())))
}

fn run_words(words: &[&str]) -> Outcome {
    let text = match words {
        ["recv", port, size, buffer, pause, stop] => {
            let pause = Duration::from_micros(pause.parse()?);
            let (size, stop) = (size.parse()?, stop.parse()?);
            serde_json::to_string(&receive(port.parse()?, size, buffer.parse()?, pause, stop)?)?
        }
        ["send", address, port, seconds] => {
            let to = SocketAddr::new(address.parse()?, port.parse()?);
            serde_json::to_string(&send(to, Duration::from_secs_f64(seconds.parse()?))?)?
        }
        ["ask", address, port, seconds, size] => {
            let to = SocketAddr::new(address.parse()?, port.parse()?);
            let length = Duration::from_secs_f64(seconds.parse()?);
            serde_json::to_string(&ask(to, length, size.parse()?)?)?
        }
        ["echo", port, size] => return echo(port.parse()?, size.parse()?),
        ["waits", file] => serde_json::to_string(&trace::waits(&std::fs::read_to_string(file)?))?,
        ["spin"] => loop {
            std::hint::spin_loop();
        },
        _ => return Err("unknown arguments; benchmarks and tests use this command".into()),
    };
    println!("{text}");
    Ok(())
}

/// Contents of the stream over at least one period plus one read or send, so that any offset can be served.
fn pattern(extra: usize) -> Vec<u8> {
    let byte = |at: usize| {
        let mixed = ((at % PATTERN_BYTES) as u32).wrapping_mul(0x9E37_79B1);
        (mixed >> 24) as u8
    };
    (0..PATTERN_BYTES + extra).map(byte).collect()
}

fn accept(port: u16, buffer: usize) -> Outcome<TcpStream> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    if buffer > 0 {
        sockopt::set_socket_recv_buffer_size(&listener, buffer)?;
    }
    let stream = listener.accept()?.0;
    stream.set_read_timeout(Some(PEER_TIMEOUT))?;
    Ok(stream)
}

/// Receives one stream.
fn receive(port: u16, size: usize, buffer: usize, pause: Duration, stop: u64) -> Outcome<Received> {
    let due = pattern(size);
    let mut received = vec![0; size];
    let mut stream = accept(port, buffer)?;
    let started = Instant::now();
    let (mut bytes, mut right) = (0_u64, true);
    let ended = loop {
        match stream.read(&mut received) {
            Ok(0) => break "end".to_owned(),
            Ok(n) => {
                let at = (bytes % PATTERN_BYTES as u64) as usize;
                right &= received[..n] == due[at..at + n];
                bytes += n as u64;
            }
            Err(e) => break e.to_string(),
        }
        if stop > 0 && bytes >= stop {
            break "stopped".to_owned();
        }
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    };
    Ok(Received {
        bytes,
        seconds: started.elapsed().as_secs_f64(),
        right,
        ended,
    })
}

/// Sends the stream for `length`. A later error of the connection is in [`Sent::ended`].
///
/// # Errors
/// The receiver accepts no connection.
pub fn send(to: SocketAddr, length: Duration) -> Outcome<Sent> {
    let due = pattern(SEND_BYTES);
    let mut stream = TcpStream::connect_timeout(&to, PEER_TIMEOUT)?;
    stream.set_write_timeout(Some(PEER_TIMEOUT))?;
    stream.set_read_timeout(Some(PEER_TIMEOUT))?;
    let started = Instant::now();
    let (mut bytes, mut trips, mut samples, mut retransmits) = (0_u64, 0.0, 0_u32, 0);
    let mut ended = None;
    while started.elapsed() < length {
        let at = (bytes % PATTERN_BYTES as u64) as usize;
        match stream.write(&due[at..at + SEND_BYTES]) {
            Ok(n) => bytes += n as u64,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => {
                ended = Some(e.to_string());
                break;
            }
        }
        let info = info(&stream)?;
        trips += f64::from(info.tcpi_rtt);
        samples += 1;
        retransmits = info.tcpi_total_retrans;
    }
    let ended = match ended {
        Some(error) => error,
        None => {
            let closed = stream
                .shutdown(Shutdown::Write)
                .and_then(|()| stream.read(&mut [0]));
            closed.map_or_else(|e| e.to_string(), |_| "end".into())
        }
    };
    Ok(Sent {
        bytes,
        seconds: started.elapsed().as_secs_f64(),
        round_trip_us: trips / f64::from(samples.max(1)),
        retransmits,
        ended,
    })
}

fn info(stream: &TcpStream) -> std::io::Result<libc::tcp_info> {
    // SAFETY: all fields are integers, for which zero is valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut size = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, the size of `info`.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &mut size,
        )
    };
    match result {
        0 => Ok(info),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn echo(port: u16, size: usize) -> Outcome {
    let mut stream = accept(port, 0)?;
    stream.set_nodelay(true)?;
    let mut request = vec![0; size];
    let mut received = 0;
    loop {
        match stream.read(&mut request[received..])? {
            0 => return Ok(()),
            n => received += n,
        }
        if received == size {
            stream.write_all(b"!")?;
            received = 0;
        }
    }
}

/// Sends requests of `size` bytes for `length`, each after the reply to the last.
///
/// # Errors
/// The other end accepts no connection, closes it, or does not reply in time.
pub fn ask(to: SocketAddr, length: Duration, size: usize) -> Outcome<Sent> {
    let mut stream = TcpStream::connect_timeout(&to, PEER_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PEER_TIMEOUT))?;
    let request = pattern(size);
    let started = Instant::now();
    let mut answers = 0_u64;
    while started.elapsed() < length {
        stream.write_all(&request[..size])?;
        stream.read_exact(&mut [0])?;
        answers += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(Sent {
        bytes: answers * size as u64,
        seconds,
        round_trip_us: seconds * 1e6 / (answers as f64).max(1.0),
        retransmits: info(&stream)?.tcpi_total_retrans,
        ended: "end".into(),
    })
}

// SPDX-License-Identifier: Apache-2.0
//! Voice calls and video sessions with a guest's `media` workload.

use std::io::BufReader;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::socket::{now_us, receive, stamp_arrivals, wait_readable};
use super::{Client, ClientNetwork, Intervals, failed, run};
use crate::error::{Error, Result};
use crate::media::{ARRIVAL_BYTES, Arrival, PORT, Stream};
use crate::rtsp::{Item, Message, read};

/// Time limit for a connection and for an answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// Time to wait for the last packets.
const LAST_PACKETS_GRACE: Duration = Duration::from_secs(1);
/// Time between two control requests during a video: random, because a fixed interval would beat
/// with the schedulers' periods.
const CONTROL_INTERVAL: (Duration, Duration) =
    (Duration::from_millis(80), Duration::from_millis(240));

/// A voice call: packets to the guest, and the same number from it if both sides speak.
#[derive(Debug, Clone)]
pub struct Call {
    /// Port of the guest's `media`.
    pub port: u16,
    /// The stream to the guest.
    pub up: Stream,
    /// Whether the guest sends as many lines and packets back.
    pub both: bool,
    /// How the client runs.
    pub client: Client,
}

impl Default for Call {
    /// One line for five seconds, both ways.
    fn default() -> Self {
        Self {
            port: PORT,
            up: Stream::voice(1, 250),
            both: true,
            client: Client::default(),
        }
    }
}

/// Received packets.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallResult {
    /// Those that a program in the guest received.
    pub up: Vec<Arrival>,
    /// Those that the client's kernel received.
    pub down: Vec<Arrival>,
}

/// Makes a call with a guest.
///
/// # Errors
/// [`Error::Load`] without a connection, or if the guest refuses or the stream is out of range;
/// [`Error::OutsideLab`].
pub fn call(net: &impl ClientNetwork, to: Ipv4Addr, options: &Call) -> Result<CallResult> {
    let (requests, time) = bounds(&options.up)?;
    run(net, to, requests, time, options.client, || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed("UDP socket"))?;
        stamp_arrivals(&socket).map_err(failed("time stamps"))?;
        let port = socket.local_addr().map_err(failed("UDP socket"))?.port();
        let mut control = Control::new(to, options.port)?;
        let transport = format!("RTP/AVP;unicast;client_port={port}");
        let setup = Message::new("SETUP rtsp://lab/voice RTSP/1.0").with("transport", transport);
        control.ask(setup)?;
        control.ask(Message::new("RECORD rtsp://lab/voice RTSP/1.0"))?;
        if options.both {
            let Stream { lines, packets, .. } = options.up;
            let address = format!("rtsp://lab/voice?lines={lines}&packets={packets}");
            control.ask(Message::new(format!("PLAY {address} RTSP/1.0")))?;
        }
        let down = exchange(&socket, SocketAddr::from((to, options.port)), options.up)?;
        control.ask(Message::new("TEARDOWN rtsp://lab/voice RTSP/1.0"))?;
        let reply = control.ask(Message::new("GET_PARAMETER rtsp://lab/voice RTSP/1.0"))?;
        let up = reply.body.chunks(ARRIVAL_BYTES).map(Arrival::from_bytes);
        let up: Option<Vec<Arrival>> = up.collect();
        Ok(CallResult {
            up: up
                .ok_or_else(|| Error::Load("the guest's list of arrivals is not valid".into()))?,
            down,
        })
    })
}

/// Number of requests and time of a stream.
fn bounds(stream: &Stream) -> Result<(usize, Duration)> {
    stream.check().map_err(Error::Load)?;
    let time = Duration::from_micros(u64::from(stream.packets) * u64::from(stream.period_us));
    Ok((stream.packets as usize * stream.lines as usize, time))
}

/// Sends a stream and receives packets meanwhile, and for a moment after.
fn exchange(socket: &UdpSocket, to: SocketAddr, stream: Stream) -> Result<Vec<Arrival>> {
    let mut arrivals = Vec::new();
    let mut data = [0; 2048];
    let begin = Instant::now();
    let mut listen = |until: Instant| -> Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if !wait_readable(socket, left).map_err(failed("waiting"))? {
                continue;
            }
            // an ICMP error is no packet
            if let Ok((length, at)) = receive(socket, &mut data) {
                arrivals.extend(Arrival::of(&data[..length], at));
            }
        }
    };
    let mut packet = [0; 1500];
    let mut end = begin;
    for (line, number, due_us) in stream.schedule() {
        end = begin + Duration::from_micros(due_us.into());
        listen(end)?;
        let length = stream.packet(line, number, due_us, &mut packet);
        // a packet that cannot be sent is lost, as on any network
        let _ = socket.send_to(&packet[..length], to);
    }
    listen(end + LAST_PACKETS_GRACE)?;
    Ok(arrivals)
}

/// A video with its sound over the RTSP connection itself, with control requests meanwhile.
#[derive(Debug, Clone)]
pub struct VideoSession {
    /// Port of the guest's `media`.
    pub port: u16,
    /// Number of packets of video, and of sound.
    pub packets: u32,
    /// How the client runs.
    pub client: Client,
}

impl Default for VideoSession {
    /// Five seconds.
    fn default() -> Self {
        Self {
            port: PORT,
            packets: 100,
            client: Client::default(),
        }
    }
}

/// Result of a video session.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VideoResult {
    /// Video packets that the client's program received.
    pub video: Vec<Arrival>,
    /// Sound packets.
    pub audio: Vec<Arrival>,
    /// Time of each control request in milliseconds.
    pub trips_ms: Vec<f64>,
    /// Time until DESCRIBE was answered, including the connection, in milliseconds.
    pub describe_ms: f64,
    /// Time of SETUP in milliseconds.
    pub setup_ms: f64,
    /// Time from PLAY to the first packet in milliseconds.
    pub play_ms: f64,
}

/// Receives a video from a guest.
///
/// # Errors
/// As [`call`]; [`Error::Load`] if the video does not end in time.
pub fn watch_video(
    net: &impl ClientNetwork,
    to: Ipv4Addr,
    options: &VideoSession,
) -> Result<VideoResult> {
    let stream = Stream::video(options.packets);
    let (requests, time) = bounds(&stream)?;
    run(net, to, requests, time, options.client, || {
        let mut result = VideoResult::default();
        let begin = Instant::now();
        let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
        let mut control = Control::new(to, options.port)?;
        let address = format!("rtsp://lab/video?packets={}", options.packets);
        control.ask(Message::new(format!("DESCRIBE {address} RTSP/1.0")))?;
        result.describe_ms = ms(begin);
        let begin = Instant::now();
        let setup = Message::new(format!("SETUP {address} RTSP/1.0"));
        control.ask(setup.with("transport", "RTP/AVP/TCP;interleaved=0-1"))?;
        result.setup_ms = ms(begin);

        let begin = Instant::now();
        control.send(Message::new(format!("PLAY {address} RTSP/1.0")))?;
        let end = begin + time + REPLY_TIMEOUT;
        let mut intervals = Intervals::new(options.client.seed, CONTROL_INTERVAL);
        let mut next = begin + intervals.next();
        let mut asked: Option<(u32, Instant)> = None;
        let packets = options.packets as usize;
        while result.video.len() < packets || result.audio.len() < packets {
            let now = Instant::now();
            if now >= end {
                return Err(Error::Load("the video did not end in time".into()));
            }
            if now >= next && asked.is_none() {
                let number = control.send(Message::new("OPTIONS * RTSP/1.0"))?;
                asked = Some((number, now));
            }
            let wait = if asked.is_some() { end } else { next };
            match control.next(wait)? {
                Some((Item::Frame(channel, packet), at)) => {
                    if result.video.is_empty() && result.audio.is_empty() {
                        result.play_ms = ms(begin);
                    }
                    let to = match channel {
                        0 => &mut result.video,
                        _ => &mut result.audio,
                    };
                    to.extend(Arrival::of(&packet, at));
                }
                Some((Item::Message(reply), _)) => {
                    if let Some((_, since)) = asked.filter(|(n, _)| reply.cseq() == Some(*n)) {
                        result.trips_ms.push(ms(since));
                        asked = None;
                        next = Instant::now() + intervals.next();
                    }
                }
                None => {}
            }
        }
        Ok(result)
    })
}

/// An RTSP connection to a guest's `media`, which a thread reads.
struct Control {
    stream: TcpStream,
    items: Receiver<std::io::Result<Option<(Item, f64)>>>,
    count: u32,
}

impl Control {
    fn new(to: Ipv4Addr, port: u16) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&SocketAddr::from((to, port)), REPLY_TIMEOUT)
            .map_err(failed("connecting to its media"))?;
        stream.set_nodelay(true).map_err(failed("TCP_NODELAY"))?;
        let from = stream.try_clone().map_err(failed("reading"))?;
        let (send, items) = channel();
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            loop {
                let item = read(&mut from).map(|item| Some((item?, now_us())));
                let more = matches!(item, Ok(Some(_)));
                if send.send(item).is_err() || !more {
                    return;
                }
            }
        });
        Ok(Self {
            stream,
            items,
            count: 0,
        })
    }

    /// Sends a request and returns its number.
    fn send(&mut self, message: Message) -> Result<u32> {
        self.count += 1;
        let message = message.with("cseq", self.count);
        message
            .write(&mut self.stream)
            .map_err(failed("asking its media"))?;
        Ok(self.count)
    }

    /// The next item; `None` if there is none until then.
    fn next(&self, until: Instant) -> Result<Option<(Item, f64)>> {
        let left = until.saturating_duration_since(Instant::now());
        match self.items.recv_timeout(left) {
            Ok(Ok(Some(item))) => Ok(Some(item)),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Ok(Err(e)) => Err(failed("its media")(e)),
            Ok(Ok(None)) | Err(_) => Err(Error::Load("its media closed the connection".into())),
        }
    }

    /// Sends a request and waits for its answer.
    fn ask(&mut self, message: Message) -> Result<Message> {
        let what = message.first.clone();
        let number = self.send(message)?;
        let end = Instant::now() + REPLY_TIMEOUT;
        while let Some((item, _)) = self.next(end)? {
            if let Item::Message(reply) = item
                && reply.cseq() == Some(number)
            {
                return match reply.is_ok() {
                    true => Ok(reply),
                    false => Err(Error::Load(format!(
                        "its media refused {what}: {}",
                        reply.first
                    ))),
                };
            }
        }
        Err(Error::Load(format!("its media does not answer {what}")))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // the reading thread ends with the connection
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

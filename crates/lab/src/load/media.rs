// SPDX-License-Identifier: Apache-2.0
//! Calls and films: the other end of a guest's `media` workload.

use std::io::BufReader;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use super::socket::{now_us, receive, stamp_arrivals, wait_readable};
use super::{Client, ClientNetwork, Intervals, failed, run};
use crate::error::{Error, Result};
use crate::media::{ARRIVAL, Arrival, PORT, Stream};
use crate::rtsp::{Item, Message, read};

/// Longest wait for a connection and for an answer.
const ANSWER: Duration = Duration::from_secs(20);
/// Time that the last packets have.
const GRACE: Duration = Duration::from_secs(1);
/// Time between two questions in a film: random, or it would beat with the schedulers' periods.
const ASK: (Duration, Duration) = (Duration::from_millis(80), Duration::from_millis(240));

/// Packets to the guest, and the same number from it when both sides speak.
#[derive(Debug, Clone)]
pub struct Call {
    /// Port of the guest's `media`.
    pub port: u16,
    /// What is sent to the guest.
    pub up: Stream,
    /// Whether the guest sends voice back meanwhile, as many lines and packets.
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

/// What was heard.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallResult {
    /// By a program in the guest.
    pub up: Vec<Arrival>,
    /// By the client's kernel.
    pub down: Vec<Arrival>,
}

/// Speaks with a guest.
///
/// # Errors
/// No connection, or a guest that says no; an address that is not of the lab; a stream that makes no sense.
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
        let down = speak(&socket, SocketAddr::from((to, options.port)), options.up)?;
        control.ask(Message::new("TEARDOWN rtsp://lab/voice RTSP/1.0"))?;
        let told = control.ask(Message::new("GET_PARAMETER rtsp://lab/voice RTSP/1.0"))?;
        let up = told.body.chunks(ARRIVAL).map(Arrival::from_bytes);
        let up: Option<Vec<Arrival>> = up.collect();
        Ok(CallResult {
            up: up.ok_or_else(|| Error::Load("the guest told no arrivals".into()))?,
            down,
        })
    })
}

/// Requests and time of a stream, for the bounds of all loads.
fn bounds(stream: &Stream) -> Result<(usize, Duration)> {
    stream.check().map_err(Error::Load)?;
    let time = Duration::from_micros(u64::from(stream.packets) * u64::from(stream.period_us));
    Ok((stream.packets as usize * stream.lines as usize, time))
}

/// Sends a stream and takes what comes meanwhile, and for a moment after.
fn speak(socket: &UdpSocket, to: SocketAddr, stream: Stream) -> Result<Vec<Arrival>> {
    let mut heard = Vec::new();
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
            // an answer that there is nobody is no packet
            if let Ok((length, at)) = receive(socket, &mut data) {
                heard.extend(Arrival::of(&data[..length], at));
            }
        }
    };
    let mut packet = [0; 1500];
    let mut end = begin;
    for (line, number, due_us) in stream.schedule() {
        end = begin + Duration::from_micros(due_us.into());
        listen(end)?;
        let length = stream.packet(line, number, due_us, &mut packet);
        // what cannot be sent is lost, as on any network
        let _ = socket.send_to(&packet[..length], to);
    }
    listen(end + GRACE)?;
    Ok(heard)
}

/// A film: video with its sound over the connection itself, and questions meanwhile.
#[derive(Debug, Clone)]
pub struct VideoSession {
    /// Port of the guest's `media`.
    pub port: u16,
    /// Packets of video, and of its sound.
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

/// How a film came.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VideoResult {
    /// Packets of video as a program of the client gets them.
    pub video: Vec<Arrival>,
    /// Its sound.
    pub audio: Vec<Arrival>,
    /// Time of each question while it runs, milliseconds.
    pub trips_ms: Vec<f64>,
    /// Time until DESCRIBE was answered, with that until the connection stood, milliseconds.
    pub describe_ms: f64,
    /// Time of SETUP, milliseconds.
    pub setup_ms: f64,
    /// Time from PLAY to the first packet, milliseconds.
    pub play_ms: f64,
}

/// Watches a film of a guest.
///
/// # Errors
/// As [`call`]; a film that does not end.
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
        let end = begin + time + ANSWER;
        let mut intervals = Intervals::new(options.client.seed, ASK);
        let mut next = begin + intervals.next();
        let mut asked: Option<(u32, Instant)> = None;
        let packets = options.packets as usize;
        while result.video.len() < packets || result.audio.len() < packets {
            let now = Instant::now();
            if now >= end {
                return Err(Error::Load("the film did not end".into()));
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
                Some((Item::Message(said), _)) => {
                    if let Some((_, since)) = asked.filter(|(n, _)| said.cseq() == Some(*n)) {
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

/// A connection to a guest's `media`, which a thread reads.
struct Control {
    stream: TcpStream,
    items: Receiver<std::io::Result<Option<(Item, f64)>>>,
    count: u32,
}

impl Control {
    fn new(to: Ipv4Addr, port: u16) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&SocketAddr::from((to, port)), ANSWER)
            .map_err(failed("connecting to its media"))?;
        stream.set_nodelay(true).map_err(failed("TCP_NODELAY"))?;
        let from = stream.try_clone().map_err(failed("reading"))?;
        let (say, items) = channel();
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            loop {
                let item = read(&mut from).map(|item| Some((item?, now_us())));
                let more = matches!(item, Ok(Some(_)));
                if say.send(item).is_err() || !more {
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

    /// Sends a request; its number.
    fn send(&mut self, message: Message) -> Result<u32> {
        self.count += 1;
        let message = message.with("cseq", self.count);
        message
            .write(&mut self.stream)
            .map_err(failed("asking its media"))?;
        Ok(self.count)
    }

    /// What comes next, until a moment.
    fn next(&self, until: Instant) -> Result<Option<(Item, f64)>> {
        let left = until.saturating_duration_since(Instant::now());
        match self.items.recv_timeout(left) {
            Ok(Ok(Some(item))) => Ok(Some(item)),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Ok(Err(e)) => Err(failed("its media")(e)),
            Ok(Ok(None)) | Err(_) => Err(Error::Load("its media has hung up".into())),
        }
    }

    /// Sends a request and waits for its answer.
    fn ask(&mut self, message: Message) -> Result<Message> {
        let what = message.first.clone();
        let number = self.send(message)?;
        let end = Instant::now() + ANSWER;
        while let Some((item, _)) = self.next(end)? {
            if let Item::Message(said) = item
                && said.cseq() == Some(number)
            {
                return match said.is_ok() {
                    true => Ok(said),
                    false => Err(Error::Load(format!(
                        "its media says to {what}: {}",
                        said.first
                    ))),
                };
            }
        }
        Err(Error::Load(format!("its media does not answer {what}")))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // the reader ends with the connection
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

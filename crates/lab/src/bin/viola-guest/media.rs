// SPDX-License-Identifier: Apache-2.0
//! The workload `media`: sends and receives streams of voice and video. RTSP over TCP and RTP over
//! UDP have the same port.
//!
//! PLAY sends the streams that its address names: by UDP if SETUP named a port, else in frames on
//! the connection. RECORD forgets the UDP packets received so far. GET_PARAMETER returns the
//! arrivals of those received since. DESCRIBE, SETUP, OPTIONS and TEARDOWN work as in RFC 2326.

use std::io::{self, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_lab::media::{Arrival, MAX_PACKETS, Stream};
use viola_lab::rtsp::{Item, Message, read, write_frame};

use crate::counters::{Slot, ready};

type Arrivals = Arc<Mutex<Vec<Arrival>>>;

pub fn serve(port: u16, slot: &'static Slot) -> Result<(), String> {
    let failed = |e: io::Error| format!("port {port}: {e}");
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(failed)?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(failed)?;
    let begin = Instant::now();
    let arrivals = Arrivals::default();
    let (from, to) = (socket.try_clone().map_err(failed)?, Arc::clone(&arrivals));
    std::thread::spawn(move || receive(&from, &to, begin, slot));
    ready();
    loop {
        let (stream, peer) = listener.accept().map_err(failed)?;
        let Ok(datagrams) = socket.try_clone() else {
            continue;
        };
        let arrivals = Arc::clone(&arrivals);
        std::thread::spawn(move || {
            // a client that closes or sends something else is dropped
            let _ = serve_client(stream, peer.ip(), datagrams, &arrivals, slot);
        });
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records when each packet reaches this program.
fn receive(socket: &UdpSocket, arrivals: &Arrivals, begin: Instant, slot: &Slot) {
    let mut data = [0; 2048];
    loop {
        let Ok((length, _)) = socket.recv_from(&mut data) else {
            continue;
        };
        let us = begin.elapsed().as_secs_f64() * 1e6;
        if let Some(arrival) = Arrival::of(&data[..length], us) {
            slot.add(1, length as u64);
            let mut arrivals = lock(arrivals);
            if arrivals.len() < MAX_PACKETS {
                arrivals.push(arrival);
            }
        }
    }
}

/// Transport of packets.
enum Transport {
    Datagrams(UdpSocket, SocketAddr),
    Frames,
}

fn serve_client(
    stream: TcpStream,
    peer: IpAddr,
    datagrams: UdpSocket,
    arrivals: &Arrivals,
    slot: &'static Slot,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let out = Arc::new(Mutex::new(stream.try_clone()?));
    let mut from = BufReader::new(stream);
    let mut to: Option<SocketAddr> = None;
    let stop = Arc::new(AtomicBool::new(false));
    let stop_on_drop = StopOnDrop(Arc::clone(&stop));
    while let Some(item) = read(&mut from)? {
        let Item::Message(ask) = item else {
            continue;
        };
        let answer = |first: &str| {
            Message::new(format!("RTSP/1.0 {first}")).with("cseq", ask.cseq().unwrap_or(0))
        };
        let mut words = ask.first.split(' ');
        let (method, address) = (words.next(), words.next().unwrap_or_default());
        let mut play = None;
        let mut reply = answer("200 OK");
        match method {
            Some("OPTIONS") => {}
            Some("DESCRIBE") => {
                reply = reply.with("content-type", "application/sdp");
                reply.body = b"v=0\r\no=- 0 0 IN IP4 0.0.0.0\r\ns=viola\r\nt=0 0\r\nm=video 0 RTP/AVP 0\r\nm=audio 0 RTP/AVP 0\r\n".to_vec();
            }
            Some("SETUP") => {
                let header = ask.get("transport").unwrap_or_default();
                let port = header.split_once("client_port=");
                to = port.and_then(|(_, port)| Some(SocketAddr::new(peer, port.parse().ok()?)));
                reply = reply.with("transport", header).with("session", 1);
            }
            Some("PLAY") => match streams(address) {
                Ok(streams) => play = Some(streams),
                Err(why) => reply = answer(&format!("400 {why}")),
            },
            Some("RECORD") => lock(arrivals).clear(),
            Some("GET_PARAMETER") => {
                let arrivals = std::mem::take(&mut *lock(arrivals));
                reply.body = arrivals.into_iter().flat_map(Arrival::to_bytes).collect();
            }
            Some("TEARDOWN") => stop.store(true, Ordering::Relaxed),
            _ => reply = answer("501 Not Implemented"),
        }
        reply.write(&mut *lock(&out))?;
        for (channel, stream) in play.into_iter().flatten().enumerate() {
            let transport = match to {
                Some(to) => Transport::Datagrams(datagrams.try_clone()?, to),
                None => Transport::Frames,
            };
            let (out, stop) = (Arc::clone(&out), Arc::clone(&stop));
            let channel = u8::try_from(channel).unwrap_or_default();
            std::thread::spawn(move || send(stream, channel, &transport, &out, &stop, slot));
        }
    }
    drop(stop_on_drop);
    Ok(())
}

/// Stops the senders of a connection when it ends.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Streams that an address names: `.../voice?lines=1&packets=250`, or `.../video?packets=100` with
/// its sound.
fn streams(address: &str) -> Result<Vec<Stream>, String> {
    let (path, query) = address.split_once('?').unwrap_or((address, ""));
    let number = |key: &str| {
        let of = query.split('&').filter_map(|part| part.split_once('='));
        let value = of.filter(|(k, _)| *k == key).map(|(_, v)| v).next();
        value.and_then(|v| v.parse::<u32>().ok()).unwrap_or(1)
    };
    let packets = number("packets");
    let streams = match path.rsplit('/').next() {
        Some("voice") => vec![Stream::voice(number("lines"), packets)],
        Some("video") => vec![Stream::video(packets), Stream::audio(packets)],
        _ => return Err("use voice or video".into()),
    };
    streams.iter().try_for_each(Stream::check)?;
    Ok(streams)
}

/// Sends a stream; late packets are sent at once.
fn send(
    stream: Stream,
    channel: u8,
    transport: &Transport,
    out: &Mutex<TcpStream>,
    stop: &AtomicBool,
    slot: &Slot,
) {
    let begin = Instant::now();
    let mut data = [0; 1500];
    for (line, number, due_us) in stream.schedule() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let due = begin + Duration::from_micros(due_us.into());
        let now = Instant::now();
        if due > now {
            std::thread::sleep(due - now);
        }
        let length = stream.packet(line, number, due_us, &mut data);
        let packet = &data[..length];
        let sent = match transport {
            // a packet that cannot be sent is lost, as on any network
            Transport::Datagrams(socket, to) => socket.send_to(packet, to).or(Ok(0)),
            Transport::Frames => write_frame(&mut *lock(out), channel, packet).map(|()| length),
        };
        match sent {
            Ok(length) => slot.add(1, length as u64),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_streams() {
        let voice = streams("rtsp://web/voice?lines=40&packets=250");
        assert_eq!(voice, Ok(vec![Stream::voice(40, 250)]));
        let video = streams("rtsp://web/video?packets=100").unwrap();
        assert_eq!(video, [Stream::video(100), Stream::audio(100)]);
        assert!(streams("rtsp://web/music").is_err());
        assert!(streams("rtsp://web/voice?lines=9999999&packets=9999999").is_err());
    }
}

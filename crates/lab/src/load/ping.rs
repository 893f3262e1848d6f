// SPDX-License-Identifier: Apache-2.0
//! ICMP echo (ping) with random intervals, timed by the kernel's receive time stamps. The system's
//! ping has neither.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with,
};

use super::socket::{now_us, receive, stamp_arrivals, wait_readable};
use super::{Client, ClientNetwork, Intervals, Times, failed, run};
use crate::error::Result;

/// Size of ICMP header and payload in bytes.
const PACKET_BYTES: usize = 64;
const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST: u8 = 8;

/// A ping run. The next request does not wait for the last answer.
#[derive(Debug, Clone)]
pub struct Ping {
    /// Requests to send.
    pub count: usize,
    /// Shortest and longest time between two requests, uniform in between. Random, because a fixed
    /// interval would beat with the scheduler's periods.
    pub interval: (Duration, Duration),
    /// Time to wait for answers after the last request.
    pub grace: Duration,
    /// How the client runs.
    pub client: Client,
}

impl Default for Ping {
    /// 1000 requests, 1 to 3 ms apart.
    fn default() -> Self {
        Self {
            count: 1000,
            interval: (Duration::from_millis(1), Duration::from_millis(3)),
            grace: Duration::from_secs(2),
            client: Client::default(),
        }
    }
}

/// Pings a guest. Round-trip times count from just before the send to the kernel's receive time
/// stamp.
///
/// # Errors
/// [`crate::Error::Load`], [`crate::Error::OutsideLab`].
pub fn ping(net: &impl ClientNetwork, to: Ipv4Addr, options: &Ping) -> Result<Times> {
    let time = options
        .interval
        .1
        .saturating_mul(u32::try_from(options.count).unwrap_or(u32::MAX))
        + options.grace;
    run(net, to, options.count, time, options.client, || {
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(ipproto::ICMP),
        )
        .map_err(|e| failed("raw socket")(e.into()))?;
        stamp_arrivals(&socket).map_err(failed("time stamps"))?;
        let tag = (options.client.seed as u16).to_be_bytes();
        let target = SocketAddrV4::new(to, 0);
        let mut intervals = Intervals::new(options.client.seed, options.interval);
        let mut sent_at = Vec::with_capacity(options.count);
        let mut answered: Vec<Option<f64>> = vec![None; options.count];
        let mut left = options.count;
        let begin = now_us();
        let mut last = begin;
        let mut next = begin;
        let mut data = [0_u8; 512];
        loop {
            let now = now_us();
            if sent_at.len() < options.count && now >= next {
                let request = request(tag, sent_at.len());
                sent_at.push(now_us());
                // a packet that cannot be sent is lost, as on any network
                let _ = sendto(&socket, &request, SendFlags::empty(), &target);
                let pause = if sent_at.len() < options.count {
                    intervals.next()
                } else {
                    options.grace
                };
                next = now_us() + pause.as_secs_f64() * 1e6;
                continue;
            }
            if left == 0 || now >= next {
                break;
            }
            let limit = Duration::from_secs_f64((next - now) / 1e6);
            if !wait_readable(&socket, limit).map_err(failed("waiting"))? {
                continue;
            }
            let Ok((count, arrived)) = receive(&socket, &mut data) else {
                continue;
            };
            let Some(index) = index_of(&data[..count], tag, to) else {
                continue;
            };
            if let (Some(sent), Some(slot @ None)) = (sent_at.get(index), answered.get_mut(index)) {
                *slot = Some(arrived - sent);
                last = last.max(arrived);
                left -= 1;
            }
        }
        Ok(Times {
            us: answered.into_iter().flatten().collect(),
            sent: sent_at.len(),
            lost: left,
            seconds: (last - begin) / 1e6,
        })
    })
}

fn request(tag: [u8; 2], index: usize) -> [u8; PACKET_BYTES] {
    let mut packet = [0_u8; PACKET_BYTES];
    packet[0] = ECHO_REQUEST;
    packet[4..6].copy_from_slice(&tag);
    packet[6..8].copy_from_slice(&(index as u16).to_be_bytes());
    packet[8..16].copy_from_slice(&(index as u64).to_be_bytes());
    let sum = checksum(&packet);
    packet[2..4].copy_from_slice(&sum.to_be_bytes());
    packet
}

/// Number of the request that an IP packet answers; `None` for other packets.
fn index_of(packet: &[u8], tag: [u8; 2], from: Ipv4Addr) -> Option<usize> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let reply = packet.get(header..header + PACKET_BYTES)?;
    let ours = packet.get(12..16)? == from.octets() && reply[0] == ECHO_REPLY && reply[4..6] == tag;
    let index = u64::from_be_bytes(reply[8..16].try_into().ok()?);
    usize::try_from(index).ok().filter(|_| ours)
}

/// The Internet checksum (RFC 1071).
fn checksum(data: &[u8]) -> u16 {
    let mut sum: u32 = data
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |b| u32::from(*b)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_a_request_is_zero() {
        assert_eq!(checksum(&request([1, 2], 70_000)), 0);
    }

    #[test]
    fn only_answers_to_this_run_have_an_index() {
        let from = Ipv4Addr::new(10, 77, 0, 11);
        let mut packet = vec![0_u8; 20];
        packet[0] = 0x45;
        packet[12..16].copy_from_slice(&from.octets());
        packet.extend(request([1, 2], 70_000));
        assert_eq!(
            index_of(&packet, [1, 2], from),
            None,
            "a request is no answer"
        );
        packet[20] = ECHO_REPLY;
        assert_eq!(index_of(&packet, [1, 2], from), Some(70_000));
        assert_eq!(index_of(&packet, [1, 3], from), None);
        assert_eq!(
            index_of(&packet, [1, 2], Ipv4Addr::new(10, 77, 0, 12)),
            None
        );
        assert_eq!(index_of(&packet[..40], [1, 2], from), None);
    }
}

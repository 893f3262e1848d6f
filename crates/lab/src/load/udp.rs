// SPDX-License-Identifier: Apache-2.0
//! UDP packets at a given rate.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use super::{Client, ClientNetwork, MAX_REQUESTS, failed, run, sleep_until};
use crate::error::{Error, Result};

/// Interval at which due packets are sent.
const SEND_INTERVAL: Duration = Duration::from_micros(250);

/// A stream of UDP packets at a fixed rate.
#[derive(Debug, Clone)]
pub struct UdpFlood {
    /// Port of the guest's `sink`.
    pub port: u16,
    /// Packets per second.
    pub rate: u32,
    /// Payload of a packet in bytes, 1 to 1472.
    pub size: usize,
    /// Length of the run.
    pub time: Duration,
    /// How the client runs.
    pub client: Client,
}

impl Default for UdpFlood {
    /// 10,000 packets of 64 bytes a second to port 9, for 5 s.
    fn default() -> Self {
        Self {
            port: 9,
            rate: 10_000,
            size: 64,
            time: Duration::from_secs(5),
            client: Client::default(),
        }
    }
}

/// Result of a flood.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FloodResult {
    /// Packets that the host's kernel accepted; the guest's `sink` counts those that arrived.
    pub sent: u64,
    /// Packets that it refused.
    pub refused: u64,
    /// Time of the run in seconds.
    pub seconds: f64,
}

/// Sends to a guest at a steady rate. A late sender sends all due packets at once.
///
/// # Errors
/// [`Error::Load`], [`Error::OutsideLab`].
pub fn udp_flood(
    net: &impl ClientNetwork,
    to: Ipv4Addr,
    options: &UdpFlood,
) -> Result<FloodResult> {
    let packets = f64::from(options.rate) * options.time.as_secs_f64();
    if packets < 1.0 || packets > MAX_REQUESTS as f64 || !(1..=1472).contains(&options.size) {
        return Err(Error::Load(format!(
            "{packets} packets of {} bytes; it must be 1 to {MAX_REQUESTS} of 1 to 1472",
            options.size
        )));
    }
    run(
        net,
        to,
        packets as usize,
        options.time,
        options.client,
        || {
            let socket =
                UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed("UDP socket"))?;
            socket
                .connect((to, options.port))
                .map_err(failed("UDP socket"))?;
            let data = vec![0x5a_u8; options.size];
            let mut result = FloodResult {
                sent: 0,
                refused: 0,
                seconds: 0.0,
            };
            let begin = Instant::now();
            let mut next = begin;
            loop {
                let elapsed = begin.elapsed().min(options.time);
                let due = (elapsed.as_secs_f64() * f64::from(options.rate)) as u64;
                while result.sent + result.refused < due {
                    match socket.send(&data) {
                        Ok(_) => result.sent += 1,
                        Err(_) => result.refused += 1,
                    }
                }
                if elapsed >= options.time {
                    break;
                }
                next += SEND_INTERVAL;
                sleep_until(next);
            }
            result.seconds = begin.elapsed().as_secs_f64();
            Ok(result)
        },
    )
}

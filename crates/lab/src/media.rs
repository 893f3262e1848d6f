// SPDX-License-Identifier: Apache-2.0
//! Paced voice and video streams with RTP headers (RFC 3550), and their quality for a listener.
//!
//! Time stamps count microseconds from the start of the stream to the moment at which a packet is
//! due. A sender's delay therefore counts like the network's.

/// RTP header of each packet, in bytes.
pub const HEADER_BYTES: usize = 12;
/// Packets that all lines of one run may have in each direction.
pub const MAX_PACKETS: usize = 1 << 20;
/// Port of a guest's `media` workload: RTSP over TCP, RTP over UDP.
pub const PORT: u16 = 554;
/// Size of an [`Arrival`] on the wire.
pub const ARRIVAL_BYTES: usize = 16;

/// A paced stream of several lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Number of parallel lines; their packets are spread evenly over the period.
    pub lines: u32,
    /// Packets of each line.
    pub packets: u32,
    /// Time from one packet of a line to the next, microseconds.
    pub period_us: u32,
    /// Payload bytes of a packet, 1 to 1460.
    pub payload: u32,
}

impl Stream {
    /// G.711 calls: 50 packets a second, each with 20 ms of sound in 160 bytes (RFC 3551).
    pub fn voice(lines: u32, packets: u32) -> Self {
        Self {
            lines,
            packets,
            period_us: 20_000,
            payload: 160,
        }
    }

    /// The video of table 2.3 in the vSlicer dissertation: 20 packets of 160 bytes a second.
    pub fn video(packets: u32) -> Self {
        Self {
            lines: 1,
            packets,
            period_us: 50_000,
            payload: 160,
        }
    }

    /// The sound of that video: as many packets of 32 bytes.
    pub fn audio(packets: u32) -> Self {
        Self {
            payload: 32,
            ..Self::video(packets)
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// A sentence that says what is out of range.
    pub fn check(&self) -> Result<(), String> {
        let all = u64::from(self.lines) * u64::from(self.packets);
        let time = u64::from(self.packets) * u64::from(self.period_us);
        match self {
            _ if all == 0 || all > MAX_PACKETS as u64 => {
                Err(format!("{all} packets; it must be 1 to {MAX_PACKETS}"))
            }
            _ if time == 0 || time > 600_000_000 => Err(format!(
                "the stream lasts {time} us; it must be above 0 and at most ten minutes"
            )),
            Self { payload, .. } if !(1..=1460).contains(payload) => {
                Err(format!("payloads of {payload} bytes; it must be 1 to 1460"))
            }
            _ => Ok(()),
        }
    }

    /// All packets in order: line, number in the line, and due time in microseconds.
    pub fn schedule(self) -> impl Iterator<Item = (u32, u32, u32)> {
        (0..self.packets).flat_map(move |number| {
            (0..self.lines).map(move |line| {
                let part = u64::from(self.period_us) * u64::from(line) / u64::from(self.lines);
                // check() has bounded it to ten minutes
                (line, number, number * self.period_us + part as u32)
            })
        })
    }

    /// Writes a packet into `to` and returns its length.
    pub fn packet(self, line: u32, number: u32, due_us: u32, to: &mut [u8; 1500]) -> usize {
        let length = HEADER_BYTES + self.payload as usize;
        to[0] = 0x80; // version 2
        to[1] = 0; // PCMU
        to[2..4].copy_from_slice(&(number as u16).to_be_bytes());
        to[4..8].copy_from_slice(&due_us.to_be_bytes());
        to[8..12].copy_from_slice(&line.to_be_bytes());
        to[HEADER_BYTES..length].fill(0xff); // silence
        length
    }
}

/// An arrived packet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// Its line.
    pub line: u32,
    /// Due time, in microseconds since the start of its stream.
    pub due_us: u32,
    /// Arrival time by the receiver's clock, in microseconds.
    pub us: f64,
}

impl Arrival {
    /// Reads a packet that arrived at `us`; `None` if it has another header.
    pub fn of(packet: &[u8], us: f64) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?));
        (packet.len() > HEADER_BYTES && packet[0] == 0x80).then_some(())?;
        Some(Self {
            line: word(8)?,
            due_us: word(4)?,
            us,
        })
    }

    /// Encodes it for the wire.
    pub fn to_bytes(self) -> [u8; ARRIVAL_BYTES] {
        let mut bytes = [0; ARRIVAL_BYTES];
        bytes[..4].copy_from_slice(&self.line.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.due_us.to_be_bytes());
        bytes[8..].copy_from_slice(&self.us.to_be_bytes());
        bytes
    }

    /// Decodes it from the wire.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ARRIVAL_BYTES] = bytes.try_into().ok()?;
        let (words, time) = bytes.split_at(8);
        Some(Self {
            line: u32::from_be_bytes(words[..4].try_into().ok()?),
            due_us: u32::from_be_bytes(words[4..].try_into().ok()?),
            us: f64::from_be_bytes(time.try_into().ok()?),
        })
    }
}

/// Quality of a received stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quality {
    /// Interarrival jitter in milliseconds: the mean of the running estimate of RFC 3550, section
    /// 6.4.1, over all packets and lines. The last value alone would describe only the last third
    /// of a second.
    pub jitter_ms: f64,
    /// Lost packets, in percent.
    pub lost: f64,
    /// Packets that arrived too late to be played, in percent of those that arrived.
    pub late: f64,
}

impl Quality {
    /// Quality of a stream with these arrivals; `None` without arrivals. A packet is late if it
    /// took `buffer_ms` more than the fastest of its line: the player's buffer is empty then.
    /// Duplicates count once.
    pub fn of(stream: Stream, arrivals: &[Arrival], buffer_ms: f64) -> Option<Self> {
        let (mut sum, mut came, mut late) = (0.0, 0_usize, 0_usize);
        for line in 0..stream.lines {
            let mut seen = std::collections::HashSet::new();
            let of: Vec<&Arrival> = arrivals
                .iter()
                .filter(|a| a.line == line && seen.insert(a.due_us))
                .collect();
            let transit = |a: &Arrival| a.us - f64::from(a.due_us);
            let least = of.iter().map(|a| transit(a)).fold(f64::INFINITY, f64::min);
            let mut jitter = 0.0;
            let mut before: Option<f64> = None;
            for packet in of {
                let now = transit(packet);
                if let Some(before) = before {
                    jitter += ((now - before).abs() - jitter) / 16.0;
                }
                before = Some(now);
                sum += jitter;
                came += 1;
                late += usize::from(now > least + buffer_ms * 1e3);
            }
        }
        let all = stream.lines as usize * stream.packets as usize;
        (came > 0).then(|| Self {
            jitter_ms: sum / came as f64 / 1e3,
            lost: 100.0 * all.saturating_sub(came) as f64 / all as f64,
            late: 100.0 * late as f64 / came as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(stream: Stream, delay_us: impl Fn(u32, u32) -> Option<f64>) -> Vec<Arrival> {
        let came = stream.schedule().filter_map(|(line, number, due)| {
            let mut data = [0; 1500];
            let length = stream.packet(line, number, due, &mut data);
            let delay = delay_us(line, number)?;
            Arrival::of(&data[..length], 5e6 + f64::from(due) + delay)
        });
        came.collect()
    }

    #[test]
    fn an_even_stream_has_no_jitter() {
        let stream = Stream::voice(3, 100);
        let quality = Quality::of(stream, &arrivals(stream, |_, _| Some(70_000.0)), 60.0).unwrap();
        assert_eq!(
            (quality.jitter_ms, quality.lost, quality.late),
            (0.0, 0.0, 0.0)
        );
    }

    #[test]
    fn jitter_is_that_of_rfc_3550() {
        // Transit times 0, 16, 0, 16 ms: |D| is 16 ms each time, so J is 0, 1, 1.9375, ... and nears 16.
        let stream = Stream::voice(1, 4);
        let every = |_: u32, n: u32| Some(f64::from(n % 2) * 16_000.0);
        let quality = Quality::of(stream, &arrivals(stream, every), 60.0).unwrap();
        let j = [0.0, 1.0, 1.9375, 1.9375 + 14.0625 / 16.0];
        assert!((quality.jitter_ms - j.iter().sum::<f64>() / 4.0).abs() < 1e-9);
        let stream = Stream::voice(1, 2000);
        let quality = Quality::of(stream, &arrivals(stream, every), 60.0).unwrap();
        assert!((quality.jitter_ms - 16.0).abs() < 0.2, "{quality:?}");
    }

    #[test]
    fn lost_and_late_packets_are_counted() {
        let stream = Stream::voice(2, 50);
        let some = |_: u32, n: u32| match n % 10 {
            0 => None,
            1 => Some(90_000.0),
            _ => Some(20_000.0),
        };
        let mut came = arrivals(stream, some);
        came.push(came[0]); // a duplicate
        let quality = Quality::of(stream, &came, 60.0).unwrap();
        assert_eq!(quality.lost, 10.0);
        assert!((quality.late - 100.0 / 9.0).abs() < 1e-9, "{quality:?}");
        assert_eq!(Quality::of(stream, &[], 60.0), None);
    }

    #[test]
    fn lines_are_spread_over_the_period() {
        let due: Vec<u32> = Stream::voice(4, 2)
            .schedule()
            .map(|(_, _, due)| due)
            .collect();
        assert_eq!(
            due,
            [0, 5000, 10_000, 15_000, 20_000, 25_000, 30_000, 35_000]
        );
    }

    #[test]
    fn an_arrival_is_encoded_and_decoded() {
        let arrival = Arrival {
            line: 7,
            due_us: 1_000_000,
            us: 1.5e9,
        };
        assert_eq!(Arrival::from_bytes(&arrival.to_bytes()), Some(arrival));
        assert_eq!(Arrival::from_bytes(&[0; 15]), None);
        assert_eq!(Arrival::of(&[0x80; 12], 0.0), None);
        assert_eq!(Arrival::of(&[0; 172], 0.0), None);
    }

    #[test]
    fn streams_out_of_range_are_refused() {
        assert!(Stream::voice(1, 250).check().is_ok());
        assert!(Stream::voice(0, 250).check().is_err());
        assert!(Stream::voice(1, 50_000).check().is_err());
        let wide = Stream {
            payload: 2000,
            ..Stream::video(10)
        };
        assert!(wide.check().unwrap_err().contains("2000 bytes"));
    }
}

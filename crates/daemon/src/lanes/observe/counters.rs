// SPDX-License-Identifier: Apache-2.0
//! Counts what guests send and receive on their paravirtual NICs and on their VFs.

use viola_lanes::{GuestAccess, VfDevice};
use viola_netdev::{Counters, Link};
use viola_policy::lanes::Samples;

/// Traffic of one NIC: samples of both paths together, and the total of its VFs.
#[derive(Debug)]
pub struct NicCounter {
    /// The last samples, packets.
    pub samples: Samples,
    last: Option<Counters>,
    last_vf: Option<(u32, u32, Counters)>,
    /// Total of its VFs so far.
    pub vf: Counters,
    /// How long the last grant of a VF took, ns.
    pub attach: u64,
}

impl NicCounter {
    /// Keeps this number of samples.
    pub fn new(samples: usize) -> Self {
        Self {
            samples: Samples::new(samples),
            last: None,
            last_vf: None,
            vf: Counters::default(),
            attach: 0,
        }
    }

    /// Adds a sample: the counters of its paravirtual path and, with pool and index, those of its VF.
    pub fn add(&mut self, nic: Counters, vf: Option<(u32, u32, Counters)>) {
        let slow = self.last.map_or(0, |last| since(nic, last).packets());
        self.last = Some(nic);
        let fast = match (vf, self.last_vf) {
            (Some((pool, index, now)), Some((p, i, last))) if (pool, index) == (p, i) => {
                since(now, last)
            }
            _ => Counters::default(),
        };
        self.last_vf = vf;
        self.vf.rx_packets += fast.rx_packets;
        self.vf.rx_bytes += fast.rx_bytes;
        self.vf.tx_packets += fast.tx_packets;
        self.vf.tx_bytes += fast.tx_bytes;
        self.samples.push(slow + fast.packets());
    }
}

/// The difference of counters. A counter that restarted counts from zero.
fn since(now: Counters, last: Counters) -> Counters {
    let part = |now: u64, last: u64| match now >= last {
        true => now - last,
        false => now,
    };
    Counters {
        rx_packets: part(now.rx_packets, last.rx_packets),
        rx_bytes: part(now.rx_bytes, last.rx_bytes),
        tx_packets: part(now.tx_packets, last.tx_packets),
        tx_bytes: part(now.tx_bytes, last.tx_bytes),
    }
}

/// Traffic of a VF: by its interface where host or namespace have one, by the PF where its driver counts VFs, and else by the VFIO
/// interrupts of the VF, each of which stands for at least one packet.
pub fn vf_counters(
    how: &GuestAccess,
    vf: &VfDevice,
    by_driver: Option<Counters>,
    interrupts: &str,
) -> Counters {
    let of = |links: Vec<Link>| {
        let is_it = |l: &&Link| l.device.as_deref() == Some(vf.address.as_str());
        let found = links.iter().find(is_it);
        found.map(|l| l.counters).unwrap_or_default()
    };
    match how {
        GuestAccess::Netns(guest) => of(guest.links().unwrap_or_default()),
        GuestAccess::Uml(_) => of(viola_netdev::links().unwrap_or_default()),
        GuestAccess::Qemu(_) => match by_driver.filter(|c| *c != Counters::default()) {
            Some(counters) => counters,
            None => Counters {
                rx_packets: vfio_interrupts(interrupts, &vf.address),
                ..Counters::default()
            },
        },
    }
}

/// VFIO interrupts of a device, from the text of /proc/interrupts.
fn vfio_interrupts(text: &str, address: &str) -> u64 {
    let device = format!("({address})");
    let lines = text
        .lines()
        .filter(|l| l.contains("vfio") && l.contains(&device));
    lines
        .flat_map(|l| {
            l.split_whitespace()
                .skip(1)
                .map_while(|n| n.parse::<u64>().ok())
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets(rx: u64, tx: u64) -> Counters {
        Counters {
            rx_packets: rx,
            tx_packets: tx,
            ..Counters::default()
        }
    }

    #[test]
    fn both_paths_count_and_a_vf_counts_from_its_first_sample() {
        let mut count = NicCounter::new(4);
        count.add(packets(1000, 1000), None);
        count.add(packets(1005, 1000), Some((0, 3, packets(70, 0))));
        count.add(packets(1005, 1001), Some((0, 3, packets(80, 10))));
        // Earlier traffic of another VF belongs to another guest.
        count.add(packets(1005, 1001), Some((0, 4, packets(9000, 9000))));
        let traffic = count.samples.traffic();
        assert_eq!((traffic.freq, traffic.avg), (50.0, 6.5));
        assert_eq!((count.vf.rx_packets, count.vf.tx_packets), (10, 10));
    }

    #[test]
    fn a_counter_that_restarts_does_not_count_backwards() {
        let mut count = NicCounter::new(2);
        count.add(packets(100, 0), None);
        count.add(packets(7, 0), None);
        assert_eq!(count.samples.traffic().avg, 3.5);
    }

    #[test]
    fn interrupts_of_all_cpus_and_vectors_add_up() {
        let text = "           CPU0       CPU1\n\
                    \x2045:         12          3  PCI-MSIX-0000:01:10.0   0-edge      vfio-msix[0](0000:01:10.0)\n\
                    \x2046:          5          0  PCI-MSIX-0000:01:10.0   1-edge      vfio-msix[1](0000:01:10.0)\n\
                    \x2047:        900          0  PCI-MSIX-0000:01:10.2   0-edge      vfio-msix[0](0000:01:10.2)\n";
        assert_eq!(vfio_interrupts(text, "0000:01:10.0"), 20);
        assert_eq!(vfio_interrupts(text, "0000:01:10.4"), 0);
    }
}

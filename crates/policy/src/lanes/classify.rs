// SPDX-License-Identifier: Apache-2.0
//! The kind of work of a VM, by DI2 and packet frequency (sections 3.5 and 3.6).

use std::fmt;

use super::{Config, Traffic};

/// Kind of a VM's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// It computes: DI2 is below its threshold.
    Cpu,
    /// It waits for I/O, but its NIC is quiet: it uses disks or is idle.
    Disk,
    /// Network-bound.
    Net,
    /// Network-bound, with packets in nearly all samples.
    NetHeavy,
}

impl Kind {
    /// Whether such a VM may get a VF.
    pub fn network_bound(self) -> bool {
        matches!(self, Kind::Net | Kind::NetHeavy)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Kind::Cpu => "cpu",
            Kind::Disk => "disk",
            Kind::Net => "net",
            Kind::NetHeavy => "net, heavy",
        })
    }
}

/// The kind of a VM with this DI2 and this traffic.
pub fn classify(config: &Config, di2: f64, traffic: Traffic) -> Kind {
    let waits = di2 >= config.di2;
    if !waits {
        Kind::Cpu
    } else if traffic.freq >= config.heavy_freq.max(config.freq) {
        Kind::NetHeavy
    } else if traffic.freq >= config.freq {
        Kind::Net
    } else {
        Kind::Disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_measures_are_needed() {
        let config = Config::default();
        let kind = |di2, freq| classify(&config, di2, Traffic { freq, avg: 1e5 });
        assert_eq!(kind(0.0, 99.0), Kind::Cpu);
        assert_eq!(kind(5.0, 0.0), Kind::Disk);
        assert_eq!(kind(5.0, 19.0), Kind::Net);
        assert_eq!(kind(5.0, 79.9), Kind::Net);
        assert_eq!(kind(5.0, 80.0), Kind::NetHeavy);
        assert_eq!(kind(f64::NAN, 80.0), Kind::Cpu);
        assert!(!Kind::Disk.network_bound() && Kind::NetHeavy.network_bound());
    }

    /// Table 2 with the printed DI2 and frequencies: five VMs compute (their DI2 is high while they rest), one is idle,
    /// ten send.
    #[test]
    fn the_vms_of_table_2_with_traffic_are_network_bound() {
        let config = Config::default();
        let table = [
            (3291.28, 0.0),
            (9251.81, 0.0),
            (921.862, 0.0),
            (29.9489, 0.0),
            (34.582, 0.0),
            (7384.23, 19.0),
            (5628.71, 34.0),
            (5396.86, 56.0),
            (3918.63, 78.0),
            (4385.75, 98.0),
            (3723.57, 17.0),
            (4491.839, 39.0),
            (689.572, 59.0),
            (285.9402, 79.0),
            (389.3761, 96.0),
            (3971.32, 0.0),
        ];
        let bound: Vec<usize> = (1..)
            .zip(table)
            .filter(|&(_, (di2, freq))| {
                classify(&config, di2, Traffic { freq, avg: 0.0 }).network_bound()
            })
            .map(|(vm, _)| vm)
            .collect();
        assert_eq!(bound, [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    }
}

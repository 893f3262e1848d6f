// SPDX-License-Identifier: Apache-2.0
//! Metrics of lanes: which guests have VFs, and how often VFs moved.

use viola_proto::lanes::{Counts, Lanes, Nic, Pool};

use crate::prometheus::{Text, metrics};

metrics! {
    const COUNTS: fn(&Counts) -> f64 = {
        Counter "granted_total" "VFs granted", |c| c.granted as f64;
        Counter "revoked_total" "VFs taken back", |c| c.revoked as f64;
        Counter "failed_total" "VFs that could not be granted", |c| c.failed as f64;
        Counter "kept_total" "VFs that a guest did not release in time", |c| c.kept as f64;
        Counter "adopted_total" "VFs that guests already had at the start", |c| c.adopted as f64;
        Counter "recovered_total" "VFs of switches that an earlier daemon did not finish", |c| c.recovered as f64;
        Counter "lost_total" "VFs that disappeared from a guest", |c| c.lost as f64;
        Counter "switching_seconds_total" "Time that all switches took", |c| c.switching_ns as f64 / 1e9;
    }

    const POOL: fn(&Pool) -> f64 = {
        Gauge "vfs" "VFs that may be granted", |p| p.usable.into();
        Gauge "held" "VFs that guests have", |p| p.holders.iter().filter(|h| !h.is_empty()).count() as f64;
    }

    const NIC: fn(&Nic) -> f64 = {
        Gauge "holds" "Whether it has a VF", |n| u8::from(n.vf.is_some()).into();
        Gauge "intensity" "I/O intensity (IF), by which VFs are granted", |n| n.intensity;
        Counter "packets_total" "Packets on the paravirtual path", |n| n.packets as f64;
        Counter "bytes_total" "Bytes on the paravirtual path", |n| n.bytes as f64;
        Counter "vf_packets_total" "Packets on VFs", |n| n.vf_packets as f64;
        Counter "vf_bytes_total" "Bytes on VFs", |n| n.vf_bytes as f64;
    }
}

/// Writes what lanes did.
pub fn write(out: &mut Text, lanes: &Lanes) {
    for (name, kind, help, value) in COUNTS {
        let name = format!("viola_lanes_{name}");
        out.head(&name, *kind, help);
        out.line(&name, &[], value(&lanes.counts));
    }
    out.all("viola_lanes_pool_", POOL, &lanes.pools, |pool| {
        ("pf", pool.pf.clone())
    });
    out.all("viola_lanes_nic_", NIC, &lanes.nics, |nic| {
        ("vm", nic.guest.clone())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_and_switches_are_written() {
        let lanes = Lanes {
            nics: vec![Nic {
                guest: "netns:n1".into(),
                vf: Some(("eth0".into(), 3)),
                ..Nic::default()
            }],
            counts: Counts {
                granted: 5,
                switching_ns: 1_500_000_000,
                ..Counts::default()
            },
            ..Lanes::default()
        };
        let mut out = Text::default();
        write(&mut out, &lanes);
        let text = out.into_text();
        for line in [
            "viola_lanes_granted_total 5\n",
            "viola_lanes_switching_seconds_total 1.5\n",
            "viola_lanes_nic_holds{vm=\"netns:n1\"} 1\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Metrics of DataNode VMs, readers and other hosts.

use viola_proto::vread::{Datanode, Peer, Reader, Reasons, Vread};

use crate::prometheus::{Kind, Text, metrics};

metrics! {
    const DATANODE: fn(&Datanode) -> f64 = {
        Gauge "serving" "Whether its blocks are served", |d| d.serving.into();
        Gauge "blocks" "Blocks that can be read now", |d| d.blocks as f64;
        Gauge "block_bytes" "Bytes of these blocks", |d| d.bytes as f64;
        Gauge "held_bytes" "Bytes of deleted files that are kept for reads", |d| d.held_bytes as f64;
        Gauge "waiting_leases" "Withdrawn names whose reads are not over", |d| d.waiting as f64;
        Gauge "epoch" "Epoch of its block names; a new epoch withdraws all names", |d| d.epoch as f64;
        Counter "named_total" "Blocks named", |d| d.named as f64;
        Counter "withdrawn_total" "Blocks withdrawn", |d| d.withdrawn as f64;
        Counter "lookups_total" "Look-ups of readers", |d| d.lookups as f64;
        Counter "unknown_total" "Look-ups of unknown blocks", |d| d.unknown as f64;
    }

    const READER: fn(&Reader) -> f64 = {
        Gauge "connected" "Whether its hypervisor is connected", |r| u64::from(r.connected) as f64;
        Gauge "open_files" "Files open", |r| r.open as f64;
        Counter "requests_total" "Requests", |r| r.requests as f64;
        Counter "reads_total" "Reads", |r| r.reads as f64;
        Counter "withdrawn_reads_total" "Reads of blocks that were withdrawn before the read", |r| r.withdrawn as f64;
        Counter "remote_reads_total" "Reads that other hosts answered", |r| r.remote_reads as f64;
        Counter "remote_errors_total" "Reads that other hosts did not answer", |r| r.remote_errors as f64;
    }

    const PEER: fn(&Peer) -> f64 = {
        Gauge "connected" "Whether this host is connected to it", |p| u64::from(p.connected) as f64;
        Gauge "incoming" "Whether it is connected to this host", |p| u64::from(p.incoming) as f64;
        Counter "asked_total" "Requests sent to it", |p| p.asked as f64;
        Counter "answered_total" "Requests of it that were answered", |p| p.answered as f64;
        Counter "read_bytes_total" "Bytes of blocks read from it", |p| p.bytes_read as f64;
        Counter "served_bytes_total" "Bytes of blocks that it has read here", |p| p.bytes_served as f64;
        Counter "unknown_total" "Requests for unknown or denied blocks, in both directions", |p| p.unknown as f64;
        Counter "withdrawn_reads_total" "Reads of blocks withdrawn meanwhile, in both directions", |p| p.withdrawn as f64;
        Counter "errors_total" "Other errors, in both directions", |p| p.errors as f64;
        Counter "broken_total" "Connections to it that broke", |p| p.broken as f64;
    }
}

/// Writes what vread did.
pub fn write(out: &mut Text, vread: &Vread) {
    let datanodes = &vread.datanodes;
    let readers = &vread.readers;
    out.all("viola_vread_datanode_", DATANODE, datanodes, |d| {
        ("vm", d.name.clone())
    });
    out.all("viola_vread_reader_", READER, readers, |r| {
        ("vm", r.name.clone())
    });
    out.all("viola_vread_peer_", PEER, &vread.peers, |p| {
        ("host", p.name.clone())
    });
    let name = "viola_vread_peer_refused_total";
    out.head(
        name,
        Kind::Counter,
        "Connections of hosts with an unknown key",
    );
    if let Some(host) = &vread.host {
        out.line(name, &[], host.strangers as f64);
    }
    let name = "viola_vread_peer_over_limit_total";
    out.head(
        name,
        Kind::Counter,
        "Connections of other hosts refused because too many were open, of one address or in all",
    );
    if let Some(host) = &vread.host {
        out.line(name, &[], host.over_limit as f64);
    }
    let name = "viola_vread_reader_bytes_total";
    out.head(name, Kind::Counter, "Bytes read, by DataNode VM");
    for r in readers {
        for (datanode, n) in &r.bytes {
            out.line(name, &[("vm", &r.name), ("datanode", datanode)], *n as f64);
        }
    }
    let why = "Refused names, by reason";
    let name = "viola_vread_datanode_refusals_total";
    reasons(out, name, why, datanodes, |d| (&d.name, &d.refusals));
    let why = "Ends of all leases, by reason";
    let name = "viola_vread_datanode_ends_total";
    reasons(out, name, why, datanodes, |d| (&d.name, &d.ends));
    let why = "Requests that the DataNode had to serve, by reason";
    let name = "viola_vread_reader_refusals_total";
    reasons(out, name, why, readers, |r| (&r.name, &r.refusals));
}

fn reasons<T>(
    out: &mut Text,
    name: &str,
    help: &str,
    items: &[T],
    of: impl Fn(&T) -> (&String, &Reasons),
) {
    out.head(name, Kind::Counter, help);
    for item in items {
        let (vm, reasons) = of(item);
        for (why, n) in reasons {
            out.line(name, &[("vm", vm), ("reason", why)], *n as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vm_has_a_sample() {
        let vread = Vread {
            on: true,
            datanodes: vec![Datanode {
                name: "dn\"1".into(),
                blocks: 3,
                refusals: [("bad extents".to_owned(), 2)].into(),
                ..Datanode::default()
            }],
            readers: vec![Reader {
                name: "vm1".into(),
                bytes: [("uml:dn1".to_owned(), 10)].into(),
                ..Reader::default()
            }],
            ..Vread::default()
        };
        let mut out = Text::default();
        write(&mut out, &vread);
        let text = out.into_text();
        for line in [
            "# TYPE viola_vread_datanode_blocks gauge\nviola_vread_datanode_blocks{vm=\"dn\\\"1\"} 3\n",
            "viola_vread_datanode_refusals_total{vm=\"dn\\\"1\",reason=\"bad extents\"} 2\n",
            "viola_vread_reader_bytes_total{vm=\"vm1\",datanode=\"uml:dn1\"} 10\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `GET /metrics`: what vread and vpipe have done, in Prometheus' text format.

use std::fmt::Write;

use viola_proto::pipe::shown::Sender;
use viola_proto::vread::{Datanode, Peer, Reader, Reasons, Vread};

/// Type of the answer.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4";

/// A metric of a DataNode VM or of a reader: name, whether it only grows, what it is, and its value.
type Metric<T> = (&'static str, bool, &'static str, fn(&T) -> u64);

const DATANODE: [Metric<Datanode>; 10] = [
    ("serving", false, "Whether its blocks are served", |d| {
        d.serving.into()
    }),
    ("blocks", false, "Blocks that can be read now", |d| d.blocks),
    ("block_bytes", false, "Bytes of these blocks", |d| d.bytes),
    (
        "held_bytes",
        false,
        "Bytes of deleted files that are held back",
        |d| d.held_bytes,
    ),
    (
        "waiting_leases",
        false,
        "Withdrawn names that a read is waited for",
        |d| d.waiting,
    ),
    (
        "epoch",
        false,
        "Number of the agreement with its agent",
        |d| d.epoch,
    ),
    ("named_total", true, "Names given", |d| d.named),
    ("withdrawn_total", true, "Names withdrawn", |d| d.withdrawn),
    ("lookups_total", true, "Look-ups of readers", |d| d.lookups),
    (
        "unknown_total",
        true,
        "Look-ups of blocks that were not known",
        |d| d.unknown,
    ),
];

const READER: [Metric<Reader>; 7] = [
    (
        "connected",
        false,
        "Whether its hypervisor is connected",
        |r| r.connected.into(),
    ),
    ("open_files", false, "Files open", |r| r.open),
    ("requests_total", true, "Requests", |r| r.requests),
    ("reads_total", true, "Reads", |r| r.reads),
    (
        "withdrawn_reads_total",
        true,
        "Reads of blocks withdrawn meanwhile",
        |r| r.withdrawn,
    ),
    (
        "remote_reads_total",
        true,
        "Reads that other hosts answered",
        |r| r.remote_reads,
    ),
    (
        "remote_errors_total",
        true,
        "Reads that other hosts did not answer",
        |r| r.remote_errors,
    ),
];

const PEER: [Metric<Peer>; 10] = [
    (
        "connected",
        false,
        "Whether this host is connected to it",
        |p| p.connected.into(),
    ),
    (
        "incoming",
        false,
        "Whether it is connected to this host",
        |p| p.incoming.into(),
    ),
    ("asked_total", true, "Requests sent to it", |p| p.asked),
    (
        "answered_total",
        true,
        "Requests of it that were answered",
        |p| p.answered,
    ),
    (
        "read_bytes_total",
        true,
        "Bytes of blocks read from it",
        |p| p.bytes_read,
    ),
    (
        "served_bytes_total",
        true,
        "Bytes of blocks that it has read here",
        |p| p.bytes_served,
    ),
    (
        "unknown_total",
        true,
        "Blocks not known or not allowed, in both directions",
        |p| p.unknown,
    ),
    (
        "withdrawn_reads_total",
        true,
        "Reads of blocks withdrawn meanwhile, in both directions",
        |p| p.withdrawn,
    ),
    (
        "errors_total",
        true,
        "Other errors, in both directions",
        |p| p.errors,
    ),
    ("broken_total", true, "Connections to it that broke", |p| {
        p.broken
    }),
];

const PIPES: [Metric<Sender>; 8] = [
    (
        "open",
        false,
        "Transfers that the host makes now",
        |s: &Sender| s.work.transfers.len() as u64,
    ),
    ("begun_total", true, "Transfers begun", |s| s.work.begun),
    ("refused_total", true, "Transfers left to the VM", |s| {
        s.work.refused
    }),
    (
        "returned_total",
        true,
        "Transfers whose connections went back whole",
        |s| s.work.returned,
    ),
    (
        "broken_total",
        true,
        "Transfers that ended in a reset or an error",
        |s| s.work.broken,
    ),
    (
        "other_congestion_total",
        true,
        "Connections sent with another congestion control than the VM's",
        |s| s.work.other_congestion,
    ),
    ("bytes_total", true, "Bytes moved in the VM's place", |s| {
        s.work.bytes
    }),
    (
        "cpu_milliseconds_total",
        true,
        "CPU time of the host spent for it",
        |s| s.work.cpu_ms,
    ),
];

/// All metrics.
pub fn text(vread: &Vread) -> String {
    let mut out = String::new();
    let datanodes = &vread.datanodes;
    let readers = &vread.readers;
    all(
        &mut out,
        "viola_vread_datanode",
        &DATANODE,
        datanodes,
        |d| ("vm", &d.name),
    );
    all(&mut out, "viola_vread_reader", &READER, readers, |r| {
        ("vm", &r.name)
    });
    all(&mut out, "viola_pipe", &PIPES, &vread.pipes.vms, |s| {
        ("vm", &s.name)
    });
    if let Some(host) = &vread.host {
        all(&mut out, "viola_vread_peer", &PEER, &vread.peers, |p| {
            ("host", &p.name)
        });
        let name = "viola_vread_peer_refused_total";
        head(
            &mut out,
            name,
            true,
            "Connections of hosts with another key",
        );
        line(&mut out, name, &[], host.strangers);
    }
    head(
        &mut out,
        "viola_vread_reader_bytes_total",
        true,
        "Bytes read, by DataNode VM",
    );
    for r in readers {
        for (datanode, n) in &r.bytes {
            let labels = [("vm", &r.name), ("datanode", datanode)];
            line(&mut out, "viola_vread_reader_bytes_total", &labels, *n);
        }
    }
    let why = "What was refused, by reason";
    reasons(
        &mut out,
        "viola_vread_datanode_refusals_total",
        why,
        datanodes,
        |d| (&d.name, &d.refusals),
    );
    let why = "Ends of all leases, by reason";
    reasons(
        &mut out,
        "viola_vread_datanode_ends_total",
        why,
        datanodes,
        |d| (&d.name, &d.ends),
    );
    let why = "What was left to the DataNode, by reason";
    reasons(
        &mut out,
        "viola_vread_reader_refusals_total",
        why,
        readers,
        |r| (&r.name, &r.refusals),
    );
    out
}

fn all<T>(
    out: &mut String,
    prefix: &str,
    metrics: &[Metric<T>],
    items: &[T],
    label: impl Fn(&T) -> (&'static str, &String),
) {
    for (name, grows, help, value) in metrics {
        let name = format!("{prefix}_{name}");
        head(out, &name, *grows, help);
        for item in items {
            line(out, &name, &[label(item)], value(item));
        }
    }
}

fn reasons<T>(
    out: &mut String,
    name: &str,
    help: &str,
    items: &[T],
    of: impl Fn(&T) -> (&String, &Reasons),
) {
    head(out, name, true, help);
    for item in items {
        let (vm, reasons) = of(item);
        for (why, n) in reasons {
            line(out, name, &[("vm", vm), ("reason", why)], *n);
        }
    }
}

fn head(out: &mut String, name: &str, grows: bool, help: &str) {
    let kind = if grows { "counter" } else { "gauge" };
    // Writing into a text does not fail.
    let _ = write!(out, "# HELP {name} {help}.\n# TYPE {name} {kind}\n");
}

fn line(out: &mut String, name: &str, labels: &[(&str, &String)], value: u64) {
    let labels: Vec<String> = labels
        .iter()
        .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
        .collect();
    let _ = match labels.is_empty() {
        true => writeln!(out, "{name} {value}"),
        false => writeln!(out, "{name}{{{}}} {value}", labels.join(",")),
    };
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::pipe::shown::{Pipes, Work};

    #[test]
    fn each_vm_has_a_line_and_each_name_one_type() {
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
            pipes: Pipes {
                vms: vec![Sender {
                    name: "web".into(),
                    work: Work {
                        bytes: 7,
                        ..Work::default()
                    },
                    ..Sender::default()
                }],
            },
            ..Vread::default()
        };
        let text = text(&vread);
        for line in [
            "# TYPE viola_vread_datanode_blocks gauge\nviola_vread_datanode_blocks{vm=\"dn\\\"1\"} 3\n",
            "viola_vread_datanode_refusals_total{vm=\"dn\\\"1\",reason=\"bad extents\"} 2\n",
            "viola_vread_reader_bytes_total{vm=\"vm1\",datanode=\"uml:dn1\"} 10\n",
            "viola_pipe_bytes_total{vm=\"web\"} 7\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        let mut types: Vec<&str> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let before = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), before);
    }
}

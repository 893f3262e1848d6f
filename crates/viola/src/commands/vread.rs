// SPDX-License-Identifier: Apache-2.0
//! `viola vread`

use viola_proto::vread::{Host, Peer, Reasons, Vread};

use crate::args;
use viola_cli::client::Client;
use viola_cli::error::Outcome;
use viola_cli::table::{align, print, print_json};

/// Shows the VMs that vread serves, and its counters.
pub fn vread(what: &args::Vread) -> Outcome {
    let (args::Vread::Ls(args) | args::Vread::Stat(args)) = what;
    let vread: Vread = Client::new(&args.socket.path()).get("/vread")?;
    if args.json {
        return print_json(&vread);
    }
    print(&match what {
        args::Vread::Ls(_) => list(&vread),
        args::Vread::Stat(_) => counts(&vread),
    })
}

pub(super) fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|c| (*c).to_owned()).collect()
}

pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

fn or_dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

fn off(v: &Vread) -> String {
    match v.on {
        true => String::new(),
        false => format!("vread is off: {}\n", v.why),
    }
}

fn list(v: &Vread) -> String {
    let mut text = off(v);
    if !v.datanodes.is_empty() {
        let mut rows = vec![row(&[
            "DATANODE", "SERVED", "BLOCKS", "BYTES", "READERS", "AGENT", "WHY",
        ])];
        for d in &v.datanodes {
            rows.push(vec![
                d.name.clone(),
                if d.serving { "yes" } else { "no" }.into(),
                d.blocks.to_string(),
                size(d.bytes),
                or_dash(d.readers.join(",")),
                or_dash(d.agent.clone()),
                d.why.clone(),
            ]);
        }
        text.push_str(&align(&rows));
    }
    if !v.readers.is_empty() {
        let mut rows = vec![row(&[
            "READER",
            "CONNECTED",
            "TRANSPORT",
            "READ",
            "MAY READ",
            "SOCKET",
            "WHY",
        ])];
        for r in &v.readers {
            rows.push(vec![
                r.name.clone(),
                if r.connected { "yes" } else { "no" }.into(),
                or_dash(r.transport.clone()),
                size(r.bytes.values().sum()),
                or_dash(r.datanodes.join(",")),
                or_dash(r.socket.clone()),
                r.why.clone(),
            ]);
        }
        text.push_str(&align(&rows));
    }
    if let Some(host) = &v.host {
        text.push_str(&hosts(host, &v.peers));
    }
    text
}

fn hosts(host: &Host, peers: &[Peer]) -> String {
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let mut rows = vec![row(&[
        "HOST",
        "CONNECTED",
        "INCOMING",
        "READ",
        "SERVED",
        "ADDRESS",
        "WHY",
    ])];
    for p in peers {
        rows.push(vec![
            p.name.clone(),
            if p.address.is_empty() {
                "-".into()
            } else {
                yes(p.connected)
            },
            yes(p.incoming),
            size(p.bytes_read),
            size(p.bytes_served),
            or_dash(p.address.clone()),
            p.why.clone(),
        ]);
    }
    let mut text = align(&rows);
    if !host.running {
        text.push_str(&format!("no worker for other hosts: {}\n", host.why));
    }
    if host.strangers > 0 {
        text.push_str(&format!(
            "{} connections refused: no [[vread.peer]] here has the key of who connected\n",
            host.strangers
        ));
    }
    if host.over_limit > 0 {
        text.push_str(&format!(
            "{} connections refused: too many were open, of one address or in all\n",
            host.over_limit
        ));
    }
    text
}

fn reasons(text: &mut String, what: &str, reasons: &Reasons) {
    if reasons.is_empty() {
        return;
    }
    let all: Vec<String> = reasons
        .iter()
        .map(|(why, n)| format!("{why} {n}"))
        .collect();
    text.push_str(&format!("  {what}: {}\n", all.join(", ")));
}

fn counts(v: &Vread) -> String {
    let mut text = off(v);
    for r in &v.readers {
        text.push_str(&format!(
            "{}: {} read, {} requests, {} reads, {} files open\n",
            r.name,
            size(r.bytes.values().sum()),
            r.requests,
            r.reads,
            r.open
        ));
        for (datanode, bytes) in &r.bytes {
            text.push_str(&format!("  from {datanode}: {}\n", size(*bytes)));
        }
        let mut fallbacks = r.refusals.clone();
        if r.withdrawn > 0 {
            fallbacks.insert("withdrawn while read".into(), r.withdrawn);
        }
        reasons(&mut text, "served by the DataNode", &fallbacks);
        if r.remote_reads + r.remote_errors > 0 {
            text.push_str(&format!(
                "  other hosts: {} reads answered, {} not\n",
                r.remote_reads, r.remote_errors
            ));
        }
    }
    for d in &v.datanodes {
        text.push_str(&format!(
            "{}: {} blocks ({}, {} extents), {} named, {} withdrawn, {} waited for, {} held back, epoch {}\n",
            d.name,
            d.blocks,
            size(d.bytes),
            d.extents,
            d.named,
            d.withdrawn,
            d.waiting,
            size(d.held_bytes),
            d.epoch
        ));
        text.push_str(&format!(
            "  look-ups: {}, unknown {}\n",
            d.lookups, d.unknown
        ));
        reasons(&mut text, "withdrawn by its agent", &d.withdrawals);
        reasons(&mut text, "refused to its agent", &d.refusals);
        reasons(&mut text, "all blocks withdrawn", &d.ends);
    }
    for p in &v.peers {
        text.push_str(&format!(
            "host {}: {} read from it in {} requests, {} served to it in {}\n",
            p.name,
            size(p.bytes_read),
            p.asked,
            size(p.bytes_served),
            p.answered
        ));
        let counts = [
            ("unknown", p.unknown),
            ("withdrawn while read", p.withdrawn),
            ("errors", p.errors),
            ("connections broken", p.broken),
        ];
        let counts = counts.into_iter().filter(|(_, n)| *n > 0);
        let counts = counts.map(|(why, n)| (why.to_owned(), n)).collect();
        reasons(&mut text, "not read", &counts);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::vread::{Datanode, Host, Peer, Reader};

    fn some() -> Vread {
        Vread {
            on: true,
            why: String::new(),
            datanodes: vec![Datanode {
                vm: "uml:dn1".into(),
                name: "dn1".into(),
                serving: true,
                why: "/data (ext4) on /dn1.img".into(),
                blocks: 3,
                bytes: 3 << 20,
                agent: "0.1".into(),
                readers: vec!["vm1".into()],
                refusals: [("bad extents".to_owned(), 2)].into(),
                ..Datanode::default()
            }],
            readers: vec![Reader {
                name: "vm1".into(),
                running: true,
                connected: true,
                transport: "virtiofs".into(),
                socket: "/run/viola/mounts/vm1.sock".into(),
                bytes: [("uml:dn1".to_owned(), 1536)].into(),
                withdrawn: 1,
                requests: 9,
                reads: 4,
                ..Reader::default()
            }],
            ..Vread::default()
        }
    }

    #[test]
    fn other_hosts_have_a_table_of_their_own() {
        let v = Vread {
            host: Some(Host {
                running: true,
                strangers: 3,
                over_limit: 2,
                ..Host::default()
            }),
            peers: vec![
                Peer {
                    name: "hostb".into(),
                    address: "10.0.0.2:7670".into(),
                    connected: true,
                    bytes_read: 2048,
                    broken: 1,
                    ..Peer::default()
                },
                Peer {
                    name: "c".into(),
                    incoming: true,
                    ..Peer::default()
                },
            ],
            on: true,
            ..Vread::default()
        };
        assert_eq!(
            list(&v),
            "HOST   CONNECTED  INCOMING  READ     SERVED  ADDRESS        WHY\n\
             hostb  yes        no        2.0 KiB  0 B     10.0.0.2:7670\n\
             c      -          yes       0 B      0 B     -\n\
             3 connections refused: no [[vread.peer]] here has the key of who connected\n\
             2 connections refused: too many were open, of one address or in all\n"
        );
        let text = counts(&v);
        assert!(
            text.contains("host hostb: 2.0 KiB read from it in 0 requests, 0 B served to it in 0\n  not read: connections broken 1\n"),
            "{text}"
        );
    }

    #[test]
    fn the_list_has_a_line_for_each_vm() {
        assert_eq!(
            list(&some()),
            "DATANODE  SERVED  BLOCKS  BYTES    READERS  AGENT  WHY\n\
             dn1       yes     3       3.0 MiB  vm1      0.1    /data (ext4) on /dn1.img\n\
             READER  CONNECTED  TRANSPORT  READ     MAY READ  SOCKET                      WHY\n\
             vm1     yes        virtiofs   1.5 KiB  -         /run/viola/mounts/vm1.sock\n"
        );
    }

    #[test]
    fn counts_come_with_their_reasons() {
        let text = counts(&some());
        assert!(
            text.contains("vm1: 1.5 KiB read, 9 requests, 4 reads, 0 files open\n"),
            "{text}"
        );
        assert!(
            text.contains("  served by the DataNode: withdrawn while read 1\n"),
            "{text}"
        );
        assert!(
            text.contains("  refused to its agent: bad extents 2\n"),
            "{text}"
        );
    }

    #[test]
    fn what_is_off_says_why() {
        let v = Vread {
            why: "no VM may read: set allow in [vread]".into(),
            ..Vread::default()
        };
        assert_eq!(
            list(&v),
            "vread is off: no VM may read: set allow in [vread]\n"
        );
    }
}

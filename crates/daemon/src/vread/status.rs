// SPDX-License-Identifier: Apache-2.0
//! What the control socket shows of readers and other hosts, and the advice that vread adds to reports of VMs. The agent of a DataNode
//! VM serves vpipe as well, so `supervisor/agent.rs` shows it.

use viola_proto::VmReport;
use viola_proto::vread::{self as shown, Vread};
use viola_vread::control::StreamState;

use super::apply::peers::Peers;
use super::apply::reader::Reader;
use crate::vms::report::propose;
use viola_config::Transport;

impl Reader {
    /// What the control socket shows.
    pub fn status(&self) -> shown::Reader {
        let stat = &self.stat;
        shown::Reader {
            name: self.name.clone(),
            running: self.worker.is_some(),
            why: match &self.worker {
                Some(_) if stat.connection.is_some() && !stat.confirmed => {
                    "who is connected to its socket is not known to be the VM, and finds no block"
                        .into()
                }
                Some(_) if stat.connected => String::new(),
                Some(_) => self.stream.why().to_owned(),
                None => self.why.clone(),
            },
            pid: self.worker.as_ref().map_or(0, |w| w.pid),
            socket: match self.transport {
                Transport::Stream => String::new(),
                _ => self.socket.display().to_string(),
            },
            connected: stat.connected,
            transport: match (stat.stream, stat.connected) {
                (StreamState::Connected, _) => "stream".into(),
                (_, true) => "virtiofs".into(),
                _ => String::new(),
            },
            datanodes: self.pairs.ids().cloned().collect(),
            requests: stat.requests,
            reads: stat.reads,
            bytes: stat
                .bytes
                .iter()
                .chain(&stat.remote_bytes)
                .map(|(from, n)| (from.clone(), *n))
                .collect(),
            remote_reads: stat.remote_reads,
            remote_errors: stat.remote_errors,
            open: stat.open,
            withdrawn: stat.withdrawn,
            refusals: stat.refusals.clone(),
        }
    }
}

impl Peers {
    /// What the control socket shows: this host's worker, and each other host.
    pub fn status(&self) -> (Option<shown::Host>, Vec<shown::Peer>) {
        if self.listed.is_empty() {
            return (None, Vec::new());
        }
        let identity = self.identity.as_ref();
        let host = shown::Host {
            running: self.worker.is_some(),
            why: self.why.clone(),
            pid: self.worker.as_ref().map_or(0, |w| w.pid),
            fingerprint: identity.map_or_else(String::new, |i| i.fingerprint.clone()),
            listening: self.stat.listening.clone(),
            datanodes: self.pairs.ids().cloned().collect(),
            strangers: self.stat.strangers,
            over_limit: self.stat.over_limit,
        };
        let peer = |(name, address): &(String, Option<String>)| {
            let counts = self.stat.peers.get(name).cloned().unwrap_or_default();
            shown::Peer {
                name: name.clone(),
                address: address.clone().unwrap_or_default(),
                connected: counts.links_out > 0,
                incoming: counts.links_in > 0,
                why: match &self.worker {
                    Some(_) if counts.links_out > 0 => String::new(),
                    Some(_) => counts.why,
                    None => self.why.clone(),
                },
                asked: counts.asked,
                answered: counts.answered,
                bytes_read: counts.bytes_in,
                bytes_served: counts.bytes_out,
                unknown: counts.unknown,
                withdrawn: counts.withdrawn,
                errors: counts.io_errors,
                broken: counts.broken,
            }
        };
        (Some(host), self.listed.iter().map(peer).collect())
    }
}

/// Advises VMs that may read blocks of this host to mount them.
pub fn add_advice(vms: &mut [VmReport], vread: &Vread) {
    let blocks = |id: &String| {
        let datanodes = vread.datanodes.iter();
        datanodes
            .filter(|d| d.vm == *id && d.serving)
            .map(|d| d.blocks)
            .sum::<u64>()
    };
    for vm in vms {
        let is_it = |r: &&shown::Reader| r.name == vm.name || r.name == vm.id;
        let Some(reader) = vread.readers.iter().find(is_it) else {
            continue;
        };
        let waiting: u64 = reader.datanodes.iter().map(blocks).sum();
        if !reader.running || reader.connected || waiting == 0 {
            continue;
        }
        let sentence = format!(
            "{}: {waiting} HDFS blocks lie on this host that it may read past {}, and it has no mount for them; the \
             book's page on vread tells what it needs",
            vm.name,
            reader.datanodes.join(", ")
        );
        propose(vm, "vread", sentence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::vread::Datanode;

    #[test]
    fn a_vm_that_may_read_blocks_without_a_mount_gets_advice() {
        let mut view = crate::testing::view(&["client", "web"]);
        let mut vread = Vread {
            readers: vec![shown::Reader {
                name: "client".into(),
                running: true,
                datanodes: vec!["uml:dn1".into()],
                ..shown::Reader::default()
            }],
            datanodes: vec![Datanode {
                vm: "uml:dn1".into(),
                serving: true,
                blocks: 7,
                ..Datanode::default()
            }],
            ..Vread::default()
        };
        let mut help = |vread: &Vread| {
            let mut vms = view.vms.vms.clone();
            vms.iter_mut().for_each(|vm| vm.help.clear());
            add_advice(&mut vms, vread);
            view.vms.vms = vms.clone();
            vms.iter().map(|vm| vm.help.join(",")).collect::<Vec<_>>()
        };
        assert_eq!(help(&vread), ["vread", ""]);
        vread.readers[0].connected = true;
        assert_eq!(help(&vread), ["", ""]);
        vread.readers[0].connected = false;
        vread.datanodes[0].blocks = 0;
        assert_eq!(help(&vread), ["", ""], "there is nothing to read");
    }
}

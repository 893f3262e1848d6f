// SPDX-License-Identifier: Apache-2.0
//! What the control socket shows of vread and vpipe.

use viola_host::Vm;
use viola_proto::pipe::status::Pipes;
use viola_proto::vread::{Datanode as DatanodeStatus, Vread as Shown};

use super::agent::Agent;
use super::reconcile::Supervisor;
use crate::vms::named;
use crate::vread::apply::reader::Reader;

impl Supervisor {
    /// DataNode VMs, readers, other hosts and senders.
    pub(super) fn show(&self) -> Shown {
        let why = match (&self.config, &self.stopped) {
            (None, _) => "it has not started yet".into(),
            (_, Some(why)) => format!("{why}; viola start goes on"),
            (Some(c), _) if c.vread.is_off() && c.vms.iter().all(|vm| vm.pipe.is_none()) => {
                "no VM may read blocks: see allow in [vread]".to_owned()
            }
            _ => self.error.clone().unwrap_or_default(),
        };
        let (host, peers) = self.peers.status();
        Shown {
            on: why.is_empty(),
            why,
            datanodes: self.datanode_status(),
            readers: self.readers.values().map(Reader::status).collect(),
            host,
            peers,
            pipes: self.sender_status(),
        }
    }

    /// VMs whose blocks may be read.
    fn datanode_status(&self) -> Vec<DatanodeStatus> {
        let is_one = |vm: &Vm| {
            let vm = named(vm);
            let vread = self.config.as_ref().map(|config| &config.vread);
            vread.is_some_and(|v| v.is_datanode(&vm))
        };
        let agents = self.agents.values().filter(|a| is_one(&a.vm));
        agents.map(Agent::status).collect()
    }

    /// VMs whose files the host may send.
    fn sender_status(&self) -> Pipes {
        let config = self.config.as_ref();
        let is_one = |vm: &Vm| config?.vm(vm.id.as_str(), &vm.name)?.pipe.as_ref();
        let agents = self.agents.values().filter(|a| is_one(&a.vm).is_some());
        Pipes {
            vms: agents.map(Agent::sender_status).collect(),
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Advice that vread adds to reports of VMs. Readers, DataNode VMs and other hosts show themselves, see `Reader::status`,
//! `Peers::status` and [`crate::supervisor::Workers::shown`].

use viola_proto::VmReport;
use viola_proto::vread::{Reader, Vread};

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
        let is_it = |r: &&Reader| r.name == vm.name || r.name == vm.id;
        let Some(reader) = vread.readers.iter().find(is_it) else {
            continue;
        };
        let waiting: u64 = reader.datanodes.iter().map(blocks).sum();
        if !reader.running || reader.connected || waiting == 0 {
            continue;
        }
        vm.help.push("vread".into());
        let sentence = format!(
            "{}: {waiting} HDFS blocks lie on this host that it may read past {}, and it has no mount for them; the \
             book's page on vread tells what it needs",
            vm.name,
            reader.datanodes.join(", ")
        );
        vm.advice = Some(match vm.advice.take() {
            Some(other) => format!("{other}; {sentence}"),
            None => sentence,
        });
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
            readers: vec![Reader {
                name: "client".into(),
                running: true,
                datanodes: vec!["uml:dn1".into()],
                ..Reader::default()
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

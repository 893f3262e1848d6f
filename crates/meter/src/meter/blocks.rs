// SPDX-License-Identifier: Apache-2.0
//! HDFS blocks that VMs read of each other, counted for some time: it costs a look at every packet of the host.

use std::collections::BTreeMap;

use viola_host::VmId;

use super::Meter;
use super::groups::{TimeSource, now};
use crate::acct::{AcctError, BlockMeter, Flow};

/// HDFS blocks that VMs of this host read of each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockReads {
    /// Time for which they were counted, ns.
    pub span: u64,
    /// Bytes by reader and DataNode.
    pub bytes: BTreeMap<(VmId, VmId), u64>,
}

/// The count that is running.
pub(super) struct BlockCount {
    program: BlockMeter,
    since: u64,
}

impl Meter {
    /// Begins to count blocks, unless that runs. Without BPF none are counted.
    ///
    /// # Errors
    /// The kernel refuses the program.
    pub fn count_blocks(&mut self) -> Result<(), AcctError> {
        if let (TimeSource::Acct(acct), None) = (&self.source, &self.blocks) {
            let program = BlockMeter::load(acct)?;
            let since = now();
            self.blocks = Some(BlockCount { program, since });
        }
        Ok(())
    }

    /// Ends the count. Returns what was read; nothing if none ran.
    ///
    /// # Errors
    /// The kernel does not give out what was counted.
    pub fn end_block_count(&mut self) -> Result<BlockReads, AcctError> {
        let Some(count) = self.blocks.take() else {
            return Ok(BlockReads::default());
        };
        let span = now().saturating_sub(count.since);
        let by_index: BTreeMap<u32, &VmId> =
            self.vms.iter().map(|(id, vm)| (vm.index, id)).collect();
        let pairs = pairs(&count.program.end()?).into_iter();
        let named = pairs.filter_map(|((reader, datanode), bytes)| {
            let name = |index: u32| by_index.get(&index).map(|id| (*id).clone());
            Some(((name(reader)?, name(datanode)?), bytes))
        });
        Ok(BlockReads {
            span,
            bytes: named.collect(),
        })
    }
}

/// Bytes by the indexes of reader and DataNode. The DataNode of an address is the VM that sends from it; where two VMs do, one of
/// them lies, and neither counts.
fn pairs(flows: &[Flow]) -> BTreeMap<(u32, u32), u64> {
    let mut datanodes: BTreeMap<[u8; 16], Vec<&Flow>> = BTreeMap::new();
    for flow in flows.iter().filter(|flow| !flow.to_guest) {
        datanodes.entry(flow.sender).or_default().push(flow);
    }
    let mut pairs = BTreeMap::new();
    for flow in flows.iter().filter(|flow| flow.to_guest) {
        if let Some([datanode]) = datanodes.get(&flow.sender).map(Vec::as_slice)
            && datanode.vm != flow.vm
        {
            // What a reader got by another way, it did not get from this VM.
            *pairs.entry((flow.vm, datanode.vm)).or_default() += flow.bytes.min(datanode.bytes);
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(vm: u32, to_guest: bool, sender: u8, bytes: u64) -> Flow {
        Flow {
            vm,
            to_guest,
            sender: [sender; 16],
            bytes,
        }
    }

    #[test]
    fn a_reader_is_paired_with_the_vm_that_sends_from_the_address() {
        let flows = [
            flow(1, true, 10, 500),
            flow(2, false, 10, 900),
            flow(3, true, 10, 400),
            // of a DataNode on another host
            flow(1, true, 11, 700),
            // to readers on other hosts only
            flow(4, false, 12, 50),
        ];
        let expected = BTreeMap::from([((1, 2), 500), ((3, 2), 400)]);
        assert_eq!(pairs(&flows), expected);
    }

    #[test]
    fn a_vm_that_takes_the_address_of_another_makes_no_pair() {
        let flows = [
            flow(1, true, 10, 500),
            flow(2, false, 10, 500),
            flow(9, false, 10, 1),
            // one that reads of itself, as it says
            flow(5, true, 20, 100),
            flow(5, false, 20, 100),
            // one that says it has sent more than came from it
            flow(6, true, 30, 1_000_000),
            flow(7, false, 30, 10),
        ];
        assert_eq!(pairs(&flows), BTreeMap::from([((6, 7), 10)]));
    }
}

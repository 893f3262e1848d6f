// SPDX-License-Identifier: Apache-2.0
//! Which VMs read HDFS blocks of another VM of this host over the network, though nobody has allowed them to read its disk.

use std::collections::BTreeMap;

use viola_host::{Vm, VmId};
use viola_meter::{BlockReads, Meter, Snapshot};
use viola_policy::blocks::{BlockReader, Thresholds};
use viola_policy::slices::Nanos;
use viola_proto::VmReport;

use crate::vms::report::propose;
use crate::vms::{named, recent};
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_cli::quantities::byte_rate;
use viola_config::Config;

/// How long blocks are counted at a time, ns.
const SAMPLE: Nanos = 1_000_000_000;
/// Time from one sample to the next, ns.
const INTERVAL: Nanos = 30_000_000_000;

/// The pairs of reader and DataNode.
#[derive(Debug, Default)]
pub struct BlockReaders {
    pairs: BTreeMap<(VmId, VmId), Pair>,
    /// Bytes that each VM got and sent since the last look, and how long that was.
    traffic: BTreeMap<VmId, (u64, u64)>,
    span: Nanos,
    /// Begin of the sample that runs.
    sampling: Option<Nanos>,
    next_sample: Nanos,
    /// Why blocks cannot be counted.
    error: log::OnChange,
}

#[derive(Debug)]
struct Pair {
    rule: BlockReader,
    /// Bytes per second in the last sample with blocks.
    rate: f64,
}

impl BlockReaders {
    /// Takes what each VM did in a window, and counts blocks for a second now and then, if one VM gets what another may send. Returns a
    /// line for the log for each VM that has begun to read blocks which it could be allowed to read from the disk.
    pub fn observe(
        &mut self,
        window: &Snapshot,
        vms: &[Vm],
        config: &Config,
        meter: &mut Meter,
    ) -> Vec<(VmId, String)> {
        let has_candidates = self.look(window);
        match self.sampling {
            Some(since) if window.at >= since + SAMPLE => {
                self.sampling = None;
                let reads = meter.end_block_count();
                match reads {
                    Ok(reads) => return self.take(window.at, &reads, vms, config),
                    Err(e) => self.log_error(chain(&e)),
                }
            }
            None if window.at >= self.next_sample && (has_candidates || self.has_any()) => {
                self.next_sample = window.at + INTERVAL;
                match meter.count_blocks() {
                    Ok(()) => self.sampling = Some(window.at),
                    Err(e) => self.log_error(chain(&e)),
                }
            }
            _ => {}
        }
        Vec::new()
    }

    /// Ends a sample that runs: nobody wants advice any more.
    pub fn rest(&mut self, meter: &mut Meter) {
        if self.sampling.take().is_some() {
            let _ = meter.end_block_count();
        }
        self.pairs.clear();
    }

    /// Adds a window to what VMs get and send. `true` when, in a second, one has got and another one sent what a reader needs.
    fn look(&mut self, window: &Snapshot) -> bool {
        self.span += window.span;
        for vm in &window.vms {
            // An identity is copied only for a new VM.
            let sum = match self.traffic.get_mut(&vm.id) {
                Some(sum) => sum,
                None => self.traffic.entry(vm.id.clone()).or_default(),
            };
            sum.0 += vm.traffic.rx_bytes;
            sum.1 += vm.traffic.tx_bytes;
        }
        if self.span < recent::WINDOW {
            return false;
        }
        let needed = Thresholds::default().bytes.0 * self.span as f64 / 1e9;
        let is_enough = |bytes: u64| bytes as f64 >= needed;
        let mut readers = self.traffic.iter().filter(|(_, sum)| is_enough(sum.0));
        let found = readers.any(|(reader, _)| {
            let mut others = self.traffic.iter().filter(|(id, _)| *id != reader);
            others.any(|(_, sum)| is_enough(sum.1))
        });
        self.traffic.values_mut().for_each(|sum| *sum = (0, 0));
        self.span = 0;
        found
    }

    /// Takes a sample.
    fn take(
        &mut self,
        at: Nanos,
        reads: &BlockReads,
        vms: &[Vm],
        config: &Config,
    ) -> Vec<(VmId, String)> {
        for pair in reads.bytes.keys() {
            self.pairs.entry(pair.clone()).or_insert_with(|| Pair {
                rule: BlockReader::new(Thresholds::default()),
                rate: 0.0,
            });
        }
        let mut lines = Vec::new();
        for ((reader, datanode), pair) in &mut self.pairs {
            let bytes = reads.bytes.get(&(reader.clone(), datanode.clone()));
            let rate = bytes.copied().unwrap_or_default() as f64 * 1e9 / reads.span.max(1) as f64;
            if rate > 0.0 {
                pair.rate = rate;
            }
            let began = pair.rule.observe(at, rate) && pair.rule.reads();
            let could = Grant::of(vms, config, reader, datanode);
            if let (true, Some(grant)) = (began, could) {
                lines.push((
                    reader.clone(),
                    format!("vread could help: it {}", grant.sentence(pair.rate)),
                ));
            }
        }
        // Guests can make up addresses.
        (self.pairs).retain(|names, pair| pair.rule.reads() || reads.bytes.contains_key(names));
        lines
    }

    /// Advises VMs that read blocks of another VM of this host over the network to read them from its disk.
    pub fn add_advice(&self, reports: &mut [VmReport], vms: &[Vm], config: &Config) {
        let reading = self.pairs.iter().filter(|(_, pair)| pair.rule.reads());
        for ((reader, datanode), pair) in reading {
            let Some(grant) = Grant::of(vms, config, reader, datanode) else {
                continue;
            };
            let mut reports = reports.iter_mut();
            let Some(report) = reports.find(|report| report.id == reader.as_str()) else {
                continue;
            };
            let sentence = format!(
                "{}: it {}; [[vread.allow]] with reader = \"{}\" and datanode = \"{}\" lets it read them from the disk: the \
                 book's page on vread tells what both VMs need",
                report.name,
                grant.sentence(pair.rate),
                grant.reader,
                grant.datanode
            );
            propose(report, "vread", sentence);
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.traffic.remove(id);
        self.pairs
            .retain(|(reader, datanode), _| reader != id && datanode != id);
    }

    fn has_any(&self) -> bool {
        self.pairs.values().any(|pair| pair.rule.reads())
    }

    fn log_error(&mut self, why: String) {
        let what = format!("HDFS blocks that VMs read are not seen: {why}");
        self.error.line(Level::Warning, what);
    }
}

/// Names for a pair that could be allowed and is not.
struct Grant<'a> {
    reader: &'a str,
    datanode: &'a str,
}

impl<'a> Grant<'a> {
    /// Nothing can be granted under a name that is not confirmed.
    fn of(vms: &'a [Vm], config: &Config, reader: &VmId, datanode: &VmId) -> Option<Self> {
        let find = |id: &VmId| vms.iter().find(|vm| vm.id == *id && vm.confirmed.is_some());
        let (reader, datanode) = (find(reader)?, find(datanode)?);
        let allowed = [reader.id.as_str(), &reader.name]
            .iter()
            .any(|name| !config.vread.pools(name, &named(datanode)).is_empty());
        (!allowed).then_some(Self {
            reader: &reader.name,
            datanode: &datanode.name,
        })
    }

    fn sentence(&self, rate: f64) -> String {
        let (rate, datanode) = (byte_rate(rate), self.datanode);
        format!(
            "gets {rate} of HDFS blocks over the network from {datanode}, which runs on this host"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{view, vm};
    use std::path::Path;
    use viola_meter::{Times, Traffic, VmSample};

    const SECOND: Nanos = 1_000_000_000;

    fn vms() -> [Vm; 2] {
        [vm("client", 10, &[&[1]]), vm("dn", 20, &[&[1]])]
    }

    fn config(text: &str) -> Config {
        Config::parse(Path::new("v.toml"), text).unwrap()
    }

    /// A window of a second in which each VM got and sent this.
    fn window(at: Nanos, traffic: [(u64, u64); 2]) -> Snapshot {
        let samples = vms()
            .into_iter()
            .zip(traffic)
            .map(|(vm, (got, sent))| VmSample {
                id: vm.id,
                vcpus: Vec::new(),
                service: Times::default(),
                traffic: Traffic {
                    rx_bytes: got,
                    tx_bytes: sent,
                    ..Traffic::default()
                },
            });
        Snapshot {
            at,
            span: SECOND,
            with_disks: false,
            vms: samples.collect(),
        }
    }

    /// A sample in which the client got this per second.
    fn reads(bytes: u64) -> BlockReads {
        let [client, dn] = vms();
        BlockReads {
            span: SECOND,
            bytes: [((client.id, dn.id), bytes)].into_iter().collect(),
        }
    }

    fn advice(readers: &BlockReaders, vms: &[Vm], config: &Config) -> Option<String> {
        let mut view = view(&["client", "dn"]);
        readers.add_advice(&mut view.vms.vms, vms, config);
        assert!(view.vms.vms[1].advice.is_none());
        let report = view.vms.vms.swap_remove(0);
        assert_eq!(report.help.is_empty(), report.advice.is_none());
        report.advice
    }

    #[test]
    fn a_pair_that_nobody_has_allowed_is_named_with_the_line_that_allows_it() {
        let (mut readers, vms, none) = (BlockReaders::default(), vms(), config(""));
        assert_eq!(readers.take(0, &reads(90_000_000), &vms, &none), []);
        assert_eq!(advice(&readers, &vms, &none), None);
        let lines = readers.take(30 * SECOND, &reads(118_000_000), &vms, &none);
        let it = "gets 118 MB/s of HDFS blocks over the network from dn, which runs on this host";
        let line = format!("vread could help: it {it}");
        assert_eq!(lines, [(vms[0].id.clone(), line)]);
        let said = advice(&readers, &vms, &none).unwrap();
        let begin = format!(
            "client: it {it}; [[vread.allow]] with reader = \"client\" and datanode = \"dn\" lets it read"
        );
        assert!(said.starts_with(&begin), "{said}");
        // A pause does not end it; six do.
        for sample in 2..7 {
            readers.take(sample * 30 * SECOND, &BlockReads::default(), &vms, &none);
            assert!(advice(&readers, &vms, &none).is_some());
        }
        readers.take(7 * 30 * SECOND, &BlockReads::default(), &vms, &none);
        assert_eq!(advice(&readers, &vms, &none), None);
    }

    #[test]
    fn nothing_is_said_of_what_is_allowed_or_cannot_be() {
        let mut readers = BlockReaders::default();
        for sample in 0..2 {
            readers.take(
                sample * 30 * SECOND,
                &reads(90_000_000),
                &vms(),
                &config(""),
            );
        }
        let allowed = config("[[vread.allow]]\nreader = \"client\"\ndatanode = \"d*\"\n");
        assert_eq!(advice(&readers, &vms(), &allowed), None);
        for stranger in 0..2 {
            let mut vms = vms();
            vms[stranger].confirmed = None;
            assert_eq!(advice(&readers, &vms, &config("")), None);
        }
        readers.forget(&vms()[1].id);
        assert_eq!(advice(&readers, &vms(), &config("")), None);
    }

    #[test]
    fn blocks_are_counted_only_where_one_vm_gets_what_another_may_send() {
        let mut readers = BlockReaders::default();
        let much = 9_000_000;
        let cases = [
            ([(much, 0), (0, much)], true),
            ([(much, 0), (0, 1000)], false),
            ([(0, 0), (much, much)], false),
            ([(much, much), (much, much)], true),
        ];
        for (traffic, expected) in cases {
            assert_eq!(readers.look(&window(0, traffic)), expected, "{traffic:?}");
        }
    }
}

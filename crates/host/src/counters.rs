// SPDX-License-Identifier: Apache-2.0
//! Counters of what a VM sent, received, read and wrote, as the host sees it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use crate::error::HostError;
use crate::proc;
use crate::thread::Tid;
use crate::vm::{NicKind, Vm};

/// Counters of one NIC since its interface was created. With segmentation offload a packet may be up to 64 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicCounters {
    /// Bytes the guest sent.
    pub from_guest_bytes: u64,
    /// Packets the guest sent.
    pub from_guest_packets: u64,
    /// Packets of the guest that the host dropped.
    pub from_guest_dropped: u64,
    /// Bytes delivered to the guest.
    pub to_guest_bytes: u64,
    /// Packets delivered to the guest.
    pub to_guest_packets: u64,
    /// Packets for the guest that were dropped; on a tap because the guest did not fetch them in time.
    pub to_guest_dropped: u64,
}

/// One line of `/proc/net/dev`, from the host's point of view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct InterfaceStats {
    rx_bytes: u64,
    rx_packets: u64,
    rx_dropped: u64,
    tx_bytes: u64,
    tx_packets: u64,
    tx_dropped: u64,
}

impl InterfaceStats {
    fn parse(line: &str) -> Option<(&str, Self)> {
        // The name may contain a colon; the numbers do not.
        let (name, numbers) = line.rsplit_once(':')?;
        let numbers: Vec<u64> = numbers
            .split_ascii_whitespace()
            .map_while(|n| n.parse().ok())
            .collect();
        let at = |i: usize| numbers.get(i).copied();
        let line = Self {
            rx_bytes: at(0)?,
            rx_packets: at(1)?,
            rx_dropped: at(3)?,
            tx_bytes: at(8)?,
            tx_packets: at(9)?,
            tx_dropped: at(11)?,
        };
        Some((name.trim_start(), line))
    }

    fn of(self, kind: NicKind) -> NicCounters {
        match kind {
            NicKind::Tap => NicCounters {
                from_guest_bytes: self.rx_bytes,
                from_guest_packets: self.rx_packets,
                from_guest_dropped: self.rx_dropped,
                to_guest_bytes: self.tx_bytes,
                to_guest_packets: self.tx_packets,
                to_guest_dropped: self.tx_dropped,
            },
            NicKind::Macvtap | NicKind::Raw => NicCounters {
                from_guest_bytes: self.tx_bytes,
                from_guest_packets: self.tx_packets,
                from_guest_dropped: self.tx_dropped,
                to_guest_bytes: self.rx_bytes,
                to_guest_packets: self.rx_packets,
                to_guest_dropped: self.rx_dropped,
            },
        }
    }
}

fn parse_net_dev(text: &str) -> HashMap<&str, InterfaceStats> {
    text.lines().filter_map(InterfaceStats::parse).collect()
}

/// Counters of all NICs: `[i][j]` of the result belongs to `vms[i].nics[j]`; `None` when the interface or the VM is
/// gone. Reads each network namespace once.
///
/// # Errors
/// [`HostError::Read`] for `/proc/PID/net/dev`.
pub fn nic_counters(vms: &[Vm]) -> Result<Vec<Vec<Option<NicCounters>>>, HostError> {
    let mut files: HashMap<u64, String> = HashMap::new();
    for vm in vms {
        for nic in &vm.nics {
            if !files.contains_key(&nic.netns)
                && let Some(text) = net_dev(vm.pid, nic.netns)?
            {
                files.insert(nic.netns, text);
            }
        }
    }
    let lines: HashMap<u64, HashMap<&str, InterfaceStats>> = files
        .iter()
        .map(|(netns, text)| (*netns, parse_net_dev(text)))
        .collect();
    Ok(vms
        .iter()
        .map(|vm| {
            vm.nics
                .iter()
                .map(|nic| {
                    let line = lines.get(&nic.netns)?.get(nic.tap.as_str())?;
                    Some(line.of(nic.kind))
                })
                .collect()
        })
        .collect())
}

/// `/proc/PID/net/dev`; `None` when the process has ended or changed its namespace.
fn net_dev(pid: Tid, netns: u64) -> Result<Option<String>, HostError> {
    let path = format!("/proc/{pid}/net/dev");
    // The kernel returns EINVAL for the network files of a zombie process.
    let text = match proc::read_text(&path) {
        Err(HostError::Read { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => None,
        other => other?,
    };
    Ok(text.filter(|_| proc::netns(pid).is_ok_and(|now| now == Some(netns))))
}

/// Bytes that the processes of a VM read and wrote, from `/proc/PID/io`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounters {
    /// Bytes fetched from storage.
    pub read_bytes: u64,
    /// Bytes sent to storage, or due to be.
    pub write_bytes: u64,
    /// Bytes requested by read system calls, including page cache hits, pipes and sockets.
    pub read_chars: u64,
    /// Bytes passed to write system calls.
    pub write_chars: u64,
}

impl DiskCounters {
    fn add(&mut self, more: &Self) {
        self.read_bytes += more.read_bytes;
        self.write_bytes += more.write_bytes;
        self.read_chars += more.read_chars;
        self.write_chars += more.write_chars;
    }

    fn parse(text: &str) -> Self {
        let field = |key| {
            proc::status_field(text, key)
                .and_then(|n| n.parse().ok())
                .unwrap_or(0)
        };
        Self {
            read_bytes: field("read_bytes"),
            write_bytes: field("write_bytes"),
            read_chars: field("rchar"),
            write_chars: field("wchar"),
        }
    }
}

/// Open `/proc/PID/io` files of many VMs: a reading takes one system call for each process.
#[derive(Debug, Default)]
pub struct IoFiles(BTreeMap<(Tid, u64), File>);

impl IoFiles {
    /// Opens the files of exactly these VMs and closes the others. A file that cannot be opened is tried again at the next
    /// call.
    pub fn follow(&mut self, vms: &[Vm]) {
        let wanted: BTreeSet<(Tid, u64)> = vms.iter().flat_map(processes).collect();
        self.0.retain(|process, _| wanted.contains(process));
        for process in wanted {
            if self.0.contains_key(&process) {
                continue;
            }
            let (pid, start_time) = process;
            let opened = File::open(format!("/proc/{pid}/io"));
            // Another process may have the number by now; the open file still belongs to the one that had it then.
            let is_it = || matches!(proc::stat(pid), Ok(Some(s)) if s.start_time == start_time);
            if let Some(file) = opened.ok().filter(|_| is_it()) {
                self.0.insert(process, file);
            }
        }
    }

    /// The sum over all processes of the VM; `None` when its main process has ended, is not followed or cannot be read.
    ///
    /// The sum keeps what ended guest processes of UML have read: the kernel adds it to their parent.
    #[must_use]
    pub fn read(&self, vm: &Vm) -> Option<DiskCounters> {
        let mut text = [0; 512];
        let mut sum = DiskCounters::default();
        let mut is_here = false;
        for process in processes(vm) {
            let Some(file) = self.0.get(&process) else {
                continue;
            };
            // The kernel returns ESRCH once the process has ended.
            let Some(text) = file.read_at(&mut text, 0).ok().map(|n| &text[..n]) else {
                continue;
            };
            is_here |= process.0 == vm.pid;
            sum.add(&DiskCounters::parse(&String::from_utf8_lossy(text)));
        }
        is_here.then_some(sum)
    }
}

/// The processes of a VM with their start times, the main one first.
fn processes(vm: &Vm) -> impl Iterator<Item = (Tid, u64)> + '_ {
    let others = vm.threads().filter(|t| t.tid == t.pid && t.pid != vm.pid);
    std::iter::once((vm.pid, vm.start_time)).chain(others.map(|t| (t.pid, t.start_time)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NET_DEV: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0
   vt0:    1000      10    0    2    0     0          0         0     5000      50    0    3    0     0       0          0
a:b:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
";

    #[test]
    fn packets_that_a_tap_receives_are_sent_by_the_guest() {
        let lines = parse_net_dev(NET_DEV);
        assert_eq!(lines.len(), 3);
        let tap = lines["vt0"].of(NicKind::Tap);
        assert_eq!(
            (
                tap.from_guest_bytes,
                tap.from_guest_packets,
                tap.from_guest_dropped
            ),
            (1000, 10, 2)
        );
        assert_eq!(
            (
                tap.to_guest_bytes,
                tap.to_guest_packets,
                tap.to_guest_dropped
            ),
            (5000, 50, 3)
        );
        let macvtap = lines["vt0"].of(NicKind::Macvtap);
        assert_eq!(
            (macvtap.from_guest_bytes, macvtap.to_guest_bytes),
            (5000, 1000)
        );
        assert_eq!(lines["a:b"].tx_dropped, 12);
    }

    #[test]
    fn reads_proc_pid_io() {
        let text = "rchar: 7\nwchar: 8\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 512\ncancelled_write_bytes: 0\n";
        let expected = DiskCounters {
            read_bytes: 4096,
            write_bytes: 512,
            read_chars: 7,
            write_chars: 8,
        };
        assert_eq!(DiskCounters::parse(text), expected);
    }

    proptest! {
        #[test]
        fn any_text_parses_without_a_panic(text in "(?s).{0,200}") {
            let _ = parse_net_dev(&text);
            let _ = DiskCounters::parse(&text);
        }
    }
}

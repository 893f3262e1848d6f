// SPDX-License-Identifier: Apache-2.0
//! VMs of Firecracker and Cloud Hypervisor.
//!
//! Thread names identify the vCPUs; the HTTP interface gives state and disks (Firecracker: `docs/api_requests`; Cloud
//! Hypervisor: `docs/api.md`).

mod api;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::HostError;
use crate::netns::{ConfiguredNic, Interface};
use crate::paths::{absolute, through_root};
use crate::proc::{self, Stat, TapFd};
use crate::question::{Awaited, Question, Reply};
use crate::thread::{Thread, Tid};
use crate::thread_cache::ThreadCache;
use crate::vm::{Disk, Hypervisor, NicKind, ServiceKind, ServiceThread, Vcpu, printable};
use crate::vm_threads::VmThreads;
pub(crate) use api::{Answer, Page, get};

/// Interval between queries after an answer; also the longest interval while no answer comes.
const MAX_QUERY_INTERVAL: Duration = Duration::from_secs(120);
/// First interval after a query without answer; it doubles each time.
const MIN_QUERY_INTERVAL: Duration = Duration::from_secs(2);

/// Which of the two a process runs, if any, by its program's name.
pub(crate) fn hypervisor(stat: &Stat, args: &[String]) -> Result<Option<Hypervisor>, HostError> {
    let Some(called) = args.first() else {
        return Ok(None);
    };
    let hints = |name: &str| name.contains("firecracker") || name.contains("cloud-hyper");
    if !hints(&stat.comm) && !hints(called) {
        return Ok(None);
    }
    let program = match proc::exe(stat.tid) {
        Ok(Some(exe)) => exe,
        Ok(None) => return Ok(None),
        Err(_) => PathBuf::from(called),
    };
    Ok(of_program(&program))
}

/// Releases have their version in the name: `firecracker-v1.12.0-x86_64`.
fn of_program(program: &Path) -> Option<Hypervisor> {
    let name = program.file_name()?.to_string_lossy();
    let name = name.strip_suffix(" (deleted)").unwrap_or(&name);
    let is = |what: &str| {
        name.strip_prefix(what)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with("-v") || rest == "-static")
    };
    if is("firecracker") {
        Some(Hypervisor::Firecracker)
    } else if is("cloud-hypervisor") {
        Some(Hypervisor::CloudHypervisor)
    } else {
        None
    }
}

/// What the inventory remembers of a VM between two refreshes.
pub(crate) struct MicroVm {
    hypervisor: Hypervisor,
    name: Option<String>,
    socket: Option<String>,
    threads: ThreadCache,
    answer: Option<Answer>,
    queried_at: Option<Instant>,
    /// A query whose answer has not come yet.
    asked: Option<Question<Option<Answer>>>,
    wait: Duration,
}

impl MicroVm {
    /// From its arguments, without the program's name.
    pub(crate) fn new(hypervisor: Hypervisor, args: &[String]) -> Self {
        let (name, socket) = match hypervisor {
            Hypervisor::Firecracker => (value(args, "--id"), value(args, "--api-sock")),
            _ => {
                let socket = value(args, "--api-socket").and_then(|s| path_of(&s));
                let name = socket.as_deref().and_then(name_of_socket);
                (name, socket)
            }
        };
        Self {
            hypervisor,
            name: name.filter(|name| !name.is_empty()),
            socket,
            threads: ThreadCache::default(),
            answer: None,
            queried_at: None,
            asked: None,
            wait: MIN_QUERY_INTERVAL,
        }
    }

    pub(crate) fn hypervisor(&self) -> Hypervisor {
        self.hypervisor
    }

    /// Firecracker: `--id`. Cloud Hypervisor has no names: the name of its socket, as libvirt chooses it.
    pub(crate) fn name(&self, pid: Tid) -> String {
        let name = self.name.clone();
        printable(&name.unwrap_or_else(|| format!("pid-{pid}")))
    }

    pub(crate) fn status(&self) -> Option<String> {
        self.answer.as_ref().map(|a| a.state.clone())
    }

    pub(crate) fn disks(&self, pid: Tid) -> Vec<Disk> {
        let mut disks = self.answer.as_ref().map_or(Vec::new(), |a| a.disks.clone());
        for disk in &mut disks {
            disk.path = absolute(pid, std::mem::take(&mut disk.path));
        }
        disks
    }

    /// The taps that its process has open; the MAC addresses come from its interface.
    pub(crate) fn nics(&self, pid: Tid) -> Result<Vec<ConfiguredNic>, HostError> {
        let mut found: Vec<ConfiguredNic> = Vec::new();
        for tap in proc::taps(pid)? {
            let (interface, kind, mac) = match tap {
                TapFd::Tap { name, .. } => {
                    let macs = self.answer.as_ref().map(|a| &a.macs);
                    let mac = macs.and_then(|macs| macs.get(&name).cloned());
                    (Interface::Name(name), NicKind::Tap, mac)
                }
                TapFd::Macvtap { ifindex, .. } => {
                    (Interface::Index(ifindex), NicKind::Macvtap, None)
                }
            };
            // A tap with several queues has one descriptor for each.
            if !found.iter().any(|n| n.interface == interface) {
                found.push(ConfiguredNic {
                    interface,
                    kind,
                    mac,
                });
            }
        }
        Ok(found)
    }

    /// Reads the threads of the VM, and queries its interface when that is due and `may_query`.
    pub(crate) fn update(&mut self, pid: Tid, may_query: bool) -> Result<VmThreads, HostError> {
        let now = Instant::now();
        let tasks = self.threads.refresh(pid, now)?.to_vec();
        let mut queried = false;
        if let Some(question) = &self.asked {
            let reply = question.poll();
            self.take(reply);
            queried = self.asked.is_none();
        }
        let due = |at: Instant| now.saturating_duration_since(at) >= self.wait;
        let is_due = self.socket.is_some() && self.queried_at.is_none_or(due);
        if may_query && is_due && self.asked.is_none() {
            self.query(pid, now);
            queried |= self.asked.is_none();
        }
        let mut vcpus = Vec::new();
        let mut service = Vec::new();
        for (thread, name) in &tasks {
            match vcpu_of_name(self.hypervisor, name) {
                Some(index) => vcpus.push(Vcpu {
                    index,
                    threads: vec![*thread],
                    kernel_thread: None,
                    cores: proc::affinity(thread.tid)?.unwrap_or_default(),
                }),
                None => service.push(ServiceThread {
                    thread: *thread,
                    kind: kind_of(pid, thread, name),
                }),
            }
        }
        vcpus.sort_by_key(|vcpu| vcpu.index);
        vcpus.dedup_by_key(|vcpu| vcpu.index);
        Ok(VmThreads {
            vcpus,
            service,
            warning: None,
            queried,
        })
    }

    /// The query whose answer has not been taken yet.
    pub(crate) fn open_question(&self) -> Option<&dyn Awaited> {
        self.asked.as_ref().map(|q| q as &dyn Awaited)
    }

    /// Queries the interface. A later [`MicroVm::update`] takes the answer.
    fn query(&mut self, pid: Tid, now: Instant) {
        self.queried_at = Some(now);
        let Some(socket) = self.socket.as_deref().map(|s| through_root(pid, s)) else {
            return;
        };
        let hypervisor = self.hypervisor;
        // Without a thread, it is as if the VM did not answer.
        let Ok(question) = Question::new(move || api::query(hypervisor, (&socket, pid)).ok())
        else {
            return self.take(Reply::Lost);
        };
        self.asked = Some(question);
    }

    /// Takes what came of a query.
    fn take(&mut self, reply: Reply<Option<Answer>>) {
        match reply {
            Reply::Open => return,
            Reply::Answer(Some(answer)) => {
                self.answer = Some(answer);
                self.wait = MAX_QUERY_INTERVAL;
            }
            // Thread names identify the vCPUs in any case.
            Reply::Answer(None) | Reply::Lost => {
                self.wait = (self.wait * 2).min(MAX_QUERY_INTERVAL);
            }
        }
        self.asked = None;
    }
}

/// The value of `--key VALUE` or `--key=VALUE`.
fn value(args: &[String], key: &str) -> Option<String> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == key {
            return args.next().cloned();
        }
        if let Some(value) = arg.strip_prefix(key).and_then(|v| v.strip_prefix('=')) {
            return Some(value.to_owned());
        }
    }
    None
}

/// The path of `PATH` or `path=PATH`; none for a descriptor.
fn path_of(text: &str) -> Option<String> {
    let first = text.split(',').next()?;
    match first.split_once('=') {
        Some(("path", path)) => Some(path.to_owned()),
        Some(_) => None,
        None => Some(first.to_owned()),
    }
}

/// libvirt names the socket of a domain `NAME-socket`.
fn name_of_socket(socket: &str) -> Option<String> {
    let name = Path::new(socket).file_name()?.to_string_lossy();
    let ends = ["-socket", ".socket", ".sock"];
    let stem = ends.iter().find_map(|end| name.strip_suffix(end));
    Some(stem.unwrap_or(&name).to_owned())
}

fn vcpu_of_name(hypervisor: Hypervisor, name: &str) -> Option<u32> {
    let number = match hypervisor {
        Hypervisor::Firecracker => name.strip_prefix("fc_vcpu ")?,
        _ => name.strip_prefix("vcpu")?,
    };
    number.parse().ok()
}

/// Cloud Hypervisor names its device threads `_disk0_q0`, `_net1_qp0`; Firecracker has one thread for all devices.
fn kind_of(pid: Tid, thread: &Thread, name: &str) -> ServiceKind {
    let is_device = ["_disk", "_net", "_fs", "_pmem"]
        .iter()
        .any(|device| name.starts_with(device));
    match thread.tid == pid || name == "vmm" {
        true => ServiceKind::Emulator,
        false if is_device => ServiceKind::Iothread,
        false => ServiceKind::Helper,
    }
}

/// The texts that an answer of an HTTP interface gives, for the fuzz target.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn texts_of(page: Page, output: &[u8]) -> std::io::Result<Vec<String>> {
    let answer = api::answer_of(page, output)?;
    let mut texts = vec![answer.state];
    texts.extend(answer.disks.into_iter().map(|disk| disk.device));
    texts.extend(answer.macs.into_iter().flat_map(|(tap, mac)| [tap, mac]));
    Ok(texts)
}

#[cfg(test)]
mod tests;

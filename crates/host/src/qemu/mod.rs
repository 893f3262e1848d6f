// SPDX-License-Identifier: Apache-2.0
//! QEMU guests.
//!
//! Which thread is which vCPU is asked over QMP. A QMP socket has one user at a time; when it is taken
//! (libvirt holds its own) QEMU's thread names tell the same: `CPU 0/KVM`, `IO name`, given
//! `-name ...,debug-threads=on`, which libvirt and Proxmox set.

mod args;
pub mod devices;
pub mod disk_watch;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub mod qmp;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::HostError;
use crate::netns::ConfiguredNic;
use crate::paths::{absolute, through_root};
use crate::proc::{self, Stat};
use crate::thread::{Thread, Tid};
use crate::thread_cache::ThreadCache;
use crate::vm::{Disk, ServiceKind, ServiceThread, Vcpu};

pub(crate) use args::{Chardev, QemuArgs};
use qmp::{Answer, QmpError, QmpFailure};

/// Shortest time between two conversations with one VM; doubled while they bring nothing new.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// After this time QMP is asked again in any case, since disks may have changed.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Whether the process is a QEMU that runs a machine, judged by its program. Where that may not be looked
/// at, the name it was called by is believed.
///
/// # Errors
/// [`HostError::Read`].
pub(crate) fn is_qemu(stat: &Stat, args: &[String]) -> Result<bool, HostError> {
    let Some(called) = args.first() else {
        return Ok(false);
    };
    let hints = |name: &str| name.contains("qemu") || name.contains("kvm");
    if !hints(&stat.comm) && !hints(called) {
        return Ok(false);
    }
    let program = match proc::exe(stat.tid) {
        Ok(Some(exe)) => exe,
        Ok(None) => return Ok(false),
        Err(_) => PathBuf::from(called),
    };
    Ok(is_program_name(&program) && !has_no_machine(args))
}

fn is_program_name(program: &Path) -> bool {
    let name = program
        .file_name()
        .map(|n| n.to_string_lossy().into_owned());
    name.is_some_and(|n| {
        let n = n.strip_suffix(" (deleted)").unwrap_or(&n);
        n.starts_with("qemu-system-") || matches!(n, "qemu-kvm" | "kvm")
    })
}

/// libvirt starts QEMU like this to ask what it can do.
fn has_no_machine(args: &[String]) -> bool {
    args.windows(2).any(|pair| {
        matches!(pair[0].as_str(), "-machine" | "--machine" | "-M")
            && pair[1]
                .split(',')
                .any(|o| matches!(o, "none" | "type=none"))
    })
}

/// What is remembered of a VM between two looks.
pub(crate) struct Qemu {
    args: QemuArgs,
    view: Option<View>,
    problem: Option<QmpError>,
    asked: Option<Instant>,
    wait: Duration,
    /// Threads that were there when QMP was last asked.
    at_ask: Vec<Thread>,
    tasks: ThreadCache,
}

/// An answer of QMP in terms of the host's threads.
#[derive(PartialEq, Eq)]
struct View {
    name: Option<String>,
    status: String,
    vcpus: Vec<(u32, Thread)>,
    iothreads: Vec<Thread>,
    disks: Vec<Disk>,
}

/// Everything about a VM that may change while it runs.
pub(crate) struct Look {
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) service: Vec<ServiceThread>,
    pub(crate) warning: Option<String>,
    /// Whether QMP was asked, so that disks and NICs are worth a new look too.
    pub(crate) asked: bool,
}

impl Qemu {
    pub(crate) fn new(args: QemuArgs) -> Self {
        Self {
            args,
            view: None,
            problem: None,
            asked: None,
            wait: SHORTEST_WAIT,
            at_ask: Vec::new(),
            tasks: ThreadCache::default(),
        }
    }

    /// The VM's name: from the command line, else from QMP, else its process number.
    pub(crate) fn name(&self, pid: Tid) -> String {
        let from_qmp = || self.view.as_ref().and_then(|v| v.name.clone());
        self.args
            .name
            .clone()
            .or_else(from_qmp)
            .unwrap_or_else(|| format!("pid-{pid}"))
    }

    pub(crate) fn uuid(&self) -> Option<String> {
        self.args.uuid.clone()
    }

    pub(crate) fn status(&self) -> Option<String> {
        self.view.as_ref().map(|v| v.status.clone())
    }

    pub(crate) fn disks(&self, pid: Tid) -> Vec<Disk> {
        let mut disks = match &self.view {
            Some(view) => view.disks.clone(),
            None => self.args.disks.clone(),
        };
        for disk in &mut disks {
            // "nbd://..." and "json:{...}" are no files.
            if !disk.path.to_string_lossy().contains(':') {
                disk.path = absolute(pid, std::mem::take(&mut disk.path));
            }
        }
        disks
    }

    pub(crate) fn nics(&self, pid: Tid) -> Result<Vec<ConfiguredNic>, HostError> {
        Ok(self.args.nics(&proc::taps(pid)?))
    }

    /// Looks at the threads of the VM, and asks QMP when there is reason to. `kernel` are its threads in
    /// the kernel.
    pub(crate) fn look(&mut self, pid: Tid, kernel: &[Thread]) -> Result<Look, HostError> {
        let mut remembered = std::mem::take(&mut self.tasks);
        let look = self.look_at(pid, kernel, remembered.look(pid, Instant::now())?);
        self.tasks = remembered;
        look
    }

    fn look_at(
        &mut self,
        pid: Tid,
        kernel: &[Thread],
        tasks: &[(Thread, String)],
    ) -> Result<Look, HostError> {
        let asked = self.is_time_to_ask(tasks);
        if asked {
            self.ask(pid, tasks)?;
        }
        let mut vcpus = self.vcpus(tasks);
        for vcpu in &mut vcpus {
            if let Some(first) = vcpu.threads.first() {
                vcpu.cores = proc::affinity(first.tid)?.unwrap_or_default();
            }
        }
        share_first_thread(&mut vcpus);
        let is_vcpu = |t: &Thread| vcpus.iter().any(|v| v.threads.contains(t));
        let mut service: Vec<ServiceThread> = tasks
            .iter()
            .filter(|(thread, _)| !is_vcpu(thread))
            .map(|(thread, name)| ServiceThread {
                thread: *thread,
                kind: self.kind(pid, thread, name),
            })
            .collect();
        service.extend(kernel.iter().map(|&thread| ServiceThread {
            thread,
            kind: ServiceKind::Vhost,
        }));
        let warning = self.warning(pid, vcpus.is_empty());
        Ok(Look {
            vcpus,
            service,
            warning,
            asked,
        })
    }

    fn is_time_to_ask(&self, tasks: &[(Thread, String)]) -> bool {
        if self.args.qmp.is_empty() {
            return false;
        }
        let Some(asked) = self.asked else {
            return true;
        };
        let elapsed = asked.elapsed();
        elapsed >= LONGEST_WAIT || (elapsed >= self.wait && self.is_stale(tasks))
    }

    /// Whether the last answer may no longer be true: a thread came whose name does not tell what it is,
    /// or one that QMP named has ended.
    fn is_stale(&self, tasks: &[(Thread, String)]) -> bool {
        let Some(view) = &self.view else {
            return true;
        };
        let is_here = |thread: &Thread| tasks.iter().any(|(t, _)| t == thread);
        let named = view.vcpus.iter().map(|(_, t)| t).chain(&view.iothreads);
        let came = tasks
            .iter()
            .any(|(t, name)| !self.at_ask.contains(t) && !is_worker_name(name));
        came || !named.into_iter().all(is_here)
    }

    fn ask(&mut self, pid: Tid, tasks: &[(Thread, String)]) -> Result<(), HostError> {
        let label = self.name(pid);
        let mut problem = None;
        let mut view = None;
        for socket in &self.args.qmp {
            match ask_socket(&label, pid, socket, tasks)? {
                Ok(answer) => {
                    view = Some(answer);
                    break;
                }
                Err(e) => problem = Some(e),
            }
        }
        let has_news = view.is_some() && view != self.view;
        self.wait = if has_news {
            SHORTEST_WAIT
        } else {
            (self.wait * 2).min(LONGEST_WAIT)
        };
        self.asked = Some(Instant::now());
        self.problem = if view.is_some() { None } else { problem };
        if view.is_some() {
            self.at_ask = tasks.iter().map(|(t, _)| *t).collect();
            self.view = view;
        }
        Ok(())
    }

    /// By QMP's last answer as far as its threads still live, else by name.
    fn vcpus(&self, tasks: &[(Thread, String)]) -> Vec<Vcpu> {
        let by_name = || {
            let named = tasks
                .iter()
                .filter_map(|(t, name)| Some((vcpu_of_name(name)?, *t)));
            named.collect::<Vec<_>>()
        };
        let mut found = match &self.view {
            Some(view) => view.vcpus.clone(),
            None => by_name(),
        };
        found.retain(|(_, thread)| tasks.iter().any(|(t, _)| t == thread));
        found.sort_unstable_by_key(|(index, thread)| (*index, thread.tid));
        found.dedup_by_key(|(index, _)| *index);
        found
            .into_iter()
            .map(|(index, thread)| Vcpu {
                index,
                threads: vec![thread],
                kernel_thread: None,
                cores: crate::CpuSet::new(),
            })
            .collect()
    }

    fn kind(&self, pid: Tid, thread: &Thread, name: &str) -> ServiceKind {
        let is_iothread = match &self.view {
            Some(view) => view.iothreads.contains(thread),
            None => name.starts_with("IO ") && name != "IO mon_iothread",
        };
        if thread.tid == pid {
            ServiceKind::Emulator
        } else if vhost_owner(name).is_some() {
            ServiceKind::Vhost
        } else if is_iothread {
            ServiceKind::Iothread
        } else {
            ServiceKind::Helper
        }
    }

    fn warning(&self, pid: Tid, no_vcpus: bool) -> Option<String> {
        const REMEDY: &str = "its vCPUs cannot be told from its other threads: start it with \
-name NAME,debug-threads=on or with a -qmp socket that nobody else holds";
        match (&self.problem, no_vcpus) {
            (Some(problem), true) => Some(format!("{problem}; {REMEDY}")),
            (Some(problem), false) if self.view.is_some() => {
                Some(format!("{problem}; its last answer is used"))
            }
            (Some(problem), false) => {
                Some(format!("{problem}; its threads are told apart by name"))
            }
            (None, true) => Some(format!("{}: {REMEDY}", self.name(pid))),
            (None, false) => None,
        }
    }
}

/// TCG with `thread=single` runs all vCPUs in one thread, which must not count twice.
fn share_first_thread(vcpus: &mut [Vcpu]) {
    let mut seen: Vec<Thread> = Vec::new();
    for vcpu in vcpus {
        vcpu.threads.retain(|t| !seen.contains(t));
        seen.extend(&vcpu.threads);
    }
}

fn ask_socket(
    vm: &str,
    pid: Tid,
    socket: &str,
    tasks: &[(Thread, String)],
) -> Result<Result<View, QmpError>, HostError> {
    let failed = |cause| QmpError {
        vm: vm.to_owned(),
        socket: PathBuf::from(socket),
        cause,
    };
    if proc::unix_sockets::has_client(pid, socket)? {
        return Ok(Err(failed(QmpFailure::Busy)));
    }
    let answer = match qmp::ask(vm, Path::new(socket), &through_root(pid, socket)) {
        Ok(answer) => answer,
        Err(e) => return Ok(Err(e)),
    };
    let numbers = thread_numbers(pid, tasks)?;
    Ok(view_of(answer, &numbers).map_err(failed))
}

/// Threads by the number that the VM's process itself sees: in a container it is another.
fn thread_numbers(pid: Tid, tasks: &[(Thread, String)]) -> Result<HashMap<Tid, Thread>, HostError> {
    let is_contained = proc::inner_tid(pid)?.is_some_and(|inner| inner != pid);
    let mut numbers = HashMap::new();
    for (thread, _) in tasks {
        let inner = if is_contained {
            proc::inner_tid(thread.tid)?
        } else {
            Some(thread.tid)
        };
        numbers.extend(inner.map(|inner| (inner, *thread)));
    }
    Ok(numbers)
}

/// Takes only threads of the VM's own process: whatever sits behind the socket cannot make viola touch
/// any other.
fn view_of(answer: Answer, numbers: &HashMap<Tid, Thread>) -> Result<View, QmpFailure> {
    let thread = |tid: Tid| {
        let foreign =
            || QmpFailure::Garbage(format!("it names thread {tid}, which is none of the VM's"));
        numbers.get(&tid).copied().ok_or_else(foreign)
    };
    Ok(View {
        name: answer.name,
        status: answer.status,
        vcpus: answer
            .vcpus
            .into_iter()
            .map(|(index, tid)| Ok((index, thread(tid)?)))
            .collect::<Result<_, QmpFailure>>()?,
        iothreads: answer
            .iothreads
            .into_iter()
            .map(thread)
            .collect::<Result<_, QmpFailure>>()?,
        disks: answer.disks,
    })
}

fn vcpu_of_name(name: &str) -> Option<u32> {
    if name == "ALL CPUs/TCG" {
        return Some(0);
    }
    name.strip_prefix("CPU ")?.split_once('/')?.0.parse().ok()
}

fn is_worker_name(name: &str) -> bool {
    name == "worker" || vhost_owner(name).is_some()
}

/// Process that a thread named `vhost-PID` works for.
pub(crate) fn vhost_owner(name: &str) -> Option<Tid> {
    name.strip_prefix("vhost-")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: Tid) -> Thread {
        Thread {
            pid: 10,
            tid,
            start_time: 5,
        }
    }

    #[test]
    fn thread_names_tell_vcpus_and_vhost() {
        assert_eq!(vcpu_of_name("CPU 0/KVM"), Some(0));
        assert_eq!(vcpu_of_name("CPU 17/TCG"), Some(17));
        assert_eq!(vcpu_of_name("ALL CPUs/TCG"), Some(0));
        assert_eq!(vcpu_of_name("CPU x/KVM"), None);
        assert_eq!(vcpu_of_name("CPU 1"), None);
        assert_eq!(vhost_owner("vhost-4711"), Some(4711));
        assert_eq!(vhost_owner("vhost-x"), None);
    }

    #[test]
    fn the_name_of_the_program_decides() {
        for yes in [
            "/usr/bin/qemu-system-x86_64",
            "/usr/bin/qemu-system-x86_64 (deleted)",
            "/usr/libexec/qemu-kvm",
        ] {
            assert!(is_program_name(Path::new(yes)), "{yes}");
        }
        for no in [
            "/usr/bin/qemu-img",
            "/usr/bin/qemu-nbd",
            "/bin/sh",
            "/usr/bin/kvmtool",
            "/",
        ] {
            assert!(!is_program_name(Path::new(no)), "{no}");
        }
        let args = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(has_no_machine(&args(
            "qemu -machine none,accel=kvm:tcg -qmp x"
        )));
        assert!(!has_no_machine(&args("qemu -machine q35 -name none")));
    }

    #[test]
    fn one_thread_for_all_vcpus_counts_once() {
        let vcpu = |index| Vcpu {
            index,
            threads: vec![thread(11)],
            kernel_thread: None,
            cores: crate::CpuSet::new(),
        };
        let mut vcpus = [vcpu(0), vcpu(1)];
        share_first_thread(&mut vcpus);
        assert_eq!((vcpus[0].threads.len(), vcpus[1].threads.len()), (1, 0));
    }

    #[test]
    fn a_thread_of_another_process_is_never_taken_from_an_answer() {
        let numbers = HashMap::from([(11, thread(11))]);
        let answer = |tid| Answer {
            vcpus: vec![(0, tid)],
            ..Answer::default()
        };
        assert!(view_of(answer(11), &numbers).is_ok());
        let error = view_of(answer(1), &numbers).err().unwrap();
        assert!(error.to_string().contains("thread 1,"), "{error}");
    }
}

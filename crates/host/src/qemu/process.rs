// SPDX-License-Identifier: Apache-2.0
//! One QEMU process: its threads, and when to query QMP.

use std::time::{Duration, Instant};

use super::args::QemuArgs;
use super::qmp::QmpError;
use super::view::{View, query_socket};
use crate::cpuset::CpuSet;
use crate::error::HostError;
use crate::netns::ConfiguredNic;
use crate::paths::absolute;
use crate::prepared::Purpose;
use crate::proc;
use crate::question::{Awaited, Question, Reply};
use crate::thread::{Thread, Tid};
use crate::thread_cache::ThreadCache;
use crate::vm::{Disk, ServiceKind, ServiceThread, Vcpu};
use crate::vm_threads::VmThreads;

/// Shortest time between two queries of one VM; doubled while they bring nothing new.
const MIN_QUERY_INTERVAL: Duration = Duration::from_secs(1);
/// QMP is queried after this time in any case, since disks may have changed.
const MAX_QUERY_INTERVAL: Duration = Duration::from_secs(120);

/// What came of a query.
type Queried = Result<Answered, HostError>;

/// The threads when QMP was queried, and its view, or why there is none.
#[derive(Default)]
struct Answered {
    threads: Vec<Thread>,
    answer: (Option<View>, Option<QmpError>),
}

/// Queries the first socket that answers.
fn query_sockets(
    label: &str,
    pid: Tid,
    sockets: &[String],
    threads: Vec<(Thread, String)>,
) -> Queried {
    let mut answer = (None, None);
    for socket in sockets {
        match query_socket(label, pid, socket, &threads)? {
            Ok(view) => {
                answer.0 = Some(view);
                break;
            }
            Err(e) => answer.1 = Some(e),
        }
    }
    Ok(Answered {
        threads: threads.into_iter().map(|(thread, _)| thread).collect(),
        answer,
    })
}

/// What the inventory remembers of a VM between two refreshes.
pub(crate) struct Qemu {
    args: QemuArgs,
    view: Option<View>,
    error: Option<QmpError>,
    queried_at: Option<Instant>,
    /// A query whose answer has not come yet.
    asked: Option<Question<Queried>>,
    wait: Duration,
    /// The threads when QMP was last queried.
    threads_at_query: Vec<Thread>,
    cache: ThreadCache,
}

impl Qemu {
    pub(crate) fn new(args: QemuArgs) -> Self {
        Self {
            args,
            view: None,
            error: None,
            queried_at: None,
            asked: None,
            wait: MIN_QUERY_INTERVAL,
            threads_at_query: Vec::new(),
            cache: ThreadCache::default(),
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

    /// Reads the threads of the VM, and queries QMP when that is due and `may_query`. `kernel` are its vhost kernel threads.
    pub(crate) fn update(
        &mut self,
        pid: Tid,
        kernel: &[Thread],
        may_query: bool,
    ) -> Result<VmThreads, HostError> {
        let mut cache = std::mem::take(&mut self.cache);
        let threads = cache.refresh(pid, Instant::now())?;
        let result = self.update_with(pid, kernel, threads, may_query);
        self.cache = cache;
        result
    }

    fn update_with(
        &mut self,
        pid: Tid,
        kernel: &[Thread],
        threads: &[(Thread, String)],
        may_query: bool,
    ) -> Result<VmThreads, HostError> {
        let mut queried = false;
        if let Some(question) = &self.asked {
            let reply = question.poll();
            self.take(reply)?;
            queried = self.asked.is_none();
        }
        if may_query && self.asked.is_none() && self.is_time_to_query(threads) {
            self.query(pid, threads)?;
            queried |= self.asked.is_none();
        }
        let mut vcpus = self.vcpus(threads);
        for vcpu in &mut vcpus {
            if let Some(first) = vcpu.threads.first() {
                vcpu.cores = proc::affinity(first.tid)?.unwrap_or_default();
            }
        }
        drop_shared_threads(&mut vcpus);
        let is_vcpu = |t: &Thread| vcpus.iter().any(|v| v.threads.contains(t));
        let mut service: Vec<ServiceThread> = threads
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
        Ok(VmThreads {
            vcpus,
            service,
            warning,
            queried,
        })
    }

    /// The QMP sockets that are not kept for a purpose.
    fn free_sockets(&self) -> impl Iterator<Item = &String> {
        let is_free = |path: &&String| Purpose::of(path.as_ref()).is_none();
        self.args.qmp.iter().filter(is_free)
    }

    fn is_time_to_query(&self, threads: &[(Thread, String)]) -> bool {
        if self.free_sockets().next().is_none() {
            return false;
        }
        let Some(at) = self.queried_at else {
            return true;
        };
        let elapsed = at.elapsed();
        elapsed >= MAX_QUERY_INTERVAL || (elapsed >= self.wait && self.is_stale(threads))
    }

    /// Whether the last answer may be outdated: a thread appeared whose name does not identify it, or one that QMP named has
    /// ended.
    fn is_stale(&self, threads: &[(Thread, String)]) -> bool {
        let Some(view) = &self.view else {
            return true;
        };
        let is_here = |thread: &Thread| threads.iter().any(|(t, _)| t == thread);
        let named = view.vcpus.iter().map(|(_, t)| t).chain(&view.iothreads);
        let came = threads
            .iter()
            .any(|(t, name)| !self.threads_at_query.contains(t) && !is_worker_name(name));
        came || !named.into_iter().all(is_here)
    }

    /// The query whose answer has not been taken yet.
    pub(crate) fn open_question(&self) -> Option<&dyn Awaited> {
        self.asked.as_ref().map(|q| q as &dyn Awaited)
    }

    /// Queries QMP. A later [`Qemu::update`] takes the answer.
    fn query(&mut self, pid: Tid, threads: &[(Thread, String)]) -> Result<(), HostError> {
        self.queried_at = Some(Instant::now());
        let sockets: Vec<String> = self.free_sockets().cloned().collect();
        let (label, threads) = (self.name(pid), threads.to_vec());
        // Without a thread, it is as if QMP did not answer.
        let Ok(question) = Question::new(move || query_sockets(&label, pid, &sockets, threads))
        else {
            return self.take(Reply::Lost);
        };
        self.asked = Some(question);
        Ok(())
    }

    /// Takes what came of a query.
    fn take(&mut self, reply: Reply<Queried>) -> Result<(), HostError> {
        let answered = match reply {
            Reply::Open => return Ok(()),
            Reply::Answer(answered) => answered,
            Reply::Lost => Ok(Answered::default()),
        };
        self.asked = None;
        let Answered {
            threads,
            answer: (view, error),
        } = answered?;
        let is_new = view.is_some() && view != self.view;
        self.wait = if is_new {
            MIN_QUERY_INTERVAL
        } else {
            (self.wait * 2).min(MAX_QUERY_INTERVAL)
        };
        self.error = if view.is_some() { None } else { error };
        if view.is_some() {
            self.threads_at_query = threads;
            self.view = view;
        }
        Ok(())
    }

    /// From QMP's last answer, as far as its threads still live, else by name.
    fn vcpus(&self, threads: &[(Thread, String)]) -> Vec<Vcpu> {
        let by_name = || {
            let named = threads
                .iter()
                .filter_map(|(t, name)| Some((vcpu_of_name(name)?, *t)));
            named.collect::<Vec<_>>()
        };
        let mut found = match &self.view {
            Some(view) => view.vcpus.clone(),
            None => by_name(),
        };
        found.retain(|(_, thread)| threads.iter().any(|(t, _)| t == thread));
        found.sort_unstable_by_key(|(index, thread)| (*index, thread.tid));
        found.dedup_by_key(|(index, _)| *index);
        found
            .into_iter()
            .map(|(index, thread)| Vcpu {
                index,
                threads: vec![thread],
                kernel_thread: None,
                cores: CpuSet::new(),
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
        const REMEDY: &str = "cannot tell its vCPUs from its other threads; start it with \
-name NAME,debug-threads=on or with a -qmp socket that no other client holds";
        match (&self.error, no_vcpus) {
            (Some(error), true) => Some(format!("{error}; {REMEDY}")),
            (Some(error), false) if self.view.is_some() => {
                Some(format!("{error}; its last answer is used"))
            }
            (Some(error), false) => Some(format!("{error}; its threads are identified by name")),
            (None, true) => Some(format!("{}: {REMEDY}", self.name(pid))),
            (None, false) => None,
        }
    }
}

/// TCG with `thread=single` runs all vCPUs in one thread; it must count only once.
fn drop_shared_threads(vcpus: &mut [Vcpu]) {
    let mut seen: Vec<Thread> = Vec::new();
    for vcpu in vcpus {
        vcpu.threads.retain(|t| !seen.contains(t));
        seen.extend(&vcpu.threads);
    }
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

/// The process that a thread named `vhost-PID` works for.
pub(crate) fn vhost_owner(name: &str) -> Option<Tid> {
    name.strip_prefix("vhost-")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    fn thread(tid: Tid) -> Thread {
        Thread {
            pid: 10,
            tid,
            start_time: 5,
        }
    }

    #[test]
    fn thread_names_identify_vcpus_and_vhost() {
        assert_eq!(vcpu_of_name("CPU 0/KVM"), Some(0));
        assert_eq!(vcpu_of_name("CPU 17/TCG"), Some(17));
        assert_eq!(vcpu_of_name("ALL CPUs/TCG"), Some(0));
        assert_eq!(vcpu_of_name("CPU x/KVM"), None);
        assert_eq!(vcpu_of_name("CPU 1"), None);
        assert_eq!(vhost_owner("vhost-4711"), Some(4711));
        assert_eq!(vhost_owner("vhost-x"), None);
    }

    /// A server that answers all queries once it is allowed to.
    fn serve(allowed: mpsc::Receiver<()>, tid: Tid) -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let greeting = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";
            client.write_all(greeting).unwrap();
            allowed.recv().unwrap();
            let cpus = format!("[{{\"cpu-index\": 0, \"thread-id\": {tid}}}]");
            let values = ["{}", "{}", "{\"status\": \"running\"}", &cpus, "[]", "[]"];
            for (number, value) in values.iter().enumerate() {
                let _ = client.read(&mut [0; 4096]);
                let answer = format!("{{\"return\": {value}, \"id\": {}}}\n", number + 1);
                let _ = client.write_all(answer.as_bytes());
            }
        });
        let path = path.display().to_string();
        (dir, path)
    }

    #[test]
    fn a_late_answer_of_qmp_holds_up_nobody_and_counts_when_it_comes() {
        let pid = std::process::id();
        for is_late in [false, true] {
            let (allow, allowed) = mpsc::channel();
            let (_dir, path) = serve(allowed, pid);
            if !is_late {
                allow.send(()).unwrap();
            }
            let words = ["-qmp".to_owned(), format!("unix:{path},server=on,wait=off")];
            let mut qemu = Qemu::new(QemuArgs::parse(&words));
            let begun = Instant::now();
            qemu.update(pid, &[], true).unwrap();
            if is_late {
                assert_eq!(qemu.status(), None);
                allow.send(()).unwrap();
            }
            let mut queried = qemu.status().is_some();
            while qemu.status().is_none() {
                assert!(begun.elapsed() < Duration::from_secs(20));
                std::thread::sleep(Duration::from_millis(20));
                queried = qemu.update(pid, &[], true).unwrap().queried;
            }
            assert!(queried, "disks are read again when the answer comes");
            assert_eq!(qemu.status().as_deref(), Some("running"));
            let vcpus = qemu.update(pid, &[], true).unwrap().vcpus;
            assert_eq!((vcpus.len(), vcpus[0].threads[0].tid), (1, pid));
        }
    }

    #[test]
    fn one_thread_for_all_vcpus_counts_once() {
        let vcpu = |index| Vcpu {
            index,
            threads: vec![thread(11)],
            kernel_thread: None,
            cores: CpuSet::new(),
        };
        let mut vcpus = [vcpu(0), vcpu(1)];
        drop_shared_threads(&mut vcpus);
        assert_eq!((vcpus[0].threads.len(), vcpus[1].threads.len()), (1, 0));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A guest made of files that behaves as a kernel does where it matters.

#![allow(dead_code, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use viola_agent::turbo::cpus::Cpus;
use viola_agent::turbo::journal::Journal;
use viola_agent::turbo::keeper::Keeper;
use viola_agent::turbo::plan::Goal;
use viola_agent::turbo::settings::Settings;
use viola_agent::turbo::system::{RealSystem, System};

/// Boot id.
pub const BOOT: &str = "boot-1";
/// The agent's cgroup.
pub const OURS: &str = "/sys/fs/cgroup/viola.turbo";

/// What the kernel refuses, and what irqbalance does.
#[derive(Debug, Default)]
pub struct Routes {
    /// Interrupts whose affinity cannot be set.
    pub managed: BTreeSet<u32>,
    /// Partitions are invalid.
    pub no_partition: bool,
    /// What irqbalance leaves alone; `None` when it does not answer.
    pub banned: Option<BTreeSet<u32>>,
    /// Changes until the agent is killed.
    pub left: Option<u32>,
}

/// The guest.
#[derive(Clone)]
pub struct Guest {
    root: PathBuf,
    real: RealSystem,
    pub routes: Arc<Mutex<Routes>>,
}

impl Guest {
    /// Three vCPUs; a network interface of two queues and a disk, both by virtio; a journal's thread, an init and a program
    /// of two threads; cgroup v2 with two groups.
    pub fn make(root: &Path) -> Self {
        let guest = Self {
            root: root.to_owned(),
            real: RealSystem::new(root),
            routes: Arc::default(),
        };
        for (path, text) in [
            ("/proc/sys/kernel/random/boot_id", BOOT),
            ("/sys/devices/system/cpu/online", "0-2"),
            ("/sys/devices/system/cpu/possible", "0-2"),
            ("/sys/devices/virtual/workqueue/cpumask", "00000007"),
            (
                "/proc/meminfo",
                "MemTotal:        4194304 kB\nMemFree: 1 kB",
            ),
            (
                "/proc/interrupts",
                "           CPU0       CPU1       CPU2\n  1:     9     0     0  IO-APIC  i8042",
            ),
            (
                "/proc/mounts",
                "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
            ),
            ("/proc/sys/net/core/rmem_max", "212992"),
            ("/proc/sys/net/core/rmem_default", "212992"),
            ("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456"),
            ("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory"),
            ("/sys/fs/cgroup/cgroup.subtree_control", "cpu"),
            ("/sys/fs/cgroup/cgroup.procs", ""),
        ] {
            guest.put(path, text);
        }
        guest.irq(1, "i8042");
        guest.nic("eth0", 0, 2, 24);
        guest.disk("vda", 1, 27);
        for group in ["system.slice", "user.slice"] {
            guest.put(&format!("/sys/fs/cgroup/{group}/cgroup.procs"), "");
        }
        let (kernel, fixed) = (0x0020_8040, 0x0420_8040);
        guest.task(1, 1, 0, "init", 0x40_0100, "/system.slice");
        guest.task(50, 50, 2, "jbd2/vda1-8", kernel, "/");
        guest.task(51, 51, 2, "ksoftirqd/1", fixed, "/");
        guest.task(52, 52, 2, "kswapd0", kernel, "/");
        guest.task(100, 100, 1, "mysqld (x)", 0x40_0000, "/user.slice");
        guest.task(100, 101, 1, "mysqld (x)", 0x40_0000, "/user.slice");
        guest
    }

    /// Makes a file and its directories.
    pub fn put(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    /// Removes a file.
    pub fn remove_dir(&self, path: &str) {
        fs::remove_file(self.at(path)).unwrap();
    }

    /// Content of a file.
    pub fn get(&self, path: &str) -> String {
        let text = fs::read_to_string(self.at(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        text.trim().to_owned()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// An interrupt with all CPUs.
    pub fn irq(&self, irq: u32, actions: &str) {
        self.put(&format!("/proc/irq/{irq}/smp_affinity_list"), "0-2");
        self.put(&format!("/sys/kernel/irq/{irq}/actions"), actions);
    }

    /// A virtio device with three interrupts from `irq` on.
    fn virtio(&self, number: u32, kind: u32, names: [&str; 3], irq: u32) -> String {
        let pci = format!("/sys/devices/pci0000:00/0000:00:0{}.0", number + 2);
        let device = format!("{pci}/virtio{number}");
        self.put(&format!("{pci}/class"), &format!("0x0{kind}0000"));
        self.put(&format!("{device}/device"), &format!("0x{kind:04x}"));
        for (name, irq) in names.iter().zip(irq..) {
            self.put(&format!("{pci}/msi_irqs/{irq}"), "msix");
            self.irq(irq, &format!("virtio{number}-{name}"));
        }
        let name = pci.rsplit('/').next().unwrap();
        for (link, to) in [
            (format!("/sys/bus/pci/devices/{name}"), pci.clone()),
            (
                format!("/sys/bus/virtio/devices/virtio{number}"),
                device.clone(),
            ),
        ] {
            self.link(&link, &to);
        }
        device
    }

    fn link(&self, link: &str, to: &str) {
        let link = self.at(link);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(self.at(to), link).unwrap();
    }

    /// A network interface by virtio; its interrupts begin at `irq`.
    pub fn nic(&self, name: &str, number: u32, queues: u32, irq: u32) {
        let device = self.virtio(number, 1, ["config", "input.0", "output.0"], irq);
        let class = format!("/sys/class/net/{name}");
        self.put(&format!("{class}/ifindex"), &(number + 2).to_string());
        self.put(&format!("{class}/speed"), "1000");
        for queue in 0..queues {
            let mask = Cpus::one(queue).to_mask();
            self.put(&format!("{class}/queues/rx-{queue}/rps_cpus"), "00000000");
            self.put(&format!("{class}/queues/rx-{queue}/rps_flow_cnt"), "64");
            self.put(&format!("{class}/queues/tx-{queue}/xps_cpus"), &mask);
        }
        self.link(&format!("{class}/device"), &device);
    }

    fn disk(&self, name: &str, number: u32, irq: u32) {
        let device = self.virtio(number, 2, ["config", "req.0", "req.1"], irq);
        self.put(&format!("/sys/block/{name}/queue/rq_affinity"), "1");
        self.link(&format!("/sys/block/{name}/device"), &device);
    }

    /// A thread with all CPUs.
    pub fn task(&self, pid: i32, tid: i32, parent: i32, name: &str, flags: u32, group: &str) {
        let zeros = "0 ".repeat(12);
        let stat = format!(
            "{tid} ({name}) S {parent} 0 0 0 -1 {flags} {zeros}{}",
            tid * 10
        );
        let mut folders = vec![format!("/proc/{pid}/task/{tid}")];
        folders.extend((pid == tid).then(|| format!("/proc/{pid}")));
        for at in folders {
            self.put(&format!("{at}/stat"), &stat);
            self.put(&format!("{at}/status"), "Name: x\nCpus_allowed_list:\t0-2");
            self.put(
                &format!("{at}/cgroup"),
                &format!("1:name=systemd:/\n0::{group}"),
            );
        }
    }

    /// Affinity of a thread.
    pub fn cpus_of(&self, pid: i32, tid: i32) -> String {
        let status = self.get(&format!("/proc/{pid}/task/{tid}/status"));
        status.rsplit('\t').next().unwrap().to_owned()
    }

    /// All files with their content.
    pub fn all(&self) -> BTreeMap<PathBuf, String> {
        let (mut all, mut folders) = (BTreeMap::new(), vec![self.root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let kind = entry.file_type().unwrap();
                if kind.is_dir() {
                    folders.push(entry.path());
                } else if kind.is_file() {
                    let text = fs::read_to_string(entry.path()).unwrap();
                    // a list's separators do not matter
                    let words: Vec<&str> = text.split_whitespace().collect();
                    all.insert(entry.path(), words.join(" "));
                }
            }
        }
        all
    }

    /// A keeper of this guest.
    pub fn keeper(&self, settings: &Settings) -> Keeper {
        let journal = Journal::open(&settings.journal, BOOT).unwrap();
        Keeper::new(Box::new(self.clone()), Goal::from(settings), journal)
    }

    /// Counts a change; panics when the agent is to be killed at it.
    fn count(&self) {
        let mut routes = self.routes.lock().unwrap();
        if let Some(left) = &mut routes.left {
            if *left == 0 {
                drop(routes);
                panic!("killed");
            }
            *left -= 1;
        }
    }

    fn thread_files(&self, tid: i32, file: &str) -> Vec<PathBuf> {
        let mut found = vec![self.at(&format!("/proc/{tid}/{file}"))];
        for pid in self.real.list_dir("/proc") {
            found.push(self.at(&format!("/proc/{pid}/task/{tid}/{file}")));
        }
        found.retain(|path| path.exists());
        found
    }
}

fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl System for Guest {
    fn read(&self, path: &str) -> io::Result<String> {
        self.real.read(path)
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        self.count();
        let routes = self.routes.lock().unwrap();
        let irq = path
            .strip_prefix("/proc/irq/")
            .and_then(|p| p.split('/').next()?.parse().ok());
        if irq.is_some_and(|irq: u32| routes.managed.contains(&irq)) {
            return Err(error(libc::EIO));
        }
        if path.ends_with("/cpuset.cpus.partition") && text != "member" && routes.no_partition {
            return self
                .real
                .write(path, "root invalid (Parent is not a partition root)\n");
        }
        if path.ends_with("/cgroup.subtree_control") {
            let old = self.get(path);
            let mut words: BTreeSet<&str> = old.split(' ').filter(|w| !w.is_empty()).collect();
            match text.split_at(1) {
                ("+", word) => words.insert(word),
                (_, word) => words.remove(word),
            };
            for group in self.real.list_dir("/sys/fs/cgroup") {
                let group = format!("/sys/fs/cgroup/{group}");
                if self.at(&group).is_dir() && words.contains("cpuset") {
                    self.put(&format!("{group}/cpuset.cpus"), "");
                } else if self.at(&group).is_dir() {
                    fs::remove_file(self.at(&format!("{group}/cpuset.cpus"))).unwrap();
                }
            }
            return self.real.write(path, &Vec::from_iter(words).join(" "));
        }
        if let Some(group) = path
            .strip_prefix("/sys/fs/cgroup")
            .and_then(|p| p.strip_suffix("/cgroup.procs"))
        {
            if !self.at(&format!("/sys/fs/cgroup{group}")).is_dir() {
                return Err(error(libc::ENOENT));
            }
            let group = if group.is_empty() { "/" } else { group };
            for file in self.thread_files(text.parse().unwrap(), "cgroup") {
                fs::write(file, format!("1:name=systemd:/\n0::{group}\n"))?;
            }
            return Ok(());
        }
        self.real.write(path, &format!("{text}\n"))
    }

    fn list_dir(&self, path: &str) -> Vec<String> {
        self.real.list_dir(path)
    }

    fn real_path(&self, path: &str) -> Option<String> {
        self.real.real_path(path)
    }

    fn is_writable(&self, path: &str) -> bool {
        self.real.is_writable(path)
    }

    fn create_dir(&self, path: &str) -> io::Result<()> {
        self.count();
        self.real.create_dir(path)?;
        for (file, text) in [
            ("cpuset.cpus", ""),
            ("cpuset.cpus.partition", "member"),
            ("cgroup.procs", ""),
        ] {
            self.put(&format!("{path}/{file}"), text);
        }
        Ok(())
    }

    fn remove_dir(&self, path: &str) -> io::Result<()> {
        self.count();
        let inside = format!("0::{}\n", path.trim_start_matches("/sys/fs/cgroup"));
        let busy = self.real.list_dir("/proc").into_iter().any(|pid| {
            self.real
                .read(&format!("/proc/{pid}/cgroup"))
                .is_ok_and(|text| text.ends_with(&inside))
        });
        match busy {
            true => Err(error(libc::EBUSY)),
            false => fs::remove_dir_all(self.at(path)),
        }
    }

    fn set_affinity(&self, tid: i32, cpus: &Cpus) -> io::Result<()> {
        self.count();
        let files = self.thread_files(tid, "status");
        if files.is_empty() {
            return Err(error(libc::ESRCH));
        }
        for file in files {
            fs::write(file, format!("Name: x\nCpus_allowed_list:\t{cpus}\n"))?;
        }
        Ok(())
    }

    fn irqbalance(&self, _: i32, words: &str) -> io::Result<String> {
        let mut routes = self.routes.lock().unwrap();
        let banned = routes
            .banned
            .as_mut()
            .ok_or_else(|| error(libc::ECONNREFUSED))?;
        if let Some(irqs) = words.strip_prefix("settings ban irqs ") {
            *banned = irqs.split(' ').filter_map(|w| w.parse().ok()).collect();
            return Ok(String::new());
        }
        let irqs = banned
            .iter()
            .map(|irq| format!("IRQ {irq} LOAD 0 DIFF 0 CLASS 0 "));
        Ok(format!("SLEEP 10 {}BANNED 0", irqs.collect::<String>()))
    }
}

/// Removes the write permission, as the kernel does for managed interrupts.
pub fn read_only(guest: &Guest, path: &str) {
    fs::set_permissions(guest.at(path), fs::Permissions::from_mode(0o444)).unwrap();
}

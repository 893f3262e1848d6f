// SPDX-License-Identifier: Apache-2.0
//! Real QEMU processes for the inventory to read. `-S` keeps their vCPUs from starting.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use viola_host::confirm::registrations;
use viola_host::{Inventory, Vm};

const QEMU: &str = "qemu-system-x86_64";

/// Timeout for every expected change.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Serialises the tests: the inventory queries every QEMU of the host, and a QMP socket has one client at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Confirms a VM, as its launcher would: the inventory queries only those. A process that has gone to the background is none.
pub fn register(pid: u32, name: &str) {
    match registrations::write(Path::new(registrations::FOLDER), pid, name) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => panic!("{e}: these tests need root"),
        _ => {}
    }
}

pub struct Qemu {
    pub name: String,
    pub dir: TempDir,
    child: Option<Child>,
    /// A process to kill that is not our child.
    daemon: Option<u32>,
}

impl Qemu {
    /// Starts a VM called `label-<test process>` with a QMP socket and `more` arguments, separated by blanks; `@` in them
    /// stands for its folder, `%` for its name.
    pub fn start(label: &str, more: &str) -> Self {
        Self::start_through(&[], label, more)
    }

    /// As `start`, through another program such as `unshare`.
    pub fn start_through(wrapper: &[&str], label: &str, more: &str) -> Self {
        let has_qemu = Command::new(QEMU)
            .arg("--version")
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|s| s.success());
        assert!(
            has_qemu,
            "{QEMU} is missing: install it, on Debian by apt-get install --no-install-recommends qemu-system-x86"
        );
        let name = format!("{label}-{}", std::process::id());
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().to_str().unwrap().to_owned();
        let line = format!(
            "-accel tcg,thread=multi -S -nodefaults -display none -machine q35 -m 32 \
-qmp unix:@/qmp,server=on,wait=off {more}"
        );
        let mut words: Vec<String> = wrapper.iter().map(|w| (*w).to_owned()).collect();
        words.push(QEMU.to_owned());
        words.extend(
            line.split_whitespace()
                .map(|w| w.replace('@', &folder).replace('%', &name)),
        );
        let child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut qemu = Self {
            name,
            dir,
            child: Some(child),
            daemon: None,
        };
        qemu.wait_for_socket();
        let is_named = words.iter().any(|word| word == "-name");
        let pid = qemu.pid();
        let name = match is_named {
            true => qemu.name.clone(),
            false => format!("pid-{pid}"),
        };
        register(pid, &name);
        qemu
    }

    fn wait_for_socket(&mut self) {
        let start = Instant::now();
        while !self.socket().exists() {
            if let Some(status) = self.child.as_mut().and_then(|c| c.try_wait().unwrap()) {
                assert!(status.success(), "QEMU ended with {status}");
            }
            assert!(start.elapsed() < TIMEOUT, "QEMU made no QMP socket");
            sleep(Duration::from_millis(20));
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    pub fn pid(&self) -> u32 {
        self.daemon
            .unwrap_or_else(|| self.child.as_ref().unwrap().id())
    }

    /// Takes over a VM that went to the background.
    pub fn adopt_daemon(&mut self, pidfile: &Path) {
        self.child.take().unwrap().wait().unwrap();
        let pid = std::fs::read_to_string(pidfile).unwrap();
        let pid = pid.trim().parse().unwrap();
        self.daemon = Some(pid);
        register(pid, &self.name);
    }

    pub fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(daemon) = self.daemon.take() {
            let _ = Command::new("kill")
                .args(["-KILL", &daemon.to_string()])
                .status();
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.end();
    }
}

/// Refreshes until the VMs called `name` fulfil `wanted`, and returns them.
pub fn until(
    inventory: &mut Inventory,
    name: &str,
    wanted: impl Fn(&[Vm], &[String]) -> bool,
) -> Vec<Vm> {
    let start = Instant::now();
    loop {
        inventory.refresh().unwrap();
        let vms: Vec<Vm> = inventory
            .vms()
            .iter()
            .filter(|vm| vm.name == name)
            .cloned()
            .collect();
        let warnings = warnings(inventory, name);
        if wanted(&vms, &warnings) {
            return vms;
        }
        assert!(
            start.elapsed() < TIMEOUT,
            "not as wanted: {vms:#?} {warnings:#?}"
        );
        sleep(Duration::from_millis(100));
    }
}

pub fn warnings(inventory: &Inventory, name: &str) -> Vec<String> {
    inventory
        .warnings()
        .iter()
        .filter(|w| w.contains(name))
        .cloned()
        .collect()
}

pub fn comm(tid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{tid}/comm")).unwrap();
    text.trim_end().to_owned()
}

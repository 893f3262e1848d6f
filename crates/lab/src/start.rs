// SPDX-License-Identifier: Apache-2.0
//! Starting a guest: its disks, control group and descriptors, and the process of its VMM.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal, setsid};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::cgroup::{self, Controller};
use crate::error::{Error, Result};
use crate::paths::Paths;
use crate::qemu::{self, Accel, Image};
use crate::sched::{close_at_exec, set_policy, unblock_signals};
use crate::spec::{DiskSpec, GuestSpec, Vmm};
use crate::uml;

/// Time limit for a guest to boot that the processor runs.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for an emulated guest to boot beside others on its core.
const EMULATED_BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// A started guest: its process and the lab's ends of its lines.
pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) channel: UnixStream,
    pub(crate) shell: UnixStream,
    pub(crate) agent: AgentLine,
    pub(crate) console: PathBuf,
    pub(crate) cgroup: Option<PathBuf>,
    pub(crate) boot_timeout: Duration,
}

/// The host end of a guest's line for its agent.
pub(crate) enum AgentLine {
    /// A serial line of UML, and the management folder that the guest's kernel creates.
    Serial(UnixStream, PathBuf),
    /// The socket at which QEMU listens.
    Socket(PathBuf),
}

/// Starts guest number `index` of a lab. Call it on the holder thread: the guest is killed when
/// that thread ends.
pub(crate) fn start(
    lab: &str,
    index: usize,
    spec: &GuestSpec,
    vmm: &Vmm,
    paths: &Paths,
    run: &Path,
) -> Result<Started> {
    for disk in &spec.disks {
        create_image(disk)?;
    }
    let console = run.join(format!("{}.log", spec.name));
    let log = File::options().create(true).append(true).open(&console);
    let log = log.map_err(Error::io("make", &console))?;
    let cgroup = Controller::of_guest(vmm, spec)?
        .map(|(controller, weight)| controller.make(lab, &spec.name, weight))
        .transpose()?;
    let procs = cgroup
        .as_deref()
        .map(cgroup::procs)
        .or_else(cgroup::root_procs);
    let group = match &procs {
        Some(path) => Some(
            File::options()
                .write(true)
                .open(path)
                .map_err(Error::io("enter", path))?,
        ),
        None => None,
    };
    let failed = |e: io::Error| Error::guest(&spec.name, format!("cannot start it: {e}"));
    let (channel, guest_channel) = UnixStream::pair().map_err(failed)?;
    let (shell, guest_shell) = UnixStream::pair().map_err(failed)?;
    let (agent, guest_agent) = UnixStream::pair().map_err(failed)?;
    let fds = [
        guest_channel.as_raw_fd(),
        guest_shell.as_raw_fd(),
        guest_agent.as_raw_fd(),
    ];
    let (mut command, agent, boot_timeout) = match vmm {
        Vmm::Uml => {
            let (command, folder) = uml::command(index, spec, paths, run, fds)?;
            (command, AgentLine::Serial(agent, folder), BOOT_TIMEOUT)
        }
        Vmm::Qemu(qemu) => {
            let image = Image::find_from([paths.image.as_path()], "cloud")?;
            let lines = [fds[0], fds[1]];
            let (command, socket) = qemu::command(index, spec, qemu, &image, run, lines)?;
            let timeout = match qemu.accel {
                Some(Accel::Kvm) => BOOT_TIMEOUT,
                _ => EMULATED_BOOT_TIMEOUT,
            };
            (command, AgentLine::Socket(socket), timeout)
        }
    };
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(failed)?)
        .stderr(log);
    let mut cores = CpuSet::new();
    spec.cores.iter().for_each(|core| cores.set(*core));
    let pinned = !spec.cores.is_empty();
    let parent = getpid();
    // SAFETY: between fork and exec the closure makes system calls only and allocates nothing.
    unsafe {
        command.pre_exec(move || enter(parent, pinned.then_some(&cores), group.as_ref(), fds));
    }
    let child = command.spawn().map_err(failed)?;
    Ok(Started {
        child,
        channel,
        shell,
        agent,
        console,
        cgroup,
        boot_timeout,
    })
}

/// Prepares the child before its exec: a session (and so an autogroup) of its own, ordinary
/// scheduling, its cores and cgroup, and only its own descriptors.
fn enter(
    parent: Pid,
    cores: Option<&CpuSet>,
    group: Option<&File>,
    fds: [RawFd; 3],
) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(parent) {
        return Err(io::ErrorKind::NotConnected.into());
    }
    setsid()?;
    set_policy(libc::SCHED_OTHER, 0)?;
    close_at_exec(3);
    unblock_signals();
    let _ = rustix::process::setpriority_process(None, 0);
    if let Some(cores) = cores {
        sched_setaffinity(None, cores)?;
    }
    if let Some(group) = group {
        rustix::io::write(group, b"0")?;
    }
    for fd in fds {
        // SAFETY: both descriptors are open in the parent until the child has started.
        fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::empty())?;
    }
    Ok(())
}

/// Creates a missing disk image, sparse and atomically.
fn create_image(disk: &DiskSpec) -> Result<()> {
    let path = &disk.image;
    if let (Some(size), false) = (disk.size, path.exists()) {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        }
        let mut new = path.clone().into_os_string();
        new.push(".new");
        let file = File::create(&new).map_err(Error::io("make", &new))?;
        file.set_len(size).map_err(Error::io("resize", &new))?;
        fs::rename(&new, path).map_err(Error::io("make", path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_image_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let disk = DiskSpec {
            image: folder.path().join("d/x.img"),
            size: Some(1 << 30),
            read_only: false,
        };
        create_image(&disk).unwrap();
        let meta = fs::metadata(&disk.image).unwrap();
        assert_eq!(meta.len(), 1 << 30);
        assert_eq!(std::os::unix::fs::MetadataExt::blocks(&meta), 0);
        fs::write(&disk.image, "data").unwrap();
        create_image(&disk).unwrap();
        assert_eq!(fs::read(&disk.image).unwrap(), b"data");
    }
}

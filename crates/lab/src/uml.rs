// SPDX-License-Identifier: Apache-2.0
//! Starting a guest: its kernel's command line and process.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal, setsid};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::cgroup::{self, Controller};
use crate::error::{Error, Result};
use crate::guest::Started;
use crate::net::nic_name;
use crate::paths::Paths;
use crate::sched::{close_at_exec, set_policy, unblock_signals};
use crate::spec::{DiskSpec, GuestSpec};

/// Folder of the guests' memory files, which the kernels unlink at once.
pub(crate) const MEMORY: &str = "/dev/shm";

/// Starts guest number `index` of a lab. Call it on the holder thread: the guest is killed when
/// that thread ends.
pub(crate) fn start(
    lab: &str,
    index: usize,
    spec: &GuestSpec,
    paths: &Paths,
    run: &Path,
) -> Result<Started> {
    for disk in &spec.disks {
        create_image(disk)?;
    }
    let console = run.join(format!("{}.log", spec.name));
    let log = File::create(&console).map_err(Error::io("make", &console))?;
    let cgroup = match spec.weight {
        None => None,
        Some(weight) => {
            let none = || {
                Error::guest(
                    &spec.name,
                    "it has a `weight`, but this host has no cpu cgroup controller",
                )
            };
            Some(
                Controller::find()
                    .ok_or_else(none)?
                    .make(lab, &spec.name, weight)?,
            )
        }
    };
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
    let failed = |e: io::Error| Error::guest(&spec.name, format!("cannot start its kernel: {e}"));
    let (channel, guest_channel) = UnixStream::pair().map_err(failed)?;
    let (shell, guest_shell) = UnixStream::pair().map_err(failed)?;
    let (agent, guest_agent) = UnixStream::pair().map_err(failed)?;
    let fds = [
        guest_channel.as_raw_fd(),
        guest_shell.as_raw_fd(),
        guest_agent.as_raw_fd(),
    ];
    let mut command = Command::new(paths.kernel(spec.cpus)?);
    command
        .args(arguments(index, spec, paths, run, fds))
        .env_clear()
        .env("TMPDIR", MEMORY)
        .env("HOME", run)
        .env("PATH", "/usr/bin:/bin")
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
        umid: uml_dir(run).join(&spec.name),
        console,
        cgroup,
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

fn arguments(
    index: usize,
    spec: &GuestSpec,
    paths: &Paths,
    run: &Path,
    [channel, shell, agent]: [RawFd; 3],
) -> Vec<String> {
    let mut words = vec![
        format!("umid={}", spec.name),
        format!("uml_dir={}", uml_dir(run).display()),
        format!("mem={}M", spec.memory >> 20),
        "root=/dev/root".into(),
        "rootfstype=hostfs".into(),
        format!("rootflags={}", paths.image.join("root").display()),
        "ro".into(),
        "init=/init".into(),
        "seccomp=on".into(),
        // the kernel's messages go to the log; its serial lines are the command channel, the shell
        // and the agent's line
        "con=null".into(),
        "con0=null,fd:1".into(),
        "ssl=null".into(),
        format!("ssl0=fd:{channel},fd:{channel}"),
        format!("ssl1=fd:{shell},fd:{shell}"),
        format!("ssl2=fd:{agent},fd:{agent}"),
    ];
    let mut nics = Vec::new();
    for (nic, tap) in spec.taps.iter().enumerate() {
        let [a, b, c, d, e, f] = tap.mac;
        words.push(format!(
            "vec{nic}:transport=raw,ifname={},depth=128,gro=1,mac={a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}",
            nic_name(index, nic)
        ));
        nics.push(format!("vec{nic}:{}/{}", tap.address, tap.prefix));
    }
    for (number, disk) in spec.disks.iter().enumerate() {
        let flag = if disk.read_only { "r" } else { "" };
        words.push(format!(
            "ubd{number}{flag}={}",
            absolute(&disk.image).display()
        ));
    }
    if spec.cpus > 1 {
        words.push(format!("ncpus={}", spec.cpus));
    }
    words.push(format!("viola.name={}", spec.name));
    words.push(format!("viola.nics={}", nics.join(",")));
    words.extend(spec.kernel_args.iter().cloned());
    words
}

/// Folder of the guests' management folders.
fn uml_dir(run: &Path) -> PathBuf {
    run.join("uml")
}

/// An absolute path: the guest's kernel runs in `/`.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
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
    use crate::spec::Spec;

    #[test]
    fn the_command_line_has_nics_and_disks_in_order() {
        let text = "[lab]\nname='t'\n[[guest]]\nname='a'\nmemory='128M'\ndisks=[{image='/x.img',size='1M'},{image='/y.img',size='1M',read_only=true}]\n";
        let spec = Spec::from_toml(text, "t", Path::new("/")).unwrap();
        let paths = Paths {
            image: "/i".into(),
            run: "/r".into(),
        };
        let words = arguments(2, &spec.guests[0], &paths, Path::new("/r/t"), [7, 9, 11]);
        for word in [
            "mem=128M",
            "rootflags=/i/root",
            "ssl0=fd:7,fd:7",
            "ssl2=fd:11,fd:11",
            "vec0:transport=raw,ifname=nic2.0,depth=128,gro=1,mac=02:00:0a:4d:00:0b",
            "ubd0=/x.img",
            "ubd1r=/y.img",
            "viola.nics=vec0:10.77.0.11/24",
        ] {
            assert!(
                words.iter().any(|w| w == word),
                "{word} is not in {words:?}"
            );
        }
    }

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

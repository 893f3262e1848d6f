// SPDX-License-Identifier: Apache-2.0
//! The command line of a User Mode Linux guest's kernel.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Result;
use crate::net::nic_name;
use crate::paths::Paths;
use crate::spec::GuestSpec;

/// Folder of the guests' memory files, which the kernels unlink at once.
pub(crate) const MEMORY: &str = "/dev/shm";

/// The command that runs guest number `index` of a lab, and the folder of its management sockets. The kernel inherits the peers of
/// its command channel, its shell and its agent's line.
///
/// # Errors
/// [`crate::Error::NoSmpKernel`].
pub(crate) fn command(
    index: usize,
    spec: &GuestSpec,
    paths: &Paths,
    run: &Path,
    fds: [RawFd; 3],
) -> Result<(Command, PathBuf)> {
    let mut command = Command::new(paths.kernel(spec.cpus)?);
    command
        .args(arguments(index, spec, paths, run, fds))
        .env_clear()
        .env("TMPDIR", MEMORY)
        .env("HOME", run)
        .env("PATH", "/usr/bin:/bin");
    Ok((command, uml_dir(run).join(&spec.name)))
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
}

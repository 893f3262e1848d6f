// SPDX-License-Identifier: Apache-2.0
//! Process 1: sets the guest up, starts the channel and the shell, reaps children.

use std::net::Ipv4Addr;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::mount::{MountFlags, mount};
use viola_netdev::device;

use crate::{RUN, halt};

pub fn run() -> Result<(), String> {
    if let Err(sentence) = prepare() {
        eprintln!("viola-guest: {sentence}");
    }
    let mut channel = start(&["serve"])?.id();
    let start_shell = || match crate::shell_terminal() {
        Some(terminal) => start(&["shell", terminal]).map(|child| child.id()),
        None => Ok(0),
    };
    let mut shell = start_shell()?;
    loop {
        let ended = match rustix::process::wait(rustix::process::WaitOptions::empty()) {
            Ok(Some((pid, _))) => pid.as_raw_nonzero().get().cast_unsigned(),
            _ => 0,
        };
        if ended == shell && ended != 0 {
            std::thread::sleep(Duration::from_millis(200));
            shell = start_shell()?;
        } else if ended == channel {
            // the lab has closed the channel, or the server failed: the guest cannot be reached any
            // more
            channel = 0;
            halt::power_off();
        } else if ended == 0 && channel == 0 {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

fn start(words: &[&str]) -> Result<Child, String> {
    Command::new("/init")
        .args(words)
        .spawn()
        .map_err(|e| format!("cannot start /init {}: {e}", words.join(" ")))
}

fn prepare() -> Result<(), String> {
    let at = |kind: &'static str, place: &'static str, data: Option<&std::ffi::CStr>| {
        mount(kind, place, kind, MountFlags::empty(), data)
            .map_err(|e| format!("mounting {place}: {e}"))
    };
    at("proc", "/proc", None)?;
    at("sysfs", "/sys", None)?;
    match at("devtmpfs", "/dev", None) {
        Err(_) if std::path::Path::new("/dev/null").exists() => {}
        other => other?,
    }
    for place in ["/tmp", "/run", "/var", "/root"] {
        at("tmpfs", place, Some(c"mode=0755"))?;
    }
    for folder in [
        "/dev/pts",
        "/dev/shm",
        "/var/log",
        "/var/lib",
        "/var/tmp",
        "/run/lock",
        RUN,
    ] {
        std::fs::create_dir_all(folder).map_err(|e| format!("making {folder}: {e}"))?;
    }
    at("devpts", "/dev/pts", None)?;
    at("tmpfs", "/dev/shm", None)?;
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    if let Some(name) = value(&line, "viola.name") {
        rustix::system::sethostname(name.as_bytes()).map_err(|e| format!("host name: {e}"))?;
    }
    // SAFETY: process 1 has one thread here.
    unsafe { std::env::set_var("PATH", "/usr/sbin:/usr/bin:/sbin:/bin") };
    // SAFETY: as above.
    unsafe { std::env::set_var("HOME", "/root") };
    if let Some(list) = value(&line, "viola.apps") {
        restrict_programs(list)?;
    }
    network(value(&line, "viola.nics").unwrap_or_default())
}

/// `viola.apps=1,2`: all programs of the guest run on these vCPUs only; the others are left to its
/// kernel.
fn restrict_programs(list: &str) -> Result<(), String> {
    let mut cpus = rustix::thread::CpuSet::new();
    for cpu in list.split(',') {
        let cpu = cpu
            .parse()
            .ok()
            .filter(|c| *c < rustix::thread::CpuSet::MAX_CPU);
        cpus.set(cpu.ok_or_else(|| format!("viola.apps: cannot read `{list}`"))?);
    }
    rustix::thread::sched_setaffinity(None, &cpus).map_err(|e| format!("viola.apps: {e}"))
}

/// `viola.nics=vec0:10.77.0.11/24,vec1:10.78.0.11/24`
fn network(nics: &str) -> Result<(), String> {
    device::up("lo").map_err(|e| format!("lo: {e}"))?;
    for nic in nics.split(',').filter(|n| !n.is_empty()) {
        let parsed = nic.split_once(':').and_then(|(name, rest)| {
            let (address, prefix) = rest.split_once('/')?;
            Some((
                name,
                address.parse::<Ipv4Addr>().ok()?,
                prefix.parse::<u8>().ok()?,
            ))
        });
        let (name, address, prefix) =
            parsed.ok_or_else(|| format!("viola.nics: cannot read `{nic}`"))?;
        device::set_address(name, address, prefix).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_whitespace()
        .filter_map(|word| word.split_once('='))
        .find(|(k, _)| *k == key)
        .map(|(_, v)| v)
}

#[cfg(test)]
mod tests {
    use super::value;

    #[test]
    fn a_value_is_found_by_its_exact_key() {
        let line = "mem=96M xviola.name=no viola.name=db01 ro\n";
        assert_eq!(value(line, "viola.name"), Some("db01"));
        assert_eq!(value(line, "viola.nics"), None);
    }
}

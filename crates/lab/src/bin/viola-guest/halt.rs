// SPDX-License-Identifier: Apache-2.0
//! Power off and reboot, without losing data on the disks.

use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Signal, kill_process, test_kill_process};
use rustix::system::{RebootCommand, reboot};

pub fn power_off() {
    quiesce();
    let _ = reboot(RebootCommand::PowerOff);
}

pub fn restart() {
    quiesce();
    let _ = reboot(RebootCommand::Restart);
}

/// Ends all processes except the caller and process 1, unmounts the disks, writes dirty data back.
fn quiesce() {
    let others = others();
    for pid in &others {
        let _ = kill_process(*pid, Signal::TERM);
    }
    for _ in 0..20 {
        if others.iter().all(|pid| test_kill_process(*pid).is_err()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    for pid in &others {
        let _ = kill_process(*pid, Signal::KILL);
    }
    rustix::fs::sync();
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    for line in mounts.lines().rev() {
        let mut words = line.split(' ');
        if let (Some(device), Some(place)) = (words.next(), words.next())
            && device.starts_with("/dev/")
            && place != "/"
        {
            let _ = unmount(place, UnmountFlags::empty());
        }
    }
    rustix::fs::sync();
}

fn others() -> Vec<rustix::process::Pid> {
    let me = std::process::id();
    let kernel_thread = |pid: u32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .map(|line| line.is_empty())
            .unwrap_or(true)
    };
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| *pid != 1 && *pid != me && !kernel_thread(*pid))
        .filter_map(|pid| rustix::process::Pid::from_raw(pid.cast_signed()))
        .collect()
}

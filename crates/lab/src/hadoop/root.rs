// SPDX-License-Identifier: Apache-2.0
//! The root file system in a guest's memory in which Java runs.

use std::time::Duration;

use super::Hadoop;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::wire::Output;

/// Path of that root in a guest. The guest's `/mnt`, its disk, is `/mnt` there too.
pub const ROOT: &str = "/run/hadoop";

/// Time limit for mounts and small files.
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// Creates the root if it is missing.
pub(super) fn make(hadoop: &Hadoop, guest: &Guest, hosts: &str) -> Result<()> {
    use std::fmt::Write;
    let mut script = format!(
        "[ -d {ROOT}/proc ] && exit 0\n\
         mkdir -p {ROOT}; mount -t tmpfs -o mode=0755 hadoop {ROOT}; cd {ROOT}\n\
         mkdir proc sys dev tmp run mnt etc var root usr vread\n\
         mount -t proc proc proc; mount -t sysfs sysfs sys; mount -o bind /dev dev; mount -o bind /mnt mnt\n\
         mount -t hostfs -o ro,/usr none usr\n\
         cp /etc/passwd /etc/group /etc/nsswitch.conf etc/; cat > etc/hosts\n"
    );
    // /bin and /lib are links into /usr on most hosts, folders on others
    for name in ["bin", "sbin", "lib", "lib32", "lib64"] {
        let host = format!("/{name}");
        if let Ok(to) = std::fs::read_link(&host) {
            let _ = writeln!(script, "ln -s {} {name}", to.display());
        } else if std::path::Path::new(&host).is_dir() {
            let _ = writeln!(
                script,
                "mkdir {name}; mount -t hostfs -o ro,{host} none {name}"
            );
        }
    }
    for folder in hadoop.folders() {
        let folder = folder.display();
        let _ = writeln!(
            script,
            "mkdir -p .{folder}; mount -t hostfs -o ro,{folder} none .{folder}"
        );
    }
    sh(guest, "making Java's root", &script, hosts, SETUP_TIMEOUT).map(drop)
}

/// Writes a small file; `path` is relative to the new root.
pub(super) fn write(guest: &Guest, path: &str, text: &str) -> Result<()> {
    let script = format!("mkdir -p {ROOT}$(dirname {path}); cat > {ROOT}{path}");
    sh(guest, path, &script, text, SETUP_TIMEOUT).map(drop)
}

/// Starts a program in the background. Its output goes to `/run/NAME.log`, its pid to
/// `/run/NAME.pid`.
pub(super) fn start(guest: &Guest, name: &str, words: &[String]) -> Result<()> {
    let script = format!(
        "setsid {} </dev/null >>/run/{name}.log 2>&1 & echo $! >/run/{name}.pid",
        quoted(words)
    );
    sh(guest, name, &script, "", SETUP_TIMEOUT).map(drop)
}

/// Words in single quotes, for a shell.
pub(super) fn quoted(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|w| format!("'{w}'")).collect();
    words.join(" ")
}

/// Runs a shell script that must succeed; `what` names it in the error.
pub(super) fn sh(
    guest: &Guest,
    what: &str,
    script: &str,
    stdin: &str,
    limit: Duration,
) -> Result<Output> {
    checked(
        guest,
        what,
        guest.exec_for(&["sh", "-ec", script], stdin, limit)?,
    )
}

/// Returns the output of a program that must succeed.
pub(super) fn checked(guest: &Guest, what: &str, output: Output) -> Result<Output> {
    if output.status == 0 && !output.timed_out {
        return Ok(output);
    }
    let end = if output.timed_out {
        "took too long"
    } else {
        "failed"
    };
    // without the stack frames of a Java trace
    let words: Vec<&str> = output
        .stderr
        .lines()
        .filter(|line| !line.trim_start().starts_with("at "))
        .collect();
    let words = &words[words.len().saturating_sub(12)..];
    Err(Error::guest(
        guest.name(),
        format!("{what} {end}: {}", words.join(" / ")),
    ))
}

/// The last lines of a program's log in a guest.
pub fn log(guest: &Guest, name: &str) -> String {
    guest
        .exec(&["tail", "-n", "15", &format!("/run/{name}.log")])
        .map(|output| output.stdout.trim().to_owned())
        .unwrap_or_default()
}

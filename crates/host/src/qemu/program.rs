// SPDX-License-Identifier: Apache-2.0
//! Recognises a QEMU process.

use std::path::{Path, PathBuf};

use crate::error::HostError;
use crate::proc::{self, Stat};

/// Whether the process is a QEMU that runs a VM, by its program. Where this program may not read that, the name in the
/// command line counts.
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

/// libvirt starts QEMU this way to query its capabilities.
fn has_no_machine(args: &[String]) -> bool {
    args.windows(2).any(|pair| {
        matches!(pair[0].as_str(), "-machine" | "--machine" | "-M")
            && pair[1]
                .split(',')
                .any(|o| matches!(o, "none" | "type=none"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_name_identifies_qemu() {
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
}

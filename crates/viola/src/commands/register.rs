// SPDX-License-Identifier: Apache-2.0
//! `viola register`

use std::io;
use std::path::Path;

use viola_host::Inventory;
use viola_host::confirm::registrations::{self, FOLDER};

use crate::args;
use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::quoted;
use viola_cli::table::print;

/// Registers the process of a VM, or removes its registration.
pub fn register(args: &args::Register) -> Outcome {
    in_folder(Path::new(FOLDER), args)
}

fn in_folder(folder: &Path, args: &args::Register) -> Outcome {
    let pid = args.pid;
    let failed = |e: io::Error| Failure::run(format!("{}/{pid}: {e}", folder.display()));
    if args.remove {
        return registrations::remove(folder, pid).map_err(failed);
    }
    let inventory = Inventory::scan().map_err(|e| Failure::run(e.one_line()))?;
    let vm = inventory.vms().iter().find(|vm| vm.pid == pid);
    let Some(vm) = vm else {
        return Err(Failure::usage(format!(
            "process {pid} runs no VM of QEMU, Firecracker, Cloud Hypervisor or User Mode Linux"
        )));
    };
    let name = args.name.as_ref().unwrap_or(&vm.name);
    if *name != vm.name {
        return Err(Failure::usage(format!(
            "process {pid} calls itself {}, not {}; start it under that name",
            quoted(&vm.name),
            quoted(name)
        )));
    }
    registrations::write(folder, pid, name).map_err(failed)?;
    print(&format!(
        "registered process {pid} as VM {}\n",
        quoted(name)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_no_vm_is_not_registered() {
        let dir = tempfile::tempdir().unwrap();
        let args = |remove| args::Register {
            pid: std::process::id(),
            name: None,
            remove,
        };
        let refused = in_folder(dir.path(), &args(false)).unwrap_err();
        assert!(
            refused.to_string().contains("runs no VM of QEMU"),
            "{refused}"
        );
        assert!(in_folder(dir.path(), &args(true)).is_ok());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The lab of the benchmark: four guests with two vCPUs each, of which the first one does I/O.

use std::fmt::Write as _;

use crate::harness::vmm::GuestKind;

/// Name of the guest that does I/O.
pub(super) const IO: &str = "io";
/// Memory of that guest, MiB; it also holds a database.
const MEMORY_MIB: u32 = 192;
/// Number of its disk that is written and read as a whole.
pub(super) const IO_DISK: u8 = 0;
/// Number of the disk of its file servers, where they are measured.
pub(super) const FILES: u8 = 1;

/// Number of the disk of its database.
pub(super) fn calendar(has_files: bool) -> u8 {
    1 + u8::from(has_files)
}

/// The lab's description. The images `files.img` and `calendar.img` lie beside it.
pub(super) fn text(core: usize, kind: GuestKind, has_files: bool, has_calendar: bool) -> String {
    let mut disks = vec![r#"{ image = "io.img", size = "256M" }"#];
    disks.extend(has_files.then_some(r#"{ image = "files.img" }"#));
    disks.extend(has_calendar.then_some(r#"{ image = "calendar.img" }"#));
    // User Mode Linux has the NFS server in its kernel.
    let module = match has_files && kind != GuestKind::Uml {
        true => r#", "viola.modules=nfsd""#,
        false => "",
    };
    let disks = disks.join(", ");
    let mut text = format!("[lab]\nname = \"bench-turbo\"\n{}", kind.lab_keys());
    let mut guest = |name: &str, module: &str, keys: &str| {
        let _ = write!(
            text,
            "\n[[guest]]\nname = \"{name}\"\ncpus = 2\ncores = [{core}]\nkernel_args = [\"viola.apps=1\"{module}]\n{keys}"
        );
    };
    let keys = format!(
        "memory = \"{MEMORY_MIB}M\"\ndisks = [{disks}]\n\
         workloads = [{{ kind = \"nginx\" }}, {{ kind = \"echo\" }}, {{ kind = \"sink\" }}]\n"
    );
    guest(IO, module, &keys);
    for name in ["vm2", "vm3", "vm4"] {
        guest(name, "", "workloads = [{ kind = \"hog\" }]\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_lab::Spec;

    #[test]
    fn each_kind_of_guests_has_the_same_disks_and_programs() {
        let folder = tempfile::tempdir().unwrap();
        for image in ["files.img", "calendar.img"] {
            std::fs::write(folder.path().join(image), "").unwrap();
        }
        for kind in [GuestKind::Uml, GuestKind::Kvm, GuestKind::Emulated] {
            for (has_files, has_calendar) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let text = text(1, kind, has_files, has_calendar);
                let spec = Spec::from_toml(&text, "t", folder.path()).unwrap();
                let io = &spec.guests[0];
                let name = |image: &std::path::Path| image.file_name().unwrap().to_owned();
                let images: Vec<_> = io.disks.iter().map(|d| name(&d.image)).collect();
                assert_eq!(images[usize::from(IO_DISK)], "io.img");
                if has_files {
                    assert_eq!(images[usize::from(FILES)], "files.img");
                }
                if has_calendar {
                    let number = usize::from(calendar(has_files));
                    assert_eq!(images[number], "calendar.img");
                }
                assert!(spec.guests.iter().all(|g| g.cpus == 2));
                let has_module = io.kernel_args.iter().any(|a| a == "viola.modules=nfsd");
                assert_eq!(has_module, has_files && kind != GuestKind::Uml);
            }
        }
    }
}

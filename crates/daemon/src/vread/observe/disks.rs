// SPDX-License-Identifier: Apache-2.0
//! Finds and opens the image files of a VM's disks, for its worker and its readers.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use viola_host::disk_files::{self, FileId, NamedBy};
use viola_host::qemu::disk_watch::BackingChain;
use viola_host::{Hypervisor, Vm};
use viola_vread::control::{Format, ImageSpec};

use viola_config::VmVread;

/// Most disks of a VM that workers get.
const MAX_DISKS: usize = 16;
/// Most files of all these disks together; their descriptors have to fit into one message.
const MAX_FILES: usize = viola_vread::control::MAX_FDS;

/// A disk.
#[derive(Debug)]
pub struct Disk {
    /// What workers know of it.
    pub spec: ImageSpec,
    /// Its files for reading, the active image first. Kept open, so the kernel gives their inode numbers to no other file.
    pub files: Vec<File>,
    /// A raw image for reading and writing, only for the VM's own worker.
    pub own: Option<File>,
}

impl Disk {
    /// Descriptors of several disks, in order.
    pub fn fds<'a>(disks: &[&'a Self]) -> Vec<BorrowedFd<'a>> {
        disks
            .iter()
            .flat_map(|d| &d.files)
            .map(AsFd::as_fd)
            .collect()
    }

    /// The same for the VM's own worker, which may write where the configuration allows it.
    pub fn own_fds(disks: &[Self]) -> Vec<BorrowedFd<'_>> {
        let mut fds = Vec::new();
        for disk in disks {
            match &disk.own {
                Some(own) => fds.push(own.as_fd()),
                None => fds.extend(disk.files.iter().map(AsFd::as_fd)),
            }
        }
        fds
    }
}

/// The files of which a disk consists, as VM or operator name them.
#[derive(Debug, PartialEq, Eq)]
struct ClaimedDisk {
    device: String,
    layers: Vec<(PathBuf, Format)>,
    by: NamedBy,
}

/// Opens all disks of a VM. Returns also why others are left out.
///
/// `chains` are the disks as QEMU reports them. `numbers` are all earlier disks of the VM; the same
/// disk keeps its number, and new numbers start at `first`. With `writes`, raw images are also
/// opened for writing.
pub fn open(
    vm: &Vm,
    config: &VmVread,
    chains: Option<&[BackingChain]>,
    numbers: &[ImageSpec],
    first: u32,
    writes: bool,
) -> (Vec<Disk>, Vec<String>) {
    let (claims, mut left_out) = claims(vm, config, chains);
    let mut disks: Vec<Disk> = Vec::new();
    let mut next = numbers.iter().map(|n| n.id + 1).max().unwrap_or(first);
    for claim in claims {
        let files: usize = disks.iter().map(|d| d.files.len()).sum();
        if disks.len() == MAX_DISKS || files + claim.layers.len() > MAX_FILES {
            left_out.push(format!("{}: the VM has too many disks", claim.device));
            continue;
        }
        match open_one(vm, &claim) {
            Ok((files, id)) => {
                let mut spec = ImageSpec {
                    id: 0,
                    device: claim.device.clone(),
                    serial: None,
                    layers: claim.layers.iter().map(|(_, f)| *f).collect(),
                    path: claim.layers[0].0.display().to_string(),
                    file: id,
                };
                let same = |old: &&ImageSpec| {
                    ImageSpec {
                        id: 0,
                        ..(*old).clone()
                    } == spec
                };
                spec.id = match numbers.iter().find(same) {
                    Some(old) => old.id,
                    None => {
                        next += 1;
                        next - 1
                    }
                };
                let own = match writes && claim.layers.len() == 1 {
                    true => open_own(vm, &claim, id),
                    false => Ok(None),
                };
                // The disk can still be read.
                let own = own.unwrap_or_else(|why| {
                    left_out.push(format!("not to be written: {why}"));
                    None
                });
                disks.push(Disk { spec, files, own });
            }
            Err(why) => left_out.push(why),
        }
    }
    (disks, left_out)
}

/// The disks that the operator names, or else those that the hypervisor names; and why others are left out.
fn claims(
    vm: &Vm,
    config: &VmVread,
    chains: Option<&[BackingChain]>,
) -> (Vec<ClaimedDisk>, Vec<String>) {
    let mut left_out = Vec::new();
    if !config.image.is_empty() {
        let claim = |i: &viola_config::vread::Image| ClaimedDisk {
            device: i.device.clone(),
            layers: std::iter::once((i.path.clone(), i.format))
                .chain(i.backing.iter().map(|l| (l.path.clone(), l.format)))
                .collect(),
            by: NamedBy::Operator,
        };
        return (config.image.iter().map(claim).collect(), left_out);
    }
    let mut claims = Vec::new();
    // Device; files and formats.
    let named: Vec<(String, Vec<(PathBuf, String)>)> = match (vm.hypervisor, chains) {
        (Hypervisor::Qemu, Some(chains)) => chains
            .iter()
            .map(|c| (c.device.clone(), c.layers.clone()))
            .collect(),
        // viola-host recognises UML's COW format; all others are raw.
        (Hypervisor::Uml, _) => vm
            .disks
            .iter()
            .map(|d| {
                let format = d.format.clone().unwrap_or_else(|| "raw".into());
                (d.device.clone(), vec![(d.path.clone(), format)])
            })
            .collect(),
        // These hypervisors report no snapshots and resets.
        (Hypervisor::Qemu | Hypervisor::Firecracker | Hypervisor::CloudHypervisor, _) => Vec::new(),
    };
    for (device, layers) in named {
        let mut known = Vec::new();
        for (path, format) in layers {
            match format_of(&format) {
                Ok(format) => known.push((path, format)),
                Err(format) => {
                    left_out.push(format!(
                        "{device}: {} has format {format}; raw and qcow2 are read",
                        path.display()
                    ));
                    known.clear();
                    break;
                }
            }
        }
        if !known.is_empty() {
            claims.push(ClaimedDisk {
                device,
                layers: known,
                by: NamedBy::Vm,
            });
        }
    }
    (claims, left_out)
}

/// The format by QEMU's block driver, which for a raw image may be that of the file itself.
fn format_of(text: &str) -> Result<Format, &str> {
    match text {
        "raw" | "file" | "host_device" => Ok(Format::Raw),
        "qcow2" => Ok(Format::Qcow2),
        other => Err(other),
    }
}

fn open_one(vm: &Vm, claim: &ClaimedDisk) -> Result<(Vec<File>, FileId), String> {
    let mut files = Vec::new();
    let mut first = None;
    for (path, _) in &claim.layers {
        let (file, id) = disk_files::open(vm, path, claim.by).map_err(|e| {
            let text = e.to_string();
            if text.contains('/') {
                text
            } else {
                format!("{}: {text}", path.display())
            }
        })?;
        first = first.or(Some(id));
        files.push(file);
    }
    first
        .map(|id| (files, id))
        .ok_or_else(|| format!("{}: no file", claim.device))
}

/// A raw image for writing: the same file as the one that is open for reading.
fn open_own(vm: &Vm, claim: &ClaimedDisk, id: FileId) -> Result<Option<File>, String> {
    let Some((path, Format::Raw)) = claim.layers.first() else {
        return Ok(None);
    };
    let with_path = |e: std::io::Error| format!("{}: {e}", path.display());
    let file = disk_files::open_for_writing(vm, path, claim.by).map_err(with_path)?;
    match disk_files::file_id(&file.metadata().map_err(with_path)?) == id {
        true => Ok(Some(file)),
        false => Err(format!(
            "{}: it has just become another file",
            path.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;
    use std::io::Write;
    use std::path::Path;
    use viola_config::vread::{Image, Layer};

    fn me(disks: Vec<viola_host::Disk>) -> Vm {
        let pid = std::process::id();
        Vm {
            pid,
            start_time: viola_host::proc::stat(pid).unwrap().unwrap().start_time,
            disks,
            ..vm("dn1", 1, &[&[0]])
        }
    }

    fn ubd(path: &Path, format: Option<&str>) -> viola_host::Disk {
        viola_host::Disk {
            path: path.to_owned(),
            device: "ubda".into(),
            read_only: false,
            format: format.map(str::to_owned),
        }
    }

    #[test]
    fn a_disk_keeps_its_number_until_it_is_another_file() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[0; 4096]).unwrap();
        let vm = me(vec![ubd(file.path(), None)]);
        let config = VmVread::default();
        let (disks, left_out) = open(&vm, &config, None, &[], 1, false);
        assert_eq!((disks[0].spec.id, left_out.len()), (1, 0));
        assert_eq!(disks[0].spec.layers, [Format::Raw]);
        let numbers = [disks[0].spec.clone()];
        assert_eq!(
            open(&vm, &config, None, &numbers, 1, false).0[0].spec,
            numbers[0]
        );
        let other = tempfile::NamedTempFile::new().unwrap();
        let vm = me(vec![ubd(other.path(), None)]);
        assert_eq!(open(&vm, &config, None, &numbers, 1, false).0[0].spec.id, 2);
    }

    #[test]
    fn a_disk_that_cannot_be_read_is_left_out_with_a_reason() {
        let (disks, why) = open(
            &me(vec![ubd(Path::new("/d.img"), Some("cow"))]),
            &VmVread::default(),
            None,
            &[],
            1,
            false,
        );
        assert!(disks.is_empty());
        assert_eq!(why, ["ubda: /d.img has format cow; raw and qcow2 are read"]);
        // The VM's process names a file that it does not have open.
        let (disks, why) = open(
            &me(vec![ubd(Path::new("/etc/hostname"), None)]),
            &VmVread::default(),
            None,
            &[],
            1,
            false,
        );
        assert!(disks.is_empty());
        assert_eq!(why, ["/etc/hostname: the VM does not have this file open"]);
    }

    #[test]
    fn images_of_the_configuration_go_before_those_of_the_hypervisor() {
        let top = tempfile::NamedTempFile::new().unwrap();
        let base = tempfile::NamedTempFile::new().unwrap();
        let config = VmVread {
            image: vec![Image {
                device: "vda".into(),
                path: top.path().into(),
                format: Format::Qcow2,
                backing: vec![Layer {
                    path: base.path().into(),
                    format: Format::Raw,
                }],
            }],
            ..VmVread::default()
        };
        let (disks, _) = open(
            &me(vec![ubd(Path::new("/x"), None)]),
            &config,
            None,
            &[],
            1,
            false,
        );
        assert_eq!(disks.len(), 1);
        assert_eq!(disks[0].spec.layers, [Format::Qcow2, Format::Raw]);
        assert_eq!(Disk::fds(&[&disks[0]]).len(), 2);
    }

    #[test]
    fn qemus_chain_is_taken_in_its_order() {
        let chain = BackingChain {
            device: "d0".into(),
            layers: vec![
                ("/snap.qcow2".into(), "qcow2".into()),
                ("/base.img".into(), "raw".into()),
            ],
        };
        let vm = Vm {
            hypervisor: Hypervisor::Qemu,
            ..me(Vec::new())
        };
        let (claims, _) = claims(&vm, &VmVread::default(), Some(&[chain]));
        assert_eq!(claims[0].layers[1], ("/base.img".into(), Format::Raw));
        assert_eq!(claims[0].by, NamedBy::Vm);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A lab's guest as a QEMU VM: QEMU's command line for its description.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::accel::Accel;
use super::image::Image;
use super::spec::{VmSpec, file_of};
use crate::error::Result;
use crate::net::port_name;
use crate::spec::{GuestSpec, QemuSpec};

/// The command that runs guest number `index` of a lab, and the socket of its agent's port. QEMU inherits the peers of its command
/// channel and its shell.
///
/// # Errors
/// [`crate::Error::NoQemuImage`].
pub(crate) fn command(
    index: usize,
    spec: &GuestSpec,
    qemu: &QemuSpec,
    image: &Image,
    run: &Path,
    [channel, shell]: [RawFd; 2],
) -> Result<(Command, PathBuf)> {
    let vm = vm(index, spec, qemu, &image.root()?).lines(channel, shell);
    let mut command = Command::new(image.program());
    command.args(vm.words(image, run));
    Ok((command, file_of(run, &spec.name, "agent").into()))
}

fn vm(index: usize, spec: &GuestSpec, qemu: &QemuSpec, root: &Path) -> VmSpec {
    let memory = u32::try_from(spec.memory >> 20).unwrap_or(u32::MAX);
    let mut vm = VmSpec::new(&spec.name)
        .memory(memory)
        .cpus(spec.cpus)
        .agent();
    (vm.accel, vm.kernel) = (qemu.accel.unwrap_or(Accel::Tcg), qemu.kernel.clone());
    for (number, disk) in spec.disks.iter().enumerate() {
        let format = if disk.read_only {
            "raw,readonly=on"
        } else {
            "raw"
        };
        vm = vm.disk(&format!("disk{number}"), &disk.image, format);
    }
    let mut nics = Vec::new();
    for (number, tap) in spec.taps.iter().enumerate() {
        let [a, b, c, d, e, f] = tap.mac;
        let mac = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
        vm = vm.tap(&port_name(index, number), &mac);
        nics.push(format!("eth{number}:{}/{}", tap.address, tap.prefix));
    }
    // last, so that the others are called as a description has them
    vm = vm.disk("viola-root", root, "raw,readonly=on");
    // On a busy core the kernel's own test of the timer interrupt may come too late.
    vm.kernel_args.push("no_timer_check".into());
    vm.kernel_args.push("viola.root=viola-root".into());
    vm.kernel_args
        .push(format!("viola.nics={}", nics.join(",")));
    vm.kernel_args.extend(spec.kernel_args.iter().cloned());
    vm
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Spec;

    #[test]
    fn the_command_line_has_nics_and_disks_in_order() {
        let text = "[lab]\nname='t'\nvmm='qemu'\naccel='kvm'\nkernel='own'\n[[guest]]\nname='a'\ncpus=2\n\
                    disks=[{image='/x.img',size='1M'},{image='/y.img',size='1M',read_only=true}]\n";
        let lab = Spec::from_toml(text, "t", Path::new("/k")).unwrap();
        let crate::spec::Vmm::Qemu(qemu) = &lab.vmm else {
            panic!("{:?}", lab.vmm);
        };
        let vm = vm(2, &lab.guests[0], qemu, Path::new("/root.img")).lines(7, 9);
        let words = vm.words(&Image::at("/i".into()), Path::new("/r"));
        for word in [
            "kvm",
            "/k/own",
            "256M",
            "if=none,id=disk0,file=/x.img,format=raw",
            "if=none,id=disk1,file=/y.img,format=raw,readonly=on",
            "if=none,id=viola-root,file=/root.img,format=raw,readonly=on",
            "virtio-net-pci,netdev=port2.0,mac=02:00:0a:4d:00:0b",
            "socket,id=lab,fd=7",
            "socket,id=shell,fd=9",
            "virtconsole,chardev=shell,name=org.viola.shell.0",
        ] {
            let is_there = words
                .iter()
                .any(|w| w == word || w == word.trim_end_matches('M'));
            assert!(is_there, "{word}: {words:?}");
        }
        let root = words.iter().position(|w| w.contains("id=viola-root"));
        assert!(root > words.iter().position(|w| w.contains("id=disk1")));
        let kernel = words.iter().find(|w| w.contains("rdinit=/boot")).unwrap();
        assert!(
            kernel.ends_with(
                "viola.name=a no_timer_check viola.root=viola-root viola.nics=eth0:10.77.0.11/24"
            ),
            "{kernel}"
        );
    }
}

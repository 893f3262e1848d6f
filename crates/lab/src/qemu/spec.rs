// SPDX-License-Identifier: Apache-2.0
//! Description of a QEMU VM, and QEMU's command line.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::accel::Accel;
use super::image::Image;

/// Time limit for an emulated VM to boot on a busy core.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// A QEMU VM: one vCPU by default, memory that other processes can share, a command channel, three
/// QMP sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSpec {
    /// Name, as `-name guest=`.
    pub name: String,
    /// Memory in MiB.
    pub memory: u32,
    /// vCPUs.
    pub cpus: u32,
    /// Host cores for all its threads; empty: any.
    pub cores: Vec<usize>,
    /// Words appended to QEMU's command line.
    pub args: Vec<String>,
    /// Words appended to the kernel's command line.
    pub kernel_args: Vec<String>,
    /// Whether its state comes from another VM by migration; it does not boot then.
    pub incoming: bool,
    /// Time limit for it to boot.
    pub boot_timeout: Duration,
    /// Hardware virtualisation or emulation.
    pub accel: Accel,
    /// A kernel instead of the image's.
    pub kernel: Option<PathBuf>,
    has_agent: bool,
    /// The host ends' peers of the command channel and of a shell, which QEMU inherits; `None`: QEMU connects to the socket `lab`,
    /// and there is no shell.
    lines: Option<[RawFd; 2]>,
}

impl VmSpec {
    /// A VM of 256 MiB on core 1 without disks.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            memory: 256,
            cpus: 1,
            cores: vec![1],
            args: Vec::new(),
            kernel_args: Vec::new(),
            incoming: false,
            boot_timeout: BOOT_TIMEOUT,
            accel: Accel::of_environment(),
            kernel: None,
            has_agent: false,
            lines: None,
        }
    }

    /// Gives the guest these descriptors of QEMU as its command channel and its shell.
    #[must_use]
    pub(super) fn lines(mut self, channel: RawFd, shell: RawFd) -> Self {
        self.lines = Some([channel, shell]);
        self
    }

    /// Sets the memory in MiB.
    #[must_use]
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory = mib;
        self
    }

    /// Sets the host cores for all its threads; none: any.
    #[must_use]
    pub fn cores(mut self, cores: &[usize]) -> Self {
        self.cores = cores.to_vec();
        self
    }

    /// Sets the number of vCPUs.
    #[must_use]
    pub fn cpus(mut self, n: u32) -> Self {
        self.cpus = n;
        self
    }

    /// Derives the guest's clock from the number of executed instructions, 2^`shift` ns each
    /// (`-icount`): what the guest measures does not depend on the load of this host. All vCPUs
    /// share one thread then.
    #[must_use]
    pub fn icount(self, shift: u32) -> Self {
        self.arg(&format!("-icount shift={shift},sleep=off"))
    }

    /// Adds words to QEMU's command line, separated by blanks.
    #[must_use]
    pub fn arg(mut self, words: &str) -> Self {
        self.args
            .extend(words.split_whitespace().map(str::to_owned));
        self
    }

    /// Adds a virtio disk; the first one is `/dev/vda`. `id` names its block node.
    #[must_use]
    pub fn disk(self, id: &str, image: &Path, format: &str) -> Self {
        self.drive(id, image, &format!("format={format}"), "virtio-blk-pci")
    }

    /// Adds an NVMe disk with a raw image; the first one is `/dev/nvme0n1`. Zeros that the guest
    /// writes become holes in the image. `id` names its block node.
    #[must_use]
    pub fn nvme(self, id: &str, image: &Path) -> Self {
        self.drive(id, image, "format=raw,discard=unmap", "nvme")
    }

    fn drive(self, id: &str, image: &Path, options: &str, device: &str) -> Self {
        let file = image.display().to_string().replace(',', ",,");
        self.arg("-drive")
            .word(format!("if=none,id={id},file={file},{options}"))
            .arg(&format!(
                "-device {device},drive={id},serial={id},id=disk-{id}"
            ))
    }

    /// Adds a virtio NIC on an existing TAP device in the network namespace of the starting thread.
    /// With KVM the host's kernel moves its packets, where it has vhost-net.
    #[must_use]
    pub fn tap(self, name: &str, mac: &str) -> Self {
        let has_vhost = self.accel == Accel::Kvm && Path::new("/dev/vhost-net").exists();
        let vhost = if has_vhost { ",vhost=on" } else { "" };
        self.arg(&format!(
            "-netdev tap,id={name},ifname={name},script=no,downscript=no{vhost} \
             -device virtio-net-pci,netdev={name},mac={mac}"
        ))
    }

    /// Adds a port for viola-agent, `/dev/virtio-ports/org.viola.agent.0`;
    /// [`super::QemuVm::agent_socket`] is its host end.
    #[must_use]
    pub fn agent(mut self) -> Self {
        self.has_agent = true;
        self
    }

    /// Adds a vhost-user-fs device `id` with tag `viola` behind a root port from which it can be
    /// unplugged. `chardev` are further options of its socket.
    #[must_use]
    pub fn vhost_user_fs(self, id: &str, socket: &Path, chardev: &str) -> Self {
        let path = socket.display().to_string().replace(',', ",,");
        self.arg("-chardev")
            .word(format!("socket,id=chr-{id},path={path}{chardev}"))
            .arg(&format!(
                "-device vhost-user-fs-pci,chardev=chr-{id},tag=viola,id={id},bus=rp0"
            ))
    }

    /// Receives its state from another VM, by QMP `migrate-incoming`.
    #[must_use]
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self.arg("-incoming defer")
    }

    /// Adds one word that may contain blanks.
    #[must_use]
    pub fn word(mut self, word: impl Into<String>) -> Self {
        self.args.push(word.into());
        self
    }

    /// QEMU's command line; sockets and the console are in `folder`.
    pub(super) fn words(&self, image: &Image, folder: &Path) -> Vec<String> {
        let at = |what: &str| file_of(folder, &self.name, what);
        let (accel, cpu) = (self.accel, self.accel.cpu());
        let (memory, cpus) = (self.memory, self.cpus);
        let line = format!(
            "-accel {accel} -cpu {cpu} -machine q35,memory-backend=mem -smp {cpus} -m {memory} \
             -object memory-backend-memfd,id=mem,size={memory}M,share=on \
             -nodefaults -no-user-config -display none \
             -device pcie-root-port,id=rp0,chassis=1 -device pcie-root-port,id=rp1,chassis=2 \
             -device virtio-serial-pci"
        );
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
        add(
            "-name",
            format!("guest={},debug-threads=on", self.name.replace(',', ",,")),
        );
        for folder in image.firmware() {
            add("-L", folder.display().to_string());
        }
        let kernel = self.kernel.clone().unwrap_or_else(|| image.kernel());
        add("-kernel", kernel.display().to_string());
        add("-initrd", image.initrd().display().to_string());
        let kernel = [
            "console=ttyS0 rdinit=/boot mitigations=off tsc=reliable quiet loglevel=5",
            &format!("viola.name={}", self.name),
            &self.kernel_args.join(" "),
        ];
        add("-append", kernel.join(" ").trim_end().to_owned());
        // beside QEMU's own messages, if they go to the same file
        let log = format!("file,id=log,path={},append=on", at("log"));
        add("-chardev", log);
        add("-serial", "chardev:log".into());
        let channel = match self.lines {
            None => format!("path={}", at("lab")),
            Some([channel, shell]) => {
                add("-chardev", format!("socket,id=shell,fd={shell}"));
                let name = "org.viola.shell.0";
                add("-device", format!("virtconsole,chardev=shell,name={name}"));
                format!("fd={channel}")
            }
        };
        add("-chardev", format!("socket,id=lab,{channel}"));
        add(
            "-device",
            "virtserialport,chardev=lab,name=org.viola.lab.0".into(),
        );
        if self.has_agent {
            let path = at("agent");
            add(
                "-chardev",
                format!("socket,id=agent,path={path},server=on,wait=off"),
            );
            let name = "org.viola.agent.0";
            add(
                "-device",
                format!("virtserialport,chardev=agent,name={name}"),
            );
        }
        // `qmp` is for viola's inventory, `lab.qmp` for tests, `viola.qmp` for viola's events
        for socket in ["qmp", "lab.qmp", "viola.qmp"] {
            add("-qmp", format!("unix:{},server=on,wait=off", at(socket)));
        }
        words.extend(self.args.iter().cloned());
        words
    }
}

/// Path of a socket or log of this VM; one folder holds those of several VMs.
pub(super) fn file_of(folder: &Path, name: &str, what: &str) -> String {
    folder.join(format!("{name}.{what}")).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_has_shared_memory_and_all_devices() {
        let spec = VmSpec::new("a")
            .memory(128)
            .disk("d0", Path::new("/x, y.img"), "raw")
            .nvme("n0", Path::new("/n.img"))
            .tap("t0", "52:54:00:00:00:01")
            .agent()
            .vhost_user_fs("fs0", Path::new("/s"), ",reconnect=1");
        let words = spec.words(&Image::at("/i".into()), Path::new("/r"));
        for word in [
            "memory-backend-memfd,id=mem,size=128M,share=on",
            "if=none,id=d0,file=/x,, y.img,format=raw",
            "virtserialport,chardev=agent,name=org.viola.agent.0",
            "nvme,drive=n0,serial=n0,id=disk-n0",
            "tap,id=t0,ifname=t0,script=no,downscript=no",
            "virtio-net-pci,netdev=t0,mac=52:54:00:00:00:01",
            "socket,id=chr-fs0,path=/s,reconnect=1",
            "unix:/r/a.viola.qmp,server=on,wait=off",
            "/i/initrd.img",
        ] {
            assert!(words.iter().any(|w| w == word), "{word}: {words:?}");
        }
        assert!(!words.iter().any(|w| w == "-incoming"));
    }
}

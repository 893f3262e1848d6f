// SPDX-License-Identifier: Apache-2.0
//! What a QEMU guest is made of, and the words of its command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};

/// Longest wait for an emulated guest to boot on a busy core.
const BOOT: Duration = Duration::from_secs(120);

/// Kernel and initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image(PathBuf);

impl Image {
    /// The folder named by `VIOLA_QEMU_IMAGE`, else `build/qemu/cloud` in the working folder, the program's folder or
    /// one above either.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] when there is none.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().ok();
        let folders = [std::env::current_dir().ok(), program];
        Self::find_from(folders.iter().flatten().map(PathBuf::as_path), "cloud")
    }

    /// As [`Image::find`], the image of this kind (`cloud` or `rdma`), looking upwards from these folders.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] when there is none.
    pub fn find_from<'a>(starts: impl IntoIterator<Item = &'a Path>, kind: &str) -> Result<Self> {
        let named = std::env::var_os("VIOLA_QEMU_IMAGE").map(PathBuf::from);
        let below = Path::new("build/qemu").join(kind);
        let above = starts.into_iter().flat_map(Path::ancestors);
        let all = named.into_iter().chain(above.map(|f| f.join(&below)));
        let mut first = None;
        for folder in all {
            if folder.join("vmlinuz").is_file() && folder.join("initrd.img").is_file() {
                return Ok(Self(std::path::absolute(&folder).unwrap_or(folder)));
            }
            first = first.or(Some(folder));
        }
        Err(Error::NoQemuImage(first.unwrap_or(below)))
    }

    /// Kernel of it.
    pub fn kernel(&self) -> PathBuf {
        self.0.join("vmlinuz")
    }

    /// QEMU: that of `VIOLA_QEMU`, else the one that was fetched with the image, else the machine's own.
    pub fn program(&self) -> PathBuf {
        let own = self
            .0
            .with_file_name("program/root/usr/bin/qemu-system-x86_64");
        match std::env::var_os("VIOLA_QEMU") {
            Some(path) => path.into(),
            None if own.is_file() => own,
            None => "qemu-system-x86_64".into(),
        }
    }

    /// Folders with the firmware of a QEMU that was fetched: it looks for them where its package would have put them.
    fn firmware(&self) -> Vec<PathBuf> {
        let program = self.program();
        let usr = program.parent().and_then(Path::parent);
        let folders = ["share/seabios", "share/qemu", "lib/ipxe/qemu"];
        let found = usr.into_iter().flat_map(|usr| folders.map(|f| usr.join(f)));
        found.filter(|folder| folder.is_dir()).collect()
    }

    /// What was made for it and is beside its folder.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.0.with_file_name(name)
    }

    /// Initramfs of it.
    pub fn initrd(&self) -> PathBuf {
        self.0.join("initrd.img")
    }
}

/// A QEMU guest: one vCPU unless more are asked for, memory that others may share, a command channel, three QMP sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Name, as `-name guest=`.
    pub name: String,
    /// Memory in MiB.
    pub memory: u32,
    /// vCPUs.
    pub cpus: u32,
    /// Cores of the host that all its threads run on; empty: any.
    pub cores: Vec<usize>,
    /// Words appended to QEMU's command line.
    pub args: Vec<String>,
    /// Words appended to the kernel's command line.
    pub kernel_args: Vec<String>,
    /// Whether its state comes from another one; it does not boot then.
    pub incoming: bool,
    /// How long it may take to boot.
    pub boot: Duration,
    has_agent: bool,
}

impl Spec {
    /// A guest of 256 MiB on core 1 without disks.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            memory: 256,
            cpus: 1,
            cores: vec![1],
            args: Vec::new(),
            kernel_args: Vec::new(),
            incoming: false,
            boot: BOOT,
            has_agent: false,
        }
    }

    /// Another amount of memory, in MiB.
    #[must_use]
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory = mib;
        self
    }

    /// Other cores of the host for all its threads; none: any.
    #[must_use]
    pub fn on(mut self, cores: &[usize]) -> Self {
        self.cores = cores.to_vec();
        self
    }

    /// So many vCPUs.
    #[must_use]
    pub fn cpus(mut self, n: u32) -> Self {
        self.cpus = n;
        self
    }

    /// Time in the guest is counted in instructions, of 2^`shift` ns each: what it measures of itself does not depend
    /// on what else runs on this machine. Its vCPUs then take turns in one thread.
    #[must_use]
    pub fn counted(self, shift: u32) -> Self {
        self.arg(&format!("-icount shift={shift},sleep=off"))
    }

    /// Words for QEMU's command line, separated by blanks.
    #[must_use]
    pub fn arg(mut self, words: &str) -> Self {
        self.args
            .extend(words.split_whitespace().map(str::to_owned));
        self
    }

    /// A virtio disk; the first one is `/dev/vda`. `id` names its block node.
    #[must_use]
    pub fn disk(self, id: &str, image: &Path, format: &str) -> Self {
        self.drive(id, image, &format!("format={format}"), "virtio-blk-pci")
    }

    /// An NVMe disk with a raw image; the first one is `/dev/nvme0n1`. It writes zeros by itself, as holes in its image. `id`
    /// names its block node.
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

    /// A virtio NIC at a TAP device that is there, in the network namespace of the thread that starts it.
    #[must_use]
    pub fn tap(self, name: &str, mac: &str) -> Self {
        self.arg(&format!(
            "-netdev tap,id={name},ifname={name},script=no,downscript=no \
             -device virtio-net-pci,netdev={name},mac={mac}"
        ))
    }

    /// A port for viola-agent: `/dev/virtio-ports/org.viola.agent.0`; [`super::Machine::agent_socket`] is its other end.
    #[must_use]
    pub fn agent(mut self) -> Self {
        self.has_agent = true;
        self
    }

    /// A vhost-user-fs device behind a root port from which it can be unplugged, as device `id` with tag `viola`;
    /// `chardev` are further options of its socket.
    #[must_use]
    pub fn mount(self, id: &str, socket: &Path, chardev: &str) -> Self {
        let path = socket.display().to_string().replace(',', ",,");
        self.arg("-chardev")
            .word(format!("socket,id=chr-{id},path={path}{chardev}"))
            .arg(&format!(
                "-device vhost-user-fs-pci,chardev=chr-{id},tag=viola,id={id},bus=rp0"
            ))
    }

    /// Takes over from another one, by QMP `migrate-incoming`.
    #[must_use]
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self.arg("-incoming defer")
    }

    /// One word that may contain blanks.
    #[must_use]
    pub fn word(mut self, word: impl Into<String>) -> Self {
        self.args.push(word.into());
        self
    }

    /// The command line; sockets and the console are in `folder`.
    pub(super) fn words(&self, image: &Image, folder: &Path) -> Vec<String> {
        let at = |what: &str| super::machine::beside(folder, &self.name, what);
        let accel = std::env::var("VIOLA_QEMU_ACCEL").unwrap_or_else(|_| "tcg".into());
        let cpu = if accel == "kvm" { "host" } else { "max" };
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
        add("-kernel", image.kernel().display().to_string());
        add("-initrd", image.initrd().display().to_string());
        let kernel = [
            "console=ttyS0 rdinit=/boot mitigations=off tsc=reliable quiet loglevel=5",
            &format!("viola.name={}", self.name),
            &self.kernel_args.join(" "),
        ];
        add("-append", kernel.join(" ").trim_end().to_owned());
        add("-serial", format!("file:{}", at("log")));
        add("-chardev", format!("socket,id=lab,path={}", at("lab")));
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
        // the first is for the inventory, the last for viola's events
        for socket in ["qmp", "lab.qmp", "viola.qmp"] {
            add("-qmp", format!("unix:{},server=on,wait=off", at(socket)));
        }
        words.extend(self.args.iter().cloned());
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_shares_the_memory_and_names_what_was_asked_for() {
        let spec = Spec::new("a")
            .memory(128)
            .disk("d0", Path::new("/x, y.img"), "raw")
            .nvme("n0", Path::new("/n.img"))
            .tap("t0", "52:54:00:00:00:01")
            .agent()
            .mount("fs0", Path::new("/s"), ",reconnect=1");
        let words = spec.words(&Image("/i".into()), Path::new("/r"));
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

    #[test]
    fn a_missing_image_is_said_with_the_script_that_makes_it() {
        let top = tempfile::tempdir().unwrap();
        let error = Image::find_from([top.path()], "cloudy").unwrap_err();
        assert!(error.to_string().contains("qemu-image.sh"), "{error}");
    }
}

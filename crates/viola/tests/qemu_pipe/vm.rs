// SPDX-License-Identifier: Apache-2.0
//! A QEMU VM with files, its agent and programs, and a daemon that moves bytes for it.

use std::fs::File;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::thread::{UnshareFlags, unshare_unsafe};
use viola_lab::Paths;
use viola_lab::qemu::{Image, QemuVm, VmSpec};
use viola_lab::wire::Workload;
use viola_proto::pipe::status::PipeStats;

use crate::client::Client;
use crate::common::Daemon;
use crate::common::guests::within;
use crate::rig::{
    GUEST, GuestPermit, HOST, MIB, NGINX, guest_permit, ip, noise, senders, wait_until_served,
};

/// Timeout of a step of an emulated VM.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(90);
/// Timeout of a change of the counters.
const COUNTER_TIMEOUT: Duration = Duration::from_secs(20);
/// The environment of programs that use the agent, inside the lab's root folder.
pub const LIBRARY: &str =
    "LD_PRELOAD=/usr/lib/libvpipe_preload.so VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock";

/// The kind of disk that holds the VM's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// The disk can write zeros by itself.
    Nvme,
    /// The VM has to write zeros to the disk.
    Virtio,
}

impl Disk {
    /// Its name in the guest, whose first virtio disk has the programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nvme => "nvme0n1",
            Self::Virtio => "vdb",
        }
    }
}

/// A VM and a daemon. The thread that boots it stays in the network namespace of its bridge. Only one exists at a time.
pub struct Vm {
    pub daemon: Daemon,
    pub machine: QemuVm,
    /// Content of `f0` and `f1` in `/r/tmp/d`.
    pub files: Vec<Vec<u8>>,
    folder: tempfile::TempDir,
    disk: Disk,
    _permit: GuestPermit,
}

impl Vm {
    /// Boots a VM with files of these sizes and starts its agent; `more` are keys of `[vm.pipe]`.
    pub fn boot(name: &str, disk: Disk, sizes: &[usize], more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let permit = guest_permit();
        let mut daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n[[vm]]\nname = \"qemu:{name}\"\n\
             [vm.pipe]\nwrites = true\n{more}\n"
        ));
        network();
        let files: Vec<Vec<u8>> = (1..).zip(sizes).map(|(n, s)| noise(n, *s)).collect();
        let tree = folder.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        for (number, file) in files.iter().enumerate() {
            std::fs::write(tree.join(format!("f{number}")), file).unwrap();
        }
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let paths = Paths::find_from([here]).unwrap_or_else(|e| panic!("{e}"));
        let size = sizes.iter().sum::<usize>() + 512 * MIB;
        let files_at = ext4(folder.path(), "d.img", &tree, size);
        let tools_at = ext4(folder.path(), "t.img", &paths.image.join("root"), 256 * MIB);
        let spec = VmSpec::new(name)
            .memory(1024)
            .disk("tools", &tools_at, "raw")
            .tap("tap0", "52:54:00:77:00:11")
            .agent();
        let spec = match disk {
            Disk::Nvme => spec.nvme("files", &files_at),
            Disk::Virtio => spec.disk("files", &files_at, "raw"),
        };
        let image = Image::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
        let machine = QemuVm::start(&spec, &image, folder.path()).unwrap_or_else(|e| panic!("{e}"));
        machine
            .sh(&format!(
                "modprobe virtio_net; ip link set lo up; ip address add {GUEST}/24 dev eth0; ip link set eth0 up; \
                 mkdir -p /r /run/viola; mount -o ro /dev/vda /r; mount -t tmpfs tmpfs /r/tmp; \
                 mount -t proc proc /r/proc; mount --bind /dev /r/dev; \
                 mkdir /r/tmp/d /r/tmp/n; mount /dev/{} /r/tmp/d",
                disk.name()
            ))
            .unwrap();
        let agent = Workload::agent(
            "[pipe]\nfiles = ['/r/tmp/d']\ninto = ['/r/tmp/d']\nsocket = '/r/tmp/n/pipe.sock'\n",
        );
        machine.start_workload("agent", agent).unwrap();
        wait_until_served(&mut daemon, 1);
        Self {
            daemon,
            machine,
            files,
            folder,
            disk,
            _permit: permit,
        }
    }

    /// Runs a script beside the agent and asserts that it succeeds.
    pub fn sh(&self, script: &str) -> String {
        self.machine.sh(script).unwrap_or_else(|e| {
            let says = self
                .machine
                .sh("viola-agent --config /run/viola/agent.toml status");
            panic!("{e}\nthe agent says: {}", says.unwrap_or_default())
        })
    }

    /// Runs a script in the root of the lab's programs, in the folder of the files, and asserts that it succeeds.
    pub fn run(&self, script: &str) -> String {
        self.sh(&format!(
            "chroot /r sh -c 'set -e; cd /tmp/d; {script}' 2>&1"
        ))
    }

    /// Starts nginx with the library.
    pub fn start_nginx(&self) {
        let config = NGINX.config;
        self.sh(&format!("cat > /r/tmp/n/nginx.conf <<'END'\n{config}END"));
        let start = NGINX.start;
        self.run(&format!(
            "{LIBRARY} {start} > /tmp/n/out 2>&1 || {{ cat /tmp/n/out; false; }}"
        ));
        self.wait_listening(NGINX.port);
    }

    /// Waits until a server in the guest listens.
    pub fn wait_listening(&self, port: u16) {
        within(CHANGE_TIMEOUT, "the server listens", || {
            connect(port).is_ok()
        });
    }

    /// An nginx client on the host's side of the bridge.
    pub fn client(&self) -> Client {
        Client::of(connect(NGINX.port).unwrap())
    }

    pub fn work(&self) -> PipeStats {
        senders(&self.daemon)[0].work.clone()
    }

    /// Waits until `begun` connections are counted and no transfer is running. Returns the counters.
    pub fn settled(&self, begun: u64) -> PipeStats {
        self.counted(|work| {
            let over = work.transfers.is_empty() && work.returned + work.broken == work.begun;
            over && work.begun >= begun
        })
    }

    /// Waits until the counters satisfy a condition. (They follow a moment after a client's last byte.)
    pub fn counted(&self, wanted: impl Fn(&PipeStats) -> bool) -> PipeStats {
        let begin = Instant::now();
        loop {
            let work = self.work();
            if wanted(&work) {
                return work;
            }
            assert!(begin.elapsed() < COUNTER_TIMEOUT, "{work:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Bytes that the guest has written to the disk of its files. Zeros that the disk writes by itself do not count.
    pub fn written(&self) -> u64 {
        let all = self.machine.qmp("query-blockstats", None).unwrap();
        let of = |d: &&serde_json::Value| d["device"] == "files";
        let disk = all.as_array().unwrap().iter().find(of).unwrap();
        disk["stats"]["wr_bytes"].as_u64().unwrap()
    }

    /// Unmounts the files, asserts that their file system is consistent, and mounts it again.
    pub fn check_disk(&self) {
        // The agent keeps files open for a while, because a program may use them again.
        within(CHANGE_TIMEOUT, "the file system is unmounted", || {
            self.machine.sh("umount /r/tmp/d").is_ok()
        });
        let checked = Command::new("/usr/sbin/e2fsck")
            .arg("-fn")
            .arg(self.folder.path().join("d.img"))
            .output()
            .unwrap();
        assert!(checked.status.success(), "{checked:?}");
        self.sh(&format!("mount /dev/{} /r/tmp/d", self.disk.name()));
    }
}

/// Moves the calling thread into a new network namespace that has a bridge with a tap.
pub fn network() {
    // SAFETY: only this thread changes its network namespace; file descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
    for words in [
        "link set lo up",
        "link add br0 type bridge",
        &format!("address add {HOST}/24 dev br0"),
        "link set br0 up",
        "tuntap add dev tap0 mode tap",
        "link set tap0 master br0 up",
    ] {
        ip(words);
    }
}

/// A connection from the host's side of the bridge.
pub fn connect(port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect_timeout(&(GUEST, port).into(), Duration::from_secs(5))
}

/// Creates a disk image with a file system that contains the folder.
pub fn ext4(folder: &Path, name: &str, tree: &Path, size: usize) -> PathBuf {
    let image = folder.join(name);
    File::create(&image).unwrap().set_len(size as u64).unwrap();
    let made = Command::new("/usr/sbin/mkfs.ext4")
        .args(["-q", "-d"])
        .args([tree, &image])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    image
}

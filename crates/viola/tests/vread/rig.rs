// SPDX-License-Identifier: Apache-2.0
//! The VMs and the daemon of these tests.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use viola_lab::testing::{GuestPermit, guest_permit};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::vread::{Datanode, Reader, Vread};

use crate::common::Daemon;

pub const POOL: &str = "BP-1-10.0.0.1-2";
pub const BLOCK_FOLDER: &str =
    "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// A DataNode VM with a disk of blocks and one of other files, a reader VM, and a daemon that permits the reads.
pub struct Rig {
    pub daemon: Daemon,
    pub lab: Option<Lab>,
    /// The DataNode VM's lab after its second start.
    pub dn_lab: Option<Lab>,
    pub folder: tempfile::TempDir,
    _permit: GuestPermit,
}

impl Rig {
    pub fn boot(name: &str, pools: &str) -> Self {
        let permit = guest_permit();
        let folder = tempfile::tempdir().unwrap();
        for image in ["d.img", "e.img"] {
            let image = folder.path().join(image);
            File::create(&image).unwrap().set_len(200 << 20).unwrap();
            let made = Command::new("/usr/sbin/mkfs.ext4")
                .args(["-q", image.to_str().unwrap()])
                .output()
                .unwrap();
            assert!(made.status.success(), "{made:?}");
        }
        let mut daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n[vread]\n\
             allow = [{{ reader = \"{name}-rd\", datanode = \"uml:{name}-d*\"{pools} }}]\n"
        ));
        let socket = daemon.run_dir().join(format!("mounts/{name}-rd.sock"));
        daemon.wait("socket for the reader", |_| socket.exists());
        let text = format!(
            "[lab]\nname='{name}'\n\
             [[guest]]\nname='{name}-dn'\ncores=[1]\ndisks=[{{image='d.img'}}, {{image='e.img'}}]\n\
             [[guest]]\nname='{name}-rd'\ncores=[1]\nkernel_args=['virtio_uml.device={}:26']\n",
            socket.display()
        );
        let lab = up(&text, name, folder.path());
        let rig = Self {
            daemon,
            lab: Some(lab),
            dn_lab: None,
            folder,
            _permit: permit,
        };
        rig.dn(&format!(
            "mkdir -p /tmp/d /tmp/e; mount /dev/ubda /tmp/d; mount /dev/ubdb /tmp/e; mkdir -p {BLOCK_FOLDER}"
        ));
        rig
    }

    pub fn lab(&self) -> &Lab {
        self.lab.as_ref().unwrap()
    }

    /// Boots the DataNode VM once more, in its own lab.
    pub fn boot_dn(&self, lab: &str, guest: &str) -> Lab {
        let text = format!(
            "[lab]\nname='{lab}'\n[[guest]]\nname='{guest}'\ncores=[1]\ndisks=[{{image='d.img'}}]\n"
        );
        up(&text, lab, self.folder.path())
    }

    pub fn guest(&self, what: &str) -> &Guest {
        let name = format!("{}-{what}", self.lab().name());
        match &self.dn_lab {
            Some(lab) if what == "dn" => lab.guest(&name).unwrap(),
            _ => self.lab().guest(&name).unwrap(),
        }
    }

    pub fn try_sh(&self, guest: &str, script: &str) -> (i32, String) {
        let output = self
            .guest(guest)
            .exec_for(&["sh", "-c", script], "", Duration::from_secs(60))
            .unwrap();
        (output.status, output.stdout + &output.stderr)
    }

    pub fn dn(&self, script: &str) -> String {
        let (status, text) = self.try_sh("dn", script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    pub fn rd(&self, script: &str) -> String {
        let (status, text) = self.try_sh("rd", script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    /// Creates a finished block as a DataNode does.
    pub fn make(&self, id: u32, kib: u32) {
        self.dn(&format!(
            "mkdir -p /tmp/d/rbw; dd if=/dev/urandom of=/tmp/d/rbw/blk_{id} bs=1024 count={kib} 2>/dev/null; \
             head -c {} /dev/urandom >/tmp/d/rbw/blk_{id}_1001.meta; \
             mv /tmp/d/rbw/blk_{id}_1001.meta {BLOCK_FOLDER}/; mv /tmp/d/rbw/blk_{id} {BLOCK_FOLDER}/",
            kib * 8 + 7
        ));
    }

    pub fn start_agent(&self) {
        let agent = Workload::agent("data = ['/tmp/d/dfs']\nquiet_ms = 500\nsettle_ms = 200\n");
        self.guest("dn").start("agent", agent).unwrap();
    }

    pub fn shown(&self) -> (Datanode, Reader) {
        let all: Vread = self.daemon.json(&["vread", "stat"]);
        let datanode = all.datanodes.first().cloned().unwrap_or_default();
        (datanode, all.readers.first().cloned().unwrap_or_default())
    }

    pub fn wait_blocks(&mut self, count: u64) {
        let limit = std::time::Instant::now() + CHANGE_TIMEOUT;
        loop {
            let (datanode, _) = self.shown();
            if datanode.blocks == count && datanode.serving {
                return;
            }
            assert!(
                std::time::Instant::now() < limit,
                "not {count} blocks: {datanode:?}\n{}",
                self.daemon.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asserts that the reader reads both files of a block as the DataNode has them.
    pub fn assert_same(&self, id: u32) {
        for (theirs, ours) in [
            (format!("blk_{id}"), format!("blk_{id}_1001")),
            (format!("blk_{id}_1001.meta"), format!("blk_{id}_1001.meta")),
        ] {
            let sum = |text: String| text.split(' ').next().unwrap().to_owned();
            assert_eq!(
                sum(self.rd(&format!("sha256sum < /mnt/{POOL}/{ours}"))),
                sum(self.dn(&format!("sha256sum < {BLOCK_FOLDER}/{theirs}"))),
                "{ours}"
            );
        }
    }

    pub fn is_absent(&self, id: u32) -> bool {
        let (status, text) = self.try_sh("rd", &format!("cat /mnt/{POOL}/blk_{id}_1001 | wc -c"));
        assert_eq!(status, 0, "{text}");
        text.contains("No such file") || text.contains("tale")
    }

    /// Boots with three named blocks and the mount.
    pub fn with_blocks(name: &str) -> Self {
        let mut rig = Self::boot(name, "");
        for id in 1..=3 {
            rig.make(id, 300 * id);
        }
        rig.start_agent();
        rig.wait_blocks(3);
        rig.rd("mount -t virtiofs viola /mnt");
        rig
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for lab in [self.lab.take(), self.dn_lab.take()].into_iter().flatten() {
            let _ = lab.down();
        }
    }
}

pub fn up(text: &str, name: &str, folder: &Path) -> Lab {
    let spec = Spec::from_toml(text, name, folder).unwrap();
    let found = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    let paths = Paths {
        run: folder.join("run"),
        ..found.unwrap_or_else(|e| panic!("{e}"))
    };
    Lab::up(&spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()))
}

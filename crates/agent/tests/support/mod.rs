// SPDX-License-Identifier: Apache-2.0
//! A lab guest with a disk, a script that acts as a DataNode in it, and the host. Needs root, the lab's image,
//! e2fsprogs and xfsprogs.
#![allow(dead_code, clippy::unwrap_used)]

pub mod host;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use viola_agent::status::Report;
pub use viola_lab::testing::wait_for;
use viola_lab::{Guest, Lab, testing};

use host::Host;

/// The DataNode's script: makes, moves, copies and changes files in the order in which HDFS does it.
const DATANODE: &str = r"
D=/tmp/d/dfs; P=$D/current/BP-1-10.0.0.1-2/current; F=$P/finalized/subdir0/subdir0; R=$P/rbw
mkdir -p $F $R $D/trash
make() { # ID STAMP KIB
    dd if=/dev/urandom of=$R/blk_$1 bs=1024 count=$3 2>/dev/null
    head -c $(($3 * 8 + 7)) /dev/urandom >$R/blk_$1_$2.meta
    mv $R/blk_$1_$2.meta $F/; mv $R/blk_$1 $F/
}
# breakHardLinksIfNeeded
unlink_one() { if [ $(stat -c %h $1) -gt 1 ]; then cp $1 $1.unlinked; mv $1.unlinked $1; fi; }
unlink_both() { unlink_one $F/blk_$1; unlink_one $F/blk_$1_$2.meta; }
append() { # ID STAMP NEW KIB
    unlink_both $1 $2
    mv $F/blk_$1_$2.meta $R/blk_$1_$3.meta; mv $F/blk_$1 $R/
    dd if=/dev/urandom bs=1024 count=$4 2>/dev/null >>$R/blk_$1
    head -c $(($4 * 8)) /dev/urandom >>$R/blk_$1_$3.meta
    mv $R/blk_$1_$3.meta $F/; mv $R/blk_$1 $F/
}
cut() { # ID STAMP NEW KIB
    unlink_both $1 $2
    sleep 0.015
    truncate -s $4K $F/blk_$1; truncate -s $(($4 * 8 + 7)) $F/blk_$1_$2.meta
    mv $F/blk_$1_$2.meta $F/blk_$1_$3.meta
}
delete() { for id; do rm $F/blk_$id $F/blk_${id}_*.meta; done; }
links() { ls /tmp/d/.viola/links-*/ 2>/dev/null | grep -c blk_ || true; }
";

/// A guest whose only disk is mounted at `/tmp/d`; `/tmp/h` is the host's root.
pub struct TestVm {
    lab: Option<Lab>,
    folder: tempfile::TempDir,
    kind: &'static str,
    _turn: testing::GuestPermit,
}

impl TestVm {
    /// Boots a guest with an empty file system of this kind, `ext4` or `xfs`.
    pub fn boot(name: &str, kind: &'static str) -> Self {
        let turn = testing::guest_permit();
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("d.img");
        File::create(&image).unwrap().set_len(400 << 20).unwrap();
        testing::host(&format!("mkfs.{kind} -q {}", image.display()));
        let core = testing::core();
        let text = format!(
            "[lab]\nname='{name}'\n[[guest]]\nname='a'\ncores=[{core}]\ndisks=[{{image='d.img'}}]\n"
        );
        let paths = testing::paths(env!("CARGO_MANIFEST_DIR"), &folder.path().join("run"));
        let lab = testing::up(&text, name, folder.path(), &paths);
        let vm = Self {
            lab: Some(lab),
            folder,
            kind,
            _turn: turn,
        };
        vm.sh("true"); // makes nothing yet
        vm
    }

    pub fn guest(&self) -> &Guest {
        self.lab.as_ref().unwrap().guest("a").unwrap()
    }

    pub fn image(&self) -> PathBuf {
        self.folder.path().join("d.img")
    }

    /// Runs a script in the guest, with the DataNode's functions; it must succeed.
    pub fn sh(&self, script: &str) -> String {
        let mount = "mkdir -p /tmp/d /tmp/h; \
            grep -q ' /tmp/h ' /proc/mounts || mount -t hostfs none /tmp/h; \
            grep -q ' /tmp/d ' /proc/mounts || mount -t KIND /dev/ubda /tmp/d"
            .replace("KIND", self.kind);
        self.bare(&format!("{mount}\n{DATANODE}\n{script}"))
    }

    /// As [`TestVm::sh`], without mounts and functions.
    pub fn bare(&self, script: &str) -> String {
        let output = self
            .guest()
            .exec_for(&["sh", "-ec", script], "", Duration::from_secs(120))
            .unwrap();
        let text = output.stdout + &output.stderr;
        let script = script.split("\n\n").last().unwrap_or_default();
        assert_eq!(output.status, 0, "{script}: {text}");
        text
    }

    /// Runs a script in the guest; returns its status and output.
    pub fn run(&self, script: &str) -> (i32, String) {
        let output = self
            .guest()
            .exec_for(&["sh", "-c", script], "", Duration::from_secs(60))
            .unwrap();
        (output.status, output.stderr + &output.stdout)
    }

    /// The command that runs a program of the host in the guest, with the host's loader and libraries.
    pub fn program(&self, path: &str) -> String {
        testing::host_program("/tmp/h", path)
    }

    /// Starts the agent; `more` is added to its configuration.
    pub fn agent(&self, more: &str) {
        let program = self.program(env!("CARGO_BIN_EXE_viola-agent"));
        // the script does not answer probes
        let datanode = match more.contains("datanode =") {
            true => "",
            false => "datanode = 'none'\n",
        };
        self.sh(&format!(
            "cat >/tmp/agent.toml <<X\nchannel = '/dev/ttyS2'\n{datanode}data = ['/tmp/d/dfs']\n\
             quiet_ms = 800\nsettle_ms = 200\n{more}\nX\n\
             setsid {program} --config /tmp/agent.toml >>/tmp/agent.log 2>&1 </dev/null &\n\
             echo $! >/tmp/agent.pid"
        ));
        wait_for("the agent answers", || self.try_status().is_some());
    }

    /// Sends the agent a signal.
    pub fn signal(&self, signal: &str) {
        self.bare(&format!("kill -{signal} $(cat /tmp/agent.pid)"));
    }

    /// Kills the agent and waits until it is gone.
    pub fn kill_agent(&self) {
        self.signal("KILL");
        self.bare("while [ -e /proc/$(cat /tmp/agent.pid)/exe ]; do sleep 0.05; done");
    }

    fn try_status(&self) -> Option<Report> {
        let program = self.program(env!("CARGO_BIN_EXE_viola-agent"));
        let command = format!("{program} --config /tmp/agent.toml status --json || true");
        serde_json::from_str(self.bare(&command).lines().next()?).ok()
    }

    /// What `viola-agent status` says.
    pub fn status(&self) -> Report {
        self.try_status()
            .unwrap_or_else(|| panic!("no agent: {}", self.bare("cat /tmp/agent.log")))
    }

    /// Number of files in the agent's link directories.
    pub fn links(&self) -> usize {
        self.sh("links").trim().parse().unwrap()
    }

    /// Connects the host.
    pub fn host(&self) -> Host {
        Host::new(self.guest().agent_socket().to_owned(), self.image())
    }

    /// SHA-256 of files in the guest.
    pub fn sum(&self, path: &str) -> String {
        self.sh(&format!("sha256sum {path}"))
            .split_whitespace()
            .next()
            .unwrap()
            .to_owned()
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            if let Ok(log) = self.guest().exec(&["cat", "/tmp/agent.log"]) {
                eprintln!("the agent's log:\n{}", log.stdout);
            }
        } else if let Some(lab) = self.lab.take() {
            lab.down().unwrap();
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! A real HDFS in VMs, a reader VM that reads it through the daemon's workers, and the test client, which compares every byte
//! that it reads with the content that the file's name determines.

#![allow(dead_code, clippy::unwrap_used)]

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use viola_lab::hadoop::{Client, FileSystem, Hadoop, Hdfs, Options, ROOT, make_disk};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::vread::{Datanode, Reader, Vread};

use super::Daemon;

/// Timeout of a step in a guest that starts Java.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Size of a DataNode's disk.
pub const DISK: u64 = 1 << 30;

/// The result of a reader.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ReadResult {
    pub bytes: u64,
    pub reads: u64,
    /// Bytes that bypassed the DataNode.
    pub local: u64,
    /// Reads with a wrong byte.
    pub wrong: u64,
    /// Longest time between the ends of two consecutive reads of one thread (ms).
    pub longest_ms: u64,
    /// The kinds of exceptions.
    pub failures: BTreeMap<String, u64>,
    /// The first wrong byte and the first exception.
    pub said: String,
}

/// The counters of the HDFS plug-in.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Counts {
    pub bytes: u64,
    /// Its longest call since the previous query.
    pub longest_ms: u64,
    pub fallbacks: BTreeMap<String, u64>,
}

/// VMs `NAME-dn` (NameNode and DataNode), `NAME-d2` (optional second DataNode) and `NAME-rd` (the client).
pub struct Bed {
    name: String,
    file_system: FileSystem,
    daemon: RefCell<Daemon>,
    lab: Option<Lab>,
    hadoop: Hadoop,
    folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Bed {
    /// Boots the VMs. `served` names the VMs whose blocks may be read, as a pattern such as `d*`.
    pub fn boot(name: &str, file_system: FileSystem, nodes: &[&str], served: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let hadoop = Hadoop::find_from([here]).unwrap_or_else(|e| panic!("{e}"));
        let folder = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n[vread]\n\
             allow = [{{ reader = \"{name}-rd\", datanode = \"uml:{name}-{served}\" }}]\n"
        ));
        let socket = daemon.run_dir().join(format!("mounts/{name}-rd.sock"));
        daemon.wait("socket for the reader", |_| socket.exists());
        let mut text = format!(
            "[lab]\nname='{name}'\n[[guest]]\nname='{name}-rd'\ncores=[1]\nmemory='1G'\n\
             kernel_args=['virtio_uml.device={}:26']\n",
            socket.display()
        );
        for node in nodes {
            let image = folder.path().join(format!("{node}.img"));
            make_disk(&image, file_system, DISK).unwrap_or_else(|e| panic!("{}", e.full()));
            let memory = if *node == "dn" { "2G" } else { "1G" };
            text += &format!(
                "[[guest]]\nname='{name}-{node}'\ncores=[1]\nmemory='{memory}'\ndisks=[{{image='{node}.img'}}]\n"
            );
        }
        let spec = Spec::from_toml(&text, name, folder.path()).unwrap();
        let found = Paths::find_from([here]).unwrap_or_else(|e| panic!("{e}"));
        let paths = Paths {
            run: folder.path().join("run"),
            ..found
        };
        let lab = Lab::up(&spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()));
        Self {
            name: name.into(),
            file_system,
            daemon: RefCell::new(daemon),
            lab: Some(lab),
            hadoop,
            folder,
            _turn: turn,
        }
    }

    pub fn lab(&self) -> &Lab {
        self.lab.as_ref().unwrap()
    }

    pub fn guest(&self, what: &str) -> &Guest {
        self.lab().guest(&format!("{}-{what}", self.name)).unwrap()
    }

    pub fn daemon(&self) -> RefMut<'_, Daemon> {
        self.daemon.borrow_mut()
    }

    pub fn file_system(&self) -> FileSystem {
        self.file_system
    }

    pub fn image(&self, node: &str) -> PathBuf {
        self.folder.path().join(format!("{node}.img"))
    }

    pub fn options(&self, keys: &[(&str, &str)]) -> Options {
        let mut all: BTreeMap<String, String> = [
            ("dfs.block.scanner.volume.bytes.per.second", "104857600"),
            ("dfs.datanode.directoryscan.interval", "5"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        all.extend(keys.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        Options {
            file_system: self.file_system,
            keys: all,
            ..Options::default()
        }
    }

    /// Starts the NameNode and the DataNode in `dn`.
    pub fn hdfs(&self, keys: &[(&str, &str)]) -> Hdfs<'_> {
        Hdfs::start(&self.hadoop, self.guest("dn"), &self.options(keys))
            .unwrap_or_else(|e| panic!("{}", e.full()))
    }

    /// Starts an agent in a DataNode VM.
    pub fn agent(&self, node: &str) {
        self.agent_with(node, "data = ['/mnt/data']\ndatanode = '127.0.0.1:9866'\n");
    }

    /// The same with this configuration, and times that suit tests.
    pub fn agent_with(&self, node: &str, config: &str) {
        let config = format!("quiet_ms = 1000\nsettle_ms = 200\nrecheck_s = 20\n{config}");
        self.guest(node)
            .start("agent", Workload::agent(&config))
            .unwrap_or_else(|e| panic!("{}", e.full()));
    }

    /// Runs `viola-agent setup` in the root in which Java runs, with further words, and returns what it says.
    pub fn setup(&self, guest: &str, words: &str) -> String {
        self.sh(
            guest,
            &format!(
                "mkdir -p {ROOT}/etc/viola; [ -e {ROOT}/tmp/viola-agent ] || cp /usr/bin/viola-agent {ROOT}/tmp; \
                 chroot {ROOT} /tmp/viola-agent setup {words}"
            ),
        )
    }

    /// The folder with Hadoop, its JDK and the plug-in.
    pub fn hadoop(&self) -> &Hadoop {
        &self.hadoop
    }

    /// Mounts the blocks and starts the client with its sides: `stock`, `viola` and `raw`, which verifies no checksums.
    pub fn reader(&self, hdfs: &Hdfs) -> Mutex<Client> {
        hdfs.prepare(self.guest("rd")).unwrap();
        self.sh("rd", &format!("mount -t virtiofs viola {ROOT}/vread"));
        let mut client = hdfs
            .client(self.lab(), self.guest("rd"))
            .unwrap_or_else(|e| panic!("{}", e.full()));
        let past = "dfs.client.replica.accessor.builder.classes=org.viola.hdfs.TimedAccess viola.vread.mount=/vread";
        for open in [
            "open stock".into(),
            format!("open viola {past}"),
            format!("open raw {past} viola.verify=false viola.vread.deadline=20s"),
        ] {
            client.ask(&open).unwrap();
        }
        Mutex::new(client)
    }

    pub fn try_sh(&self, guest: &str, script: &str) -> (i32, String) {
        let output = self
            .guest(guest)
            .exec_for(&["sh", "-ec", script], "", STEP_TIMEOUT)
            .unwrap();
        (output.status, output.stdout + &output.stderr)
    }

    /// Runs a script in a guest and asserts that it succeeds.
    pub fn sh(&self, guest: &str, script: &str) -> String {
        let (status, text) = self.try_sh(guest, script);
        assert_eq!(status, 0, "{guest}: {script}: {text}");
        text
    }

    /// The daemon's report on a DataNode and on the reader.
    pub fn shown(&self, node: &str) -> (Datanode, Reader) {
        let all: Vread = self.daemon().json(&["vread", "stat"]);
        let name = format!("{}-{node}", self.name);
        let datanode = all.datanodes.into_iter().find(|d| d.name == name);
        let reader = all.readers.into_iter().next();
        (datanode.unwrap_or_default(), reader.unwrap_or_default())
    }

    /// Changes a byte of a finished block in the disk image. Caches of the block's content do not notice.
    pub fn corrupt_byte(&self, node: &str, block: &str, at: u64) {
        let place = self.place(node, block, at);
        let image = File::options()
            .read(true)
            .write(true)
            .open(self.image(node))
            .unwrap();
        let mut byte = [0];
        image.read_exact_at(&mut byte, place).unwrap();
        byte[0] ^= 0x40;
        image.write_all_at(&byte, place).unwrap();
        image.sync_all().unwrap();
    }

    /// The position in the disk image of a byte of a guest's file.
    fn place(&self, node: &str, file: &str, at: u64) -> u64 {
        let text = self.sh(
            node,
            &format!("sync; chroot {ROOT} /usr/sbin/filefrag -v -b4096 {file}"),
        );
        for line in text.lines() {
            let cells: Vec<u64> = line
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            if let [_, first, last, physical, ..] = cells[..]
                && line.contains("..")
                && (first..=last).contains(&(at / 4096))
            {
                return (physical + at / 4096 - first) * 4096 + at % 4096;
            }
        }
        panic!("byte {at} of {file} has no extent: {text}");
    }

    /// Paths of the finished blocks of a DataNode. A block that is deleted during the search is no failure.
    pub fn blocks(&self, node: &str) -> Vec<String> {
        let found = self.sh(
            node,
            "find /mnt/data -name 'blk_*' -path '*/current/finalized/*' ! -name '*.meta' || [ -d /mnt/data/current ]",
        );
        found.lines().map(str::to_owned).collect()
    }

    /// Names of the finished blocks of a DataNode in viola's form `POOL/blk_ID_STAMP`.
    pub fn names(&self, node: &str) -> Vec<String> {
        let found = self.sh(
            node,
            "cd /mnt/data/current; find BP-* -path '*/current/finalized/*' -name 'blk_*.meta' || [ -d BP-* ]",
        );
        found
            .lines()
            .filter_map(|path| {
                let (pool, rest) = path.split_once('/')?;
                let (_, name) = rest.rsplit_once('/')?;
                Some(format!("{pool}/{}", name.strip_suffix(".meta")?))
            })
            .collect()
    }

    /// Fragments the free space of a DataNode's disk and leaves `free` bytes in all. Returns the file that holds the rest.
    pub fn fill_up(&self, node: &str, free: u64, pieces: bool) -> String {
        let text = self.sh(node, "df -k /mnt | tail -n 1");
        let room: u64 = text.split_whitespace().nth(3).unwrap().parse().unwrap();
        let length = (room << 10).saturating_sub(if pieces { 24 << 20 } else { free });
        let io = format!("chroot {ROOT} /usr/sbin/xfs_io");
        let mut script = format!("{io} -f -c 'falloc 0 {length}' /mnt/filler\n");
        if pieces {
            // The loop runs in the guest, because the serial line is too slow for long scripts.
            let end = length.min(2 * free);
            script += &format!(
                "at=0; while [ $at -lt {end} ]; do set -- \"$@\" -c \"fpunch $at 128k\"; at=$((at+262144)); done\n\
                 {io} -f \"$@\" /mnt/filler; sync"
            );
        }
        self.sh(node, &script);
        "/mnt/filler".into()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(lab) = self.lab.take() {
            if std::thread::panicking() {
                let rd = lab.guest(&format!("{}-rd", self.name));
                let script = format!(
                    "mount -t fusectl f /sys/fs/fuse/connections; cat /sys/fs/fuse/connections/*/waiting; \
                     grep -i virtio /proc/interrupts; timeout 5 ls -R {ROOT}/vread | wc -l; dmesg | tail -n 5; \
                     sleep 1; grep -i virtio /proc/interrupts; cat /sys/fs/fuse/connections/*/waiting"
                );
                if let Ok(output) = rd.and_then(|g| g.exec(&["sh", "-c", &script])) {
                    eprintln!("rd: {}{}", output.stdout, output.stderr);
                }
                if let Ok(daemon) = self.daemon.try_borrow() {
                    eprintln!("{}", super::stdout(&daemon.ask(&["vread", "stat"])));
                }
                for node in ["dn", "d2"] {
                    if let Ok(guest) = lab.guest(&format!("{}-{node}", self.name)) {
                        for log in ["datanode", "agent"] {
                            let path = format!("/run/{log}.log");
                            let path = if log == "agent" {
                                "/run/viola/agent.log".into()
                            } else {
                                path
                            };
                            let text = guest.exec(&["tail", "-n", "12", &path]);
                            let text = text.map(|o| o.stdout).unwrap_or_default();
                            eprintln!("{node}: {log} said:\n{text}");
                        }
                    }
                }
            }
            let _ = lab.down();
        }
    }
}

/// Sends a request to the client and returns its answer.
pub fn ask<T: serde::de::DeserializeOwned>(client: &Mutex<Client>, request: &str) -> T {
    client
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .ask_for(request)
        .unwrap_or_else(|e| panic!("{}", e.full()))
}

/// Sends a request to the client and ignores its answer.
pub fn tell(client: &Mutex<Client>, request: &str) {
    let _: serde_json::Value = ask(client, request);
}

/// Reads the file once and asserts that every byte is present and right.
pub fn check(client: &Mutex<Client>, side: &str, path: &str, bytes: u64) -> ReadResult {
    let seen: ReadResult = ask(client, &format!("{side} check {path} 262144"));
    assert!(
        seen.wrong == 0 && seen.bytes == bytes,
        "{side} {path}: {seen:?}"
    );
    seen
}

/// Reads the file until all of it bypasses the DataNode, for at most half a minute. Asserts that no byte is ever wrong.
pub fn check_local(client: &Mutex<Client>, path: &str, bytes: u64) {
    for side in ["raw", "viola"] {
        let end = Instant::now() + Duration::from_secs(45);
        loop {
            let seen = check(client, side, path, bytes);
            if seen.local == bytes {
                break;
            }
            assert!(
                Instant::now() < end,
                "{side} does not read all of {path} past the DataNode: {seen:?} {:?}",
                ask::<Counts>(client, "counts")
            );
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

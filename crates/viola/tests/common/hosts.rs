// SPDX-License-Identifier: Apache-2.0
//! Two hosts, each a network namespace with its own daemon, and VMs that run on one or the other.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::{Daemon, output, stdout, viola, write_config};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, NetnsHost, Paths, Spec};
use viola_proto::vread::{Peer, Reader, Vread};

/// The block pool.
pub const POOL: &str = "BP-1-10.0.0.1-2";
/// The folder of finished blocks in the DataNode VM.
pub const BLOCK_FOLDER: &str =
    "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";
/// Timeout of an expected change.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
const PORT: u16 = 7670;

/// A host: its network, its daemon, and the VMs that run on it.
pub struct Host {
    /// `a` or `b`.
    pub name: &'static str,
    /// Its network namespace.
    pub site: NetnsHost,
    /// Its daemon.
    pub daemon: Daemon,
    /// Its address for the other host.
    pub fingerprint: String,
}

impl Host {
    fn address(number: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 98, 0, number)
    }

    /// A host whose daemon has nothing to do yet.
    fn new(name: &'static str, number: u8) -> Self {
        let site = NetnsHost::new(name, Self::address(number)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let config = write_config(dir.path(), &keys(dir.path()));
        let config = config.to_str().unwrap();
        let made = output(&["keys", "init", "--host", name, "--config", config]);
        assert!(made.status.success(), "{made:?}");
        let shown = stdout(&output(&["keys", "show", "--config", config]));
        let fingerprint = shown.lines().next().unwrap();
        let fingerprint = fingerprint.strip_prefix("fingerprint ").unwrap().to_owned();
        let path = dir.path().join("viola.toml");
        let daemon = site
            .in_netns(|| Daemon::spawn(dir, viola().args(["run", "-c"]).arg(path)))
            .unwrap();
        Self {
            name,
            site,
            daemon,
            fingerprint,
        }
    }

    /// Changes `[vread]` at once: `allow` are its lines, `peer` is the section about the other host.
    pub fn configure(&self, allow: &str, peer: &str) {
        let listen = format!(
            "listen = \"{}:{PORT}\"\nallow = [{allow}]\n",
            self.site.address()
        );
        let dir = self.daemon.dir.path();
        let text = keys(dir).replace("[vread]\n", &format!("[vread]\n{listen}"));
        let config = write_config(dir, &format!("{text}[[vread.peer]]\n{peer}\n"));
        let text = fs::read_to_string(&config).unwrap();
        fs::write(
            &config,
            text.replacen("[daemon]\n", "[daemon]\nvms = \"own\"\n", 1),
        )
        .unwrap();
        self.daemon.signal(rustix::process::Signal::HUP);
    }

    /// The section about this host for the other host's configuration.
    pub fn as_peer(&self) -> String {
        format!(
            "name = \"{}\"\naddress = \"{}:{PORT}\"\nfingerprint = \"{}\"",
            self.name,
            self.site.address(),
            self.fingerprint
        )
    }

    /// Starts the daemon again in its network namespace.
    pub fn restart(&mut self) {
        let (site, daemon) = (&self.site, &mut self.daemon);
        site.in_netns(|| daemon.restart()).unwrap();
    }

    /// Boots VMs on this host.
    pub fn up(&self, text: &str, lab: &str, folder: &Path) -> Lab {
        let spec = Spec::from_toml(text, lab, folder).unwrap();
        let found = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
        let paths = Paths {
            run: folder.join("run"),
            ..found.unwrap_or_else(|e| panic!("{e}"))
        };
        Lab::up_in(&self.site, &spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()))
    }

    /// The daemon's vread report.
    pub fn shown(&self) -> Vread {
        self.daemon.json(&["vread", "stat"])
    }

    /// The daemon's report on the other host.
    pub fn peer(&self) -> Peer {
        self.shown().peers.first().cloned().unwrap_or_default()
    }

    /// The daemon's report on its reader.
    pub fn reader(&self) -> Reader {
        self.shown().readers.first().cloned().unwrap_or_default()
    }

    /// Process ID of its worker that serves other hosts.
    pub fn worker(&self) -> u32 {
        self.shown().host.map_or(0, |h| h.pid)
    }
}

fn keys(dir: &Path) -> String {
    let d = dir.display();
    format!(
        "[slices]\nenabled = false\n[vread]\nkey = \"{d}/host.key\"\ncertificate = \"{d}/host.crt\"\n"
    )
}

/// Host `a` with a reader VM, host `b`, and a DataNode VM with a disk on one of them.
pub struct TwoHosts {
    /// The host of the reader VM.
    pub a: Host,
    /// The other host.
    pub b: Host,
    name: String,
    reader: Option<Lab>,
    node: Option<Lab>,
    folder: tempfile::TempDir,
}

impl TwoHosts {
    /// Starts both hosts with their keys and the VMs: the reader on `a`, the DataNode on `b`.
    pub fn boot(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("d.img");
        File::create(&image).unwrap().set_len(200 << 20).unwrap();
        let made: Output = Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", image.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let (a, b) = (Host::new("a", 1), Host::new("b", 2));
        a.site.connect(&b.site).unwrap();
        let mut two = Self {
            a,
            b,
            name: name.to_owned(),
            reader: None,
            node: None,
            folder,
        };
        two.allow();
        // `vms = "own"` applies from the first start on.
        for host in [&mut two.a, &mut two.b] {
            assert!(host.daemon.stop().success());
            host.restart();
        }
        let socket = two
            .a
            .daemon
            .run_dir()
            .join(format!("mounts/{name}-rd.sock"));
        two.a
            .daemon
            .wait("socket for the reader", |_| socket.exists());
        let text = format!(
            "[lab]\nname='{name}'\n\
             [[guest]]\nname='{name}-rd'\ncores=[1]\ntaps=0\nkernel_args=['virtio_uml.device={}:26']\n",
            socket.display()
        );
        two.reader = Some(two.a.up(&text, name, two.folder.path()));
        two.boot_node("b");
        two
    }

    /// Sets the default permissions of both hosts for each other.
    pub fn allow(&self) {
        let name = &self.name;
        self.a.configure(
            &format!("{{ reader = \"{name}-rd\", datanode = \"{name}-d*\" }}"),
            &self.b.as_peer(),
        );
        self.b.configure(
            &format!("{{ host = \"a\", datanode = \"uml:{name}-dn\" }}"),
            &self.a.as_peer(),
        );
    }

    /// Starts the DataNode VM on a host with its disk.
    pub fn boot_node(&mut self, on: &str) {
        let (name, host) = (&self.name, if on == "a" { &self.a } else { &self.b });
        let text = format!(
            "[lab]\nname='{name}-on-{on}'\n[[guest]]\nname='{name}-dn'\ncores=[1]\ntaps=0\ndisks=[{{image='d.img'}}]\n"
        );
        self.node = Some(host.up(&text, &format!("{name}-on-{on}"), self.folder.path()));
        self.dn(&format!(
            "mkdir -p /tmp/d; mount /dev/ubda /tmp/d; mkdir -p {BLOCK_FOLDER}"
        ));
    }

    /// Shuts the DataNode VM down.
    pub fn stop_node(&mut self) {
        self.dn("sync; umount -l /tmp/d; sync");
        let _ = self.node.take().unwrap().down();
    }

    /// Starts the agent in the DataNode VM.
    pub fn start_agent(&self) {
        let agent = Workload::agent("data = ['/tmp/d/dfs']\nquiet_ms = 500\nsettle_ms = 200\n");
        self.guest("dn").start("agent", agent).unwrap();
    }

    fn guest(&self, what: &str) -> &Guest {
        let lab = if what == "dn" {
            &self.node
        } else {
            &self.reader
        };
        lab.as_ref()
            .unwrap()
            .guest(&format!("{}-{what}", self.name))
            .unwrap()
    }

    /// Runs a script in a guest.
    pub fn try_sh(&self, guest: &str, script: &str) -> (i32, String) {
        let output = self
            .guest(guest)
            .exec_for(&["sh", "-c", script], "", Duration::from_secs(60))
            .unwrap();
        (output.status, output.stdout + &output.stderr)
    }

    /// Runs a script in the DataNode VM and asserts that it succeeds.
    pub fn dn(&self, script: &str) -> String {
        let (status, text) = self.try_sh("dn", script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    /// Runs a script in the reader VM and asserts that it succeeds.
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

    /// Waits until the DataNode's host reports `count` blocks.
    pub fn wait_blocks(&self, on: &Host, count: u64) {
        let limit = Instant::now() + CHANGE_TIMEOUT;
        loop {
            let datanodes = on.shown().datanodes;
            if datanodes.iter().any(|d| d.blocks == count && d.serving) {
                return;
            }
            assert!(
                Instant::now() < limit,
                "not {count} blocks: {datanodes:?}\n{}",
                on.daemon.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Checksums of a block and of its meta file in the DataNode VM.
    pub fn sums(&self, id: u32) -> [String; 2] {
        let sum = |name: String| {
            let text = self.dn(&format!("sha256sum < {BLOCK_FOLDER}/{name}"));
            text.split(' ').next().unwrap().to_owned()
        };
        [sum(format!("blk_{id}")), sum(format!("blk_{id}_1001.meta"))]
    }

    /// Reads a block in the reader VM. Returns the same checksums or an error, and the duration.
    pub fn read(&self, id: u32) -> (Result<[String; 2], String>, Duration) {
        let begun = Instant::now();
        let one = |name: String| {
            let script = format!("cat /mnt/{POOL}/{name} >/tmp/b && sha256sum </tmp/b");
            match self.try_sh("rd", &script) {
                (0, text) => Ok(text.split(' ').next().unwrap_or_default().to_owned()),
                (_, text) => Err(text),
            }
        };
        let data = one(format!("blk_{id}_1001"));
        let meta = one(format!("blk_{id}_1001.meta"));
        let took = begun.elapsed();
        match (data, meta) {
            (Ok(data), Ok(meta)) => (Ok([data, meta]), took),
            (Err(why), _) | (_, Err(why)) => (Err(why), took),
        }
    }

    /// Waits until the reader reads the block again. No attempt may return wrong bytes or take longer than `longest`.
    pub fn reads_again(&self, id: u32, sums: &[String; 2], longest: Duration) {
        let limit = Instant::now() + CHANGE_TIMEOUT;
        loop {
            let (read, took) = self.read(id);
            assert!(took <= longest, "{took:?}: {read:?}");
            match read {
                Ok(read) => return assert_eq!(&read, sums, "block {id}"),
                Err(why) => assert!(
                    Instant::now() < limit,
                    "block {id}: {why}\na: {:?}\n{}\nb: {:?}\n{}",
                    self.a.shown(),
                    self.a.daemon.log(),
                    self.b.shown(),
                    self.b.daemon.log()
                ),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether the reader gets ENOENT for the block.
    pub fn is_absent(&self, id: u32) -> bool {
        matches!(self.read(id).0, Err(why) if why.contains("No such file"))
    }

    /// Boots with three named blocks on `b` and the mount.
    pub fn with_blocks(name: &str) -> Self {
        let two = Self::boot(name);
        for id in 1..=3 {
            two.make(id, 300 * id);
        }
        two.start_agent();
        two.wait_blocks(&two.b, 3);
        two.rd("mount -t virtiofs viola /mnt");
        two
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for lab in [self.reader.take(), self.node.take()].into_iter().flatten() {
            let _ = lab.down();
        }
    }
}

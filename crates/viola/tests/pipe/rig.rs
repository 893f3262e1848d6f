// SPDX-License-Identifier: Apache-2.0
//! A VM with files on its own disk, its agent, a web server, and a daemon that sends the files.
#![allow(dead_code)]

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Deref;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub use viola_lab::testing::{GuestPermit, guest_permit, noise};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::pipe::status::{PipeStats, PipeVm, Pipes};

use crate::client::Client;
use crate::common::Daemon;
use crate::common::guests::within;

/// Timeout of an expected change.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
pub const MIB: usize = 1 << 20;
/// The address of the host in a lab and of the first VM.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 11);

/// The configuration of a VM.
pub struct WebSpec<'a> {
    /// The lab's name; the VM's name is this with the suffix `-web`.
    pub name: &'a str,
    /// Sizes of the files `/f0`, `/f1` and so on, in bytes.
    pub sizes: &'a [usize],
    /// Another seed gives other content for the same sizes.
    pub seed: usize,
    /// Additional guests and bridges of the lab, in TOML.
    pub more: &'a str,
    /// The disk is a loop device over the image. It fails where the image has been cut.
    pub looped: bool,
    /// Maximum of bytes per second that the host moves for the VM.
    pub rate: Option<u64>,
}

impl Default for WebSpec<'_> {
    fn default() -> Self {
        Self {
            name: "pi",
            sizes: &[MIB, 40 * MIB],
            seed: 0,
            more: "",
            looped: false,
            rate: None,
        }
    }
}

/// A lab whose first VM has the files.
pub struct Web {
    pub lab: Lab,
    pub files: Vec<Vec<u8>>,
    pub folder: tempfile::TempDir,
}

impl Web {
    /// Boots the lab and starts the agent.
    pub fn boot(spec: &WebSpec<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (image, tree) = (folder.path().join("d.img"), folder.path().join("tree"));
        let files: Vec<Vec<u8>> = (spec.sizes.iter().enumerate())
            .map(|(number, size)| noise((spec.seed * 1000 + number * 2 + 1) as u64, *size))
            .collect();
        std::fs::create_dir(&tree).unwrap();
        for (number, file) in files.iter().enumerate() {
            std::fs::write(tree.join(format!("f{number}")), file).unwrap();
        }
        let size = (spec.sizes.iter().sum::<usize>() + 256 * MIB) as u64;
        File::create(&image).unwrap().set_len(size).unwrap();
        let made = Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-d", tree.to_str().unwrap(), image.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let WebSpec { name, more, .. } = spec;
        let device = spec.looped.then(|| loop_device(&image));
        let disk = device.as_ref().map_or("d.img", |(path, _)| path);
        let text = format!(
            "[lab]\nname = '{name}'\n[[guest]]\nname = '{name}-web'\ncores = [1]\n\
             disks = [{{ image = '{disk}' }}]\n{more}"
        );
        let spec = Spec::from_toml(&text, name, folder.path()).unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let found = Paths::find_from([here]).unwrap_or_else(|e| panic!("{e}"));
        let paths = Paths {
            run: folder.path().join("run"),
            ..found
        };
        let lab = Lab::up(&spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()));
        let web = Self { lab, files, folder };
        web.sh("mkdir -p /tmp/d /tmp/n /run/viola; mount /dev/ubda /tmp/d");
        let agent = Workload::agent(
            "[pipe]\nfiles = ['/tmp/d']\ninto = ['/tmp/d']\nrelay = true\nusers = ['root', 'nobody']\nsocket = '/tmp/n/pipe.sock'\n",
        );
        web.guest().start("agent", agent).unwrap();
        web
    }

    pub fn guest(&self) -> &Guest {
        &self.lab.guests()[0]
    }

    /// Runs a script in the VM and asserts that it succeeds.
    pub fn sh(&self, script: &str) -> String {
        sh(self.guest(), script)
    }

    /// The agent's status report.
    pub fn agent_status(&self) -> String {
        self.sh("viola-agent --config /run/viola/agent.toml status")
    }

    /// Runs `ip` (iproute2) on the host's side of the lab.
    pub fn ip(&self, words: &str) {
        self.lab.in_netns(|| ip(words)).unwrap();
    }

    /// Starts a server with the library and more variables in its environment.
    pub fn start(&self, server: &Server, more: &str) {
        // The server's configuration contains no shell quotes.
        let Server { name, config, .. } = server;
        self.sh(&format!("cat > /tmp/n/{name}.conf <<'END'\n{config}END"));
        self.sh(&format!(
            "LD_PRELOAD=/usr/lib/libvpipe_preload.so VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock {more} \
             {} > /tmp/n/out 2>&1 || {{ cat /tmp/n/out; false; }}",
            server.start
        ));
        within(CHANGE_TIMEOUT, "the server listens", || {
            self.connect(server.port).is_ok()
        });
    }

    /// A connection from the host's side of the lab.
    pub fn client(&self) -> Client {
        self.client_of(80)
    }

    pub fn client_of(&self, port: u16) -> Client {
        Client::of(self.connect(port).unwrap())
    }

    pub fn connect(&self, port: u16) -> std::io::Result<TcpStream> {
        let to: SocketAddr = (self.guest().address().unwrap(), port).into();
        let connect = || TcpStream::connect_timeout(&to, CHANGE_TIMEOUT);
        self.lab.in_netns(connect).unwrap()
    }
}

/// A loop device over a file. It detaches when the last process closes it; the returned file keeps it open.
fn loop_device(image: &Path) -> (String, File) {
    let losetup = |words: &[&str]| {
        let made = Command::new("losetup").args(words).output().unwrap();
        assert!(made.status.success(), "losetup {words:?}: {made:?}");
        String::from_utf8(made.stdout).unwrap().trim().to_owned()
    };
    let path = losetup(&["--find", "--show", image.to_str().unwrap()]);
    let open = File::open(&path).unwrap();
    losetup(&["--detach", &path]);
    (path, open)
}

/// Runs a script in a guest and asserts that it succeeds.
pub fn sh(guest: &Guest, script: &str) -> String {
    let output = guest
        .exec_for(&["sh", "-c", script], "", CHANGE_TIMEOUT)
        .unwrap();
    let text = output.stdout + &output.stderr;
    assert_eq!(output.status, 0, "{script}: {text}");
    text
}

/// Runs `ip` (iproute2) in the calling thread's network namespace.
pub fn ip(words: &str) {
    let made = Command::new("ip").args(words.split(' ')).output().unwrap();
    assert!(made.status.success(), "ip {words}: {made:?}");
}

/// A web server with `/tmp/d` as its document root.
pub struct Server {
    pub name: &'static str,
    pub port: u16,
    pub config: &'static str,
    pub start: &'static str,
}

pub const NGINX: Server = Server {
    name: "nginx",
    port: 80,
    config: "user root root; worker_processes 1; pid /tmp/n/pid; error_log /tmp/n/error.log;
events { worker_connections 512; }
http {
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000; default_type text/plain;
  client_body_temp_path /tmp/n/1; proxy_temp_path /tmp/n/2; fastcgi_temp_path /tmp/n/3;
  uwsgi_temp_path /tmp/n/4; scgi_temp_path /tmp/n/5;
  server { listen 80 backlog=512; listen [::]:80 backlog=512; root /tmp/d; }
}
",
    start: "nginx -c /tmp/n/nginx.conf -e /tmp/n/error.log",
};

/// A VM with a web server and a daemon that sends its files. Two tests may have one at a time: they mostly wait.
pub struct Rig {
    pub daemon: Daemon,
    pub web: Web,
    _permit: GuestPermit,
}

impl Rig {
    /// Boots with files of 1 and 40 MiB.
    pub fn boot(name: &str) -> Self {
        Self::with(&WebSpec {
            name,
            ..WebSpec::default()
        })
    }

    pub fn with(spec: &WebSpec<'_>) -> Self {
        let permit = guest_permit();
        let rate = spec.rate.map(|rate| format!("rate = {rate}\n"));
        let daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n{}{}",
            vm(spec.name),
            rate.unwrap_or_default()
        ));
        let web = Web::boot(spec);
        let mut rig = Self {
            daemon,
            web,
            _permit: permit,
        };
        rig.wait_until_served();
        rig
    }

    pub fn wait_until_served(&mut self) {
        wait_until_served(&mut self.daemon, 1);
    }

    pub fn start_nginx(&self) {
        self.web.start(&NGINX, "");
    }

    pub fn work(&self) -> PipeStats {
        senders(&self.daemon)[0].work.clone()
    }

    /// Waits until no transfer begins for a second: a server detects closed clients late.
    pub fn quiet(&self) -> PipeStats {
        let mut work = self.settled(0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let later = self.settled(0);
            if later.begun == work.begun {
                return later;
            }
            work = later;
        }
    }

    /// Waits until the host has counted `begun` connections and no transfer is running. Returns the counters. (They follow a
    /// moment after a client's last byte.)
    pub fn settled(&self, begun: u64) -> PipeStats {
        let begin = Instant::now();
        loop {
            let work = self.work();
            let over = work.transfers.is_empty() && work.returned + work.broken == work.begun;
            if over && work.begun >= begun {
                return work;
            }
            assert!(
                begin.elapsed() < CHANGE_TIMEOUT,
                "{begun} are to be over: {work:?}\nthe agent says: {}",
                self.agent_status()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Deref for Rig {
    type Target = Web;

    fn deref(&self) -> &Web {
        &self.web
    }
}

/// The daemon's configuration for the VM of a lab's web server.
pub fn vm(lab: &str) -> String {
    format!("[[vm]]\nname = \"uml:{lab}-web\"\n[vm.pipe]\nwrites = true\n")
}

/// Waits until the daemon has verified the disks of `count` VMs.
pub fn wait_until_served(daemon: &mut Daemon, count: usize) {
    daemon.wait("the VMs' disks are verified", |d| {
        let all = senders(d);
        all.iter().filter(|vm| vm.serving).count() == count
    });
}

pub fn senders(daemon: &Daemon) -> Vec<PipeVm> {
    let all: Pipes = daemon.json(&["pipe", "ls"]);
    all.vms
}

// SPDX-License-Identifier: Apache-2.0
//! A guest with files on a disk of its own, its agent, a web server, and a daemon that sends the files.
#![allow(dead_code)]

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::Deref;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use viola_lab::testing::noise;
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::pipe::status::{PipeStats, PipeVm, Pipes};

use crate::client::Client;
use crate::common::Daemon;
use crate::common::guests::within;

/// How long what is to happen may take.
pub const SOON: Duration = Duration::from_secs(30);
pub const MIB: usize = 1 << 20;
/// The host's address in a lab, and that of the first guest.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 11);

/// What a guest is to have.
pub struct Wish<'a> {
    /// Of the lab; the guest's name is this with `-web` behind it.
    pub name: &'a str,
    /// Files `/f0`, `/f1` and so on, in bytes.
    pub sizes: &'a [usize],
    /// Other content for the same sizes.
    pub seed: usize,
    /// More guests and bridges of the lab, in TOML.
    pub more: &'a str,
    /// Its disk is a loop device over the image, which fails where the image has been cut.
    pub looped: bool,
    /// Most bytes a second that the host moves for it.
    pub rate: Option<u64>,
}

impl Default for Wish<'_> {
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

/// A lab whose first guest has the files.
pub struct Web {
    pub lab: Lab,
    pub files: Vec<Vec<u8>>,
    pub folder: tempfile::TempDir,
}

impl Web {
    /// Boots it, and starts the agent.
    pub fn boot(wish: &Wish<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (image, tree) = (folder.path().join("d.img"), folder.path().join("tree"));
        let files: Vec<Vec<u8>> = (wish.sizes.iter().enumerate())
            .map(|(number, size)| noise((wish.seed * 1000 + number * 2 + 1) as u64, *size))
            .collect();
        std::fs::create_dir(&tree).unwrap();
        for (number, file) in files.iter().enumerate() {
            std::fs::write(tree.join(format!("f{number}")), file).unwrap();
        }
        let size = (wish.sizes.iter().sum::<usize>() + 256 * MIB) as u64;
        File::create(&image).unwrap().set_len(size).unwrap();
        let made = Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-d", tree.to_str().unwrap(), image.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let Wish { name, more, .. } = wish;
        let device = wish.looped.then(|| loop_device(&image));
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

    /// Runs a script in the guest that must succeed.
    pub fn sh(&self, script: &str) -> String {
        sh(self.guest(), script)
    }

    /// What the agent says of itself.
    pub fn agent_says(&self) -> String {
        self.sh("viola-agent --config /run/viola/agent.toml status")
    }

    /// Runs `ip` (of iproute2) on the host's side of the lab.
    pub fn ip(&self, words: &str) {
        self.lab.in_netns(|| ip(words)).unwrap();
    }

    /// Starts a server with the library in its environment, and more variables.
    pub fn start(&self, server: &Server, more: &str) {
        // the configuration has no quotes of the shell's in it
        let Server { name, config, .. } = server;
        self.sh(&format!("cat > /tmp/n/{name}.conf <<'END'\n{config}END"));
        self.sh(&format!(
            "LD_PRELOAD=/usr/lib/libvpipe_preload.so VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock {more} \
             {} > /tmp/n/out 2>&1 || {{ cat /tmp/n/out; false; }}",
            server.start
        ));
        within(SOON, "it listens", || self.connect(server.port).is_ok());
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
        let connect = || TcpStream::connect_timeout(&to, SOON);
        self.lab.in_netns(connect).unwrap()
    }
}

/// A loop device over a file; it goes with the last process that has it open, of which this is one.
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

/// Runs a script in a guest that must succeed.
pub fn sh(guest: &Guest, script: &str) -> String {
    let output = guest.exec_for(&["sh", "-c", script], "", SOON).unwrap();
    let text = output.stdout + &output.stderr;
    assert_eq!(output.status, 0, "{script}: {text}");
    text
}

/// Runs `ip` (of iproute2) in the calling thread's network namespace.
pub fn ip(words: &str) {
    let made = Command::new("ip").args(words.split(' ')).output().unwrap();
    assert!(made.status.success(), "ip {words}: {made:?}");
}

/// A web server with `/tmp/d` as its root.
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

/// A guest with a web server and a daemon that sends its files. One at a time.
pub struct Rig {
    pub daemon: Daemon,
    pub web: Web,
    _turn: Turn,
}

impl Rig {
    /// With files of 1 and 40 MiB, and addresses of IPv4.
    pub fn boot(name: &str) -> Self {
        Self::with(&Wish {
            name,
            ..Wish::default()
        })
    }

    pub fn with(wish: &Wish<'_>) -> Self {
        Self::at(wish, &format!("\"{GUEST}\""))
    }

    /// With these addresses for `[vm.pipe]`.
    pub fn at(wish: &Wish<'_>, addresses: &str) -> Self {
        let turn = turn();
        let rate = wish.rate.map(|rate| format!("rate = {rate}\n"));
        let daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n{}{}",
            vm(wish.name, addresses),
            rate.unwrap_or_default()
        ));
        let web = Web::boot(wish);
        let mut rig = Self {
            daemon,
            web,
            _turn: turn,
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

    /// Waits until nothing is begun any more for a second: a server hears late of clients that went away.
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

    /// Waits until so many connections are counted and nothing is under way any more; what was done until then. (The host's
    /// counts come a moment later than a client's last byte.)
    pub fn settled(&self, begun: u64) -> PipeStats {
        let begin = Instant::now();
        loop {
            let work = self.work();
            let over = work.transfers.is_empty() && work.returned + work.broken == work.begun;
            if over && work.begun >= begun {
                return work;
            }
            assert!(
                begin.elapsed() < SOON,
                "{begun} are to be over: {work:?}\nthe agent says: {}",
                self.agent_says()
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

/// Keeps other tests' guests from the machine.
pub type Turn = MutexGuard<'static, ()>;

pub fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The daemon's configuration of a lab's web server.
pub fn vm(lab: &str, addresses: &str) -> String {
    format!(
        "[[vm]]\nname = \"uml:{lab}-web\"\n[vm.pipe]\naddresses = [{addresses}]\nwrites = true\n"
    )
}

/// Waits until the disks of so many guests are proved.
pub fn wait_until_served(daemon: &mut Daemon, count: usize) {
    daemon.wait("the guests' disks are proved", |d| {
        let all = senders(d);
        all.iter().filter(|vm| vm.serving).count() == count
    });
}

pub fn senders(daemon: &Daemon) -> Vec<PipeVm> {
    let all: Pipes = daemon.json(&["pipe", "ls"]);
    all.vms
}

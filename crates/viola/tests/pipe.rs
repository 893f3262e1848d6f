// SPDX-License-Identifier: Apache-2.0
//! Debian's nginx in a guest, unmodified, whose files the host sends: every byte compared, and who sent it.
//! Needs root and the lab's image.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::Daemon;
use common::guests::{signal, within};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::pipe::shown::{Pipes, Work};

const SOON: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
/// Of the files that nginx serves, in MiB.
const SIZES: [usize; 2] = [1, 40];

const NGINX: &str =
    "user root root; worker_processes 1; pid /tmp/n/pid; error_log /tmp/n/error.log;
events { worker_connections 512; }
http {
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000; default_type text/plain;
  client_body_temp_path /tmp/n/1; proxy_temp_path /tmp/n/2; fastcgi_temp_path /tmp/n/3;
  uwsgi_temp_path /tmp/n/4; scgi_temp_path /tmp/n/5;
  server { listen 80; root /tmp/d; }
}
";

/// A guest with a web server and a daemon that sends its files.
struct Rig {
    daemon: Daemon,
    lab: Lab,
    files: Vec<Vec<u8>>,
    _folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

fn noise(seed: usize, size: usize) -> Vec<u8> {
    let mut word = seed as u64 | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        word = word
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&word.rotate_left(17).to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

impl Rig {
    fn boot(name: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let (image, tree) = (folder.path().join("d.img"), folder.path().join("tree"));
        let files: Vec<Vec<u8>> = SIZES.iter().map(|size| noise(*size, size * MIB)).collect();
        std::fs::create_dir(&tree).unwrap();
        for (size, file) in SIZES.iter().zip(&files) {
            std::fs::write(tree.join(format!("f{size}")), file).unwrap();
        }
        File::create(&image).unwrap().set_len(128 << 20).unwrap();
        let made = Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-d", tree.to_str().unwrap(), image.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let guest = format!("{name}-web");
        let daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n[[vm]]\nname = \"uml:{guest}\"\n[vm.pipe]\naddresses = [\"10.77.0.11\"]\n"
        ));
        let text = format!(
            "[lab]\nname='{name}'\n[[guest]]\nname='{guest}'\ncores=[1]\ndisks=[{{image='d.img'}}]\n"
        );
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let spec = Spec::from_toml(&text, name, folder.path()).unwrap();
        let found = Paths::find_from([here]).unwrap_or_else(|e| panic!("{e}"));
        let paths = Paths {
            run: folder.path().join("run"),
            ..found
        };
        let lab = Lab::up(&spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()));
        let rig = Self {
            daemon,
            lab,
            files,
            _folder: folder,
            _turn: turn,
        };
        rig.sh("mkdir -p /tmp/d /tmp/n /run/viola; mount /dev/ubda /tmp/d");
        let agent = Workload::agent(
            "[pipe]\nfiles = ['/tmp/d']\nusers = ['root']\nsocket = '/tmp/n/pipe.sock'\n",
        );
        rig.guest().start("agent", agent).unwrap();
        rig
    }

    fn guest(&self) -> &Guest {
        &self.lab.guests()[0]
    }

    fn sh(&self, script: &str) -> String {
        let output = self
            .guest()
            .exec_for(&["sh", "-c", script], "", SOON)
            .unwrap();
        let text = output.stdout + &output.stderr;
        assert_eq!(output.status, 0, "{script}: {text}");
        text
    }

    fn wait_until_served(&mut self) {
        self.daemon.wait("the guest's disk is proved", |d| {
            let all: Pipes = d.json(&["pipe", "ls"]);
            all.vms.iter().any(|vm| vm.serving)
        });
    }

    fn start_nginx(&self) {
        // the configuration has no quotes in it
        self.sh(&format!("cat > /tmp/n/nginx.conf <<'END'\n{NGINX}END"));
        self.sh(
            "LD_PRELOAD=/usr/lib/libvpipe_preload.so VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock \
             nginx -c /tmp/n/nginx.conf -e /tmp/n/error.log > /tmp/n/out 2>&1",
        );
    }

    fn client(&self) -> Client {
        let to: SocketAddr = (self.guest().address().unwrap(), 80).into();
        let stream = self
            .lab
            .in_netns(|| TcpStream::connect_timeout(&to, SOON).unwrap())
            .unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Client(BufReader::new(stream))
    }

    fn work(&self) -> Work {
        let all: Pipes = self.daemon.json(&["pipe", "ls"]);
        all.vms[0].work.clone()
    }
}

/// A connection that is kept.
struct Client(BufReader<TcpStream>);

impl Client {
    fn ask(&mut self, path: &str, more: &str) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
    }

    /// Status and body.
    fn answer(&mut self) -> (u16, Vec<u8>) {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            assert!(
                self.0.read_line(&mut line).unwrap() > 0,
                "the connection ends"
            );
            let line = line.trim_end();
            if line.is_empty() {
                break;
            }
            if let Some(rest) = line.strip_prefix("HTTP/1.1 ") {
                status = rest[..3].parse().unwrap();
            }
            if let Some(rest) = line.to_lowercase().strip_prefix("content-length: ") {
                length = rest.parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        (status, body)
    }
}

#[test]
fn unmodified_nginx_serves_files_that_the_host_sends() {
    let mut rig = Rig::boot("pi-web");
    rig.wait_until_served();
    rig.start_nginx();
    let mut client = rig.client();
    for round in 0..5 {
        for (size, file) in SIZES.iter().zip(&rig.files) {
            client.ask(&format!("/f{size}"), "");
            let (status, body) = client.answer();
            assert_eq!(status, 200);
            assert!(body == *file, "round {round}: f{size}");
        }
    }
    let whole = (5 * SIZES.iter().sum::<usize>() * MIB) as u64;
    within(SOON, "the host has sent nearly all", || {
        rig.work().bytes > whole * 9 / 10
    });

    // a part of a file, nothing of it, and one that is not there
    client.ask("/f40", "Range: bytes=1000000-29999999\r\n");
    let (status, body) = client.answer();
    assert_eq!(status, 206);
    assert!(body == rig.files[1][1_000_000..30_000_000]);
    client.ask("/none", "");
    assert_eq!(client.answer().0, 404);
    // two questions at once are answered one after the other
    client.ask("/f40", "");
    client.ask("/f1", "");
    assert!(client.answer().1 == rig.files[1]);
    assert!(client.answer().1 == rig.files[0]);
    within(SOON, "all of them are given back", || {
        let work = rig.work();
        work.transfers.is_empty() && work.returned == work.begun && work.broken == 0
    });
}

#[test]
fn a_client_that_goes_away_harms_nobody() {
    let mut rig = Rig::boot("pi-gone");
    rig.wait_until_served();
    rig.start_nginx();
    for _ in 0..10 {
        let mut client = rig.client();
        client.ask("/f40", "");
        let mut some = vec![0; MIB];
        client.0.read_exact(&mut some).unwrap();
    }
    let mut client = rig.client();
    client.ask("/f40", "");
    assert!(client.answer().1 == rig.files[1]);
    within(SOON, "nothing is left", || {
        let work = rig.work();
        work.transfers.is_empty() && work.begun >= 11 && work.begun == work.returned + work.broken
    });
}

/// A client in the middle of a large answer.
fn half_way(rig: &Rig) -> (Client, Vec<u8>) {
    let mut client = rig.client();
    client.ask("/f40", "");
    let mut some = vec![0; MIB];
    client.0.read_exact(&mut some).unwrap();
    let mut found = None;
    within(SOON, "it is under way", || {
        found = rig.work().transfers.first().cloned();
        found.is_some()
    });
    (client, some)
}

/// Where the body of an answer begins.
fn body_of(answer: &[u8]) -> usize {
    let head = answer.windows(4).position(|four| four == b"\r\n\r\n");
    head.map_or(answer.len(), |at| at + 4)
}

/// What comes is the file's, up to a reset; a cut body never looks complete.
fn assert_reset(mut client: Client, mut got: Vec<u8>, file: &[u8]) {
    let error = client.0.read_to_end(&mut got).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let body = body_of(&got);
    assert!(got[body..] == file[..got.len() - body] && got.len() - body < file.len());
}

#[test]
fn a_killed_daemon_is_not_noticed_by_a_client() {
    let mut rig = Rig::boot("pi-daemon");
    rig.wait_until_served();
    rig.start_nginx();
    let (mut client, mut got) = half_way(&rig);
    rig.daemon.kill();
    let mut more = vec![0; 39 * MIB];
    client.0.read_exact(&mut more).unwrap();
    got.extend(more);
    let body = body_of(&got);
    assert!(got[body..] == rig.files[1][..got.len() - body]);
    // the next one finds the worker, which serves on
    rig.daemon.again();
    rig.wait_until_served();
    let mut client = rig.client();
    client.ask("/f40", "");
    assert!(client.answer().1 == rig.files[1]);
    within(SOON, "it is counted on", || rig.work().begun >= 2);
}

#[test]
fn a_killed_worker_is_a_reset_and_the_next_one_serves() {
    let mut rig = Rig::boot("pi-work");
    rig.wait_until_served();
    rig.start_nginx();
    let (client, got) = half_way(&rig);
    let workers = viola_host::proc::children(rig.daemon.pid()).unwrap();
    assert_eq!(workers.len(), 1);
    signal(workers[0], rustix::process::Signal::KILL);
    assert_reset(client, got, &rig.files[1]);
    // what is given away while the agent has not heard of the next one is reset, too
    within(SOON, "another one serves", || {
        let mut client = rig.client();
        client.ask("/f40", "");
        let mut whole = vec![0; 40 * MIB];
        let got = client.0.read_exact(&mut whole);
        let body = body_of(&whole);
        got.is_ok() && whole[body..] == rig.files[1][..whole.len() - body] && rig.work().begun > 0
    });
}

#[test]
fn a_killed_agent_is_a_reset_and_never_an_end() {
    let mut rig = Rig::boot("pi-agent");
    rig.wait_until_served();
    rig.start_nginx();
    let (client, got) = half_way(&rig);
    rig.sh("killall -9 viola-agent");
    // a serial line does not tell: silence does
    within(SOON, "the host resets it", || rig.work().broken > 0);
    assert_reset(client, got, &rig.files[1]);
    // the server goes on by itself
    let mut client = rig.client();
    client.ask("/f40", "");
    assert!(client.answer().1 == rig.files[1]);
}

#[test]
fn a_file_is_not_written_to_while_the_host_sends_it() {
    let mut rig = Rig::boot("pi-write");
    rig.wait_until_served();
    rig.start_nginx();
    let (mut client, mut got) = half_way(&rig);
    let before = rig.files[1].clone();
    std::thread::scope(|scope| {
        let rig = &rig;
        let writer = scope
            .spawn(move || rig.sh("printf new | dd of=/tmp/d/f40 conv=notrunc 2>/dev/null; sync"));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!writer.is_finished(), "it waits for the transfer's end");
        let mut more = vec![0; 20 * MIB];
        client.0.read_exact(&mut more).unwrap();
        got.extend(more);
        // what is not sent yet comes from the VM itself, as it is then
        let mut rest = Vec::new();
        client
            .0
            .get_mut()
            .set_read_timeout(Some(Duration::from_secs(3)))
            .unwrap();
        let _ = client.0.read_to_end(&mut rest);
        got.extend(rest);
        writer.join().unwrap();
    });
    let body = body_of(&got);
    assert!(
        got[body..] == before[..got.len() - body],
        "the first bytes were sent long before"
    );
    let mut client = rig.client();
    client.ask("/f40", "");
    let (_, now) = client.answer();
    assert!(&now[..3] == b"new" && now[3..] == before[3..]);
}

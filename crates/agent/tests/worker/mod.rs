// SPDX-License-Identifier: Apache-2.0
//! A reader worker with made-up blocks, and a `viola-agent` that mounts them in a mount namespace of its own. Needs
//! root and /dev/fuse.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use viola_extents::host::{Image, Layer};
use viola_proto::agent::{BlockKey, Extent, FileMap};
use viola_vread::lookup::{Found, Incoming, Server};
use viola_vread::reader::{Service, StreamServer};
use viola_vread::table::Table;
use viola_vread::{hazard, table};

pub const POOL: &str = "BP-1-10.0.0.1-2";
/// Bytes per block.
pub const LENGTH: u64 = 6 << 20;
/// Number of blocks; their ids are below it.
pub const BLOCKS: u32 = 8;
const PIECE: u64 = 64 << 10;
const TABLE: u32 = 1;

/// Position of a piece of a block: neighbours are far apart.
fn place(block: u32, piece: u64) -> u64 {
    let pieces = LENGTH / PIECE;
    ((piece * 37 + 5) % pieces * u64::from(BLOCKS) + u64::from(block)) * PIECE
}

/// The disk with the blocks.
fn disk() -> &'static [u8] {
    static DISK: OnceLock<Vec<u8>> = OnceLock::new();
    DISK.get_or_init(|| {
        let all = 0..LENGTH * u64::from(BLOCKS);
        all.map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8)
            .collect()
    })
}

/// The bytes of a block from `offset` on.
pub fn bytes(block: u32, offset: u64, length: usize) -> Vec<u8> {
    let end = LENGTH.min(offset + length as u64);
    let (mut at, mut all) = (offset, Vec::with_capacity(length));
    while at < end {
        let some = (PIECE - at % PIECE).min(end - at);
        let from = (place(block, at / PIECE) + at % PIECE) as usize;
        all.extend_from_slice(&disk()[from..from + some as usize]);
        at += some;
    }
    all
}

fn found(table: &Table, key: &BlockKey) -> Option<Found> {
    let id = u32::try_from(key.id()).ok().filter(|id| *id < BLOCKS)?;
    let extent = |piece: u64| Extent {
        logical: piece * PIECE,
        physical: place(id, piece),
        length: PIECE,
        zero: false,
    };
    Some(Found {
        lease: table.lease(id)?,
        image: 1,
        data: FileMap {
            size: LENGTH,
            extents: (0..LENGTH / PIECE).map(extent).collect(),
        },
        meta: FileMap {
            size: 7,
            extents: vec![Extent {
                length: 7,
                ..extent(0)
            }],
        },
    })
}

/// The part of a worker that outlives its streams.
pub struct Worker {
    pub service: Arc<Service>,
    streams: StreamServer,
}

impl Worker {
    /// A worker whose files belong to this user.
    pub fn new(uid: u32) -> Self {
        let (table_file, cells) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        table::create(&table_file, TABLE, BLOCKS).unwrap();
        hazard::create(&cells, 16).unwrap();
        let table = Table::map(&table_file).unwrap();
        let image = tempfile::tempfile().unwrap();
        image.write_all_at(disk(), 0).unwrap();
        let flags = SocketFlags::CLOEXEC;
        let (here, there) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        std::thread::spawn(move || {
            let mut server = Server::new(there);
            loop {
                match server.receive() {
                    Incoming::Question(number, question) => {
                        let known = question.key.pool() == POOL;
                        let found = known.then(|| found(&table, &question.key)).flatten();
                        server.answer(number, found.as_ref()).unwrap();
                    }
                    Incoming::Empty => {
                        let _ = poll(&mut [PollFd::new(server.socket(), PollFlags::IN)], None);
                    }
                    Incoming::Closed => return,
                }
            }
        });
        let service = Arc::new(Service::new(hazard::Cells::map(&cells).unwrap()));
        service.add("dn1", here, table_file.into()).unwrap();
        let image = Image::open(vec![Layer::raw(image)]).unwrap();
        assert!(service.set_images("dn1", HashMap::from([(1, Arc::new(image))])));
        Self {
            streams: StreamServer::new(service.clone(), uid),
            service,
        }
    }

    /// Serves the next agent; returns a handle of the stream, to cut it.
    pub fn take(&self, listener: &UnixListener) -> UnixStream {
        let (stream, _) = listener.accept().unwrap();
        let hold = stream.try_clone().unwrap();
        self.streams.replace(stream.into()).unwrap();
        hold
    }
}

/// A mount namespace that lives as long as this value.
pub struct Namespace(Child);

impl Namespace {
    pub fn new() -> Self {
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg("echo; exec sleep 600")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // the namespace is ready when the line has come
        let mut line = [0];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut line)
            .unwrap();
        Self(child)
    }

    /// A command that runs in the namespace.
    pub fn command(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.0.id().to_string(), "--"]);
        command.current_dir("/");
        command
    }

    fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.0.id()))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `viola-agent` with a mount only.
pub struct Agent {
    child: Child,
    folder: PathBuf,
    root: PathBuf,
}

impl Agent {
    /// Starts an agent that connects to `port.sock` in `folder`.
    pub fn start(folder: &Path, namespace: &Namespace) -> Self {
        let text = format!(
            "status = '{0}/status.sock'\n[mount]\npath = '{0}/mnt'\nport = 'unix:{0}/port.sock'\n",
            folder.display()
        );
        std::fs::write(folder.join("agent.toml"), text).unwrap();
        let child = namespace
            .command()
            .args([env!("CARGO_BIN_EXE_viola-agent"), "--config"])
            .arg(folder.join("agent.toml"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            folder: folder.to_owned(),
            root: namespace.root(),
        }
    }

    /// The mount, as this process can see it.
    pub fn mount(&self) -> PathBuf {
        let inside = self.folder.join("mnt");
        let inside = inside.strip_prefix("/").unwrap();
        self.root.join(inside)
    }

    /// A block's file.
    pub fn block(&self, id: u32) -> PathBuf {
        self.mount().join(format!("{POOL}/blk_{id}_1001"))
    }

    /// What `viola-agent status` says.
    pub fn status(&self) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_viola-agent"))
            .arg("--config")
            .arg(self.folder.join("agent.toml"))
            .arg("status")
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Waits until its status contains `what`.
    pub fn wait(&self, what: &str) {
        within(what, Duration::from_secs(30), || {
            self.status().contains(what)
        });
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub fn wait_end(&mut self) {
        self.child.wait().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn within(what: &str, limit: Duration, done: impl Fn() -> bool) {
    let end = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads at an offset; the errno on failure.
pub fn read_at(file: &File, offset: u64, length: usize) -> Result<Vec<u8>, i32> {
    let mut room = vec![0; length];
    let mut have = 0;
    while have < length {
        match file.read_at(&mut room[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(count) => have += count,
            Err(e) => return Err(e.raw_os_error().unwrap_or(0)),
        }
    }
    room.truncate(have);
    Ok(room)
}

// SPDX-License-Identifier: Apache-2.0
//! A guest with native system calls: it shows the cost of a hand-over without User Mode Linux.
//!
//! The guest image's own programs, including the agent, run in namespaces without a kernel of their own: an ext4 image
//! on a loop device as the disk, a veth on a bridge as the tap, a unix socket as the channel. The worker is the same
//! code that serves VMs, in a thread of this process without its sandbox.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use viola_lab::Paths;
use viola_netdev::{Netns, add_veth, device};
use viola_vpipe::pipes::{PipeResources, congestion_controls};
use viola_vpipe::{AttachedPrograms, HoldQueue, Steering, VmNetns};
use viola_vread::agent_worker::{self, Params};
use viola_vread::control::{Control, Format, ImageSpec, Inbox, Limits, Order, Report, Session};
use viola_vread::table;

use super::bed::{Side, path};
use super::servers::{SOCKET, Work};
use crate::harness::side::lab_failure;
use crate::harness::tool;
use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::interrupt;

const NAME: &str = "native";
const GUEST: ([u8; 6], Ipv4Addr) = ([2, 0, 10, 78, 0, 11], Ipv4Addr::new(10, 78, 0, 11));
const CLIENT: ([u8; 6], Ipv4Addr) = ([2, 0, 10, 78, 0, 1], Ipv4Addr::new(10, 78, 0, 1));
/// Size of the disk, bytes.
const IMAGE: u64 = 512 << 20;
/// Timeout for each part of the setup.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// A native guest; see the module.
pub struct Native {
    programs: Child,
    device: String,
    worker: Option<JoinHandle<std::io::Result<()>>>,
    orders: Control,
    client: Netns,
    _guest: Netns,
    _host: Netns,
    _attached: AttachedPrograms,
}

impl Native {
    /// Creates it in `folder`, with these files.
    ///
    /// # Errors
    /// A program or resource is missing.
    pub fn new(folder: &Path, files: &[Vec<u8>]) -> Outcome<Self> {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
        let image = disk(folder, files)?;
        let run = folder.join("run");
        let _ = fs::remove_dir_all(&run);
        fs::create_dir_all(&run).map_err(failed)?;
        let listener = UnixListener::bind(run.join("host")).map_err(failed)?;
        let agent = format!(
            "channel = 'unix:/tmp/host'\nstatus = '/tmp/status'\n[pipe]\nfiles = ['/mnt']\nsocket = '{SOCKET}'\n"
        );
        fs::write(run.join("agent.toml"), agent).map_err(failed)?;
        let web = [Side::Stock, Side::Viola].map(|side| Work::Lighttpd.start(side, "", false));
        let web: Vec<String> = web.into_iter().flatten().collect();
        fs::write(run.join("web.sh"), web.join("\n")).map_err(failed)?;
        let (host, guest, client) = (netns()?, netns()?, netns()?);
        let (space, place, attached) = host.run(|| ports(&guest, &client)).map_err(failed)??;
        for (room, (mac, address)) in [(&guest, GUEST), (&client, CLIENT)] {
            let made = room.run(|| {
                device::up("lo")?;
                device::set_mac("eth0", mac)?;
                device::set_address("eth0", address, 24)
            });
            made.and_then(|made| made).map_err(failed)?;
        }
        let (orders, worker) = worker(space, place).map_err(failed)?;
        let device = output("losetup", &["-f", "--show", &image.display().to_string()])?;
        let device = device.trim().trim_start_matches("/dev/").to_owned();
        let programs = guest.run(|| programs(folder, &device)).map_err(failed)?;
        let native = Self {
            programs: programs?,
            device,
            worker: Some(worker),
            orders,
            client,
            _guest: guest,
            _host: host,
            _attached: attached,
        };
        native.begin(&image, &listener)?;
        Ok(native)
    }

    /// Gives the disk and the channel to the worker and waits for the agent's proof of the disk.
    fn begin(&self, image: &Path, listener: &UnixListener) -> Outcome {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", image.display()));
        let file = File::open(image).map_err(failed)?;
        let about = file.metadata().map_err(failed)?;
        let images = Order::Images {
            datanode: NAME.into(),
            images: vec![ImageSpec {
                id: 1,
                device: self.device.clone(),
                serial: None,
                layers: vec![Format::Raw],
                path: image.display().to_string(),
                file: (about.dev(), about.ino()),
            }],
            why: "start".into(),
        };
        self.order(&images, &[file.as_fd()])?;
        let channel = accept(listener)?;
        self.order(&Order::Channel, &[channel.as_fd()])?;
        let started = Instant::now();
        loop {
            interrupt::check()?;
            let stat = self.orders.order(&Order::Stat, &[], READY_TIMEOUT);
            match stat.map_err(|e| Failure::run(chain(&e)))? {
                Report::Agent(stat) if stat.session == Session::Proved => return Ok(()),
                stat if started.elapsed() > READY_TIMEOUT => {
                    return Err(Failure::run(format!(
                        "the agent did not prove the disk: {stat:?}"
                    )));
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Outcome {
        match self.orders.order(order, fds, READY_TIMEOUT) {
            Ok(Report::Done) => Ok(()),
            Ok(other) => Err(Failure::run(format!("the worker replied {other:?}"))),
            Err(e) => Err(Failure::run(chain(&e))),
        }
    }

    /// Number of pipes that the worker has started.
    ///
    /// # Errors
    /// The worker does not reply.
    pub fn begun(&self) -> Outcome<u64> {
        match self.orders.order(&Order::Stat, &[], READY_TIMEOUT) {
            Ok(Report::Agent(stat)) => Ok(stat.pipes.map_or(0, |work| work.begun)),
            Ok(other) => Err(Failure::run(format!("the worker replied {other:?}"))),
            Err(e) => Err(Failure::run(chain(&e))),
        }
    }

    /// Address of a side's server.
    pub fn address(work: Work, side: Side) -> SocketAddr {
        (IpAddr::from(GUEST.1), work.port(side)).into()
    }

    /// CPU time of its programs so far, including the agent: `schedstat` of all their threads.
    ///
    /// # Errors
    /// The programs have ended.
    pub fn cpu(&self) -> Outcome<Duration> {
        let space = |pid: u32, which: &str| fs::read_link(format!("/proc/{pid}/ns/{which}"));
        let own = space(self.programs.id(), "pid_for_children").map_err(Failure::run)?;
        let mut ns = 0;
        for entry in fs::read_dir("/proc").map_err(Failure::run)?.flatten() {
            let pid = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            let Some(pid) = pid.filter(|pid| space(*pid, "pid").is_ok_and(|it| it == own)) else {
                continue;
            };
            // A thread may have ended meanwhile.
            for task in fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten()
                .flatten()
            {
                let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
                let ran = text
                    .split(' ')
                    .next()
                    .and_then(|ran| ran.parse::<u64>().ok());
                ns += ran.unwrap_or(0);
            }
        }
        Ok(Duration::from_nanos(ns))
    }

    /// Runs a closure in the client's network namespace.
    ///
    /// # Errors
    /// The thread cannot enter the namespace.
    pub fn at_client<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Outcome<T> {
        self.client.run(job).map_err(Failure::run)
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        // When the first process of the namespace ends, the kernel ends the others.
        let _ = self.programs.kill();
        let _ = self.programs.wait();
        let why = "the end".into();
        let _ = self.orders.order(&Order::Quit { why }, &[], READY_TIMEOUT);
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        let _ = output("losetup", &["-d", &format!("/dev/{}", self.device)]);
    }
}

fn netns() -> Outcome<Netns> {
    Netns::new().map_err(|e| Failure::run(format!("cannot create a network namespace: {e}")))
}

/// Runs a host program to its end.
fn output(name: &str, arguments: &[&str]) -> Outcome<String> {
    let output = tool::output(Command::new(name).args(arguments))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Creates an ext4 image with the files.
fn disk(folder: &Path, files: &[Vec<u8>]) -> Outcome<PathBuf> {
    let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
    let tree = folder.join("tree");
    let _ = fs::remove_dir_all(&tree);
    fs::create_dir_all(&tree).map_err(failed)?;
    for file in files {
        fs::write(tree.join(&path(file.len())[1..]), file).map_err(failed)?;
    }
    let image = folder.join("disk.img");
    let _ = fs::remove_file(&image);
    let made = File::create(&image).and_then(|file| file.set_len(IMAGE));
    made.map_err(failed)?;
    let (tree, at) = (tree.display().to_string(), image.display().to_string());
    output(
        "/usr/sbin/mkfs.ext4",
        &["-q", "-b", "4096", "-d", &tree, &at],
    )?;
    fs::canonicalize(&image).map_err(failed)
}

/// Creates a bridge with the guest and its client in the calling thread's network namespace, and the worker's resources
/// there.
fn ports(guest: &Netns, client: &Netns) -> Outcome<(VmNetns, PipeResources, AttachedPrograms)> {
    let (tap, to_client) = ("tap", "client");
    let made = (|| {
        device::add_bridge("bridge")?;
        device::up("bridge")?;
        for (port, room) in [(tap, guest), (to_client, client)] {
            add_veth(port, "eth0", Some(room.as_fd()))?;
            device::add_port("bridge", port)?;
            device::up(port)?;
        }
        device::index(tap)
    })();
    let tap = made.map_err(|e: std::io::Error| Failure::run(format!("a bridge: {e}")))?;
    let congestion_controls = congestion_controls().map_err(Failure::run)?;
    let made = (|| {
        let steering = Steering::load()?;
        let space = VmNetns::new("vionative", GUEST.0, 1500)?;
        let attached = steering.attach(tap, &space)?;
        let place = PipeResources {
            flows: steering.flows().descriptor()?.into(),
            gate: steering.gate().descriptor()?.into(),
            hold_queue: HoldQueue::new(&space)?,
            tap,
            veth: space.veth(),
            hold_veth: space.hold_veth(),
            addresses: Vec::new(),
            congestion_controls,
            max_pipes: 8,
            max_bytes_per_s: None,
            receive_limit: None,
        };
        Ok((space, place, attached))
    })();
    made.map_err(|e: viola_vpipe::Error| Failure::run(chain(&e)))
}

/// Starts the worker in its own thread and returns its channel.
fn worker(
    space: VmNetns,
    place: PipeResources,
) -> std::io::Result<(Control, JoinHandle<std::io::Result<()>>)> {
    let memory = rustix::fs::memfd_create("table", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = File::from(memory);
    table::create(&file, 1, 16)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let start = Params {
        vm: NAME.into(),
        table: OwnedFd::from(file),
        inbox: Inbox::single(Control::from_fd(theirs)),
        pipes: Some(place),
        limits: Limits::default(),
    };
    let run = move || {
        let sink = Box::new(|_, _: &str| ());
        space.netns().run(|| agent_worker::run(start, sink))?
    };
    let thread = std::thread::Builder::new().name("native-worker".into());
    Ok((Control::from_fd(ours), thread.spawn(run)?))
}

/// Starts the agent and the servers in the calling thread's network namespace. The agent does not accept loop devices
/// as disks, so it sees a disk in their place.
fn programs(folder: &Path, device: &str) -> Outcome<Child> {
    let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
    let number = fs::read_to_string(format!("/sys/block/{device}/dev")).map_err(failed)?;
    let sys = folder.join("sys");
    let _ = fs::remove_dir_all(&sys);
    let block = sys.join(format!("devices/pci0/block/{device}"));
    fs::create_dir_all(&block).map_err(failed)?;
    fs::create_dir_all(sys.join("dev/block")).map_err(failed)?;
    fs::write(block.join("size"), (IMAGE / 512).to_string()).map_err(failed)?;
    let link = sys.join("dev/block").join(number.trim());
    let to = format!("../../devices/pci0/block/{device}");
    std::os::unix::fs::symlink(to, link).map_err(failed)?;
    let root = Paths::find().map_err(lab_failure)?.image.join("root");
    let folder = fs::canonicalize(folder).map_err(failed)?;
    let serve = |side, variables: &str| {
        let port = Work::Times.port(side);
        format!("{variables} vpipe-times /mnt {port} > /tmp/{port}.log 2>&1 &")
    };
    let inside = format!(
        "sh -e /tmp/web.sh; {} {} exec viola-agent --config /tmp/agent.toml > /tmp/agent.log 2>&1",
        serve(Side::Stock, "VIOLA_PIPE_SOCKET=/tmp/none.sock"),
        serve(
            Side::Viola,
            &format!("VIOLA_PIPE_MIN=1 VIOLA_PIPE_SOCKET={SOCKET}")
        ),
    );
    let script = format!(
        "cd {}; mount --bind {folder}/run tmp; mount --bind {folder}/sys sys; mount --bind /dev dev; mount -t proc proc proc; \
         mount -o noatime /dev/{device} mnt; PATH=/usr/sbin:/usr/bin exec chroot . sh -c '{inside}'",
        root.display(),
        folder = folder.display(),
    );
    Command::new("unshare")
        .args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-ec",
            &script,
        ])
        .stdin(Stdio::null())
        .spawn()
        .map_err(|e| Failure::run(format!("unshare: {e}")))
}

/// Accepts the agent's connection.
fn accept(listener: &UnixListener) -> Outcome<UnixStream> {
    let started = Instant::now();
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    while started.elapsed() < READY_TIMEOUT {
        interrupt::check()?;
        let mut polled = [PollFd::new(listener, PollFlags::IN)];
        if poll(&mut polled, Some(&moment)).is_ok_and(|ready| ready > 0) {
            return listener.accept().map(|(it, _)| it).map_err(Failure::run);
        }
    }
    Err(Failure::run("the agent does not start"))
}

// SPDX-License-Identifier: Apache-2.0
//! How fast a block is read by a byte stream through the kernel's FUSE, beside its image file.
//!
//! ```text
//! stream-throughput FOLDER [--mib N] [--rounds N]
//! ```
//!
//! Needs root and /dev/fuse. FOLDER holds the image. Agent and worker are threads of this program, the
//! stream is a unix socket between them: what a hypervisor and its port add is not in the figures. Both
//! sides are read in turn, and the median is shown: MiB/s, and CPU-seconds per GiB of everything.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use viola_agent::io::channel::Address;
use viola_agent::relay::Relay;
use viola_extents::host::{Image, Layer};
use viola_proto::agent::{Extent, FileMap};
use viola_vread::lookup::{Found, Incoming, Server};
use viola_vread::reader::{MountOptions, Service, StreamServer};
use viola_vread::table::Table;
use viola_vread::{hazard, table};

type Error = Box<dyn std::error::Error>;

const MIB: u64 = 1 << 20;

/// A worker for one block, which is the whole image.
fn worker(image: &Path, size: u64) -> Result<StreamServer, Error> {
    let (table_file, cells) = (tempfile::tempfile()?, tempfile::tempfile()?);
    table::create(&table_file, 1, 1)?;
    hazard::create(&cells, 16)?;
    let table = Table::map(&table_file)?;
    let flags = SocketFlags::CLOEXEC;
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    std::thread::spawn(move || {
        let map = |size: u64| FileMap {
            size,
            extents: vec![Extent {
                logical: 0,
                physical: 0,
                length: size,
                zero: false,
            }],
        };
        let mut server = Server::new(there);
        loop {
            match server.receive() {
                Incoming::Question(number, _) => {
                    let found = table.lease(0).map(|lease| Found {
                        lease,
                        image: 1,
                        data: map(size),
                        meta: map(7),
                    });
                    if server.answer(number, found.as_ref()).is_err() {
                        return;
                    }
                }
                Incoming::Empty => {
                    let _ = poll(&mut [PollFd::new(server.socket(), PollFlags::IN)], None);
                }
                Incoming::Closed => return,
            }
        }
    });
    let service = Arc::new(Service::new(hazard::Cells::map(&cells)?));
    service.add("dn1", here, table_file.into())?;
    let image = Image::open(vec![Layer::raw(File::open(image)?)])?;
    service.set_images("dn1", HashMap::from([(1, Arc::new(image))]));
    let mount = MountOptions {
        uid: 0,
        gid: 0,
        keep_cache: false,
    };
    Ok(StreamServer::new(service, mount, 4))
}

/// CPU time of this process so far.
fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn run(folder: &str, options: &[String]) -> Result<(), Error> {
    let option = |name: &str, default: u64| -> Result<u64, Error> {
        match options.iter().position(|word| word == name) {
            Some(at) => Ok(options.get(at + 1).ok_or("a number is needed")?.parse()?),
            None => Ok(default),
        }
    };
    let (mib, rounds) = (option("--mib", 512)?, option("--rounds", 5)?);
    let folder = Path::new(folder).canonicalize()?;
    // A mount namespace of this program's own, while it has one thread.
    // SAFETY: the descriptor table stays shared; nothing here depends on the old namespace.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS)? };
    rustix::mount::mount_change(
        "/",
        rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
    )?;
    let path = folder.join("stream.img");
    let image = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)?;
    let piece: Vec<u8> = (0..MIB).map(|i| (i * 31 + i / 251) as u8).collect();
    for at in 0..mib {
        image.write_all_at(&piece, at * MIB)?;
    }
    let streams = worker(&path, mib * MIB)?;
    let own = tempfile::tempdir()?;
    let listener = UnixListener::bind(own.path().join("port"))?;
    let mount = own.path().join("mnt");
    let relay = Relay::start(mount.clone(), Address::Unix(own.path().join("port")))?;
    streams.replace(listener.accept()?.0.into())?;
    while !relay.report().state.starts_with("served") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let block = mount.join("BP-1-x-1/blk_1_1");
    println!("{:<34} {:>9} {:>10}", "", "MiB/s", "s/GiB");
    for (name, size, flags) in [
        ("1 MiB O_DIRECT", MIB, libc::O_DIRECT),
        ("64 KiB O_DIRECT", 64 << 10, libc::O_DIRECT),
        ("4 KiB O_DIRECT", 4 << 10, libc::O_DIRECT),
        ("buffered", MIB, 0),
    ] {
        // of small requests a part of the block is enough
        let whole = if size < 64 << 10 { mib / 16 } else { mib } * MIB;
        let mut sides: [[Vec<f64>; 2]; 2] = Default::default();
        for _ in 0..rounds {
            for (side, path) in [&path, &block].into_iter().enumerate() {
                // the image is in the page cache; read past it only through the mount
                let flags = if side == 1 { flags } else { 0 };
                let file = File::options().read(true).custom_flags(flags).open(path)?;
                if side == 1 {
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
                }
                let mut room = vec![0; usize::try_from(size)? + 4096];
                let skip = room.as_ptr().align_offset(4096);
                let room = &mut room[skip..skip + usize::try_from(size)?];
                let (before, begin) = (cpu(), Instant::now());
                for at in (0..whole).step_by(usize::try_from(size)?) {
                    file.read_exact_at(room, at)?;
                }
                let seconds = begin.elapsed().as_secs_f64();
                sides[side][0].push(whole as f64 / MIB as f64 / seconds);
                let gib = whole as f64 / (1024.0 * MIB as f64);
                sides[side][1].push((cpu() - before).as_secs_f64() / gib);
            }
        }
        for (side, [speed, cost]) in ["image", "stream"].iter().zip(&mut sides) {
            let name = format!("{name}, {side}");
            println!("{name:<34} {:>9.0} {:>10.2}", median(speed), median(cost));
        }
    }
    drop(relay);
    std::fs::remove_file(path)?;
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, options @ ..] = &arguments[..] else {
        eprintln!("usage: stream-throughput FOLDER [--mib N] [--rounds N]");
        return ExitCode::from(2);
    };
    match run(folder, options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("stream-throughput: {e}");
            ExitCode::FAILURE
        }
    }
}

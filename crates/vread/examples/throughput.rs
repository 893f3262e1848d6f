// SPDX-License-Identifier: Apache-2.0
//! How fast a guest reads a block through the device, beside its own virtual disk with the same bytes.
//!
//! ```text
//! throughput FOLDER [--mib N] [--rounds N] [--only WORDS] [-- WORKER OPTIONS]
//! ```
//!
//! Needs root, the lab's image and `serve-blocks` beside this program. FOLDER holds the image, on the
//! file system to be measured. Prints MiB/s, and CPU-seconds per GiB of guest and worker; both sides
//! are read in turn, and the median is shown.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use viola_lab::{Lab, Paths, Spec};

const MIB: u64 = 1 << 20;
const BLOCK: &str = "/mnt/BP-1-x-1/blk_1_1";

/// CPU time of a process and of what it has reaped, in seconds.
fn cpu(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(") ").context("an odd stat file")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let ticks: f64 = fields[11..15]
        .iter()
        .filter_map(|f| f.parse::<f64>().ok())
        .sum();
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}

/// CPU time of all processes of a guest: its kernel's session.
fn guest_cpu(pid: u32) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(member) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let session = rustix::process::Pid::from_raw(member.cast_signed())
            .and_then(|p| rustix::process::getsid(Some(p)).ok());
        if session.is_some_and(|s| s.as_raw_nonzero().get().cast_unsigned() == pid) {
            sum += cpu(member).unwrap_or(0.0);
        }
    }
    Ok(sum)
}

/// The worker; it ends with this program, however that ends.
struct Worker(std::process::Child);

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn evict(image: &File) -> anyhow::Result<()> {
    image.sync_all()?;
    rustix::fs::fadvise(image, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (own, worker_options) = match arguments.iter().position(|word| word == "--") {
        Some(place) => (&arguments[..place], &arguments[place + 1..]),
        None => (&arguments[..], &[][..]),
    };
    let [folder, options @ ..] = own else {
        bail!("usage: throughput FOLDER [--mib N] [--rounds N] [--only WORDS] [-- WORKER OPTIONS]");
    };
    let option = |name: &str, default: u64| -> anyhow::Result<u64> {
        match options.iter().position(|word| word == name) {
            Some(place) => Ok(options
                .get(place + 1)
                .context("a number is needed")?
                .parse()?),
            None => Ok(default),
        }
    };
    let only = options.iter().position(|word| word == "--only");
    let only = only.and_then(|place| options.get(place + 1));
    let only = only.map_or("", String::as_str);
    let (mib, rounds) = (option("--mib", 512)?, option("--rounds", 5)?);
    let folder = Path::new(folder).canonicalize()?;
    let path = folder.join("throughput.img");
    let image = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)?;
    let piece: Vec<u8> = (0..MIB).map(|i| (i * 31 + i / 251) as u8).collect();
    if image.metadata()?.len() != mib * MIB {
        image.set_len(0)?;
        for at in 0..mib {
            image.write_all_at(&piece, at * MIB)?;
        }
    }
    let description = folder.join("throughput.json");
    let block = format!("{{\"size\":{0},\"extents\":[[0,0,{0},false]]}}", mib * MIB);
    std::fs::write(
        &description,
        format!(
            "{{\"image\":\"{}\",\"blocks\":[{{\"key\":{{\"pool\":\"BP-1-x-1\",\"id\":1,\"stamp\":1}},\"data\":{block},\"meta\":{{\"size\":0,\"extents\":[]}}}}]}}",
            path.display()
        ),
    )?;
    let socket = folder.join("throughput.sock");
    let program = std::env::current_exe()?.with_file_name("serve-blocks");
    let worker = Command::new(program)
        .args([&description, &socket])
        .args(worker_options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut worker = Worker(worker);
    let mut ready = String::new();
    let mut answers = BufReader::new(worker.0.stdout.take().context("no output")?);
    answers.read_line(&mut ready)?;
    ensure!(ready.trim() == "ready", "the worker says {ready}");
    std::thread::sleep(Duration::from_millis(50));

    let text = format!(
        "[lab]\nname='vr-speed'\n[[guest]]\nname='a'\nmemory='384M'\ncores=[1]\ndisks=[{{image='{}',read_only=true}}]\nkernel_args=['virtio_uml.device={}:26']\n",
        path.display(),
        socket.display()
    );
    let spec = Spec::from_toml(&text, "vr-speed", &folder)?;
    let lab = Lab::up(&spec, &Paths::find()?)?;
    let guest = lab.guest("a")?;
    let run = |command: &str| -> anyhow::Result<String> {
        let output = guest.exec_for(&["sh", "-c", command], "", Duration::from_secs(120))?;
        ensure!(
            output.status == 0,
            "{command}: {}{}",
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    };
    run("mount -t virtiofs viola /mnt")?;
    let device = "d=$(awk '$5 == \"/mnt\" {print $3}' /proc/self/mountinfo); echo 1024 > /sys/class/bdi/$d/read_ahead_kb";
    let gib = mib as f64 / 1024.0;
    println!(
        "{:<34} {:>9} {:>12} {:>12}",
        "", "MiB/s", "guest s/GiB", "worker s/GiB"
    );
    for (name, flags, prepare, cold) in [
        ("1 MiB O_DIRECT", "bs=1M iflag=direct", "true", false),
        ("64 KiB O_DIRECT", "bs=64k iflag=direct", "true", false),
        ("4 KiB O_DIRECT", "bs=4k iflag=direct", "true", false),
        ("buffered, readahead 128 KiB", "bs=1M", "true", false),
        ("buffered, readahead 1 MiB", "bs=1M", device, false),
        ("cold, 1 MiB O_DIRECT", "bs=1M iflag=direct", "true", true),
        ("cold, buffered, readahead 1 MiB", "bs=1M", device, true),
    ] {
        if !only.is_empty() && !name.contains(only) {
            continue;
        }
        run(prepare)?;
        run(&format!(
            "echo {} > /sys/block/ubda/queue/read_ahead_kb",
            if prepare == "true" { 128 } else { 1024 }
        ))?;
        // of small requests a part of the block is enough
        let (part, share) = match flags {
            "bs=4k iflag=direct" => (mib * 16, 1.0 / 16.0),
            "bs=64k iflag=direct" => (mib * 16, 1.0),
            _ => (mib, 1.0),
        };
        let mut sides: [[Vec<f64>; 3]; 2] = Default::default();
        for _ in 0..rounds {
            for (side, file) in ["/dev/ubda", BLOCK].iter().enumerate() {
                run("echo 3 > /proc/sys/vm/drop_caches")?;
                if cold {
                    evict(&image)?;
                }
                let before = (guest_cpu(guest.pid())?, cpu(worker.0.id())?);
                let begin = Instant::now();
                run(&format!(
                    "dd if={file} of=/dev/null {flags} count={part} 2>/dev/null"
                ))?;
                let seconds = begin.elapsed().as_secs_f64();
                let after = (guest_cpu(guest.pid())?, cpu(worker.0.id())?);
                let read = gib * share;
                sides[side][0].push(read * 1024.0 / seconds);
                sides[side][1].push((after.0 - before.0) / read);
                sides[side][2].push((after.1 - before.1) / read);
            }
        }
        for (side, values) in ["ubd", "vread"].iter().zip(&mut sides) {
            let [speed, guest, worker] = values;
            println!(
                "{:<34} {:>9.0} {:>12.2} {:>12.2}",
                format!("{name}, {side}"),
                median(speed),
                median(guest),
                median(worker)
            );
        }
    }
    let mut orders = worker.0.stdin.take().context("no input")?;
    writeln!(orders, "stat")?;
    let mut stat = String::new();
    answers.read_line(&mut stat)?;
    println!("{}", stat.trim());
    lab.down()?;
    drop(worker);
    for file in [&path, &description, &socket] {
        let _ = std::fs::remove_file(file);
    }
    Ok(())
}

// SPDX-License-Identifier: Apache-2.0
//! A guest, an image with blocks, and a worker that serves them.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use viola_lab::testing::noise;
pub use viola_lab::testing::sha256;
use viola_lab::{Guest, Lab, testing};

pub const POOL: &str = "BP-1-10.0.0.1-1";
/// Bytes of a block.
pub const BLOCK: usize = 16 << 20;
/// Length of an extent of the test image.
const RUN: usize = 1 << 20;

/// Examples are beside the tests' own folder.
fn worker() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    folder.join("examples/serve-blocks")
}

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    /// Logical, physical, length, zero.
    extents: Vec<(u64, u64, u64, bool)>,
}

impl Content {
    fn json(&self) -> String {
        let extents: Vec<String> = self
            .extents
            .iter()
            .map(|(l, p, n, z)| format!("[{l},{p},{n},{z}]"))
            .collect();
        format!(
            "{{\"size\":{},\"extents\":[{}]}}",
            self.bytes.len(),
            extents.join(",")
        )
    }
}

pub struct Vm {
    lab: Lab,
    worker: Child,
    orders: ChildStdin,
    answers: BufReader<std::process::ChildStdout>,
    image: File,
    contents: HashMap<String, Content>,
    _folder: tempfile::TempDir,
    _turn: testing::GuestPermit,
}

/// Three blocks: one in runs all over the disk, one with a hole and a part that was never written, one
/// whose length is odd; their checksum files are small.
fn contents() -> (HashMap<String, Content>, u64) {
    let mut all = HashMap::new();
    let mut end = 1 << 20;
    for id in 1..=3u64 {
        let length = if id == 3 { 5_000_001 } else { BLOCK };
        let mut data = Content {
            bytes: noise(id, length),
            ..Content::default()
        };
        let runs = length.div_ceil(RUN) as u64;
        for run in 0..runs {
            // backwards on the disk, so that no two runs can be read as one
            let logical = run * RUN as u64;
            let length = (RUN as u64).min(length as u64 - logical);
            let physical = end + (runs - 1 - run) * RUN as u64;
            let range = logical as usize..(logical + length) as usize;
            match (id, run) {
                (2, 3) => data.bytes[range].fill(0), // a hole
                (2, 5) => {
                    data.bytes[range].fill(0);
                    data.extents.push((logical, physical, length, true));
                }
                _ => data.extents.push((logical, physical, length, false)),
            }
        }
        end += runs * RUN as u64;
        let meta = Content {
            bytes: noise(100 + id, 131_079),
            extents: vec![(0, end, 131_079, false)],
        };
        end += RUN as u64;
        all.insert(format!("blk_{id}_1001"), data);
        all.insert(format!("blk_{id}_1001.meta"), meta);
    }
    (all, end)
}

/// Boots a guest that has the device mounted at `/mnt`.
pub fn boot(name: &str) -> Vm {
    let turn = testing::guest_permit();
    let folder = tempfile::tempdir().unwrap();
    let (contents, end) = contents();
    let path = folder.path().join("image");
    let image = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    // where no block is the disk holds other bytes, also where one was never written
    image.write_all_at(&vec![0x5a; end as usize], 0).unwrap();
    for content in contents.values() {
        write(&image, content, None);
    }
    let blocks: Vec<String> = (1..=3)
        .map(|id| {
            let data = &contents[&format!("blk_{id}_1001")];
            let meta = &contents[&format!("blk_{id}_1001.meta")];
            format!(
                "{{\"key\":{{\"pool\":\"{POOL}\",\"id\":{id},\"stamp\":1001}},\"data\":{},\"meta\":{}}}",
                data.json(),
                meta.json()
            )
        })
        .collect();
    let description = folder.path().join("blocks.json");
    std::fs::write(
        &description,
        format!(
            "{{\"image\":\"{}\",\"blocks\":[{}]}}",
            path.display(),
            blocks.join(",")
        ),
    )
    .unwrap();
    let socket = folder.path().join("vfs.sock");
    let mut worker = Command::new(worker())
        .args([&description, &socket])
        .arg("--sandbox")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answers = BufReader::new(worker.stdout.take().unwrap());
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "ready");
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }

    let core = testing::core();
    let text = format!(
        "[lab]\nname='{name}'\n[[guest]]\nname='a'\ncores=[{core}]\nkernel_args=['virtio_uml.device={}:26']\n",
        socket.display()
    );
    let paths = testing::paths(env!("CARGO_MANIFEST_DIR"), &folder.path().join("run"));
    let lab = testing::up(&text, name, folder.path(), &paths);
    let vm = Vm {
        lab,
        orders: worker.stdin.take().unwrap(),
        worker,
        answers,
        image,
        contents,
        _folder: folder,
        _turn: turn,
    };
    vm.mount();
    vm
}

/// Writes a content to its places, or `other` bytes.
fn write(image: &File, content: &Content, other: Option<u8>) {
    for (logical, physical, length, zero) in &content.extents {
        if !zero {
            let range = *logical as usize..(logical + length) as usize;
            let bytes = match other {
                None => content.bytes[range].to_vec(),
                Some(byte) => vec![byte; range.len()],
            };
            image.write_all_at(&bytes, *physical).unwrap();
        }
    }
}

impl Vm {
    pub fn guest(&self) -> &Guest {
        self.lab.guest("a").unwrap()
    }

    pub fn mount(&self) {
        self.sh("mount -t virtiofs viola /mnt");
    }

    /// Status and both outputs of a shell command in the guest.
    pub fn try_sh(&self, command: &str) -> (i32, String) {
        let output = self.guest().exec(&["sh", "-c", command]).unwrap();
        (output.status, output.stdout + &output.stderr)
    }

    pub fn sh(&self, command: &str) -> String {
        let (status, output) = self.try_sh(command);
        assert_eq!(status, 0, "{command}: {output}");
        output
    }

    pub fn data(&self, id: u64) -> String {
        format!("blk_{id}_1001")
    }

    pub fn meta(&self, id: u64) -> String {
        format!("blk_{id}_1001.meta")
    }

    pub fn expected(&self, name: &str) -> &[u8] {
        &self.contents[name].bytes
    }

    pub fn sha(&self, name: &str) -> String {
        sha256(self.expected(name))
    }

    /// Sums of all beginnings of a file, in steps.
    pub fn prefixes(&self, name: &str, step: usize) -> HashSet<String> {
        let bytes = self.expected(name);
        (0..=bytes.len() / step)
            .map(|count| sha256(&bytes[..count * step]))
            .collect()
    }

    /// Gives the worker an order; its answer.
    pub fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn stat(&mut self) -> String {
        self.order("stat")
    }

    pub fn overwrite(&self, id: u64, byte: u8) {
        write(&self.image, &self.contents[&self.data(id)], Some(byte));
    }

    pub fn restore(&self, id: u64) {
        write(&self.image, &self.contents[&self.data(id)], None);
    }

    /// Stops the worker's process without ending it.
    pub fn stop_worker(&self) {
        let pid = rustix::process::Pid::from_child(&self.worker);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    }

    pub fn kill_worker(&mut self) {
        self.worker.kill().unwrap();
        self.worker.wait().unwrap();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.worker.kill();
        let _ = self.worker.wait();
    }
}

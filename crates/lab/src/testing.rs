// SPDX-License-Identifier: Apache-2.0
//! What tests with guests share. Everything here panics where something does not go as it should.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Lab, Paths, Spec};

/// The core on which a test's guests run: the second one, where there is one.
pub fn core() -> usize {
    usize::from(std::thread::available_parallelism().is_ok_and(|n| n.get() > 1))
}

/// Keeps further tests of the same program from running guests.
#[derive(Debug)]
pub struct GuestPermit(());

/// Guests of this many tests of a program run at a time: most of a test is waiting for what happens in its guest.
const MAX_TESTS_WITH_GUESTS: usize = 2;
static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits until guests may be run. For tests that measure nothing: guests of two tests share a core then.
pub fn guest_permit() -> GuestPermit {
    let taken = RUNNING.0.lock().unwrap_or_else(PoisonError::into_inner);
    let free = RUNNING
        .1
        .wait_while(taken, |taken| *taken >= MAX_TESTS_WITH_GUESTS);
    *free.unwrap_or_else(PoisonError::into_inner) += 1;
    GuestPermit(())
}

impl Drop for GuestPermit {
    fn drop(&mut self) {
        *RUNNING.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        RUNNING.1.notify_one();
    }
}

/// Bytes that look random and follow from the seed.
pub fn noise(seed: u64, size: usize) -> Vec<u8> {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// The lab's image, found from the folder of the crate that tests (`env!("CARGO_MANIFEST_DIR")`), and a folder for what
/// a lab needs while it runs.
pub fn paths(from: &str, run: &Path) -> Paths {
    let found = Paths::find_from([Path::new(from)]);
    Paths {
        run: run.into(),
        ..found.unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Boots the guests of a description whose images lie in `folder`.
pub fn up(description: &str, name: &str, folder: &Path, paths: &Paths) -> Lab {
    let spec = Spec::from_toml(description, name, folder).unwrap_or_else(|e| panic!("{e}"));
    Lab::up(&spec, paths).unwrap_or_else(|e| panic!("{}", e.full()))
}

/// The words that run a program of the host in a guest which has the host's root at `root`: with the host's own loader
/// and libraries, those that the calling test is linked to.
pub fn host_program(root: &str, path: &str) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("what this test is linked to");
    let mapped = |name: &str| -> PathBuf {
        let files = maps.lines().filter_map(|l| l.split_whitespace().nth(5));
        let is_it = |p: &PathBuf| {
            p.file_name()
                .is_some_and(|f| f.to_string_lossy().starts_with(name))
        };
        files
            .map(PathBuf::from)
            .find(is_it)
            .unwrap_or_else(|| panic!("this test is not linked to {name}"))
    };
    let (loader, libc) = (mapped("ld-linux"), mapped("libc.so"));
    let libraries = libc.parent().unwrap_or(Path::new("/"));
    format!(
        "{root}{} --library-path {root}{} {root}{path}",
        loader.display(),
        libraries.display()
    )
}

/// Runs a program of the host on the host; it must succeed.
pub fn host(command: &str) {
    let mut words = command.split_whitespace();
    let program = words.next().expect("a program");
    let output = Command::new(program)
        .args(words)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(
        output.status.success(),
        "{command}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// SHA-256 in hexadecimal digits, by the host's own program.
pub fn sha256(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sha256sum");
    let mut input = child.stdin.take().expect("its input");
    input.write_all(bytes).expect("sha256sum reads");
    drop(input);
    let output = child.wait_with_output().expect("sha256sum ends");
    String::from_utf8_lossy(&output.stdout)[..64].to_owned()
}

/// Waits at most half a minute.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_test_waits_for_its_turn() {
        let (first, second) = (guest_permit(), guest_permit());
        let third = std::thread::spawn(|| drop(guest_permit()));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!third.is_finished());
        drop(first);
        third.join().expect("its turn");
        drop(second);
    }

    #[test]
    fn noise_follows_from_its_seed() {
        let some = noise(5, 1001);
        assert_eq!(some.len(), 1001);
        assert!(some == noise(5, 2000)[..1001] && some != noise(6, 1001));
    }

    #[test]
    fn sums_are_those_of_the_standard() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_program_of_the_host_runs_by_its_own_loader() {
        let words = host_program("", "/bin/true");
        host(&words);
        assert!(host_program("/h", "/bin/true").starts_with("/h/"));
    }
}

/// The program `viola-lab` in the folder of a program of the same build; cargo builds it when it is missing.
///
/// # Panics
/// When cargo cannot build it.
pub fn lab_program(beside: &Path) -> PathBuf {
    let lab = beside.with_file_name("viola-lab");
    if !lab.is_file() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut build = std::process::Command::new(cargo);
        build.args(["build", "--quiet", "--package", "viola-bench"]);
        let done = build.current_dir(root).status();
        assert!(
            done.is_ok_and(|s| s.success()),
            "cargo cannot build viola-lab"
        );
    }
    lab
}

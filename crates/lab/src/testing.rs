// SPDX-License-Identifier: Apache-2.0
//! Helpers of tests with guests. All functions panic on failure.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Lab, Paths, Spec};

/// The core for guests of tests: the second one if there are several.
pub fn core() -> usize {
    usize::from(std::thread::available_parallelism().is_ok_and(|n| n.get() > 1))
}

/// Permission to run guests. Dropping it lets another test of the same program run guests.
#[derive(Debug)]
pub struct GuestPermit(());

/// Number of tests of a program that may have guests at a time. Two, because tests mostly wait for
/// their guests.
const MAX_TESTS_WITH_GUESTS: usize = 2;
static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits for permission to run guests. Only for tests that measure nothing: the guests of two tests
/// share a core.
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

/// Pseudo-random bytes that depend on the seed only.
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

/// The lab's image, searched from the folder of the testing crate (`env!("CARGO_MANIFEST_DIR")`),
/// with `run` as folder of running labs.
pub fn paths(from: &str, run: &Path) -> Paths {
    let found = Paths::find_from([Path::new(from)]);
    Paths {
        run: run.into(),
        ..found.unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Boots the guests of a description; `folder` is the base of its disk images.
pub fn up(description: &str, name: &str, folder: &Path, paths: &Paths) -> Lab {
    let spec = Spec::from_toml(description, name, folder).unwrap_or_else(|e| panic!("{e}"));
    Lab::up(&spec, paths).unwrap_or_else(|e| panic!("{}", e.full()))
}

/// Command line that runs a host program in a guest that has the host's root at `root`: with the
/// host's loader and libraries, those that the calling test is linked to.
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

/// Runs a command on the host, which must succeed.
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

/// SHA-256 in hexadecimal digits, computed by sha256sum.
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

/// Waits for a condition, at most half a minute.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Core of this host for an emulated PC that counts instructions, whose clock does not depend on what else runs there:
/// `VIOLA_BEDS_CORE`, or 0, which such a PC shares with the system (scripts/test-beds.sh).
///
/// # Panics
/// If `VIOLA_BEDS_CORE` is no number.
pub fn core_of_counting_pc() -> usize {
    std::env::var("VIOLA_BEDS_CORE").map_or(0, |core| {
        let number = core.parse();
        number.unwrap_or_else(|_| panic!("VIOLA_BEDS_CORE={core} is no core"))
    })
}

/// Path of `viola-lab` beside a program of the same build; cargo builds it if it is missing.
///
/// # Panics
/// If cargo cannot build it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_test_waits_for_a_permit() {
        let (first, second) = (guest_permit(), guest_permit());
        let third = std::thread::spawn(|| drop(guest_permit()));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!third.is_finished());
        drop(first);
        third.join().expect("its permit");
        drop(second);
    }

    #[test]
    fn noise_depends_on_its_seed() {
        let some = noise(5, 1001);
        assert_eq!(some.len(), 1001);
        assert!(some == noise(5, 2000)[..1001] && some != noise(6, 1001));
    }

    #[test]
    fn sha256_of_abc_is_the_standards() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_host_program_runs_by_its_own_loader() {
        let words = host_program("", "/bin/true");
        host(&words);
        assert!(host_program("/h", "/bin/true").starts_with("/h/"));
    }
}

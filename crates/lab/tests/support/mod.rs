// SPDX-License-Identifier: Apache-2.0
//! Helpers of the tests with guests.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_lab::{Lab, Paths, Spec};

/// One lab at a time: labs share a core.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn paths(run: &Path) -> Paths {
    let found = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    Paths {
        run: run.into(),
        ..found.unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Core of the guests: not core 0 if there is another.
pub fn core() -> usize {
    usize::from(std::thread::available_parallelism().unwrap().get() > 1)
}

pub struct Bench {
    pub lab: Lab,
    pub run: PathBuf,
    pub _folder: tempfile::TempDir,
    pub _turn: MutexGuard<'static, ()>,
}

/// Boots a lab of the given guests; `CORE` in the text becomes the core's number.
pub fn boot(name: &str, guests: &str) -> Bench {
    let turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let text = format!("[lab]\nname='{name}'\n{guests}").replace("CORE", &core().to_string());
    let spec = Spec::from_toml(&text, name, folder.path()).unwrap();
    let run = folder.path().join("run");
    let lab = Lab::up(&spec, &paths(&run)).unwrap_or_else(|error| panic!("{}", error.full()));
    Bench {
        lab,
        run,
        _folder: folder,
        _turn: turn,
    }
}

pub const TWO: &str = "[[guest]]\nname='a'\ncores=[CORE]\n[[guest]]\nname='b'\ncores=[CORE]\n";
pub const ONE: &str = "[[guest]]\nname='a'\ncores=[CORE]\n";

pub fn interfaces() -> HashSet<String> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.lines()
        .skip(2)
        .filter_map(|l| Some(l.split_once(':')?.0.trim().to_owned()))
        .collect()
}

/// Whether the process has ended; it may still be a zombie.
pub fn gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with('Z'))
}

/// Living processes whose session is the guest's.
pub fn session(pid: u32) -> Vec<u32> {
    let member = |p: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{p}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        (fields[0] != "Z" && fields[3] == pid.to_string()).then_some(p)
    };
    let all = std::fs::read_dir("/proc").unwrap();
    all.filter_map(|e| member(e.unwrap().file_name().to_str()?.parse().ok()?))
        .collect()
}

pub fn wait_for(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

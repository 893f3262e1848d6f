// SPDX-License-Identifier: Apache-2.0
//! The sockets and shared files of workers, in the folder `vread` of the run directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use viola_host::Tid;
use viola_host::proc;
use viola_vread::control::Role;
use viola_vread::{hazard, table};

/// Longest path of a unix socket (`sun_path` in unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The folder of these files.
pub fn folder(run_dir: &Path) -> PathBuf {
    run_dir.join("vread")
}

/// A VM's name as one component of a path; other bytes than letters, digits, `-`, `_` and `.` are escaped.
pub fn component(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_' || b == b'.';
    let mut out = String::new();
    for (i, b) in name.bytes().enumerate() {
        // A leading dot is escaped, so no name is hidden, `.` or `..`.
        if plain(b) && !(i == 0 && b == b'.') {
            out.push(b as char);
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

/// Control socket of a worker.
pub fn socket(folder: &Path, role: Role, vm: &str) -> PathBuf {
    folder.join(format!("{role}-{}.sock", component(vm)))
}

/// Table of the blocks of a DataNode VM.
pub fn table(folder: &Path, vm: &str) -> PathBuf {
    folder.join(format!("{}.table", component(vm)))
}

/// Hazard cells of a reader.
pub fn hazards(folder: &Path, reader: &str) -> PathBuf {
    folder.join(format!("{}.hazards", component(reader)))
}

/// Checks the length of a socket's path.
///
/// # Errors
/// What to do when the path is too long.
pub fn check_socket_path(socket: &Path) -> Result<(), String> {
    match socket.as_os_str().len() {
        0..=MAX_SOCKET_PATH_BYTES => Ok(()),
        n => Err(format!(
            "{}: a socket's path may have {MAX_SOCKET_PATH_BYTES} bytes, this one has {n}; choose a shorter run_dir or sockets",
            socket.display()
        )),
    }
}

fn new_file(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// The table of a VM: the existing one, since readers may have mapped it, or else a new one with this number of slots.
///
/// # Errors
/// When the kernel cannot create the file.
pub fn open_table(folder: &Path, vm: &str, slots: u32) -> io::Result<File> {
    let path = table(folder, vm);
    if let Ok(file) = OpenOptions::new().read(true).write(true).open(&path)
        && table::Table::map(&file).is_ok()
    {
        return Ok(file);
    }
    let file = new_file(&path)?;
    table::create(&file, random_id()?, slots.min(table::MAX_SLOTS))?;
    Ok(file)
}

/// A random number for a table or disk, which distinguishes it from those of earlier daemons.
///
/// # Errors
/// When /dev/urandom cannot be read.
pub fn random_id() -> io::Result<u32> {
    let mut bytes = [0; 4];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes).max(1))
}

/// Hazard cells for a new worker of a reader; the reads of the worker before it are over.
///
/// # Errors
/// When the kernel cannot create the file.
pub fn new_hazards(folder: &Path, reader: &str) -> io::Result<File> {
    let file = new_file(&hazards(folder, reader))?;
    hazard::create(&file, hazard::MAX_CELLS)?;
    Ok(file)
}

/// Running workers of this folder: process, start time (clock ticks since boot), socket. They are
/// found by the socket on their command line, so workers that do not answer are among them.
pub fn workers(folder: &Path) -> Vec<(Tid, u64, PathBuf)> {
    let Ok(pids) = proc::processes() else {
        return Vec::new();
    };
    let socket_of = |pid: Tid| {
        let args = proc::cmdline(pid).ok()??;
        let [_, worker, role, socket] = &args[..] else {
            return None;
        };
        let socket = PathBuf::from(socket);
        (worker == "worker" && matches!(role.as_str(), "agent" | "reader" | "peer"))
            .then_some(socket)
            .filter(|s| s.parent() == Some(folder))
    };
    pids.into_iter()
        .filter_map(|pid| {
            let socket = socket_of(pid)?;
            let stat = proc::stat(pid).ok()??;
            (!stat.is_dead()).then_some((pid, stat.start_time, socket))
        })
        .collect()
}

/// Kills all workers of a folder and removes it, for `viola restore`. Returns the number of workers.
pub fn remove(folder: &Path) -> usize {
    let ended = workers(folder)
        .into_iter()
        .filter(|(pid, start_time, _)| crate::host::process::kill(*pid, *start_time))
        .count();
    let _ = fs::remove_dir_all(folder);
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_part_of_a_path_and_no_other_name_is_the_same() {
        assert_eq!(component("uml:dn1"), "uml%3Adn1");
        assert_eq!(component("../x"), "%2E.%2Fx");
        assert_eq!(component(".."), "%2E.");
        assert_eq!(component("a%3Ab"), "a%253Ab");
    }

    #[test]
    fn a_table_that_is_there_is_kept_and_a_broken_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let epoch = |file: &File| table::Table::map(file).unwrap().epoch();
        let first = open_table(dir.path(), "uml:dn1", 8).unwrap();
        table::Table::map(&first).unwrap().end_epoch();
        assert_eq!(epoch(&open_table(dir.path(), "uml:dn1", 16).unwrap()), 2);
        fs::write(table(dir.path(), "uml:dn1"), "junk").unwrap();
        let new = open_table(dir.path(), "uml:dn1", 16).unwrap();
        assert_eq!(
            (epoch(&new), table::Table::map(&new).unwrap().slots()),
            (1, 16)
        );
    }

    #[test]
    fn a_socket_whose_path_is_too_long_is_told() {
        assert_eq!(
            check_socket_path(Path::new("/run/viola/vread/a.sock")),
            Ok(())
        );
        let long = PathBuf::from(format!("/{}", "x".repeat(107)));
        assert!(
            check_socket_path(&long)
                .unwrap_err()
                .contains("107 bytes, this one has 108")
        );
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola run` with `[vread]` as an operator would configure it, started before its guests.

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use viola_proto::vread::Vread;

use crate::harness::spawn;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Timeout for the daemon to serve the reader's socket, and to end.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(15);

/// A running daemon and its folder; drop ends and removes both.
pub struct Daemon {
    child: Child,
    folder: PathBuf,
    socket: PathBuf,
}

impl Daemon {
    /// Starts the daemon and waits until the reading guest can connect its device.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn start(reader: &str, datanode: &str) -> Outcome<Self> {
        let folder = Self::folder("")?;
        let text = config(&folder, reader, datanode);
        Self::begin(folder, &text, Some(reader), None)
    }

    /// Creates the daemon's folder. The workers run as user nobody, which needs access to the sockets.
    pub fn folder(suffix: &str) -> Outcome<PathBuf> {
        let folder = PathBuf::from(format!("/run/viola-vread.{}{suffix}", std::process::id()));
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
        let _ = fs::remove_dir_all(&folder);
        fs::DirBuilder::new()
            .mode(0o755)
            .create(&folder)
            .map_err(failed)?;
        Ok(folder)
    }

    /// Starts a daemon with this configuration, in `netns` if given, and waits until it serves the
    /// reader's socket, or its API without a reader.
    ///
    /// # Errors
    /// The daemon ends or does not serve the socket in time; the error quotes its log.
    pub fn begin(
        folder: PathBuf,
        config: &str,
        reader: Option<&str>,
        netns: Option<BorrowedFd<'_>>,
    ) -> Outcome<Self> {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
        let path = folder.join("viola.toml");
        fs::write(&path, config).map_err(failed)?;
        let child = spawn::daemon(&path, &folder.join("log"), netns).map_err(failed)?;
        let socket = match reader {
            Some(reader) => folder.join("sockets").join(format!("{reader}.sock")),
            None => folder.join("viola.sock"),
        };
        let mut daemon = Self {
            child,
            folder,
            socket,
        };
        let started = Instant::now();
        while !daemon.socket.exists() {
            interrupt::check()?;
            let ended = matches!(daemon.child.try_wait(), Ok(Some(_)));
            if ended || started.elapsed() > DAEMON_TIMEOUT {
                return Err(Failure::run(format!(
                    "the daemon does not serve {}: {}",
                    daemon.socket.display(),
                    daemon.log_tail()
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Socket of the reading guest's device.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Bytes read by its readers since it started.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn served(&self) -> Outcome<u64> {
        let vread: Vread = self.ask("/vread")?;
        Ok(vread.readers.iter().flat_map(|r| r.bytes.values()).sum())
    }

    /// Reply to an API request.
    ///
    /// # Errors
    /// The daemon does not answer, or with another type.
    pub fn ask<T: serde::de::DeserializeOwned>(&self, path: &str) -> Outcome<T> {
        let client = viola_cli::client::Client::new(&self.folder.join("viola.sock"));
        client.get(path).map_err(Failure::run)
    }

    /// Last lines of its log.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(8)..].join(" / ")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Workers outlive their daemon by design, but must not outlive the benchmark.
        let workers = viola_host::proc::children(self.pid()).unwrap_or_default();
        let own = [self.pid()];
        for (pid, signal) in own
            .iter()
            .map(|pid| (*pid, rustix::process::Signal::TERM))
            .chain(
                workers
                    .iter()
                    .map(|pid| (*pid, rustix::process::Signal::KILL)),
            )
        {
            if let Some(pid) = rustix::process::Pid::from_raw(pid.cast_signed()) {
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
        let started = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && started.elapsed() < DAEMON_TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn config(folder: &Path, reader: &str, datanode: &str) -> String {
    let allow = format!("allow = [{{ reader = {reader:?}, datanode = {datanode:?} }}]\n");
    format!("{}{allow}", head(folder, "all"))
}

/// Configuration up to the keys of `[vread]` other than `sockets`; `vms` as in `[daemon]`.
pub fn head(folder: &Path, vms: &str) -> String {
    let at = |name: &str| format!("{:?}", folder.join(name).display().to_string());
    format!(
        "[daemon]\nsocket = {}\nrun_dir = {}\nstate_dir = {}\nvms = {vms:?}\n\n[slices]\nenabled = false\n\n\
         [vread]\nsockets = {}\n",
        at("viola.sock"),
        at("run"),
        at("state"),
        at("sockets"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_config::Config;

    #[test]
    fn the_daemon_takes_its_configuration() {
        let text = config(Path::new("/run/x"), "client", "node");
        let config = Config::parse(Path::new("vread.toml"), &text).unwrap();
        assert_eq!(config.vread.readers(), ["client"]);
        assert_eq!(
            config.vread.sockets.as_deref(),
            Some(Path::new("/run/x/sockets"))
        );
    }
}

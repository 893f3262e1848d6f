// SPDX-License-Identifier: Apache-2.0
//! Binds the control socket and the read socket, and starts the thread that serves them and takes signals.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use rustix::fs::Gid;
use tokio::signal::unix::{SignalKind, signal};

use crate::api::http::{self, Request, Shared};
use crate::host::files::bind_private;
use crate::host::users::group_id;
use viola_cli::error::{Failure, Outcome};
use viola_cli::log::{self, Level};
use viola_config::{Daemon, ReadSocket};

/// The sockets that a daemon serves.
#[derive(Debug)]
pub struct Sockets {
    control: (PathBuf, UnixListener),
    read: Option<(PathBuf, UnixListener)>,
}

impl Sockets {
    /// Binds the control socket and the read socket.
    ///
    /// # Errors
    /// When another daemon listens on one, the path is not a socket, or the kernel refuses. Without a read socket that the
    /// configuration does not name, the daemon starts all the same.
    pub fn bind(config: &Daemon) -> Outcome<Self> {
        let control = bind("control socket", &config.socket, &config.group)?;
        let read = match config.read_socket() {
            None => None,
            Some(path) => match bind("read socket", &path, &config.read_group) {
                Ok(listener) => Some((path, listener)),
                Err(e) if config.read_socket == ReadSocket::Beside => {
                    log::line(
                        Level::Warning,
                        format!("there is no socket for reading only: {e}"),
                    );
                    None
                }
                Err(e) => {
                    let _ = std::fs::remove_file(&config.socket);
                    return Err(e);
                }
            },
        };
        Ok(Self {
            control: (config.socket.clone(), control),
            read,
        })
    }

    /// Their paths.
    pub fn paths(&self) -> Vec<PathBuf> {
        let read = self.read.iter().map(|(path, _)| path.clone());
        std::iter::once(self.control.0.clone())
            .chain(read)
            .collect()
    }
}

/// Binds a socket with mode 0660 for root and a group, or 0600 when there is no such group.
fn bind(what: &str, socket: &Path, group: &str) -> Outcome<UnixListener> {
    let fail = |e: io::Error| Failure::run(format!("{what} {}: {e}", socket.display()));
    match std::fs::symlink_metadata(socket) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(fail(e)),
        Ok(m) if !m.file_type().is_socket() => {
            return Err(Failure::usage(format!(
                "{} exists and is not a socket; remove it, or name another socket",
                socket.display()
            )));
        }
        Ok(_) if UnixStream::connect(socket).is_ok() => {
            return Err(Failure::usage(format!(
                "another daemon answers on {}; stop it first, or name another socket",
                socket.display()
            )));
        }
        // An earlier daemon left it.
        Ok(_) => std::fs::remove_file(socket).map_err(fail)?,
    }
    // No other user may connect before owner and mode are set.
    let listener = bind_private(socket).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    match group_id(group) {
        Some(gid) => {
            if let Err(e) = rustix::fs::chown(socket, None, Some(Gid::from_raw(gid))) {
                log::line(
                    Level::Warning,
                    format!(
                        "{} cannot be given to group {group} ({e}); only this user may use it",
                        socket.display()
                    ),
                );
            } else {
                std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o660))
                    .map_err(fail)?;
            }
        }
        None => log::line(
            Level::Info,
            format!(
                "there is no group {group}; only root may use {}",
                socket.display()
            ),
        ),
    }
    Ok(listener)
}

/// Starts the thread. When this returns, signals become requests.
///
/// # Errors
/// When the thread cannot start.
pub fn start(sockets: Sockets, shared: Arc<Shared>) -> Outcome {
    let (ready, is_ready) = mpsc::channel();
    std::thread::Builder::new()
        .name("server".into())
        .spawn(move || {
            // After the start, an error can only be logged.
            if let Err(e) = run(sockets, shared, &ready)
                && let Err(mpsc::SendError(Err(e))) = ready.send(Err(e))
            {
                log::line(Level::Error, format!("the control socket is gone: {e}"));
            }
        })
        .map_err(|e| Failure::run(format!("the server cannot start: {e}")))?;
    match is_ready.recv() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => Err(Failure::run(format!("the server cannot start: {e}"))),
        Err(_) => Err(Failure::run("the server cannot start")),
    }
}

fn run(
    sockets: Sockets,
    shared: Arc<Shared>,
    ready: &mpsc::Sender<io::Result<()>>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let mut hup = signal(SignalKind::hangup())?;
        let (control, listener) = sockets.control;
        let listener = tokio::net::UnixListener::from_std(listener)?;
        tokio::spawn(http::serve(listener, http::router(shared.clone())));
        // Clients of one socket take no place of the other's.
        if let Some((_, listener)) = sockets.read {
            let listener = tokio::net::UnixListener::from_std(listener)?;
            let router = http::read_router(shared.clone(), &control);
            tokio::spawn(http::serve(listener, router));
        }
        // The receiver may be gone, which is no error.
        let _ = ready.send(Ok(()));
        loop {
            let request = tokio::select! {
                _ = term.recv() => Request::Quit("SIGTERM"),
                _ = int.recv() => Request::Quit("SIGINT"),
                _ = hup.recv() => Request::Reload,
            };
            shared.send(request);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_socket_is_for_owner_and_group_and_replaces_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("v.sock");
        let mode = || std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
        let first = bind("control socket", &socket, "root").unwrap();
        assert_eq!(mode(), 0o660);
        assert!(
            matches!(bind("control socket", &socket, "root"), Err(Failure::Usage(s)) if s.contains("another daemon answers"))
        );
        drop(first);
        bind("control socket", &socket, "no-such-group-here").unwrap();
        assert_eq!(mode(), 0o600);
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("v.sock");
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(
            bind("control socket", &file, "root"),
            Err(Failure::Usage(_))
        ));
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        assert!(matches!(
            bind("control socket", &dir.path().join("none/v.sock"), "root"),
            Err(Failure::Run(_))
        ));
    }

    /// A configuration whose sockets lie in `dir`, with groups of this host.
    fn daemon(dir: &Path) -> Daemon {
        Daemon {
            socket: dir.join("v.sock"),
            group: "root".into(),
            read_group: "nogroup".into(),
            ..Daemon::default()
        }
    }

    #[test]
    fn the_read_socket_is_for_its_own_group() {
        let dir = tempfile::tempdir().unwrap();
        let attributes = |name: &str| {
            let m = std::fs::metadata(dir.path().join(name)).unwrap();
            (m.permissions().mode() & 0o777, m.uid(), m.gid())
        };
        let Some(gid) = group_id("nogroup") else {
            return;
        };
        let user = rustix::process::getuid();
        let sockets = Sockets::bind(&daemon(dir.path())).unwrap();
        assert_eq!(sockets.paths().len(), 2);
        if user.is_root() {
            assert_eq!(attributes("v-read.sock"), (0o660, 0, gid));
            assert_eq!(attributes("v.sock"), (0o660, 0, 0));
        }
        drop(sockets);
        let none = Daemon {
            read_group: "no-such-group-here".into(),
            ..daemon(dir.path())
        };
        let _sockets = Sockets::bind(&none).unwrap();
        assert_eq!(attributes("v-read.sock").0, 0o600);
    }

    #[test]
    fn a_read_socket_that_is_switched_off_does_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let off = Daemon {
            read_socket: ReadSocket::Off,
            ..daemon(dir.path())
        };
        let sockets = Sockets::bind(&off).unwrap();
        assert_eq!(sockets.paths(), [dir.path().join("v.sock")]);
        assert!(!dir.path().join("v-read.sock").exists());
    }

    #[test]
    fn only_a_read_socket_that_the_configuration_names_is_required() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("v-read.sock"), "precious").unwrap();
        let sockets = Sockets::bind(&daemon(dir.path())).unwrap();
        assert_eq!(sockets.paths(), [dir.path().join("v.sock")]);
        drop(sockets);
        let named = Daemon {
            read_socket: ReadSocket::At(dir.path().join("v-read.sock")),
            ..daemon(dir.path())
        };
        assert!(
            matches!(Sockets::bind(&named), Err(Failure::Usage(s)) if s.contains("v-read.sock"))
        );
        // A daemon that does not start leaves no socket.
        assert!(!dir.path().join("v.sock").exists());
        assert_eq!(
            std::fs::read(dir.path().join("v-read.sock")).unwrap(),
            b"precious"
        );
    }
}

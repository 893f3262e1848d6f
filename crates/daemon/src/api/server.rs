// SPDX-License-Identifier: Apache-2.0
//! Binds the control socket, and starts the thread that serves it and takes signals.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, mpsc};

use rustix::fs::Gid;
use tokio::signal::unix::{SignalKind, signal};

use crate::api::http::{self, Request, Shared};
use crate::host::files::bind_private;
use crate::host::users::group_id;
use viola_cli::error::{Failure, Outcome};
use viola_cli::log::{self, Level};

/// Binds the control socket with mode 0660 for root and a group, or 0600 when there is no such group.
///
/// # Errors
/// When another daemon listens there, the path is not a socket, or the kernel refuses.
pub fn bind(socket: &Path, group: &str) -> Outcome<UnixListener> {
    let fail = |e: io::Error| Failure::run(format!("control socket {}: {e}", socket.display()));
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
pub fn start(listener: UnixListener, shared: Arc<Shared>) -> Outcome {
    let (ready, is_ready) = mpsc::channel();
    std::thread::Builder::new()
        .name("server".into())
        .spawn(move || {
            // After the start, an error can only be logged.
            if let Err(e) = run(listener, shared, &ready)
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
    listener: UnixListener,
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
        let listener = tokio::net::UnixListener::from_std(listener)?;
        tokio::spawn(http::serve(listener, http::router(shared.clone())));
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

    #[test]
    fn the_socket_is_for_owner_and_group_and_replaces_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("v.sock");
        let mode = || std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
        let first = bind(&socket, "root").unwrap();
        assert_eq!(mode(), 0o660);
        assert!(
            matches!(bind(&socket, "root"), Err(Failure::Usage(s)) if s.contains("another daemon answers"))
        );
        drop(first);
        bind(&socket, "no-such-group-here").unwrap();
        assert_eq!(mode(), 0o600);
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("v.sock");
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(bind(&file, "root"), Err(Failure::Usage(_))));
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        assert!(matches!(
            bind(&dir.path().join("none/v.sock"), "root"),
            Err(Failure::Run(_))
        ));
    }
}

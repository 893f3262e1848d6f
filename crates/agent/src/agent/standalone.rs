// SPDX-License-Identifier: Apache-2.0
//! The agent of a VM that serves neither blocks nor pipes: it runs the mount, the turbo vCPU or the lane, and answers
//! `viola-agent status`.

use rustix::event::{PollFd, PollFlags, poll};

use crate::config::Config;
use crate::error::{StartError, start_error};
use crate::io::signals::{TERMINATION, signal_fd};
use crate::lane::service::{self as lane, Lane};
use crate::relay::Relay;
use crate::status::{self, Report};
use crate::turbo::service::{self, Turbo};

/// Runs until a signal ends it.
///
/// # Errors
/// When another file system is mounted at the mount's path, or another agent runs.
pub fn run(config: &Config) -> Result<(), StartError> {
    // before the first thread starts, which inherits the signal mask
    let signals = start_error("signals", signal_fd(&TERMINATION))?;
    let requests = start_error(
        format!("status socket {}", config.status.display()),
        status::serve(&config.status),
    )?;
    let relay = config.mount.as_ref().map(Relay::start).transpose()?;
    let turbo = start_error("turbo", service::start(config.turbo.as_ref()))?;
    let lane = start_error("lane", lane::start(config.lane.as_ref()))?;
    loop {
        let mut fds = [
            PollFd::new(&signals, PollFlags::IN),
            PollFd::new(&requests, PollFlags::IN),
        ];
        // an interrupted wait is harmless
        let _ = poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            let _ = std::fs::remove_file(&config.status);
            return Ok(());
        }
        requests.clear();
        while let Some(request) = requests.try_recv() {
            let report = Report {
                version: env!("CARGO_PKG_VERSION").into(),
                mount: relay.as_ref().map(|r| r.report()),
                turbo: turbo.as_ref().map(Turbo::report),
                lane: lane.as_ref().map(Lane::report),
                ..Report::default()
            };
            // the client may be gone
            let _ = request.reply.send(report);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! An agent in a VM that gives nothing to its host: it keeps a mount, a turbo vCPU or a lane, and answers questions about them.

use rustix::event::{PollFd, PollFlags, poll};

use crate::agent::{CannotRun, cannot, signals};
use crate::config::Config;
use crate::io::status::{self, Report};
use crate::lane::service::{self as lane, Lane};
use crate::turbo::service::{self, Turbo};

/// Works until a signal ends it.
///
/// # Errors
/// When there is something else at the mount's place, or another agent.
pub fn run(config: &Config) -> Result<(), CannotRun> {
    // before there are threads, which inherit what is blocked
    let signals = cannot("signals", signals())?;
    let (questions, wake) = cannot(
        format!("status socket {}", config.status.display()),
        status::serve(&config.status),
    )?;
    let relay = match &config.mount {
        Some(mount) => Some(mount.start()?),
        None => None,
    };
    let turbo = cannot("turbo", service::begin(config.turbo.as_ref()))?;
    let lane = cannot("lane", lane::begin(config.lane.as_ref()))?;
    loop {
        let mut fds = [
            PollFd::new(&signals, PollFlags::IN),
            PollFd::new(&*wake, PollFlags::IN),
        ];
        // an interrupted wait is as good as a short one
        let _ = poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            let _ = std::fs::remove_file(&config.status);
            return Ok(());
        }
        let _ = rustix::io::read(&*wake, &mut [0; 8]);
        while let Ok(question) = questions.try_recv() {
            let report = Report {
                version: env!("CARGO_PKG_VERSION").into(),
                mount: relay.as_ref().map(|r| r.report()),
                turbo: turbo.as_ref().map(Turbo::report),
                lane: lane.as_ref().map(Lane::report),
                ..Report::default()
            };
            // whoever has asked may be gone
            let _ = question.answer.send(report);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The end of a child process of a real-time process.
//!
//! To reap a child, the kernel removes its directory of /proc, and waits in a loop for everyone who removes a part of it at that
//! moment (`d_invalidate` in fs/dcache.c). A thread of the child that ends does so too. If a real-time thread has preempted it on
//! its CPU, the loop never ends, and the CPU is lost: so a real-time thread must not reap.

use std::io;
use std::process::{Child, ExitStatus};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::threads::set_ordinary;

/// Whether the child has ended. Does not reap it.
///
/// # Errors
/// The kernel's error.
pub fn has_ended(child: &Child) -> io::Result<bool> {
    wait(child, WaitIdOptions::NOHANG)
}

/// Waits until the child has ended. Does not reap it.
///
/// # Errors
/// The kernel's error.
pub fn await_end(child: &Child) -> io::Result<()> {
    wait(child, WaitIdOptions::empty()).map(drop)
}

/// Reaps a child, after it has ended. The calling thread is an ordinary one from then on.
///
/// # Errors
/// The kernel's error.
pub fn reap(child: &mut Child) -> io::Result<ExitStatus> {
    await_end(child)?;
    match set_ordinary(0) {
        0 => child.wait(),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

fn wait(child: &Child, options: WaitIdOptions) -> io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ECHILD))?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | options;
    let status = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options))?;
    Ok(status.is_some())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use viola_host::attrs::{self, Policy};

    use super::*;
    use crate::slots::threads::set_fifo;

    #[test]
    fn a_child_that_has_ended_stays_until_an_ordinary_thread_reaps_it() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        assert!(!has_ended(&child).unwrap());
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while !has_ended(&child).unwrap() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        await_end(&child).unwrap();
        let pid = child.id() as i32;
        assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Not where the test may not have real-time threads; then it is an ordinary one already.
                set_fifo(0, 1);
                reap(&mut child).unwrap();
                let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
                assert_eq!(attrs::get(own).unwrap().unwrap().policy, Policy::Normal);
            });
        });
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}

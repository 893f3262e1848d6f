// SPDX-License-Identifier: Apache-2.0
//! The thread that keeps a core busy while VMs over their cap must not run.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::threads::{become_realtime, set_fifo};
use crate::priorities::{FILLER_IDLE_PRIORITY, FILLER_PRIORITY};

/// Keeps the core busy while a VM over its cap must not run.
///
/// No quota stops a real-time thread, so a thread that ranks between "capped" and "background" must hold the core. It runs only
/// while no VM within its cap is runnable. Otherwise it sleeps above every VM, so that it can exit at once when the controller is
/// killed.
pub struct Filler {
    shared: Arc<FillerState>,
}

#[derive(Default)]
struct FillerState {
    command: AtomicU32,
    tid: AtomicI32,
}

const IDLE: u32 = 0;
const FILL: u32 = 1;
const END: u32 = 2;

impl Filler {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn start(cpu: u32) -> io::Result<Self> {
        let shared = Arc::new(FillerState::default());
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(format!("filler/{cpu}"))
            .stack_size(64 << 10)
            .spawn(move || {
                if become_realtime(cpu, FILLER_IDLE_PRIORITY).is_ok() {
                    // SAFETY: a plain system call.
                    theirs
                        .tid
                        .store(unsafe { libc::gettid() }, Ordering::Release);
                    hold(&theirs.command);
                }
            })?;
        Ok(Self { shared })
    }

    /// Makes it hold the core, or sleep.
    pub fn set(&self, on: bool) {
        self.command(if on { FILL } else { IDLE });
    }

    fn command(&self, to: u32) {
        let from = self.shared.command.swap(to, Ordering::AcqRel);
        if from == to {
            return;
        }
        if from == FILL {
            // The filler may not get the core to raise its own priority.
            let tid = self.shared.tid.load(Ordering::Acquire);
            if tid != 0 {
                set_fifo(tid, FILLER_IDLE_PRIORITY);
            }
        }
        // SAFETY: FUTEX_WAKE on a live word.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.shared.command.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                1,
            )
        };
    }
}

/// Body of the filler's thread.
fn hold(command: &AtomicU32) {
    loop {
        match command.load(Ordering::Acquire) {
            END => return,
            FILL => {
                set_fifo(0, FILLER_PRIORITY);
                while command.load(Ordering::Acquire) == FILL {
                    std::hint::spin_loop();
                }
                set_fifo(0, FILLER_IDLE_PRIORITY);
            }
            _ => {
                // SAFETY: FUTEX_WAIT on a live word, without a time limit.
                unsafe {
                    libc::syscall(
                        libc::SYS_futex,
                        command.as_ptr(),
                        libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                        IDLE,
                        std::ptr::null::<libc::timespec>(),
                    )
                };
            }
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.command(END);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! What a process can still do in the sandbox.

use std::process::Command;

use super::*;

const PARENT: &str = "VIOLA_TEST_PARENT";

/// Sends signal 0, which only checks whether the sender may.
fn may_signal(process: u32) -> bool {
    let id = process.cast_signed();
    // SAFETY: numbers only; signal 0 changes nothing.
    unsafe { libc::syscall(libc::SYS_tgkill, id, id, 0) == 0 }
}

/// No test: the process that the next one starts.
#[test]
#[ignore = "it is the process that another test starts"]
fn sandboxed() {
    let parent: u32 = std::env::var(PARENT).unwrap().parse().unwrap();
    let own = std::process::id();
    // This thread's number is not the process's.
    let thread = || {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        // SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_tgkill, own, tid, 0) == 0 }
    };
    assert!(may_signal(parent) && thread());
    enter(None, Profile::Agent, &[]).unwrap();
    assert!(!may_signal(parent), "it signals another process");
    assert!(thread(), "it cannot abort");
    assert!(std::fs::File::open("/dev/null").is_err());
}

#[test]
fn a_worker_signals_only_itself_and_opens_no_file() {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "sandbox::tests::sandboxed"])
        .env(PARENT, std::process::id().to_string())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn this_kernel_can_confine_workers() {
    assert!(landlock_abi() >= MIN_LANDLOCK_ABI);
    assert!(check_kernel().is_ok());
}

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

/// The number of the last system call's error.
fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

/// Sets an integer option of a socket, and returns the error's number; 0 for none.
fn set_option(socket: &impl std::os::fd::AsRawFd, level: i32, name: i32) -> i32 {
    let values = [1_i32, 0];
    let (fd, from) = (socket.as_raw_fd(), values.as_ptr().cast());
    // SAFETY: the kernel reads at most 8 bytes of `values`, which outlives the call.
    match unsafe { libc::setsockopt(fd, level, name, from, 8) } {
        0 => 0,
        _ => errno(),
    }
}

/// No test: the process that another one starts.
#[test]
#[ignore = "it is the process that another test starts"]
fn sandboxed_with_threads() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT), 0);
    enter(None, Profile::Pipes, &[]).unwrap();
    assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
    assert!(Command::new("/bin/true").spawn().is_err(), "it forks");
    let new_namespace = (libc::CLONE_THREAD | libc::CLONE_NEWUSER) as usize;
    // SAFETY: the filter refuses the call; the kernel would, too, since these two flags exclude each other.
    let made = unsafe { libc::syscall(libc::SYS_clone, new_namespace, 0, 0, 0, 0) };
    assert_eq!((made, errno()), (-1, libc::EPERM));
    // SAFETY: size 0 is refused in any case.
    let made = unsafe { libc::syscall(libc::SYS_clone3, 0, 0) };
    assert_eq!((made, errno()), (-1, libc::ENOSYS));
    let options = [
        (libc::SOL_SOCKET, libc::SO_LINGER, 0),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT, libc::EPERM),
        (libc::SOL_SOCKET, libc::SO_MARK, libc::EPERM),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, libc::EPERM),
        (libc::IPPROTO_IP, libc::IP_TRANSPARENT, libc::EPERM),
        (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, libc::EPERM),
    ];
    for (level, name, error) in options {
        assert_eq!(set_option(&socket, level, name), error, "{level} {name}");
    }
    let mut addresses = [0_u8; 64];
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: SIOCGIFCONF would read a length of 0 and a null pointer, and write a length.
    let got = unsafe { libc::ioctl(fd, libc::SIOCGIFCONF as _, addresses.as_mut_ptr()) };
    assert_eq!((got, errno()), (-1, libc::EPERM));
    socket.set_nonblocking(true).unwrap();
    // BPF_MAP_GET_FD_BY_ID: the maps of the whole host.
    // SAFETY: the kernel reads 64 zero bytes.
    let got = unsafe { libc::syscall(libc::SYS_bpf, 14, addresses.as_mut_ptr(), 64) };
    assert_eq!((got, errno()), (-1, libc::EPERM));
    // SAFETY: numbers only.
    let got = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1_usize, 0_usize, 0_usize, 0_usize) };
    assert_eq!((got, errno()), (-1, libc::EPERM));
}

/// Runs one of the tests above in a process of its own.
fn run_alone(test: &str) {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", &format!("sandbox::tests::{test}")])
        .env(PARENT, std::process::id().to_string())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_worker_signals_only_itself_and_opens_no_file() {
    run_alone("sandboxed");
}

#[test]
fn system_calls_are_held_to_the_arguments_that_workers_need() {
    run_alone("sandboxed_with_threads");
}

#[test]
fn this_kernel_can_confine_workers() {
    assert!(landlock_abi() >= MIN_LANDLOCK_ABI);
    assert!(check_kernel().is_ok());
}

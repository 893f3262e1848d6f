// SPDX-License-Identifier: Apache-2.0
//! The sandbox of a worker. The worker enters it before it reads anything from a guest.
//!
//! The worker has received all descriptors by then. It switches to another user and can afterwards gain no privilege,
//! open no file, open no connection, signal no other process, and use only the system calls on a list.

use std::collections::BTreeMap;
use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// Lowest version of Landlock's interface with which workers start: rules for files (Linux 5.13).
pub const MIN_LANDLOCK_ABI: u32 = 1;
/// The version with all rules that workers use: files, TCP, and signals and abstract sockets (Linux 6.12).
pub const FULL_LANDLOCK_ABI: u32 = 6;

/// Version of Landlock's interface in this kernel; 0 without Landlock (landlock_create_ruleset(2)).
#[must_use]
pub fn landlock_abi() -> u32 {
    const VERSION: libc::c_uint = 1;
    // SAFETY: with this flag the kernel reads no memory, and answers a number.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0_usize,
            VERSION,
        )
    };
    u32::try_from(version).unwrap_or(0)
}

/// Whether this kernel can confine workers.
///
/// # Errors
/// [`SandboxError::NoLandlock`].
pub fn check_kernel() -> Result<(), SandboxError> {
    match landlock_abi() {
        MIN_LANDLOCK_ABI.. => Ok(()),
        _ => Err(SandboxError::NoLandlock),
    }
}

/// Why a worker could not enter its sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The kernel has no Landlock, or it is switched off.
    #[error(
        "this kernel has no Landlock, which confines workers: add landlock to lsm= on its command line"
    )]
    NoLandlock,
    /// Switching the user failed.
    #[error("cannot switch to user {uid}: {source}")]
    User {
        /// The user ID.
        uid: u32,
        /// The error of the system call.
        source: io::Error,
    },
    /// Setting no_new_privs failed.
    #[error("cannot set no_new_privs: {0}")]
    NoNewPrivs(io::Error),
    /// Landlock exists but failed.
    #[error("cannot restrict the worker by Landlock: {0}")]
    Landlock(String),
    /// Installing the seccomp filter failed.
    #[error("cannot install the seccomp filter: {0}")]
    Seccomp(String),
}

/// The kind of worker, which determines its system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// An agent worker: sockets, shared memory, reading open files.
    Agent,
    /// An agent worker with vpipe: also writing open files, and TCP connections within its network namespace. It
    /// keeps CAP_NET_ADMIN and CAP_NET_BIND_SERVICE and cannot enter another namespace.
    Pipes,
    /// A reader worker: also threads, events and a VM's memory.
    Reader,
    /// The peer worker: as a reader, and TCP connections to the ports passed to [`enter`].
    Peer,
}

/// Puts the process with all its threads into the sandbox. `user` are the user and group ID to switch to; `None` for
/// an unprivileged process, as in tests. `ports` are the TCP ports to which [`Profile::Peer`] may connect at any
/// address.
///
/// # Errors
/// [`SandboxError`]; the caller must exit then.
pub fn enter(
    user: Option<(u32, u32)>,
    profile: Profile,
    ports: &[u16],
) -> Result<(), SandboxError> {
    if let Some((uid, gid)) = user {
        let keep_net_admin = profile == Profile::Pipes;
        become_user(uid, gid, keep_net_admin)
            .map_err(|source| SandboxError::User { uid, source })?;
    }
    check_kernel()?;
    rustix::thread::set_no_new_privs(true).map_err(|e| SandboxError::NoNewPrivs(e.into()))?;
    // Other processes of this user must not trace it or read its memory.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    restrict_files_and_network(profile, ports)?;
    filter(profile)
}

fn become_user(uid: u32, gid: u32, keep_net_admin: bool) -> io::Result<()> {
    if keep_net_admin {
        rustix::thread::set_keep_capabilities(true)?;
    }
    let done = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: a null pointer with length 0 is what setgroups(2) takes for no groups at all.
    done(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: numbers only; the C library changes all threads.
    done(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: as above. When no user ID is 0 any more, the kernel drops all capabilities that
    // were not kept (capabilities(7)).
    done(unsafe { libc::setresuid(uid, uid, uid) })?;
    if keep_net_admin {
        let kept = CapabilitySet::NET_ADMIN | CapabilitySet::NET_BIND_SERVICE;
        rustix::thread::set_capabilities(
            None,
            CapabilitySets {
                effective: kept,
                permitted: kept,
                inheritable: CapabilitySet::empty(),
            },
        )?;
    }
    Ok(())
}

/// Restricts the worker by Landlock, as far as the kernel's version of it goes (`viola check` shows that). The seccomp filter
/// forbids opening files, too.
///
/// [`Profile::Pipes`] has its own network namespace instead: its sockets must use the addresses and ports of the VM's
/// connections.
fn restrict_files_and_network(profile: Profile, ports: &[u16]) -> Result<(), SandboxError> {
    let abi = ABI::V6;
    let network = match profile {
        Profile::Pipes => BitFlags::EMPTY,
        _ => AccessNet::from_all(abi),
    };
    let error = |e: landlock::RulesetError| SandboxError::Landlock(e.to_string());
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .and_then(|r| match network.is_empty() {
            true => Ok(r),
            false => r.handle_access(network),
        })
        .and_then(|r| r.scope(Scope::from_all(abi)))
        .and_then(Ruleset::create)
        .and_then(|r| {
            let rules = ports
                .iter()
                .map(|port| Ok(NetPort::new(*port, AccessNet::ConnectTcp)));
            r.add_rules(rules)
        })
        .and_then(landlock::RulesetCreated::restrict_self)
        .map(drop)
        .map_err(error)
}

/// System calls of every worker.
const COMMON: &[libc::c_long] = &[
    // open descriptors
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_ioctl,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_poll,
    libc::SYS_ppoll,
    // open sockets
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
    // memory
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    // time, sleep, locks, identity
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_restart_syscall,
    libc::SYS_membarrier,
    // signals, and the end
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// System calls of reader, peer and vpipe workers: threads, and events from and to the VMM.
const READER: &[libc::c_long] = &[
    libc::SYS_clone3,
    libc::SYS_clone,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_set_tid_address,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_io_uring_enter,
];

/// Installs the seccomp filter: a system call outside the profile's list fails with EPERM.
fn filter(profile: Profile) -> Result<(), SandboxError> {
    let error = |e: &dyn std::fmt::Display| SandboxError::Seccomp(e.to_string());
    let reader = match profile {
        Profile::Agent => &[][..],
        Profile::Pipes | Profile::Reader | Profile::Peer => READER,
    };
    let mut rules: BTreeMap<i64, Vec<seccompiler::SeccompRule>> = BTreeMap::new();
    for call in COMMON.iter().chain(reader) {
        rules.insert(*call, Vec::new());
    }
    let own = own_tgkill().map_err(|e| error(&e))?;
    rules.insert(libc::SYS_tgkill, vec![own]);
    // x86-64 also has older variants of some calls.
    #[cfg(target_arch = "x86_64")]
    for call in [
        libc::SYS_dup2,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_create,
        libc::SYS_arch_prctl,
    ] {
        rules.insert(call, Vec::new());
    }
    if profile == Profile::Pipes {
        for call in [
            libc::SYS_bind,
            libc::SYS_bpf,
            libc::SYS_sendfile,
            libc::SYS_splice,
            libc::SYS_pipe2,
            libc::SYS_copy_file_range,
            libc::SYS_sync_file_range,
            libc::SYS_pwrite64,
        ] {
            rules.insert(call, Vec::new());
        }
    }
    if matches!(profile, Profile::Peer | Profile::Pipes) {
        rules.insert(libc::SYS_connect, Vec::new());
        rules.insert(
            libc::SYS_socket,
            vec![
                tcp_socket(libc::AF_INET).map_err(|e| error(&e))?,
                tcp_socket(libc::AF_INET6).map_err(|e| error(&e))?,
            ],
        );
    }
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(|e| error(&e))?;
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        arch,
    )
    .map_err(|e| error(&e))?;
    let program: seccompiler::BpfProgram = filter
        .try_into()
        .map_err(|e: seccompiler::BackendError| error(&e))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|e| error(&e))
}

/// Allows tgkill(2) for threads of this process, which abort(3) uses.
fn own_tgkill() -> Result<SeccompRule, seccompiler::BackendError> {
    let own = u64::from(std::process::id());
    SeccompRule::new(vec![SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        own,
    )?])
}

/// Allows a TCP socket of this family; the two flags of socket(2) are free.
fn tcp_socket(family: libc::c_int) -> Result<SeccompRule, seccompiler::BackendError> {
    let is = |argument, mask: u64, value: libc::c_int| {
        let operator = SeccompCmpOp::MaskedEq(mask);
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value as u64)
    };
    SeccompRule::new(vec![
        is(0, u32::MAX.into(), family)?,
        is(1, 0xf, libc::SOCK_STREAM)?,
    ])
}

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! What a worker gives up before it looks at anything that a guest has sent.
//!
//! It has been handed all its descriptors by then. It becomes another user, can gain no privilege, open no file,
//! reach no network, send no signal to others, and call nothing of the kernel that it has no use for.

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

/// Why a worker is not shut in.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// It cannot become another user.
    #[error("it cannot run as user {uid}: {source}")]
    User {
        /// Which.
        uid: u32,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel does not let it give up privilege.
    #[error("no_new_privs: {0}")]
    NoNewPrivs(io::Error),
    /// Landlock is there and refuses.
    #[error("landlock: {0}")]
    Landlock(String),
    /// System calls cannot be filtered.
    #[error("seccomp: {0}")]
    Seccomp(String),
}

/// Which system calls a worker has use for beyond those of every program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Sockets, shared memory, files to be read.
    Agent,
    /// The same, files to be written, and TCP connections that are handed over, within the network namespace that the process is in: it keep_net_admin
    /// CAP_NET_ADMIN and CAP_NET_BIND_SERVICE, and can enter no other one.
    Pipes,
    /// The same, and threads, events and a VM's memory.
    Reader,
    /// The same as a reader, and connections by TCP to the ports that [`enter`] is told.
    Peer,
}

/// Shuts the process in, with all threads that it has and will have. `user` are the numbers of user and group to
/// become; `None` where the process has no right to become anybody, as in tests. `ports` are those to which
/// [`Profile::Peer`] may connect, whatever the address; others have no use for any.
///
/// # Errors
/// [`SandboxError`]; the caller has to end then.
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
    rustix::thread::set_no_new_privs(true).map_err(|e| SandboxError::NoNewPrivs(e.into()))?;
    // Others of this user may neither trace it nor read its memory.
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
    // SAFETY: as above; with the last of the three numbers all capabilities are gone.
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

/// A kernel without Landlock (before 5.13, or switched off) leaves this to user and filter: opening files is
/// filtered as well.
///
/// [`Profile::Pipes`] has a network namespace of its own instead: its sockets have to be bound and connected to whatever the VM's were.
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

/// Calls of every worker.
const COMMON: &[libc::c_long] = &[
    // descriptors and what is behind them
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
    // sockets that are there
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
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Calls of the reader worker: a thread per queue, and events from and to the VMM.
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

/// Everything else fails with EPERM.
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
    // On x86-64 there are older forms of some of them as well.
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

/// A TCP socket of this family; the two flags of socket(2) may be set.
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

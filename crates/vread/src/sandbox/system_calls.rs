// SPDX-License-Identifier: Apache-2.0
//! The system calls of workers, with their arguments: a seccomp filter (`seccomp(2)`).
//!
//! A system call that is not listed fails with EPERM. So does one with another argument, where the list names
//! arguments: those are calls by which a capability, a device or a kernel interface could be reached.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::Profile;

/// System calls of every worker, with any arguments.
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

/// Older variants of some of these calls, which x86-64 has besides.
#[cfg(target_arch = "x86_64")]
const COMMON_OLD: &[libc::c_long] = &[
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_create,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const COMMON_OLD: &[libc::c_long] = &[];

/// System calls of reader, peer and vpipe workers: threads, and events from and to the VMM. [`threads`] has those of
/// them whose arguments count.
const THREADS_AND_EVENTS: &[libc::c_long] = &[
    // [`no_clone3`] lets it fail
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
];

/// Further system calls of vpipe workers.
const PIPES: &[libc::c_long] = &[
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_pipe2,
    libc::SYS_copy_file_range,
    libc::SYS_sync_file_range,
    libc::SYS_pwrite64,
];

/// Requests of ioctl(2): blocking or not, close on exec, and the lengths of a socket's queues
/// (include/uapi/asm-generic/ioctls.h). None of them reaches a device or an interface.
const IOCTLS: &[u64] = &[
    0x5421, // FIONBIO
    0x5451, // FIOCLEX
    0x541b, // FIONREAD, SIOCINQ
    0x5411, // SIOCOUTQ
];

/// Options of SOL_SOCKET for every worker: time limits of reads and writes.
const SOCKET_OPTIONS: &[i32] = &[libc::SO_RCVTIMEO, libc::SO_SNDTIMEO];

/// Options of SOL_SOCKET for vpipe workers: buffers as the VM's socket had them, and a reset when a socket is closed.
const PIPES_SOCKET_OPTIONS: &[i32] = &[
    libc::SO_SNDBUFFORCE,
    libc::SO_RCVBUFFORCE,
    libc::SO_LINGER,
    libc::SO_MAX_PACING_RATE,
    72, // SO_BUF_LOCK (include/uapi/asm-generic/socket.h)
];

/// Options of IPPROTO_TCP for vpipe workers: the state of a connection (include/uapi/linux/tcp.h).
const PIPES_TCP_OPTIONS: &[i32] = &[
    libc::TCP_MAXSEG,
    libc::TCP_WINDOW_CLAMP,
    libc::TCP_CONGESTION,
    libc::TCP_REPAIR,
    libc::TCP_REPAIR_QUEUE,
    libc::TCP_QUEUE_SEQ,
    libc::TCP_REPAIR_OPTIONS,
    libc::TCP_TIMESTAMP,
    29, // TCP_REPAIR_WINDOW
];

/// Options of IPPROTO_IPV6 for vpipe workers: a socket may have an address of the VM, which no interface has.
const PIPES_IPV6_OPTIONS: &[i32] = &[libc::IPV6_FREEBIND];

/// Commands of bpf(2) for vpipe workers: elements of the maps that they have (include/uapi/linux/bpf.h).
const BPF_COMMANDS: &[u64] = &[
    1, // BPF_MAP_LOOKUP_ELEM
    2, // BPF_MAP_UPDATE_ELEM
    3, // BPF_MAP_DELETE_ELEM
];

/// Options of prctl(2): names of threads and of memory, and the precision of timers.
const PRCTLS: &[u64] = &[
    libc::PR_SET_NAME as u64,
    libc::PR_SET_TIMERSLACK as u64,
    libc::PR_SET_VMA as u64,
];

/// All flags of clone(2) that make a namespace.
const NEW_NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64
    | CLONE_NEWTIME;
/// include/uapi/linux/sched.h
const CLONE_NEWTIME: u64 = 0x80;

/// Rules by system call; none means any arguments.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Installs the filter for all threads of the process.
///
/// # Errors
/// When the architecture is not known to the filter's compiler, or the kernel refuses the filter.
pub fn filter(profile: Profile) -> Result<(), seccompiler::Error> {
    let mut rules: Rules = BTreeMap::new();
    let any = |rules: &mut Rules, calls: &[libc::c_long]| {
        rules.extend(calls.iter().map(|call| (*call, Vec::new())));
    };
    any(&mut rules, COMMON);
    any(&mut rules, COMMON_OLD);
    let own = u64::from(std::process::id());
    // abort(3) uses it
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![is(0, own)?])?]);
    rules.insert(libc::SYS_ioctl, one_of(1, IOCTLS)?);
    let mut options = socket_options(libc::SOL_SOCKET, SOCKET_OPTIONS)?;
    if profile != Profile::Agent {
        any(&mut rules, THREADS_AND_EVENTS);
        threads(&mut rules)?;
    }
    match profile {
        Profile::Agent | Profile::Reader => {}
        Profile::Peer => {
            any(&mut rules, &[libc::SYS_connect]);
            options.extend(socket_options(libc::IPPROTO_TCP, &[libc::TCP_NODELAY])?);
            rules.insert(libc::SYS_socket, tcp_sockets()?);
        }
        Profile::Pipes => {
            any(&mut rules, PIPES);
            options.extend(socket_options(libc::SOL_SOCKET, PIPES_SOCKET_OPTIONS)?);
            options.extend(socket_options(libc::IPPROTO_TCP, PIPES_TCP_OPTIONS)?);
            options.extend(socket_options(libc::IPPROTO_IPV6, PIPES_IPV6_OPTIONS)?);
            rules.insert(libc::SYS_socket, tcp_sockets()?);
            rules.insert(libc::SYS_bpf, one_of(0, BPF_COMMANDS)?);
        }
    }
    rules.insert(libc::SYS_setsockopt, options);
    // The second filter forbids seccomp(2).
    install(no_clone3(), SeccompAction::Allow, libc::ENOSYS)?;
    install_allowed(rules)
}

/// Allows what `rules` say. Anything else fails with EPERM.
fn install_allowed(rules: Rules) -> Result<(), seccompiler::Error> {
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    apply(rules, refused, SeccompAction::Allow)
}

/// Lets what `rules` say fail with `error`. For anything else `otherwise` holds.
fn install(rules: Rules, otherwise: SeccompAction, error: i32) -> Result<(), seccompiler::Error> {
    apply(rules, otherwise, SeccompAction::Errno(error as u32))
}

fn apply(
    rules: Rules,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<(), seccompiler::Error> {
    let arch: TargetArch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, otherwise, matched, arch)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter_all_threads(&program)
}

/// clone3(2) has its flags in memory, where no filter can see them. Where it does not exist, the C library uses clone(2).
fn no_clone3() -> Rules {
    [(libc::SYS_clone3, Vec::new())].into()
}

/// Threads of this process, but no process and no namespace.
fn threads(rules: &mut Rules) -> Result<(), BackendError> {
    let thread = libc::CLONE_THREAD as u64;
    let only_threads = SeccompCmpOp::MaskedEq(NEW_NAMESPACES | thread);
    let flags = SeccompCondition::new(0, SeccompCmpArgLen::Qword, only_threads, thread)?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![flags])?]);
    rules.insert(libc::SYS_prctl, one_of(0, PRCTLS)?);
    Ok(())
}

/// Whether an argument, as a number of 32 bits, has this value.
fn is(argument: u8, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

/// Rules that allow these values of an argument.
fn one_of(argument: u8, values: &[u64]) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |value: &u64| SeccompRule::new(vec![is(argument, *value)?]);
    values.iter().map(rule).collect()
}

/// Rules that allow these options of one level in setsockopt(2).
fn socket_options(level: i32, names: &[i32]) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |name: &i32| SeccompRule::new(vec![is(1, level as u64)?, is(2, *name as u64)?]);
    names.iter().map(rule).collect()
}

/// Rules that allow TCP sockets in socket(2); the two flags are free.
fn tcp_sockets() -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |family: &libc::c_int| {
        let stream = SeccompCmpOp::MaskedEq(0xf);
        SeccompRule::new(vec![
            is(0, *family as u64)?,
            SeccompCondition::new(1, SeccompCmpArgLen::Dword, stream, libc::SOCK_STREAM as u64)?,
        ])
    };
    [libc::AF_INET, libc::AF_INET6].iter().map(rule).collect()
}

// SPDX-License-Identifier: Apache-2.0
//! The sandbox of a worker. The worker enters it before it reads anything from a guest.
//!
//! The worker has received all descriptors by then. It switches to another user and can afterwards gain no privilege,
//! open no file, open no connection, signal no other process, and use only the system calls of `system_calls`.

use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};
use rustix::thread::{CapabilitySet, CapabilitySets};
mod system_calls;

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
    system_calls::filter(profile).map_err(|e| SandboxError::Seccomp(e.to_string()))
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

#[cfg(test)]
mod tests;

// SPDX-License-Identifier: Apache-2.0
//! Under which user a worker runs: each under a number of its own, so that none can signal or trace another one.

use viola_config::Vread;
use viola_config::vread::UidRange;
use viola_host::proc;

use crate::host::users;

/// The users as which libvirt runs QEMU: on Debian and its relatives, and on others.
const LIBVIRTS_QEMU: [&str; 2] = ["libvirt-qemu", "qemu"];

/// Users of workers and of the sockets of their VMs.
#[derive(Debug, Clone, Copy)]
pub struct Users {
    /// Owner of a reader's socket: the user of the VMMs. `None` keeps the daemon's own, when it does not run as root.
    pub vmm: Option<u32>,
    worker: WorkerUser,
}

/// The user of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerUser {
    /// The daemon's own, when it does not run as root.
    Daemon,
    /// This user and group for all workers.
    Fixed(u32, u32),
    /// A number that no other process has.
    Own(UidRange),
}

impl Users {
    /// The users that the configuration names.
    ///
    /// # Errors
    /// A sentence when this host does not have one of them, or the workers' user is root.
    pub fn find(config: &Vread) -> Result<Self, String> {
        let is_root = rustix::process::geteuid().is_root();
        let find = |name: &str| {
            users::user_ids(name).ok_or_else(|| {
                format!("this host has no user {name}; see user and vmm_user in [vread]")
            })
        };
        let vmm = match &config.vmm_user {
            Some(name) => find(name)?.0,
            None => libvirts_qemu(users::user_ids),
        };
        let worker = match &config.user {
            None => WorkerUser::Own(config.worker_uids),
            Some(name) => match find(name)? {
                (0, _) => {
                    return Err(format!(
                        "user {name} has root's number; workers need another one"
                    ));
                }
                (uid, gid) => WorkerUser::Fixed(uid, gid),
            },
        };
        Ok(Self {
            vmm: is_root.then_some(vmm),
            worker: if is_root { worker } else { WorkerUser::Daemon },
        })
    }

    /// User and group of a worker that starts now; `None` keeps the daemon's own.
    ///
    /// # Errors
    /// A sentence when all numbers of the range are taken, or the processes of this host cannot be listed.
    pub fn of_new_worker(&self) -> Result<Option<(u32, u32)>, String> {
        match self.worker {
            WorkerUser::Daemon => Ok(None),
            WorkerUser::Fixed(uid, gid) => Ok(Some((uid, gid))),
            WorkerUser::Own(range) => {
                let taken = taken(range)?;
                let free = (range.first..=range.last).find(|uid| !taken.contains(uid));
                let free = free.ok_or_else(|| {
                    format!("all numbers of worker_uids in [vread] ({range}) are taken")
                })?;
                Ok(Some((free, free)))
            }
        }
    }
}

/// The number of libvirt's user for QEMU; root where there is none.
fn libvirts_qemu(ids: impl Fn(&str) -> Option<(u32, u32)>) -> u32 {
    LIBVIRTS_QEMU
        .iter()
        .find_map(|name| ids(name))
        .map_or(0, |(uid, _)| uid)
}

/// The numbers of a range that processes of this host have.
fn taken(range: UidRange) -> Result<Vec<u32>, String> {
    let pids = proc::processes().map_err(|e| e.one_line())?;
    let users = |pid| proc::users(pid).unwrap_or_default();
    let in_range = |uid: &u32| (range.first..=range.last).contains(uid);
    Ok(pids.into_iter().flat_map(users).filter(in_range).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    #[test]
    fn the_vmms_user_is_libvirts_where_there_is_one() {
        let ids = |known: &'static [&'static str]| {
            move |name: &str| {
                known
                    .iter()
                    .position(|k| *k == name)
                    .map(|i| (64_055 + i as u32, 1))
            }
        };
        assert_eq!(libvirts_qemu(ids(&["libvirt-qemu", "qemu"])), 64_055);
        assert_eq!(libvirts_qemu(ids(&["x", "qemu"])), 64_056);
        assert_eq!(libvirts_qemu(ids(&[])), 0);
    }

    #[test]
    fn each_worker_gets_a_number_that_no_process_has() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("not root: users cannot be switched");
        }
        let first = 1_879_100_000;
        let range = UidRange {
            first,
            last: first + 1,
        };
        let users = Users {
            vmm: None,
            worker: WorkerUser::Own(range),
        };
        let mut workers = Vec::new();
        for uid in [first, first + 1] {
            assert_eq!(users.of_new_worker(), Ok(Some((uid, uid))));
            let sleep = Command::new("sleep").arg("600").uid(uid).spawn().unwrap();
            workers.push(sleep);
        }
        let full = users.of_new_worker().unwrap_err();
        assert!(
            full.contains("worker_uids in [vread] (1879100000-1879100001)"),
            "{full}"
        );
        for worker in &mut workers {
            worker.kill().unwrap();
            worker.wait().unwrap();
        }
        assert_eq!(users.of_new_worker(), Ok(Some((first, first))));
    }

    #[test]
    fn a_fixed_user_is_looked_up_and_never_root() {
        let config = |user: &str| {
            let mut config = Vread::default();
            config.user = Some(user.into());
            config
        };
        assert!(
            Users::find(&config("no-such-user"))
                .unwrap_err()
                .contains("has no user no-such-user")
        );
        assert!(
            Users::find(&config("root"))
                .unwrap_err()
                .contains("has root's number")
        );
        assert!(Users::find(&config("nobody")).is_ok());
        assert!(Users::find(&Vread::default()).is_ok());
    }
}

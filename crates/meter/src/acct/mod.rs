// SPDX-License-Identifier: Apache-2.0
//! Exact time accounting at context switches, by a BPF program (bpf/acct.bpf.c).
//!
//! [`Acct`] loads and attaches the program and enrols threads. The results lie in maps that are mapped into memory, so reading
//! them takes no system call: [`Accounts`] and [`Delays`] for the meter, [`CoreView`] for a slot controller. The controller gets events (a VM
//! woke or blocked, a packet came, a thread was created) through [`Ring`].

mod answers;
mod beside;
mod blocks;
mod layout;
mod maps;
#[cfg(test)]
mod replay;
mod ring;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, MapType, Object, ObjectBuilder, ProgramInput};

pub use answers::{AnswerCounters, AnswerMeter};
pub use blocks::{BlockMeter, Flow};
pub use layout::{
    Account, AccountTimes, CoreCtl, CoreVm, Event, EventKind, HIST_BUCKETS, HistCounters,
    MAX_ACCOUNTS, MAX_NICS, MAX_VMS, NO_VM, NotifyIo, VmDelay, bucket_bounds, bucket_of,
};
pub use maps::{Accounts, CoreView, Delays, MapError};
pub use ring::Ring;

use layout::{NO_CPU, RING_BYTES};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/acct.bpf.o"));

/// Why exact accounting is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum AcctError {
    /// The kernel has no type information, which the program needs.
    #[error(
        "the kernel has no BTF (/sys/kernel/btf/vmlinux): exact accounting needs CONFIG_DEBUG_INFO_BTF"
    )]
    NoBtf,
    /// viola lacks a capability.
    #[error("loading the accounting program needs CAP_BPF and CAP_PERFMON: run viola as root")]
    Privilege,
    /// libbpf or the kernel refused.
    #[error("the kernel refused the accounting program at {step}: {source}")]
    Bpf {
        /// What was being done.
        step: &'static str,
        /// The refusal.
        source: libbpf_rs::Error,
    },
    /// More VMs or vCPUs than the maps hold.
    #[error(
        "cannot account thread {tid} to VM {vm} and account {account}: there is room for {MAX_VMS} VMs and {MAX_ACCOUNTS} accounts"
    )]
    Full {
        /// Thread.
        tid: i32,
        /// Index of the VM.
        vm: u32,
        /// Index of the account.
        account: u32,
    },
    /// A map could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

fn at(step: &'static str) -> impl Fn(libbpf_rs::Error) -> AcctError {
    move |source| {
        if source.kind() == libbpf_rs::ErrorKind::PermissionDenied
            && rustix::process::geteuid().as_raw() != 0
        {
            AcctError::Privilege
        } else {
            AcctError::Bpf { step, source }
        }
    }
}

/// The loaded and attached accounting program. Dropping it detaches the program.
pub struct Acct {
    object: Object,
    links: Vec<Link>,
    sees_packets: bool,
    _rings: Vec<MapHandle>,
    accounts: Accounts,
    delays: Delays,
    cpus: u32,
}

impl std::fmt::Debug for Acct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Acct")
            .field("cpus", &self.cpus)
            .finish_non_exhaustive()
    }
}

/// What a thread of a VM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It runs a vCPU. An event for the VM waits until such a thread runs.
    Vcpu,
    /// It does I/O or other work for the VM.
    Service,
}

/// Which packets of an interface go to its VM. The others come from the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GuestPackets {
    /// Those that the host transmits on it: a tap.
    Transmitted = 0,
    /// Those that the host receives on it: an interface that the VM reads through a packet socket.
    Received = 1,
}

/// Whether the program runs for every packet of the host; such programs are attached when the first NIC is watched.
fn is_for_packets(prog: &libbpf_rs::ProgramMut<'_>) -> bool {
    ["on_xmit", "on_receive"].iter().any(|n| prog.name() == *n)
}

/// The descriptors from which a controller opens its [`CoreView`] and [`Ring`].
#[derive(Debug)]
pub struct CoreFds {
    /// Map of [`CoreVm`].
    pub core_vms: OwnedFd,
    /// Map of [`CoreCtl`].
    pub core_ctls: OwnedFd,
    /// Ring of [`Event`]s of this core.
    pub ring: OwnedFd,
}

impl Acct {
    /// Loads and attaches the program. Needs root (CAP_BPF and CAP_PERFMON) and kernel BTF.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn load() -> Result<Self, AcctError> {
        if !std::path::Path::new("/sys/kernel/btf/vmlinux").exists() {
            return Err(AcctError::NoBtf);
        }
        // libbpf's errors carry its messages; printing them too would confuse.
        libbpf_rs::set_print(None);
        let cpus = libbpf_rs::num_possible_cpus().map_err(at("counting CPUs"))? as u32;
        let mut open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(at("open"))?;
        for mut map in open.maps_mut() {
            let entries = match map.name().to_str() {
                Some("core_vms") => cpus * MAX_VMS as u32,
                Some("core_ctls" | "rings") => cpus,
                _ => continue,
            };
            map.set_max_entries(entries)
                .map_err(at("sizing the maps"))?;
        }
        let object = open.load().map_err(at("load"))?;
        let mut links = Vec::new();
        for prog in object.progs_mut() {
            let tracing = prog.prog_type() == libbpf_rs::ProgramType::Tracing;
            if tracing && !is_for_packets(&prog) {
                links.push(prog.attach().map_err(at("attach"))?);
            }
        }
        let accounts = Accounts::map(map(&object, "accounts")?.as_fd())?;
        let delays = Delays::map(map(&object, "vm_delays")?.as_fd())?;
        Ok(Self {
            object,
            links,
            sees_packets: false,
            _rings: Vec::new(),
            accounts,
            delays,
            cpus,
        })
    }

    /// Number of possible CPUs, the rows of [`CoreView`].
    pub fn cpus(&self) -> u32 {
        self.cpus
    }

    /// All accounts.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// The delays of all VMs.
    pub fn delays(&self) -> &Delays {
        &self.delays
    }

    /// Prepares the index `vm` (below [`MAX_VMS`]) for another VM: packets that still wait for the last VM with this index are
    /// dropped.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn begin_vm(&mut self, vm: u32) -> Result<(), AcctError> {
        self.run("begin_vm", &mut vm.to_ne_bytes()).map(drop)
    }

    /// Accounts `tid`, and every thread that it creates, to VM `vm` (below [`MAX_VMS`]) and account `account` (below
    /// [`MAX_ACCOUNTS`]) from now on. Returns whether the thread exists.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn enrol(
        &mut self,
        tid: i32,
        vm: u32,
        account: u32,
        role: Role,
    ) -> Result<bool, AcctError> {
        if vm as usize >= MAX_VMS || account as usize >= MAX_ACCOUNTS {
            return Err(AcctError::Full { tid, vm, account });
        }
        self.call_enrol(tid, vm, account, role)
    }

    /// Stops accounting a thread. Returns whether it was accounted.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn unenrol(&mut self, tid: i32) -> Result<bool, AcctError> {
        self.call_enrol(tid, NO_VM, 0, Role::Service)
    }

    fn call_enrol(
        &mut self,
        tid: i32,
        vm: u32,
        account: u32,
        role: Role,
    ) -> Result<bool, AcctError> {
        let mut args = [0u8; 16];
        args[..4].copy_from_slice(&tid.to_ne_bytes());
        args[4..8].copy_from_slice(&vm.to_ne_bytes());
        args[8..12].copy_from_slice(&account.to_ne_bytes());
        args[12..].copy_from_slice(&u32::from(role == Role::Vcpu).to_ne_bytes());
        Ok(self.run("enrol", &mut args)? == 1)
    }

    /// Creates the event ring of a core and returns the descriptors for its controller.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn prepare_core(&mut self, cpu: u32) -> Result<CoreFds, AcctError> {
        let opts = libbpf_rs::libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_rs::libbpf_sys::bpf_map_create_opts>() as _,
            ..Default::default()
        };
        let ring = MapHandle::create(
            MapType::RingBuf,
            Some("viola_ring"),
            0,
            0,
            RING_BYTES,
            &opts,
        )
        .map_err(at("making an event ring"))?;
        map(&self.object, "rings")?
            .update(
                &cpu.to_ne_bytes(),
                &ring.as_fd().as_raw_fd().to_ne_bytes(),
                MapFlags::ANY,
            )
            .map_err(at("installing an event ring"))?;
        let fds = CoreFds {
            core_vms: dup(map(&self.object, "core_vms")?.as_fd())?,
            core_ctls: dup(map(&self.object, "core_ctls")?.as_fd())?,
            ring: dup(ring.as_fd())?,
        };
        self._rings.push(ring);
        Ok(fds)
    }

    /// Counts the delays of packets of an interface (`ifindex` in the network namespace with inode number `netns`) that go to VM
    /// `vm`. `to_guest` tells which packets those are. With `cpu`, the core on which the VM takes interrupts, the packets are
    /// reported to the core's controller too.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn watch_nic(
        &mut self,
        ifindex: u32,
        netns: u32,
        to_guest: GuestPackets,
        vm: u32,
        cpu: Option<u32>,
    ) -> Result<(), AcctError> {
        if !self.sees_packets {
            let programs = self.object.progs_mut().filter(is_for_packets);
            let attached = programs.map(|prog| prog.attach().map_err(at("attach")));
            let links: Vec<Link> = attached.collect::<Result<_, _>>()?;
            self.links.extend(links);
            self.sees_packets = true;
        }
        let cpu = cpu.unwrap_or(NO_CPU);
        let value = [vm, cpu, to_guest as u32].map(u32::to_ne_bytes).concat();
        map(&self.object, "nics")?
            .update(&nic_key(ifindex, netns), &value, MapFlags::ANY)
            .map_err(at("watching a NIC"))
    }

    /// Stops counting packets of an interface.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn unwatch_nic(&mut self, ifindex: u32, netns: u32) -> Result<(), AcctError> {
        match map(&self.object, "nics")?.delete(&nic_key(ifindex, netns)) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => Err(at("unwatching a NIC")(e)),
            _ => Ok(()),
        }
    }

    fn run(&mut self, name: &'static str, args: &mut [u8]) -> Result<u32, AcctError> {
        for prog in self.object.progs_mut() {
            if prog.name() == name {
                let out = prog
                    .test_run(ProgramInput {
                        context_in: Some(args),
                        ..Default::default()
                    })
                    .map_err(at(name))?;
                return Ok(out.return_value);
            }
        }
        Err(missing(name))
    }
}

fn missing(step: &'static str) -> AcctError {
    AcctError::Bpf {
        step,
        source: libbpf_rs::Error::from(io::Error::from(io::ErrorKind::NotFound)),
    }
}

fn nic_key(ifindex: u32, netns: u32) -> [u8; 8] {
    let mut key = [0; 8];
    key[..4].copy_from_slice(&ifindex.to_ne_bytes());
    key[4..].copy_from_slice(&netns.to_ne_bytes());
    key
}

fn map<'a>(object: &'a Object, name: &'static str) -> Result<libbpf_rs::Map<'a>, AcctError> {
    object
        .maps()
        .find(|m| m.name() == name)
        .ok_or_else(|| missing(name))
}

fn dup(fd: BorrowedFd<'_>) -> Result<OwnedFd, MapError> {
    fd.try_clone_to_owned().map_err(|source| MapError {
        what: "descriptor",
        source,
    })
}

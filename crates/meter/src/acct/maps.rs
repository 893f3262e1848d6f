// SPDX-License-Identifier: Apache-2.0
//! The accounting program's maps, mapped into memory.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::layout::{
    Account, AccountTimes, CoreCtl, CoreVm, HistCounters, MAX_ACCOUNTS, MAX_VMS, NotifyIo, VmDelay,
};

/// A map of the accounting program could not be mapped.
#[derive(Debug, thiserror::Error)]
#[error("the {what} of the accounting program cannot be mapped: {source}")]
pub struct MapError {
    /// The map.
    pub what: &'static str,
    /// The cause.
    pub source: io::Error,
}

/// `len` values of `T` shared with the kernel.
pub(super) struct Shared<T> {
    at: NonNull<T>,
    len: usize,
}

// SAFETY: the memory belongs to the kernel map and stays mapped until drop; it is only read and written through
// volatile accesses of plain integers, for which any interleaving yields valid values.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    pub(super) fn map(
        fd: BorrowedFd<'_>,
        len: usize,
        writable: bool,
        what: &'static str,
    ) -> Result<Self, MapError> {
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice; the kernel checks length and access.
        let at = unsafe {
            mmap(
                std::ptr::null_mut(),
                len * size_of::<T>(),
                prot,
                MapFlags::SHARED,
                fd,
                0,
            )
        }
        .map_err(|e| MapError {
            what,
            source: e.into(),
        })?;
        let at = NonNull::new(at.cast::<T>()).ok_or_else(|| MapError {
            what,
            source: io::Error::from(io::ErrorKind::InvalidData),
        })?;
        Ok(Self { at, len })
    }

    fn ptr(&self, index: usize) -> *mut T {
        assert!(
            index < self.len,
            "index {index} of {} in a shared map",
            self.len
        );
        // SAFETY: in bounds by the line above.
        unsafe { self.at.as_ptr().add(index) }
    }

    pub(super) fn read(&self, index: usize) -> T {
        // SAFETY: in bounds and mapped; T is plain integers, of which each is read whole.
        unsafe { self.ptr(index).read_volatile() }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, not used after this.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len * size_of::<T>()) };
    }
}

/// All accounts, read-only.
pub struct Accounts(Shared<Account>);

impl Accounts {
    pub(super) fn map(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        Ok(Self(Shared::map(fd, MAX_ACCOUNTS, false, "vCPU table")?))
    }

    /// The counters of one account (below [`MAX_ACCOUNTS`]): one cache line. Each counter is consistent, but they may be one
    /// context switch apart.
    pub fn times(&self, account: u32) -> AccountTimes {
        let account = self.0.ptr(account as usize);
        // SAFETY: in bounds and mapped; aligned words. A context switch clears `on_since` before it adds to `run`: read in
        // this order, a run that ends meanwhile is missed, but never counted twice.
        unsafe {
            let times = &raw const (*account).times;
            let run = (&raw const (*times).run).read_volatile();
            fence(Ordering::Acquire);
            AccountTimes {
                run,
                on_since: (&raw const (*times).on_since).read_volatile(),
                wait: (&raw const (*times).wait).read_volatile(),
                wakes: (&raw const (*times).wakes).read_volatile(),
                switches: (&raw const (*times).switches).read_volatile(),
                preempted: (&raw const (*times).preempted).read_volatile(),
            }
        }
    }

    /// The waits of one account, see [`Accounts::times`].
    pub fn waits(&self, account: u32) -> HistCounters {
        let account = self.0.ptr(account as usize);
        // SAFETY: in bounds and mapped; words, of which each is read whole.
        unsafe { (&raw const (*account).waits).read_volatile() }
    }
}

/// What events wait for each VM, read-only.
pub struct Delays(Shared<VmDelay>);

impl Delays {
    pub(super) fn map(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        Ok(Self(Shared::map(fd, MAX_VMS, false, "delay table")?))
    }

    /// The delays of the VM with this index (below [`MAX_VMS`]).
    pub fn vm(&self, vm: u32) -> VmDelay {
        self.0.read(vm as usize)
    }
}

/// A controller's view of its core.
pub struct CoreView {
    vms: Shared<CoreVm>,
    ctls: Shared<CoreCtl>,
    cpu: usize,
}

impl CoreView {
    /// Opens the view of core `cpu` of `cpus` from the maps' descriptors.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn open(
        core_vms: BorrowedFd<'_>,
        core_ctls: BorrowedFd<'_>,
        cpu: u32,
        cpus: u32,
    ) -> Result<Self, MapError> {
        let (cpu, cpus) = (cpu as usize, cpus as usize);
        if cpu >= cpus {
            return Err(MapError {
                what: "core table",
                source: io::Error::from(io::ErrorKind::InvalidInput),
            });
        }
        Ok(Self {
            vms: Shared::map(core_vms, cpus * MAX_VMS, true, "VM table")?,
            ctls: Shared::map(core_ctls, cpus, true, "core table")?,
            cpu,
        })
    }

    fn row(&self, vm: u32) -> usize {
        assert!((vm as usize) < MAX_VMS);
        self.cpu * MAX_VMS + vm as usize
    }

    /// The state of a VM on this core.
    pub fn vm(&self, vm: u32) -> CoreVm {
        self.vms.read(self.row(vm))
    }

    /// Time that the VM has run on this core up to `now`, ns, including the present run.
    pub fn used(&self, vm: u32, now: u64) -> u64 {
        self.used_in(self.row(vm), now)
    }

    /// The same for another core; 0 when there is no such core.
    pub fn used_on(&self, cpu: u32, vm: u32, now: u64) -> u64 {
        assert!((vm as usize) < MAX_VMS);
        match cpu as usize * MAX_VMS + vm as usize {
            row if row < self.vms.len => self.used_in(row, now),
            _ => 0,
        }
    }

    fn used_in(&self, row: usize, now: u64) -> u64 {
        let row = self.vms.ptr(row);
        // The two words change together at a context switch; read again when one has changed in between.
        for _ in 0..8 {
            // SAFETY: in bounds and mapped; aligned words.
            let (before, since, after) = unsafe {
                let before = (&raw const (*row).used).read_volatile();
                fence(Ordering::Acquire);
                let since = (&raw const (*row).on_since).read_volatile();
                fence(Ordering::Acquire);
                (before, since, (&raw const (*row).used).read_volatile())
            };
            if before == after {
                return before
                    + if since == 0 {
                        0
                    } else {
                        now.saturating_sub(since)
                    };
            }
        }
        // SAFETY: in bounds and mapped; one aligned word.
        unsafe { (&raw const (*row).used).read_volatile() }
    }

    /// Requests one [`super::EventKind::Io`] for a packet of the VM, or cancels the request. `ignored`: the bits of
    /// [`CoreVm::open`] that stand for no request.
    pub fn notify_io(&self, vm: u32, packet: NotifyIo, ignored: u64) {
        let row = self.vms.ptr(self.row(vm));
        // SAFETY: in bounds and mapped writable; aligned words.
        unsafe {
            (&raw mut (*row).ignored).write_volatile(ignored);
            (&raw mut (*row).notify_io).write_volatile(packet as u32);
        }
    }

    /// Chooses the events that wake this core's controller: the next VM that becomes runnable, and each VM that blocks.
    pub fn notify(&self, wake: bool, block: bool) {
        let ctl = self.ctls.ptr(self.cpu);
        // SAFETY: in bounds and mapped writable; aligned words.
        unsafe {
            (&raw mut (*ctl).notify_wake).write_volatile(u32::from(wake));
            (&raw mut (*ctl).notify_block).write_volatile(u32::from(block));
        }
    }

    /// Tells the accounting program whether a controller reads events; without one it sends none.
    pub fn set_managed(&self, managed: bool) {
        let ctl = self.ctls.ptr(self.cpu);
        // SAFETY: in bounds and mapped writable; one aligned word.
        unsafe { (&raw mut (*ctl).managed).write_volatile(u32::from(managed)) };
    }

    /// Events lost so far because the ring was full.
    pub fn lost(&self) -> u32 {
        self.ctls.read(self.cpu).lost
    }
}

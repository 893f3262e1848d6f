// SPDX-License-Identifier: Apache-2.0
//! Context switches of a core, from the kernel's records (perf_event_open(2), PERF_RECORD_SWITCH_CPU_WIDE). Needs
//! neither tracefs nor BPF.

use std::collections::HashMap;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::charts::timeline::Stretch;

/// Data pages of the ring: 1 MiB holds more than one second at 10,000 switches per second.
const PAGES: usize = 256;

// From linux/perf_event.h.
const TYPE_SOFTWARE: u32 = 1;
const CONFIG_DUMMY: u64 = 9;
const SAMPLE_TID: u64 = 1 << 1;
const SAMPLE_TIME: u64 = 1 << 2;
const FLAG_SAMPLE_ID_ALL: u64 = 1 << 18;
const FLAG_USE_CLOCKID: u64 = 1 << 25;
const FLAG_CONTEXT_SWITCH: u64 = 1 << 26;
const OPEN_CLOEXEC: libc::c_ulong = 8;
const RECORD_LOST: u32 = 2;
const RECORD_SWITCH_CPU_WIDE: u32 = 15;
const MISC_SWITCH_OUT: u16 = 1 << 13;
/// Offsets of `data_head` and `data_tail` in the first page.
const HEAD: usize = 1024;
const TAIL: usize = 1032;

/// `struct perf_event_attr`, up to its first version with `clockid`.
#[repr(C)]
#[derive(Default)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
    config2: u64,
    branch_sample_type: u64,
    sample_regs_user: u64,
    sample_stack_user: u32,
    clockid: i32,
    sample_regs_intr: u64,
}

/// A context switch of the core; thread 0 is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switch {
    /// CLOCK_MONOTONIC, ns.
    pub at: u64,
    /// Thread that left the core.
    pub from: i32,
    /// Thread that runs next.
    pub to: i32,
}

/// A running trace of one core.
pub struct CoreTrace {
    page: NonNull<u8>,
    bytes: usize,
    page_bytes: usize,
    _event: OwnedFd,
    /// Switches read so far, in order of time.
    pub switches: Vec<Switch>,
    /// Records that the kernel dropped because the ring was full.
    pub lost: u64,
}

impl CoreTrace {
    /// Starts recording the switches of a core. Call [`CoreTrace::read`] at least once a second.
    ///
    /// # Errors
    /// Errors of perf_event_open(2), for example without CAP_PERFMON or without perf events in the kernel.
    pub fn start(cpu: usize) -> io::Result<Self> {
        let attr = Attr {
            kind: TYPE_SOFTWARE,
            size: size_of::<Attr>() as u32,
            config: CONFIG_DUMMY,
            sample_type: SAMPLE_TID | SAMPLE_TIME,
            flags: FLAG_SAMPLE_ID_ALL | FLAG_USE_CLOCKID | FLAG_CONTEXT_SWITCH,
            clockid: libc::CLOCK_MONOTONIC,
            ..Attr::default()
        };
        // SAFETY: `attr` outlives the call and carries its size; all other arguments are numbers.
        let event = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attr,
                -1,
                cpu as i32,
                -1,
                OPEN_CLOEXEC,
            )
        };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created this descriptor and no other value owns it.
        let event = unsafe { OwnedFd::from_raw_fd(event as i32) };
        let page_bytes = rustix::param::page_size();
        let bytes = page_bytes * (1 + PAGES);
        // SAFETY: a new mapping at an address that the kernel chooses; `drop` unmaps it.
        let page = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &event,
                0,
            )
        }?;
        let page = NonNull::new(page.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self {
            page,
            bytes,
            page_bytes,
            _event: event,
            switches: Vec::new(),
            lost: 0,
        })
    }

    /// Reads the records since the last call.
    pub fn read(&mut self) {
        let head = self.position(HEAD).load(Ordering::Acquire);
        let mut tail = self.position(TAIL).load(Ordering::Relaxed);
        let mut record = Vec::with_capacity(64);
        while tail < head {
            let header = self.bytes_at(tail, 8, &mut record);
            let (kind, misc, size) = header_of(header);
            if size < 8 {
                break; // an invalid size: the next record cannot be found
            }
            match parse(kind, misc, self.bytes_at(tail, size, &mut record)) {
                Some(Record::Switch(switch)) => self.switches.push(switch),
                Some(Record::Lost(count)) => self.lost += count,
                None => {}
            }
            tail += size as u64;
        }
        self.position(TAIL).store(tail, Ordering::Release);
    }

    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the first page stays mapped as long as self lives; both positions are aligned words in it that the
        // kernel and this process share.
        unsafe { &*self.page.as_ptr().add(offset).cast::<AtomicU64>() }
    }

    /// Copies `count` bytes from a position of the ring; the range may wrap.
    fn bytes_at<'a>(&self, at: u64, count: usize, copy: &'a mut Vec<u8>) -> &'a [u8] {
        let ring = PAGES * self.page_bytes;
        copy.clear();
        for i in 0..count {
            let offset = self.page_bytes + (at as usize + i) % ring;
            // SAFETY: the offset lies inside the mapping's data pages; the kernel does not write between tail and head.
            copy.push(unsafe { self.page.as_ptr().add(offset).read_volatile() });
        }
        copy
    }
}

impl Drop for CoreTrace {
    fn drop(&mut self) {
        // SAFETY: the mapping comes from `start`, and no reference into it is left.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), self.bytes) };
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Record {
    Switch(Switch),
    Lost(u64),
}

fn header_of(bytes: &[u8]) -> (u32, u16, usize) {
    (
        number(bytes, 0),
        number(bytes, 4) as u16,
        (number(bytes, 4) >> 16) as usize,
    )
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_ne_bytes)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u64::from_ne_bytes)
}

/// Parses a record: header (8 bytes), next or previous pid and tid, then pid, tid and time of the sample.
fn parse(kind: u32, misc: u16, record: &[u8]) -> Option<Record> {
    match kind {
        RECORD_LOST => Some(Record::Lost(long(record, 16))),
        RECORD_SWITCH_CPU_WIDE if misc & MISC_SWITCH_OUT != 0 => Some(Record::Switch(Switch {
            at: long(record, 24),
            from: number(record, 20) as i32,
            to: number(record, 12) as i32,
        })),
        _ => None,
    }
}

/// Stretches of time in which each VM had the core, from the first switch on. `owner` maps threads to VMs. Threads of
/// no VM count as VM number `vms`; idle time is left out.
pub fn stretches(switches: &[Switch], owner: &HashMap<i32, usize>, vms: usize) -> Vec<Stretch> {
    let Some(first) = switches.first() else {
        return Vec::new();
    };
    let mut stretches: Vec<Stretch> = Vec::new();
    for pair in switches.windows(2) {
        let tid = pair[0].to;
        if tid == 0 {
            continue;
        }
        let vm = owner.get(&tid).copied().unwrap_or(vms);
        let from_ms = (pair[0].at - first.at) as f64 / 1e6;
        let ms = pair[1].at.saturating_sub(pair[0].at) as f64 / 1e6;
        match stretches.last_mut() {
            // Threads of one VM hand its vCPU to each other.
            Some(last) if last.vm == vm && from_ms - (last.from_ms + last.ms) < 1e-3 => {
                last.ms += ms
            }
            _ => stretches.push(Stretch { vm, from_ms, ms }),
        }
    }
    stretches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_the_kernel_writes_it() {
        let mut bytes = Vec::new();
        for word in [15u32, (40 << 16) | 0x2000, 8, 9, 6, 7] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(123_456_789_012u64.to_ne_bytes());
        let (kind, misc, size) = header_of(&bytes);
        assert_eq!((kind, misc, size), (15, 0x2000, 40));
        let switch = Switch {
            at: 123_456_789_012,
            from: 7,
            to: 9,
        };
        assert_eq!(parse(kind, misc, &bytes), Some(Record::Switch(switch)));
        assert_eq!(parse(kind, 0, &bytes), None);
    }

    #[test]
    fn threads_of_one_vm_make_one_stretch() {
        let owner = HashMap::from([(10, 0), (11, 0), (20, 1)]);
        let at = |at: u64, from, to| Switch {
            at: at * 1_000_000,
            from,
            to,
        };
        let switches = [
            at(5, 20, 10),
            at(6, 10, 11),
            at(8, 11, 99),
            at(9, 99, 20),
            at(12, 20, 0),
            at(13, 0, 10),
        ];
        let (a, b, c) = (
            Stretch {
                vm: 0,
                from_ms: 0.0,
                ms: 3.0,
            },
            Stretch {
                vm: 2,
                from_ms: 3.0,
                ms: 1.0,
            },
            Stretch {
                vm: 1,
                from_ms: 4.0,
                ms: 3.0,
            },
        );
        assert_eq!(stretches(&switches, &owner, 2), [a, b, c]);
        assert!(stretches(&[], &owner, 2).is_empty());
    }

    #[test]
    fn a_thread_that_sleeps_and_wakes_is_seen_on_its_core() {
        let Ok(cpu) = std::fs::read_to_string("/proc/self/stat") else {
            return;
        };
        let cpu = cpu
            .rsplit(' ')
            .nth(13)
            .and_then(|c| c.parse().ok())
            .unwrap_or(0);
        let Ok(mut trace) = CoreTrace::start(cpu) else {
            return;
        }; // perf events are not allowed here
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        let mut here = rustix::thread::CpuSet::new();
        here.set(cpu);
        rustix::thread::sched_setaffinity(None, &here).unwrap();
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        trace.read();
        let mine = trace.switches.iter().filter(|s| s.from == me).count();
        assert!(mine >= 20, "{mine} of {} switches", trace.switches.len());
        assert!(trace.switches.windows(2).all(|w| w[0].at <= w[1].at));
    }
}

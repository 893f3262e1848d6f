// SPDX-License-Identifier: Apache-2.0
//! Loads the scheduler and reaches it through its maps.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use libbpf_rs::{
    ErrorKind, Link, MapCore, MapFlags, Object, ObjectBuilder, ProgramInput, libbpf_sys,
};

use super::layout::{CoreRows, CoreStats, Enrol, ExitInfo, Knobs, Plain, ROWS, VmStats};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/scx.bpf.o"));

const SYSFS: &str = "/sys/kernel/sched_ext";

/// Why the sched_ext scheduler is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum ScxError {
    /// The kernel has no sched_ext.
    #[error("the kernel was built without CONFIG_SCHED_CLASS_EXT; Linux 6.12 or later can have it")]
    NoClass,
    /// viola lacks a capability.
    #[error("loading a scheduler needs CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN: run viola as root")]
    Privilege,
    /// Another scheduler is loaded; the kernel has room for one.
    #[error(
        "the sched_ext scheduler {0} is loaded, and there can be only one: stop that one first"
    )]
    Occupied(String),
    /// libbpf or the kernel refused.
    #[error("the kernel refused viola's sched_ext scheduler at {step}")]
    Bpf {
        /// What was being done.
        step: &'static str,
        /// The refusal.
        source: libbpf_rs::Error,
    },
}

fn at(step: &'static str) -> impl Fn(libbpf_rs::Error) -> ScxError {
    move |source| {
        let refused = source.kind() == ErrorKind::PermissionDenied;
        if refused && rustix::process::geteuid().as_raw() != 0 {
            ScxError::Privilege
        } else {
            ScxError::Bpf { step, source }
        }
    }
}

fn missing(step: &'static str) -> ScxError {
    at(step)(libbpf_rs::Error::from(io::Error::from(
        io::ErrorKind::NotFound,
    )))
}

/// The loaded scheduler; with a link it is attached. When it is dropped, or the process ends in any way, the kernel returns all
/// its threads to the fair class.
pub(super) struct Loaded {
    object: Object,
    link: Option<Link>,
    pub cpus: u32,
}

/// How the scheduler ended.
pub(super) struct SchedulerExit {
    pub kind: u32,
    /// The kernel's message.
    pub message: String,
}

impl SchedulerExit {
    /// Whether a CPU came or went; the scheduler may be started again at once.
    pub fn by_hotplug(&self) -> bool {
        self.kind == 66 && self.message.contains("going")
    }
}

/// Longest wait for a scheduler that is being disabled.
const DISABLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Name of the active sched_ext scheduler, viola's or another.
pub(super) fn active_scheduler() -> Option<String> {
    let read = |file: &str| std::fs::read_to_string(Path::new(SYSFS).join(file)).ok();
    let deadline = Instant::now() + DISABLE_TIMEOUT;
    loop {
        match read("state")?.trim() {
            "disabled" => return None,
            "disabling" if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            _ => {
                let name = read("root/ops");
                return Some(name.map_or("(unnamed)".into(), |s| s.trim().to_owned()));
            }
        }
    }
}

fn verified(object: &Object) -> Vec<(String, u32)> {
    let of = |prog: libbpf_rs::Program<'_>| {
        let mut info = libbpf_sys::bpf_prog_info::default();
        let mut size = size_of_val(&info) as u32;
        let fd = prog.as_fd().as_raw_fd();
        // SAFETY: the kernel fills in at most `size` bytes of plain data.
        unsafe { libbpf_sys::bpf_prog_get_info_by_fd(fd, &raw mut info, &raw mut size) };
        let name = prog.name().to_string_lossy().into_owned();
        (name, info.verified_insns)
    };
    object.progs().map(of).collect()
}

impl Loaded {
    /// Loads the scheduler, which the kernel verifies, without attaching it.
    pub fn load(mut knobs: Knobs) -> Result<Self, ScxError> {
        if !Path::new(SYSFS).exists() {
            return Err(ScxError::NoClass);
        }
        // libbpf's errors carry its messages
        libbpf_rs::set_print(None);
        let cpus = libbpf_rs::num_possible_cpus().map_err(at("counting CPUs"))? as u32;
        knobs.cpus = cpus;
        let mut open = ObjectBuilder::default()
            .open_memory(OBJECT)
            .map_err(at("opening"))?;
        for mut map in open.maps_mut() {
            let entries = match map.name().to_str() {
                Some("cores" | "timers" | "plan_seqs" | "core_stats") => cpus,
                Some("plans") => cpus * 2,
                Some("vm_stats") => cpus * ROWS as u32,
                Some(name) if name.ends_with(".rodata") => {
                    let knobs = knobs.bytes();
                    let value = map.initial_value_mut();
                    let value = value.filter(|v| v.len() == knobs.len());
                    value
                        .ok_or_else(|| missing("setting the knobs"))?
                        .copy_from_slice(knobs);
                    continue;
                }
                _ => continue,
            };
            map.set_max_entries(entries)
                .map_err(at("sizing the maps"))?;
        }
        let object = open.load().map_err(at("loading"))?;
        Ok(Self {
            object,
            link: None,
            cpus,
        })
    }

    /// The number of instructions that the verifier examined, by program.
    pub fn verified(&self) -> Vec<(String, u32)> {
        verified(&self.object)
    }

    /// Attaches it. All cores that it is ever to manage must have a plan by now.
    pub fn attach(&mut self) -> Result<(), ScxError> {
        if let Some(name) = active_scheduler() {
            return Err(ScxError::Occupied(name));
        }
        for mut map in self.object.maps_mut() {
            if map.name() == "viola_ops" {
                self.link = Some(map.attach_struct_ops().map_err(at("attaching it"))?);
                return Ok(());
            }
        }
        Err(missing("attaching it"))
    }

    /// Gives a core its plan. `seq` is 1 for the first plan, and one more for each further one.
    pub fn publish(&self, cpu: u32, seq: u64, rows: &CoreRows) -> Result<(), ScxError> {
        let slot = cpu * 2 + (seq & 1) as u32;
        self.put("plans", slot, rows.bytes())?;
        self.put("plan_seqs", cpu, &seq.to_ne_bytes())
    }

    /// Assigns a thread to a VM, or with id 0 to none. Returns whether the thread exists.
    pub fn enrol(&self, tid: i32, id: u32, service: bool) -> Result<bool, ScxError> {
        let mut args = Enrol {
            tid: tid as u32,
            id,
            service: u32::from(service),
        }
        .bytes()
        .to_vec();
        for prog in self.object.progs_mut() {
            if prog.name() == "enrol" {
                let out = prog
                    .test_run(ProgramInput {
                        context_in: Some(&mut args),
                        ..Default::default()
                    })
                    .map_err(at("assigning a thread"))?;
                return Ok(out.return_value == 1);
            }
        }
        Err(missing("assigning a thread"))
    }

    /// How it ended, if it ended without being asked to.
    pub fn ended(&self) -> Option<SchedulerExit> {
        let row: ExitInfo = self.get("end", 0).ok()??;
        let text = |bytes: &[u8]| {
            let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        (row.kind != 0).then(|| SchedulerExit {
            kind: row.kind,
            message: [text(&row.reason), text(&row.message)]
                .into_iter()
                .filter(|t| !t.is_empty())
                .collect::<Vec<_>>()
                .join(": "),
        })
    }

    pub fn core_stats(&self, cpu: u32) -> CoreStats {
        self.get("core_stats", cpu)
            .ok()
            .flatten()
            .unwrap_or_default()
    }

    pub fn vm_stats(&self, cpu: u32, row: u32) -> VmStats {
        let key = cpu * ROWS as u32 + row;
        self.get("vm_stats", key).ok().flatten().unwrap_or_default()
    }

    fn map(&self, name: &'static str) -> Result<libbpf_rs::Map<'_>, ScxError> {
        let mut maps = self.object.maps();
        maps.find(|m| m.name() == name).ok_or_else(|| missing(name))
    }

    fn put(&self, name: &'static str, key: u32, value: &[u8]) -> Result<(), ScxError> {
        self.map(name)?
            .update(&key.to_ne_bytes(), value, MapFlags::ANY)
            .map_err(at("setting parameters"))
    }

    fn get<T: Plain>(&self, name: &'static str, key: u32) -> Result<Option<T>, ScxError> {
        let bytes = self
            .map(name)?
            .lookup(&key.to_ne_bytes(), MapFlags::ANY)
            .map_err(at("reading"))?;
        Ok(bytes.and_then(|b| T::from_bytes(&b)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::VmParams;
    use super::*;

    static DECIDE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/decide.bpf.o"));

    /// The verifier gives up after a million instructions, and takes seconds to get there. Kernels differ in what they examine
    /// twice.
    #[test]
    fn the_verifier_examines_few_instructions() {
        if rustix::process::geteuid().as_raw() != 0 {
            return;
        }
        libbpf_rs::set_print(None);
        let open = ObjectBuilder::default().open_memory(DECIDE).unwrap();
        let object = open.load().unwrap();
        let verified = verified(&object);
        println!("{verified:?}");
        assert!(
            verified[0].1 > 100 && verified[0].1 < 20_000,
            "{verified:?}"
        );
        // Alone, latency-sensitive and awake: BOOST. A turbo vCPU that is alone and has not slept: in its slot, OWNER.
        for (of, rank) in [(0, 5), (1, 3)] {
            let vm = VmParams {
                id: 1,
                ls: 1,
                weight: 256,
                cap_permille: 0,
                microslice: 300_000,
                here: of,
                of,
            };
            let mut vm = vm.bytes().to_vec();
            let ranks = object.progs_mut().map(|prog| {
                let input = ProgramInput {
                    context_in: Some(&mut vm),
                    ..Default::default()
                };
                prog.test_run(input).unwrap().return_value
            });
            assert_eq!(ranks.collect::<Vec<_>>(), [rank]);
        }
    }
}

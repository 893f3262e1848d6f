// SPDX-License-Identifier: Apache-2.0
//! Records the threads that VMs create while the controller runs.

use std::sync::atomic::Ordering;

use super::Slots;
use crate::mechanism::SchedError;
use crate::restore::RestoreError;

impl Slots {
    /// Records the threads that the controller gave a priority as the VMs created them; returns whether reports were lost. They
    /// are restored wherever they are then.
    pub(super) fn record_forks(&mut self) -> Result<bool, SchedError> {
        let Some(running) = self.running.as_mut() else {
            return Ok(false);
        };
        let (mut lost, mut new, mut found) = (false, false, Vec::new());
        for (core, read) in running.shared.cores().iter().zip(&mut running.forks_read) {
            found.clear();
            let (n, whole) = core.forks(*read, &mut found);
            *read = n;
            lost |= !whole;
            let cpu = core.cpu.load(Ordering::Relaxed);
            let planned = running.plan.cores.iter().find(|c| c.cpu == cpu);
            for &(index, tid) in &found {
                let vm = planned.and_then(|c| c.vms.iter().find(|vm| vm.index == index));
                if let Some(vm) = vm {
                    let (vm, tid) = (vm.pid.cast_unsigned(), tid.cast_unsigned());
                    new |= self
                        .state
                        .record_forked(vm, tid)
                        .map_err(RestoreError::from)?;
                }
            }
        }
        if new {
            self.state.write(&self.saved)?;
        }
        Ok(lost)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use viola_policy::slices::{Class, Params};

    use super::*;
    use crate::plan::{Algorithm, CorePlan, Plan, VmPlan};
    use crate::restore::SavedState;
    use crate::slots::shared::SharedMemory;
    use crate::slots::{HelperCommand, Running};

    fn sleeper() -> Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    fn vm(pid: u32) -> viola_host::Vm {
        let start_time = viola_host::proc::stat(pid).unwrap().unwrap().start_time;
        serde_json::from_value(serde_json::json!({
            "id": "uml:x", "name": "x", "hypervisor": "uml", "pid": pid, "start_time": start_time,
            "vcpus": [], "service": [], "disks": [], "nics": [], "cgroup": null,
            "cores": viola_host::CpuSet::new(), "status": null
        }))
        .unwrap()
    }

    #[test]
    fn a_thread_that_the_controller_reports_is_in_the_file_before_the_next_plan() {
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("slots.json");
        let (mut guest, mut watchdog) = (sleeper(), sleeper());
        let (shared, _fd) = SharedMemory::create().unwrap();
        shared.n_cores.store(1, Ordering::Release);
        shared.cores[0].cpu.store(1, Ordering::Relaxed);
        let plan = Plan {
            cores: vec![CorePlan {
                cpu: 1,
                algorithm: Algorithm::Interleaved,
                batch_slice: 4_000_000,
                budget_permille: None,
                reserve_permille: 0,
                vms: vec![VmPlan {
                    params: Params {
                        id: 0,
                        class: Class::Ls,
                        weight: 256,
                        cap_permille: None,
                        microslice: 300_000,
                    },
                    index: 9,
                    pid: guest.id() as i32,
                    sees_packets: false,
                    resets_on_fork: false,
                    threads: Vec::new(),
                    regular_vcpus: (0, 0),
                    hold_cpu: None,
                }],
            }],
        };
        let command = HelperCommand {
            program: "true".into(),
            args: Vec::new(),
        };
        let mut slots = Slots::new(command, saved.clone());
        slots.state.record(&vm(guest.id()), false).unwrap();
        let mut child = sleeper();
        let start_time = viola_host::proc::stat(child.id())
            .unwrap()
            .unwrap()
            .start_time;
        shared.cores[0].report_fork(9, child.id() as i32);
        shared.cores[0].report_fork(8, child.id() as i32);
        let (_, lifeline) = rustix::pipe::pipe().unwrap();
        watchdog.kill().unwrap();
        slots.running = Some(Running {
            watchdog,
            lifeline,
            shared,
            cpus: vec![1],
            plan,
            forks_read: vec![0],
        });
        assert!(!slots.record_forks().unwrap());
        let read = || SavedState::read(&saved).unwrap();
        assert_eq!(read().vms[0].forked, [(child.id(), start_time)]);
        std::fs::remove_file(&saved).unwrap();
        assert!(!slots.record_forks().unwrap());
        assert!(!saved.exists(), "nothing new");
        drop(slots);
        for process in [&mut guest, &mut child] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

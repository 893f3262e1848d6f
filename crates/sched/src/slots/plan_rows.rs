// SPDX-License-Identifier: Apache-2.0
//! A plan in shared memory, in rows of fixed size, and as the controller holds it.

use viola_policy::slices::{Class, MAX_VMS, Params};

use crate::plan::{Algorithm, CorePlan, ThreadPlan};

/// Most managed cores of one host.
pub const MAX_CORES: usize = 64;

/// Most threads of all VMs on one core.
pub const MAX_THREADS: usize = 2048;

/// A plan as the controller holds it: filled in place, never reallocated.
pub struct LocalPlan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Slice of batch VMs, ns.
    pub batch_slice: u64,
    /// As [`CorePlan::budget_permille`].
    pub budget_permille: Option<u32>,
    /// As [`CorePlan::reserve_permille`].
    pub reserve_permille: u32,
    /// The other cores of vTurbo's pools.
    pub pool: Vec<PoolCore>,
    /// VMs in the order of the plan.
    pub vms: Vec<LocalVm>,
    /// Threads, each with the position of its VM.
    pub threads: Vec<(usize, ThreadPlan)>,
}

/// A core of vTurbo's pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCore {
    /// CPU number.
    pub cpu: u32,
    /// Whether it is in the turbo pool.
    pub turbo: bool,
}

/// A VM in a [`LocalPlan`].
#[derive(Debug, Clone, Copy)]
pub struct LocalVm {
    /// Parameters.
    pub params: Params,
    /// Index in the accounting program.
    pub index: u32,
    /// As [`crate::VmPlan::sees_packets`].
    pub sees_packets: bool,
    /// As [`crate::VmPlan::resets_on_fork`].
    pub resets_on_fork: bool,
    /// As [`crate::VmPlan::regular_vcpus`].
    pub regular_vcpus: (u32, u32),
    /// As [`crate::VmPlan::hold_cpu`].
    pub hold_cpu: Option<u32>,
}

impl LocalPlan {
    /// Room for the largest plan.
    pub fn new() -> Self {
        Self {
            algorithm: Algorithm::Interleaved,
            batch_slice: 0,
            budget_permille: None,
            reserve_permille: 0,
            pool: Vec::with_capacity(MAX_CORES),
            vms: Vec::with_capacity(MAX_VMS),
            threads: Vec::with_capacity(MAX_THREADS),
        }
    }
}

impl Default for LocalPlan {
    fn default() -> Self {
        Self::new()
    }
}

const NO_CPU: u32 = u32::MAX;

#[derive(Clone, Copy)]
#[repr(C)]
struct VmRow {
    id: u32,
    class: u32,
    weight: u32,
    cap_permille: u32,
    microslice: u64,
    index: u32,
    sees_packets: u32,
    resets_on_fork: u32,
    regular_here: u32,
    regular_all: u32,
    /// CPU, or [`NO_CPU`].
    hold_cpu: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PoolRow {
    cpu: u32,
    turbo: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ThreadRow {
    tid: i32,
    vm: u16,
    service: u16,
}

#[repr(C)]
pub(super) struct PlanRows {
    algorithm: u32,
    n_vms: u32,
    n_threads: u32,
    n_pool: u32,
    budget_permille: u32,
    reserve_permille: u32,
    batch_slice: u64,
    pool: [PoolRow; MAX_CORES],
    vms: [VmRow; MAX_VMS],
    threads: [ThreadRow; MAX_THREADS],
}

fn algorithm_code(a: Algorithm) -> u32 {
    match a {
        Algorithm::Interleaved => 0,
        Algorithm::Paper => 1,
        Algorithm::Credit { boost: true } => 2,
        Algorithm::Credit { boost: false } => 3,
        Algorithm::Regular => 4,
        Algorithm::Turbo => 5,
    }
}

fn algorithm_of(code: u32) -> Algorithm {
    match code {
        1 => Algorithm::Paper,
        2 => Algorithm::Credit { boost: true },
        3 => Algorithm::Credit { boost: false },
        4 => Algorithm::Regular,
        5 => Algorithm::Turbo,
        _ => Algorithm::Interleaved,
    }
}

impl PlanRows {
    /// Writes a plan; `pool` are all cores of vTurbo's pools. Returns whether all VMs and threads had room.
    ///
    /// # Safety
    /// `rows` is mapped, and this is the only writer.
    pub(super) unsafe fn write(rows: *mut Self, plan: &CorePlan, pool: &[PoolCore]) -> bool {
        let mut n_threads = 0;
        let mut fits = plan.vms.len() <= MAX_VMS;
        // SAFETY: by the contract of this function. Volatile, because readers may read at the same time.
        unsafe {
            (&raw mut (*rows).algorithm).write_volatile(algorithm_code(plan.algorithm));
            (&raw mut (*rows).batch_slice).write_volatile(plan.batch_slice);
            (&raw mut (*rows).budget_permille).write_volatile(plan.budget_permille.unwrap_or(0));
            (&raw mut (*rows).reserve_permille).write_volatile(plan.reserve_permille);
            let mut n_pool = 0;
            let others = pool.iter().filter(|c| c.cpu != plan.cpu);
            for other in others.take(MAX_CORES) {
                (&raw mut (*rows).pool[n_pool]).write_volatile(PoolRow {
                    cpu: other.cpu,
                    turbo: u32::from(other.turbo),
                });
                n_pool += 1;
            }
            (&raw mut (*rows).n_pool).write_volatile(n_pool as u32);
            for (i, vm) in plan.vms.iter().take(MAX_VMS).enumerate() {
                let p = &vm.params;
                (&raw mut (*rows).vms[i]).write_volatile(VmRow {
                    id: p.id,
                    class: u32::from(p.class == Class::Ls),
                    weight: p.weight,
                    cap_permille: p.cap_permille.unwrap_or(0),
                    microslice: p.microslice,
                    index: vm.index,
                    sees_packets: u32::from(vm.sees_packets),
                    resets_on_fork: u32::from(vm.resets_on_fork),
                    regular_here: vm.regular_vcpus.0,
                    regular_all: vm.regular_vcpus.1,
                    hold_cpu: vm.hold_cpu.unwrap_or(NO_CPU),
                });
                for t in &vm.threads {
                    if n_threads < MAX_THREADS {
                        let row = ThreadRow {
                            tid: t.tid,
                            vm: i as u16,
                            service: u16::from(t.service),
                        };
                        (&raw mut (*rows).threads[n_threads]).write_volatile(row);
                        n_threads += 1;
                    } else {
                        fits = false;
                    }
                }
            }
            (&raw mut (*rows).n_vms).write_volatile(plan.vms.len().min(MAX_VMS) as u32);
            (&raw mut (*rows).n_threads).write_volatile(n_threads as u32);
        }
        fits
    }

    /// Copies the plan, which may be torn while another process writes it.
    ///
    /// # Safety
    /// `rows` is mapped.
    pub(super) unsafe fn read(rows: *const Self, into: &mut LocalPlan) {
        into.vms.clear();
        into.threads.clear();
        into.pool.clear();
        // SAFETY: volatile copies of plain integers from mapped memory, by the contract of this function.
        unsafe {
            into.algorithm = algorithm_of((&raw const (*rows).algorithm).read_volatile());
            into.batch_slice = (&raw const (*rows).batch_slice).read_volatile();
            let budget = (&raw const (*rows).budget_permille).read_volatile();
            into.budget_permille = (budget != 0).then_some(budget);
            into.reserve_permille = (&raw const (*rows).reserve_permille).read_volatile();
            let n_pool = ((&raw const (*rows).n_pool).read_volatile() as usize).min(MAX_CORES);
            for i in 0..n_pool {
                let row = (&raw const (*rows).pool[i]).read_volatile();
                into.pool.push(PoolCore {
                    cpu: row.cpu,
                    turbo: row.turbo != 0,
                });
            }
            let n_vms = ((&raw const (*rows).n_vms).read_volatile() as usize).min(MAX_VMS);
            let n_threads =
                ((&raw const (*rows).n_threads).read_volatile() as usize).min(MAX_THREADS);
            for i in 0..n_vms {
                let row = (&raw const (*rows).vms[i]).read_volatile();
                into.vms.push(LocalVm {
                    params: Params {
                        id: row.id,
                        class: if row.class == 1 {
                            Class::Ls
                        } else {
                            Class::Batch
                        },
                        weight: row.weight,
                        cap_permille: (row.cap_permille != 0).then_some(row.cap_permille),
                        microslice: row.microslice,
                    },
                    index: row.index,
                    sees_packets: row.sees_packets != 0,
                    resets_on_fork: row.resets_on_fork != 0,
                    regular_vcpus: (row.regular_here, row.regular_all),
                    hold_cpu: (row.hold_cpu != NO_CPU).then_some(row.hold_cpu),
                });
            }
            for i in 0..n_threads {
                let row = (&raw const (*rows).threads[i]).read_volatile();
                if usize::from(row.vm) < n_vms {
                    into.threads.push((
                        row.vm.into(),
                        ThreadPlan {
                            tid: row.tid,
                            service: row.service != 0,
                        },
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_has_a_code_of_its_own() {
        use Algorithm::*;
        let all = [
            Interleaved,
            Paper,
            Credit { boost: true },
            Credit { boost: false },
            Regular,
            Turbo,
        ];
        assert_eq!(all.map(|a| algorithm_of(algorithm_code(a))), all);
    }
}

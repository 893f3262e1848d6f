// SPDX-License-Identifier: Apache-2.0
//! Assigns VMs their ids in the scheduler and their rows on a core.

use std::collections::{BTreeMap, BTreeSet};

use viola_policy::slices::Class;

use super::layout::{CoreRows, Kind, NAME, ROWS, VM_IDS, VmParams};
use crate::mechanism::SchedError;
use crate::plan::{Algorithm, CorePlan, VmPlan};

/// The scheduler's ids of the VMs, by main process.
#[derive(Default)]
pub(super) struct VmIds {
    pub of: BTreeMap<i32, u32>,
    last: u32,
}

impl VmIds {
    /// The id of a VM; a new VM gets the id that has been free for longest, since the scheduler takes a known id for the same VM.
    pub fn get(&mut self, pid: i32) -> Option<u32> {
        if let Some(id) = self.of.get(&pid) {
            return Some(*id);
        }
        let all = VM_IDS - 1;
        let used: BTreeSet<u32> = self.of.values().copied().collect();
        let id = (0..all)
            .map(|k| (self.last + k) % all + 1)
            .find(|id| !used.contains(id))?;
        self.last = id;
        self.of.insert(pid, id);
        Some(id)
    }
}

/// The rows of a core. A VM keeps its row; new VMs get an id and a free row.
///
/// # Errors
/// [`SchedError::Unavailable`] for an algorithm that the scheduler lacks, and for too many VMs.
pub(super) fn rows(
    core: &CorePlan,
    before: Option<&CoreRows>,
    ids: &mut VmIds,
) -> Result<CoreRows, SchedError> {
    let kind = match core.algorithm {
        Algorithm::Interleaved => Kind::Interleaved,
        Algorithm::Regular => Kind::Regular,
        Algorithm::Turbo => Kind::Turbo,
        Algorithm::Paper | Algorithm::Credit { .. } => {
            return Err(SchedError::unavailable(
                NAME,
                "it has mode interleaved only; use mechanism = \"slots\" for the others",
            ));
        }
    };
    if core.vms.len() > ROWS {
        return Err(SchedError::unavailable(
            NAME,
            format!(
                "{} VMs are to share core {}, and a core has room for {ROWS}",
                core.vms.len(),
                core.cpu
            ),
        ));
    }
    let mut rows = CoreRows {
        batch_slice: core.batch_slice,
        kind: kind as u32,
        reserve: core.reserve_permille,
        vms: [VmParams::default(); ROWS],
    };
    let mut new = Vec::new();
    for vm in &core.vms {
        let id = ids.get(vm.pid).ok_or_else(|| {
            SchedError::unavailable(NAME, format!("one host has room for {} VMs", VM_IDS - 1))
        })?;
        let params = params(vm, id);
        let old = before.and_then(|b| b.vms.iter().position(|v| v.id == id));
        match old {
            Some(row) => rows.vms[row] = params,
            None => new.push(params),
        }
    }
    for params in new {
        // Prefer a row that was vacant before: a thread may still wait in one that has just become vacant.
        let vacant = |row: &usize| rows.vms[*row].id == 0;
        let was_vacant = |row: &usize| before.is_none_or(|b| b.vms[*row].id == 0);
        let row = (0..ROWS).find(|r| vacant(r) && was_vacant(r));
        if let Some(row) = row.or_else(|| (0..ROWS).find(vacant)) {
            rows.vms[row] = params;
        }
    }
    Ok(rows)
}

fn params(vm: &VmPlan, id: u32) -> VmParams {
    VmParams {
        id,
        ls: u32::from(vm.params.class == Class::Ls),
        weight: vm.params.weight,
        cap_permille: vm.params.cap_permille.unwrap_or(0),
        microslice: vm.params.microslice,
        here: vm.regular_vcpus.0,
        of: vm.regular_vcpus.1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_policy::slices::Params;

    fn core(pids: &[i32]) -> CorePlan {
        let vm = |pid: &i32| VmPlan {
            params: Params {
                id: 0,
                class: Class::Ls,
                weight: 256,
                cap_permille: Some(300),
                microslice: 5,
            },
            index: 0,
            pid: *pid,
            sees_packets: false,
            threads: Vec::new(),
            regular_vcpus: (1, 2),
            hold_cpu: None,
            resets_on_fork: false,
        };
        CorePlan {
            cpu: 1,
            algorithm: Algorithm::Interleaved,
            batch_slice: 7,
            budget_permille: None,
            reserve_permille: 400,
            vms: pids.iter().map(vm).collect(),
        }
    }

    /// VmIds by row, without the vacant rows at the end.
    fn ids(rows: &CoreRows) -> Vec<u32> {
        let n = rows
            .vms
            .iter()
            .rposition(|v| v.id != 0)
            .map_or(0, |i| i + 1);
        rows.vms[..n].iter().map(|v| v.id).collect()
    }

    #[test]
    fn a_vm_keeps_its_row_and_a_new_one_takes_a_vacant_row() {
        let mut known = VmIds::default();
        let first = rows(&core(&[10, 20, 30]), None, &mut known).unwrap();
        assert_eq!(ids(&first), [1, 2, 3]);
        assert_eq!(
            first.vms[0],
            VmParams {
                id: 1,
                ls: 1,
                weight: 256,
                cap_permille: 300,
                microslice: 5,
                here: 1,
                of: 2,
            }
        );
        known.of.remove(&20);
        let second = rows(&core(&[30, 40, 10]), Some(&first), &mut known).unwrap();
        assert_eq!(ids(&second), [1, 0, 3, 4], "and an id of its own");
    }

    #[test]
    fn a_full_core_gives_a_new_vm_the_row_of_one_that_leaves() {
        let mut known = VmIds::default();
        let all: Vec<i32> = (1..=ROWS as i32).collect();
        let first = rows(&core(&all), None, &mut known).unwrap();
        known.of.remove(&1);
        let mut next = all[1..].to_vec();
        next.push(100);
        let second = rows(&core(&next), Some(&first), &mut known).unwrap();
        assert_eq!(second.vms[0].id, known.of[&100]);
        next.push(101);
        let error = rows(&core(&next), None, &mut known)
            .unwrap_err()
            .to_string();
        assert!(error.contains("65 VMs"), "{error}");
    }

    #[test]
    fn other_modes_are_refused_with_the_remedy() {
        for algorithm in [Algorithm::Paper, Algorithm::Credit { boost: true }] {
            let plan = CorePlan {
                algorithm,
                ..core(&[1])
            };
            let error = rows(&plan, None, &mut VmIds::default())
                .unwrap_err()
                .to_string();
            assert!(error.contains("mechanism = \"slots\""), "{error}");
        }
    }

    #[test]
    fn cores_of_both_pools_have_their_own_kind() {
        let kinds = [Algorithm::Interleaved, Algorithm::Regular, Algorithm::Turbo].map(|a| {
            let plan = CorePlan {
                algorithm: a,
                ..core(&[1])
            };
            let rows = rows(&plan, None, &mut VmIds::default()).unwrap();
            (rows.kind, rows.reserve)
        });
        assert_eq!(kinds, [(0, 400), (1, 400), (2, 400)]);
    }
}

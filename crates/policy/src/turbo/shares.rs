// SPDX-License-Identifier: Apache-2.0
//! Fair shares over both pools: the equations of vTurbo (paper section 3.1, dissertation section 3.3.1), and the shares
//! that a work-conserving scheduler converges to under them.

/// What one VM ran in the last accounting period, in any one unit of core time (percent of a core, ns).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measured {
    /// Proportional share, 1..=65535.
    pub weight: u32,
    /// Whether it has a turbo vCPU.
    pub turbo_vcpu: bool,
    /// rd_i: on regular cores, at least 0.
    pub regular: f64,
    /// td_i: on turbo cores, at least 0.
    pub turbo: f64,
}

/// The share of one VM in the next accounting period, in the unit of [`Measured`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Share {
    /// FS_i: on both pools together.
    pub total: f64,
    /// FS^T_i: on the turbo pool, before other VMs leave some of theirs.
    pub turbo: f64,
    /// FS^R_i = FS_i less what it ran on the turbo pool. Negative if it ran more than FS_i there: it then gets only
    /// what other VMs leave of the regular pool.
    pub regular: f64,
}

/// FS_i, FS^T_i and FS^R_i of all VMs (the three equations of section 3.1).
///
/// The total capacity is what was consumed (C_tot = sum of rd_i and td_i), because the scheduler conserves work. A VM
/// without a turbo vCPU, a case that the paper does not have, has no part in FS^T.
///
/// The listing (paper Algorithm 2, dissertation Algorithm 3) differs from the equations. It swaps the usage of the two
/// pools, which is harmless because it uses only their sum. It refills the turbo vCPU from an undefined variable
/// (dissertation) or from FS^R (paper), so that a VM that is busy on the turbo core would lose its share of it; FS^T is
/// meant.
pub fn fair_shares(vms: &[Measured]) -> Vec<Share> {
    let sum = |f: &dyn Fn(&Measured) -> f64| vms.iter().map(f).sum::<f64>();
    let all_weight = sum(&|vm| weight(vm.weight));
    let all_turbo_weight = sum(&turbo_weight);
    let turbo = sum(&|vm| vm.turbo);
    let all = turbo + sum(&|vm| vm.regular);
    vms.iter()
        .map(|vm| {
            let total = all * weight(vm.weight) / all_weight;
            Share {
                total,
                turbo: if vm.turbo_vcpu {
                    turbo * turbo_weight(vm) / all_turbo_weight
                } else {
                    0.0
                },
                regular: total - vm.turbo,
            }
        })
        .collect()
}

fn weight(weight: u32) -> f64 {
    f64::from(weight.max(1))
}

fn turbo_weight(vm: &Measured) -> f64 {
    if vm.turbo_vcpu {
        weight(vm.weight)
    } else {
        0.0
    }
}

/// What one VM would run if it were alone.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Demand {
    /// Proportional share, 1..=65535.
    pub weight: u32,
    /// Maximum use of both pools together, cores (0.001 or more); `None`: no limit.
    pub cap: Option<f64>,
    /// Cores that its regular vCPUs want, at least 0.
    pub regular: f64,
    /// Cores that its turbo vCPU wants, 0.0 ..= 1.0; 0 without one.
    pub turbo: f64,
}

/// What one VM gets, cores.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Granted {
    /// On the regular pool.
    pub regular: f64,
    /// On the turbo pool.
    pub turbo: f64,
}

/// What each VM runs in the long run under the equations of [`fair_shares`], if all VMs share `regular_cores` and
/// `turbo_cores` (the columns "consumed" of the paper's Table 1).
///
/// The turbo pool is divided first, by weight among the VMs that want it; what one leaves goes to the others. The
/// regular pool is divided so that the totals by weight are as equal as possible: a VM gets as much less of it as it
/// ran on the turbo pool. Nothing stays unused that a VM wants and may use. (The schedulers keep the total of a VM at
/// its cap; how it is divided between the pools depends on which vCPU runs first.)
pub fn allocate(vms: &[Demand], regular_cores: f64, turbo_cores: f64) -> Vec<Granted> {
    let cap = |vm: &Demand| vm.cap.unwrap_or(f64::INFINITY).max(0.0);
    let ranges: Vec<_> = vms
        .iter()
        .map(|vm| (vm.weight, 0.0, vm.turbo.clamp(0.0, cap(vm))))
        .collect();
    let turbo = fill(&ranges, turbo_cores);
    let ranges: Vec<_> = vms
        .iter()
        .zip(&turbo)
        .map(|(vm, &t)| (vm.weight, t, (t + vm.regular.max(0.0)).min(cap(vm)).max(t)))
        .collect();
    let total = fill(&ranges, regular_cores);
    turbo
        .iter()
        .zip(total)
        .map(|(&turbo, total)| Granted {
            regular: total - turbo,
            turbo,
        })
        .collect()
}

/// Raises all values from their least towards their most, given as (weight, least, most), to one level per weight,
/// until `amount` is spent.
fn fill(ranges: &[(u32, f64, f64)], amount: f64) -> Vec<f64> {
    let at = |level: f64| {
        ranges
            .iter()
            .map(move |&(w, least, most)| (level * weight(w)).clamp(least, most))
    };
    let spent = |level: f64| {
        at(level).sum::<f64>() - ranges.iter().map(|&(_, least, _)| least).sum::<f64>()
    };
    // Between two neighbouring bends the amount spent is linear in the level.
    let mut bends: Vec<f64> = ranges
        .iter()
        .flat_map(|&(w, least, most)| [least / weight(w), most / weight(w)])
        .collect();
    bends.sort_by(f64::total_cmp);
    let amount = amount.max(0.0);
    let over = bends.iter().position(|&level| spent(level) > amount);
    let level = match over {
        None => bends.last().copied().unwrap_or(0.0),
        Some(0) => bends[0],
        Some(k) => {
            let (low, high) = (bends[k - 1], bends[k]);
            let (a, b) = (spent(low), spent(high));
            low + (high - low) * (amount - a) / (b - a)
        }
    };
    at(level).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two VMs of equal weight with a turbo vCPU each, as in Table 1.
    fn measured(rd: [f64; 2], td: [f64; 2]) -> Vec<Measured> {
        std::iter::zip(rd, td)
            .map(|(regular, turbo)| Measured {
                weight: 256,
                turbo_vcpu: true,
                regular,
                turbo,
            })
            .collect()
    }

    fn regular_and_turbo(rd: [f64; 2], td: [f64; 2]) -> ([f64; 2], [f64; 2]) {
        let s = fair_shares(&measured(rd, td));
        ([s[0].regular, s[1].regular], [s[0].turbo, s[1].turbo])
    }

    /// Percent consumed on one regular and one turbo core.
    fn consumed(regular: [f64; 2], turbo: [f64; 2]) -> ([f64; 2], [f64; 2]) {
        let vms: Vec<_> = std::iter::zip(regular, turbo)
            .map(|(r, t)| Demand {
                weight: 256,
                cap: None,
                regular: r / 100.0,
                turbo: t / 100.0,
            })
            .collect();
        let got = allocate(&vms, 1.0, 1.0);
        let percent = |part: f64| (part * 1e6).round() / 1e4;
        (
            [percent(got[0].regular), percent(got[1].regular)],
            [percent(got[0].turbo), percent(got[1].turbo)],
        )
    }

    #[test]
    fn table_1_scenario_1_only_regular_work() {
        let allocated = regular_and_turbo([50.0, 50.0], [0.0, 0.0]);
        assert_eq!(allocated, ([50.0, 50.0], [0.0, 0.0]));
        assert_eq!(
            consumed([100.0, 100.0], [0.0, 0.0]),
            ([50.0, 50.0], [0.0, 0.0])
        );
    }

    /// The print has FS^T = 0 and 100 here (paper Table 1 and dissertation Table 3.1, second scenario, column 7). The
    /// equation FS^T_i = C^T·wt_i / sum of wt gives 50 and 50, as in the fourth scenario, where 35 and 35 are printed
    /// though 15 and 55 are consumed. VM2 gets the whole core because VM1 leaves it. FS^R and the consumed values are
    /// as printed.
    #[test]
    fn table_1_scenario_2_one_vm_does_all_io() {
        let allocated = regular_and_turbo([50.0, 50.0], [0.0, 100.0]);
        assert_eq!(allocated, ([100.0, 0.0], [50.0, 50.0]));
        assert_eq!(
            consumed([100.0, 100.0], [0.0, 100.0]),
            ([100.0, 0.0], [0.0, 100.0])
        );
    }

    #[test]
    fn table_1_scenario_3_both_want_everything() {
        let allocated = regular_and_turbo([50.0, 50.0], [50.0, 50.0]);
        assert_eq!(allocated, ([50.0, 50.0], [50.0, 50.0]));
        assert_eq!(
            consumed([100.0, 100.0], [100.0, 100.0]),
            ([50.0, 50.0], [50.0, 50.0])
        );
    }

    #[test]
    fn table_1_scenario_4_some_io_each() {
        let allocated = regular_and_turbo([50.0, 50.0], [15.0, 55.0]);
        assert_eq!(allocated, ([70.0, 30.0], [35.0, 35.0]));
        assert_eq!(
            consumed([100.0, 100.0], [15.0, 55.0]),
            ([70.0, 30.0], [15.0, 55.0])
        );
    }

    /// Introduction of the paper: VM1 asks for 100 % of the regular core, VM2 for 50 % of each core; the regular core
    /// is split 75 to 25. VM2 gets 25 of the 50 it asks for because its turbo half counts.
    #[test]
    fn the_introductions_example_splits_the_regular_core_75_to_25() {
        let allocated = regular_and_turbo([50.0, 50.0], [0.0, 50.0]);
        assert_eq!(allocated.0, [75.0, 25.0]);
        assert_eq!(
            consumed([100.0, 50.0], [0.0, 50.0]),
            ([75.0, 25.0], [0.0, 50.0])
        );
    }

    #[test]
    fn the_equations_are_at_rest_at_the_consumed_values() {
        for (regular, turbo) in [
            ([100.0, 100.0], [0.0, 100.0]),
            ([100.0, 100.0], [15.0, 55.0]),
            ([100.0, 50.0], [0.0, 50.0]),
        ] {
            let (rd, td) = consumed(regular, turbo);
            assert_eq!(regular_and_turbo(rd, td).0, rd);
        }
    }

    #[test]
    fn a_vm_without_turbo_vcpu_has_no_part_in_the_turbo_pool() {
        let mut vms = measured([50.0, 50.0], [0.0, 60.0]);
        vms[0].turbo_vcpu = false;
        let shares = fair_shares(&vms);
        assert_eq!((shares[0].turbo, shares[1].turbo), (0.0, 60.0));
        assert_eq!((shares[0].regular, shares[1].regular), (80.0, 20.0));
        assert!(fair_shares(&[]).is_empty() && allocate(&[], 1.0, 1.0).is_empty());
    }

    #[test]
    fn weights_and_caps_hold_over_both_pools() {
        let vm = |weight, cap, regular, turbo| Demand {
            weight,
            cap,
            regular,
            turbo,
        };
        // Three to one, over 1.4 cores: 1.05 and 0.35.
        let got = allocate(
            &[vm(768, None, 1.0, 0.4), vm(256, None, 1.0, 0.0)],
            1.0,
            1.0,
        );
        assert!((got[0].regular - 0.65).abs() < 1e-9 && (got[1].regular - 0.35).abs() < 1e-9);
        // The cap of the second is spent on the turbo core first.
        let got = allocate(
            &[vm(256, None, 1.0, 0.0), vm(256, Some(0.3), 1.0, 0.2)],
            1.0,
            1.0,
        );
        assert!((got[1].turbo - 0.2).abs() < 1e-9 && (got[1].regular - 0.1).abs() < 1e-9);
        assert!((got[0].regular - 0.9).abs() < 1e-9);
        // More I/O than the fair share of all: nothing of the regular core while others want it, all when none does.
        let got = allocate(
            &[vm(256, None, 0.3, 0.0), vm(256, None, 1.0, 0.9)],
            1.0,
            1.0,
        );
        assert!((got[0].regular - 0.3).abs() < 1e-9 && (got[1].regular - 0.7).abs() < 1e-9);
    }
}

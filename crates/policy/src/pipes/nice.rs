// SPDX-License-Identifier: Apache-2.0
//! A VM's weight as the kernel's nice value, for the worker process that sends on behalf of the VM.

use crate::slices::DEFAULT_WEIGHT;

/// Nice value, -10..=19, by which the kernel gives processes CPU time in the proportion of these weights: a step is a
/// factor of 1.25 (`sched_prio_to_weight`, kernel/sched/core.c). [`DEFAULT_WEIGHT`] is 0; the steps make it exact to
/// one eighth. Beyond ten times the default it grows no more: the host has other work, too.
pub fn nice(weight: u32) -> i32 {
    let steps = (f64::from(weight.max(1)) / f64::from(DEFAULT_WEIGHT)).ln() / 1.25_f64.ln();
    (-steps.round() as i32).clamp(-10, 19)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_the_weight_is_three_steps() {
        let all = [(256, 0), (512, -3), (128, 3), (1, 19), (65535, -10)];
        for (weight, wanted) in all {
            assert_eq!(nice(weight), wanted, "{weight}");
        }
        // never in the wrong order, and never off by more than an eighth within the range
        for weight in 10..2_000 {
            assert!(nice(weight + 1) <= nice(weight));
            let given = 1.25_f64.powi(-nice(weight));
            let wanted = f64::from(weight) / 256.0;
            assert!((given / wanted).ln().abs() <= 1.125_f64.ln(), "{weight}");
        }
    }
}

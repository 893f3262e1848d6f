// SPDX-License-Identifier: Apache-2.0
//! How long an interrupt waits with and without a turbo core, and how large a guest's buffers must be (vTurbo, paper
//! introduction and section 3.2; dissertation sections 3.1 and 3.3.2).

use crate::slices::Nanos;

/// Longest wait of a busy VM among `vms` busy VMs of equal weight on a core with slices of `slice` ns: (vms - 1)·slice,
/// ns. On a turbo core the VM waits so long to serve an interrupt, on a regular core to read the data.
pub fn longest_wait(vms: u32, slice: Nanos) -> Nanos {
    u64::from(vms.saturating_sub(1)).saturating_mul(slice)
}

/// B_min, the smallest receive buffer (bytes) that holds what arrives while the reading process waits for its core:
/// bandwidth (bits per second) times `delay` (ns). The paper used about four times as much (40 MB instead of 11.25).
pub fn least_buffer(bits_per_second: u64, delay: Nanos) -> u64 {
    let bits = u128::from(bits_per_second) * u128::from(delay) / 1_000_000_000;
    u64::try_from(bits.div_ceil(8)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::{REGULAR_SLICE, TURBO_SLOT};
    use super::*;
    use crate::slices::{MS, US};

    #[test]
    fn with_5_vms_an_interrupt_waits_400_us_instead_of_120_ms() {
        assert_eq!(longest_wait(5, TURBO_SLOT), 400 * US);
        assert_eq!(longest_wait(5, REGULAR_SLICE), 120 * MS);
        assert_eq!(longest_wait(0, TURBO_SLOT), 0);
    }

    #[test]
    fn at_1_gbit_4_vms_need_11_25_mb() {
        let delay = longest_wait(4, REGULAR_SLICE);
        assert_eq!(delay, 90 * MS);
        assert_eq!(least_buffer(1_000_000_000, delay), 11_250_000);
        assert_eq!(least_buffer(u64::MAX, Nanos::MAX), u64::MAX);
    }
}

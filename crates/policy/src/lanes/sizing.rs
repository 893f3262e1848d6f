// SPDX-License-Identifier: Apache-2.0
//! How many VFs a NIC should have, so that each keeps its bandwidth (sections 3.1 and 3.3.2).

/// Capacity of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Bandwidth, bits per second.
    pub bandwidth: u64,
    /// Bandwidth reserved for paravirtual NICs, bits per second.
    pub reserve: u64,
    /// Minimum bandwidth of a VF while all are busy, bits per second, more than 0.
    pub per_vf: u64,
    /// Number of VFs that the NIC has created.
    pub created: u32,
}

/// Number of VFs that may be granted at once: (bandwidth - reserve)/per_vf rounded down, at most those created. At
/// least one if any is created, even if its bandwidth is below `per_vf`.
pub fn usable(capacity: Capacity) -> u32 {
    let fit = lanes(capacity) / capacity.per_vf.max(1);
    u32::try_from(fit)
        .unwrap_or(u32::MAX)
        .max(1)
        .min(capacity.created)
}

/// Bandwidth (bits per second) of each usable VF while all are busy, to be set as its rate limit; 0 without VFs.
pub fn rate(capacity: Capacity) -> u64 {
    lanes(capacity)
        .checked_div(u64::from(usable(capacity)))
        .unwrap_or(0)
}

fn lanes(capacity: Capacity) -> u64 {
    capacity.bandwidth.saturating_sub(capacity.reserve)
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 1_000_000_000;
    const TEN: Capacity = Capacity {
        bandwidth: 10 * G,
        reserve: 2 * G,
        per_vf: G,
        created: 63,
    };

    #[test]
    fn each_vf_keeps_its_bandwidth_and_paravirtual_nics_their_reserve() {
        assert_eq!((usable(TEN), rate(TEN)), (8, G));
        let few = Capacity { created: 4, ..TEN };
        assert_eq!((usable(few), rate(few)), (4, 2 * G));
        let wide = Capacity {
            per_vf: 3 * G,
            ..TEN
        };
        assert_eq!((usable(wide), rate(wide)), (2, 4 * G));
    }

    #[test]
    fn too_little_bandwidth_gives_one_vf_and_no_vfs_give_none() {
        let narrow = Capacity {
            per_vf: 40 * G,
            ..TEN
        };
        assert_eq!((usable(narrow), rate(narrow)), (1, 8 * G));
        let none = Capacity { created: 0, ..TEN };
        assert_eq!((usable(none), rate(none)), (0, 0));
        let all_reserved = Capacity {
            reserve: 11 * G,
            ..TEN
        };
        assert_eq!((usable(all_reserved), rate(all_reserved)), (1, 0));
    }
}

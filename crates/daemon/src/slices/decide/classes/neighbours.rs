// SPDX-License-Identifier: Apache-2.0
//! What a trial does to the VMs of the same core.

use viola_host::VmId;
use viola_policy::slices::{MS, Nanos};

use viola_cli::error::one_line;
use viola_cli::quantities::rounded;

/// A VM on the core of one that is being tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its identity.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// The p99 of its packet delay in the last 10 s, ns.
    pub p99: Nanos,
}

/// A neighbour is harmed when its p99 grew by more than this factor and by at least [`MIN_LOSS`]. Without any change, the p99 of
/// one ten seconds differs from that of the next by less.
const MAX_DELAY_RATIO: f64 = 1.5;
/// Smallest increase of the p99 that counts as a loss, ns.
const MIN_LOSS: Nanos = 2 * MS;

/// The neighbour that lost most by a trial, in words; `None` if none lost. Those that were not measured on both sides do not count.
pub fn harmed(before: &[Neighbour], after: &[Neighbour]) -> Option<String> {
    let lost = before.iter().filter_map(|before| {
        let after = after.iter().find(|after| after.id == before.id)?;
        let loss = after.p99.saturating_sub(before.p99);
        let is_harmed = loss >= MIN_LOSS && after.p99 as f64 > before.p99 as f64 * MAX_DELAY_RATIO;
        is_harmed.then_some((loss, before, after))
    });
    let (_, before, after) = lost.max_by_key(|(loss, ..)| *loss)?;
    Some(format!(
        "packet delay p99 of {} went from {} to {}",
        one_line(&before.name),
        rounded(before.p99),
        rounded(after.p99)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;

    fn neighbour(name: &str, p99: Nanos) -> Neighbour {
        Neighbour {
            id: vm(name, 7, &[&[1]]).id,
            name: name.into(),
            p99,
        }
    }

    #[test]
    fn a_neighbour_whose_packets_wait_much_longer_is_harmed() {
        let before = [
            neighbour("a", 4 * MS),
            neighbour("b", MS),
            neighbour("c", 9 * MS),
        ];
        let same = harmed(&before, &before);
        assert_eq!(same, None);
        // By half and more, but only 1.9 ms; by 2 ms and more, but less than half.
        let little = [neighbour("b", MS * 29 / 10), neighbour("c", 12 * MS)];
        assert_eq!(harmed(&before, &little), None);
        let much = [
            neighbour("a", 6 * MS + 1),
            neighbour("b", 20 * MS),
            neighbour("d", MS),
        ];
        assert_eq!(
            harmed(&before, &much).unwrap(),
            "packet delay p99 of b went from 1 ms to 20 ms"
        );
    }
}

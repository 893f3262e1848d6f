// SPDX-License-Identifier: Apache-2.0
//! How long requests to the VMs wait when no VM of their core has class ls, as the trials of class ls found it.
//!
//! A VM of class ls shortens the delays of all servers of its core, since batch VMs are then served by lags too. So what a
//! neighbour may lose when another VM gets the class is measured from here, and not from what the first one gave it.

use std::collections::BTreeMap;

use viola_host::VmId;
use viola_policy::slices::{Class, MS, Nanos};

/// After this time a delay is forgotten, ns: the load may have become another.
const LIFETIME: Nanos = 3_600_000 * MS;

/// The delays by VM, ns, and when they were found.
#[derive(Debug, Default)]
pub(super) struct References(BTreeMap<VmId, (f64, Nanos)>);

impl References {
    /// Keeps the delay (ns) of a VM without class ls that a trial found by `at` (ns). Where others had the class, that delay is
    /// shorter than on stock, and so errs on the safe side.
    pub(super) fn learn(&mut self, id: &VmId, delay: f64, at: Nanos) {
        self.0.insert(id.clone(), (delay, at));
    }

    /// The delay (ns) up to which a VM that viola gave this class does not lose; 0 when nothing is known. A VM of class ls keeps
    /// at least half of what it gained.
    pub(super) fn tolerated(&self, id: &VmId, class: Class, at: Nanos) -> f64 {
        let known = self.0.get(id).filter(|(_, found)| at < found + LIFETIME);
        let delay = known.map_or(0.0, |(delay, _)| *delay);
        match class {
            Class::Ls => delay / 2.0,
            Class::Batch => delay,
        }
    }

    /// Forgets a VM that is gone or does something else.
    pub(super) fn forget(&mut self, id: &VmId) {
        self.0.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;

    #[test]
    fn a_vm_of_class_ls_keeps_half_of_its_gain_and_a_batch_vm_what_stock_gave_it() {
        let [web, db] = ["web", "db"].map(|name| vm(name, 7, &[&[1]]).id);
        let mut known = References::default();
        known.learn(&web, 8e6, 0);
        assert_eq!(known.tolerated(&web, Class::Ls, 1), 4e6);
        assert_eq!(known.tolerated(&db, Class::Batch, 1), 0.0);
        known.learn(&db, 6e6, 0);
        assert_eq!(known.tolerated(&db, Class::Batch, 1), 6e6);
        assert_eq!(known.tolerated(&db, Class::Batch, LIFETIME), 0.0);
        known.forget(&db);
        assert_eq!(known.tolerated(&db, Class::Batch, 1), 0.0);
    }
}

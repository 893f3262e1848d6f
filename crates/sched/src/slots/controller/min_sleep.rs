// SPDX-License-Identifier: Apache-2.0
//! The shortest sleep of a controller.

use viola_policy::slices::Nanos;

/// With one so short, a decision that is over cannot make the thread spin, ns.
const LEAST: Nanos = 5_000;
/// Longer than any switch between a controller and a VM takes, ns.
const MOST: Nanos = 64 * LEAST;

/// The shortest sleep of a controller.
///
/// Where controller and VMs share a CPU, a short sleep may be over before the switch to the VM is: on a virtual machine, setting
/// a timer can take tens of microseconds. The next decision then finds that nothing has happened, and asks for the same sleep
/// again. So each one doubles the shortest sleep, until a VM has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinSleep(Nanos);

impl MinSleep {
    /// After a step: whether a VM has run since the last one, and whether one wants to run.
    pub fn step(&mut self, has_run: bool, is_runnable: bool) {
        self.0 = match is_runnable && !has_run {
            true => (2 * self.0).min(MOST),
            false => LEAST,
        };
    }

    /// The shortest sleep now, ns.
    pub fn get(self) -> Nanos {
        self.0
    }
}

impl Default for MinSleep {
    fn default() -> Self {
        Self(LEAST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sleeps until a VM runs that needs `switch` (ns) to start. Returns how often.
    fn sleeps(switch: Nanos) -> u32 {
        let mut least = MinSleep::default();
        for k in 1..20 {
            if least.get() > switch {
                least.step(true, true);
                assert_eq!(least, MinSleep::default());
                return k;
            }
            least.step(false, true);
        }
        panic!("no VM runs if a switch takes {switch} ns");
    }

    #[test]
    fn a_vm_runs_however_long_a_switch_takes() {
        assert_eq!(sleeps(2_000), 1);
        assert_eq!(sleeps(35_000), 4);
        assert_eq!(sleeps(300_000), 7);
    }

    #[test]
    fn while_no_vm_wants_to_run_it_stays_short() {
        let mut least = MinSleep::default();
        (0..10).for_each(|_| least.step(false, false));
        assert_eq!(least, MinSleep::default());
    }
}

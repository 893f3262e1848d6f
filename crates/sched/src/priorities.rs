// SPDX-License-Identifier: Apache-2.0
//! The real-time priorities of the slot mechanism.

use viola_policy::slices::Rank;

/// Priorities that the slot mechanism gives to VM threads.
pub const PRIORITIES: std::ops::RangeInclusive<i32> = 10..=23;
/// Priority of the filler thread while it holds the core.
pub const FILLER_PRIORITY: i32 = 12;
/// Priority of the filler thread while it sleeps.
pub const FILLER_IDLE_PRIORITY: i32 = CONTROLLER_PRIORITY - 1;
/// Priority of the controller threads, above every VM thread.
pub const CONTROLLER_PRIORITY: i32 = 60;
/// Priority of the watchdog where VMs have real-time threads on all cores.
pub const WATCHDOG_PRIORITY: i32 = 61;

/// SCHED_FIFO priority of a vCPU thread; service threads have one more, unless they gather packets.
pub fn priority(rank: Rank) -> i32 {
    match rank {
        Rank::Capped => 10,
        Rank::Background => 14,
        Rank::Waiting => 16,
        Rank::Owner => 18,
        Rank::Preempt => 20,
        Rank::Boost => 22,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_keep_their_order_and_leave_room_for_service_threads_and_the_filler() {
        let ranks = [
            Rank::Capped,
            Rank::Background,
            Rank::Waiting,
            Rank::Owner,
            Rank::Preempt,
            Rank::Boost,
        ];
        for pair in ranks.windows(2) {
            assert!(priority(pair[0]) + 1 < priority(pair[1]));
        }
        assert!(
            priority(Rank::Capped) + 1 < FILLER_PRIORITY
                && FILLER_PRIORITY < priority(Rank::Background)
        );
        assert!(
            ranks
                .iter()
                .all(|&r| PRIORITIES.contains(&priority(r))
                    && PRIORITIES.contains(&(priority(r) + 1)))
        );
        assert!(*PRIORITIES.end() < CONTROLLER_PRIORITY);
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Future events in order of time; events of the same time in order of insertion.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use viola_policy::slices::{FOREVER, Nanos};

/// Future events.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    pushed: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    order: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            pushed: 0,
        }
    }
}

impl<E> Queue<E> {
    /// Inserts an event at time `at`, ns.
    pub fn push(&mut self, at: Nanos, event: E) {
        self.pushed += 1;
        let order = self.pushed;
        self.heap.push(Reverse(Entry { at, order, event }));
    }

    /// Time of the next event, ns.
    pub fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse(e)| e.at)
    }

    /// Removes the next event if it is due at `until` or before.
    pub fn pop(&mut self, until: Nanos) -> Option<(Nanos, E)> {
        if self.heap.peek()?.0.at > until {
            return None;
        }
        self.heap.pop().map(|Reverse(e)| (e.at, e.event))
    }

    /// Number of events inserted so far.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }
}

/// One timer for each of a few owners. Setting one takes O(log n), finding the earliest O(1).
#[derive(Debug, Default)]
pub struct Timers {
    /// A tournament tree: node k has the children 2k and 2k + 1; leaves begin at `leaves`.
    at: Vec<Nanos>,
    leaves: usize,
    owners: usize,
}

impl Timers {
    /// Adds an owner and clears all timers.
    pub fn add(&mut self) {
        let owners = self.owners + 1;
        *self = Self {
            leaves: owners.next_power_of_two(),
            at: vec![FOREVER; 2 * owners.next_power_of_two()],
            owners,
        };
    }

    /// Sets the timer of an owner; [`FOREVER`] clears it.
    pub fn set(&mut self, owner: usize, at: Nanos) {
        let mut k = self.leaves + owner;
        self.at[k] = at;
        while k > 1 {
            k /= 2;
            let earlier = self.at[2 * k].min(self.at[2 * k + 1]);
            if self.at[k] == earlier {
                break;
            }
            self.at[k] = earlier;
        }
    }

    /// The earliest time; [`FOREVER`] without timers.
    pub fn next(&self) -> Nanos {
        self.at.get(1).copied().unwrap_or(FOREVER)
    }

    /// The owner of the earliest timer; of several the lowest.
    pub fn first(&self) -> usize {
        let (at, mut k) = (self.next(), 1);
        while k < self.leaves {
            k = 2 * k + usize::from(self.at[2 * k] != at);
        }
        k - self.leaves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_of_all_timers_is_found() {
        let mut timers = Timers::default();
        assert_eq!(timers.next(), FOREVER);
        for _ in 0..5 {
            timers.add();
        }
        for (owner, at) in [(0, 9), (4, 3), (2, 7), (3, 3), (1, FOREVER)] {
            timers.set(owner, at);
        }
        assert_eq!((timers.next(), timers.first()), (3, 3));
        timers.set(3, 20);
        timers.set(4, FOREVER);
        assert_eq!((timers.next(), timers.first()), (7, 2));
    }

    #[test]
    fn events_of_one_time_come_in_order_of_insertion() {
        let mut queue = Queue::default();
        for (at, event) in [(5, 'd'), (3, 'a'), (3, 'b'), (5, 'e'), (3, 'c'), (9, 'f')] {
            queue.push(at, event);
        }
        let mut seen = String::new();
        while let Some((_, event)) = queue.pop(5) {
            seen.push(event);
        }
        assert_eq!((seen.as_str(), queue.pushed()), ("abcde", 6));
        assert_eq!(queue.pop(9), Some((9, 'f')));
    }
}

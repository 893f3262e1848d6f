// SPDX-License-Identifier: Apache-2.0
//! The future events in order of time; of the same time in the order they were put in.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use viola_policy::slices::Nanos;

/// Events that are to come.
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
    /// Puts an event in.
    pub fn push(&mut self, at: Nanos, event: E) {
        self.pushed += 1;
        let order = self.pushed;
        self.heap.push(Reverse(Entry { at, order, event }));
    }

    /// Takes the next event out, if it is due at `until` at the latest.
    pub fn pop(&mut self, until: Nanos) -> Option<(Nanos, E)> {
        if self.heap.peek()?.0.at > until {
            return None;
        }
        self.heap.pop().map(|Reverse(e)| (e.at, e.event))
    }

    /// How many events were ever put in.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_one_time_come_in_the_order_they_were_put_in() {
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

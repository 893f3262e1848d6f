// SPDX-License-Identifier: Apache-2.0
//! The slots of the shared memory: what each holds or waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_proto::agent::BlockKey;

use crate::peer::shared_memory::{SLOT_BYTES, SLOT_COUNT};
use crate::peer::wire::ErrorCode;

/// Time after which bytes that were not read are dropped.
pub(super) const UNREAD_TIMEOUT: Duration = Duration::from_secs(2);

/// A range of a block's data or checksum file on another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReadRange {
    pub(super) host: u16,
    pub(super) key: Arc<BlockKey>,
    pub(super) meta: bool,
    pub(super) offset: u64,
    /// 1 to [`SLOT_BYTES`].
    pub(super) length: u32,
}

#[derive(Debug)]
enum State {
    Requested,
    Arrived { at: Instant },
    Failed { code: ErrorCode, at: Instant },
}

#[derive(Debug)]
struct Slot {
    id: u64,
    range: ReadRange,
    ahead: bool,
    state: State,
    /// Number of threads that copy from the slot.
    readers: u32,
    /// Bytes copied so far.
    used: u32,
}

impl Slot {
    /// Whether the slot's content has expired.
    fn is_expired(&self) -> bool {
        match self.state {
            State::Requested => false,
            State::Arrived { at } | State::Failed { at, .. } => {
                self.readers == 0 && at.elapsed() > UNREAD_TIMEOUT
            }
        }
    }
}

/// What is known of the first byte of a range.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SlotContent {
    /// It is in a slot: slot number, offset in the slot, bytes from there to the slot's end.
    Arrived(usize, u32, u32),
    /// It was requested.
    Requested,
    /// The request failed.
    Failed(ErrorCode),
    /// It was not requested.
    Absent,
}

/// All slots.
#[derive(Debug)]
pub(super) struct Slots {
    slots: [Option<Slot>; SLOT_COUNT],
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            slots: [const { None }; SLOT_COUNT],
        }
    }
}

impl Slots {
    /// Looks for the first byte of a range. A failure is returned once.
    pub(super) fn find(&mut self, range: &ReadRange) -> SlotContent {
        for (number, place) in self.slots.iter_mut().enumerate() {
            let Some(slot) = place else {
                continue;
            };
            let begin = slot.range.offset;
            let is_it = slot.range.key == range.key
                && slot.range.meta == range.meta
                && slot.range.host == range.host
                && (begin..begin + u64::from(slot.range.length)).contains(&range.offset);
            if !is_it || slot.is_expired() {
                continue;
            }
            match slot.state {
                State::Requested => return SlotContent::Requested,
                State::Arrived { .. } => {
                    let skip = (range.offset - begin) as u32;
                    return SlotContent::Arrived(number, skip, slot.range.length - skip);
                }
                State::Failed { code, .. } => {
                    let ahead = slot.ahead;
                    *place = None;
                    // A failed request ahead is not reported; the reader requests the bytes itself.
                    if !ahead {
                        return SlotContent::Failed(code);
                    }
                }
            }
        }
        SlotContent::Absent
    }

    /// Returns a free slot if more than `reserve` are free. With `reserve` 0 and no free slot it
    /// drops the oldest bytes fetched ahead.
    pub(super) fn take_free(&mut self, reserve: usize) -> Option<usize> {
        for place in &mut self.slots {
            if place.as_ref().is_some_and(Slot::is_expired) {
                *place = None;
            }
        }
        let free = self.slots.iter().filter(|slot| slot.is_none()).count();
        if free > reserve {
            return self.slots.iter().position(Option::is_none);
        }
        if reserve > 0 {
            return None;
        }
        let ahead = |slot: &Slot| match slot.state {
            State::Arrived { at } if slot.ahead && slot.readers == 0 => Some(at),
            _ => None,
        };
        let slots = self.slots.iter().enumerate();
        let (_, oldest) = slots
            .filter_map(|(i, slot)| Some((slot.as_ref().and_then(ahead)?, i)))
            .min()?;
        self.slots[oldest] = None;
        Some(oldest)
    }

    /// Marks a free slot as requested.
    pub(super) fn mark_requested(&mut self, slot: usize, id: u64, range: ReadRange, ahead: bool) {
        debug_assert!(range.length as usize <= SLOT_BYTES);
        self.slots[slot] = Some(Slot {
            id,
            range,
            ahead,
            state: State::Requested,
            readers: 0,
            used: 0,
        });
    }

    /// Records the answer to a request: a number of bytes, or an error.
    pub(super) fn complete(&mut self, id: u64, answer: Result<u32, ErrorCode>) {
        let mut slots = self.slots.iter_mut().flatten();
        let Some(slot) = slots.find(|slot| slot.id == id && matches!(slot.state, State::Requested))
        else {
            return;
        };
        let at = Instant::now();
        slot.state = match answer {
            Ok(length) if length == slot.range.length => State::Arrived { at },
            Ok(_) => State::Failed {
                code: ErrorCode::Io,
                at,
            },
            Err(code) => State::Failed { code, at },
        };
    }

    /// Marks the start of a copy from a slot.
    pub(super) fn begin_copy(&mut self, slot: usize) {
        if let Some(slot) = &mut self.slots[slot] {
            slot.readers += 1;
        }
    }

    /// Marks the end of a copy of `length` bytes. The slot is freed when all its bytes were copied.
    pub(super) fn end_copy(&mut self, slot: usize, length: u32) {
        let place = &mut self.slots[slot];
        if let Some(slot) = place {
            slot.readers -= 1;
            slot.used = slot.used.saturating_add(length);
            if slot.readers == 0 && slot.used >= slot.range.length {
                *place = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, length: u32) -> ReadRange {
        ReadRange {
            host: 0,
            key: Arc::new(BlockKey::new("BP-1", 1, 1).unwrap()),
            meta: false,
            offset,
            length,
        }
    }

    #[test]
    fn bytes_are_found_where_they_are_and_go_when_all_were_read() {
        let mut slots = Slots::default();
        assert_eq!(slots.find(&range(0, 10)), SlotContent::Absent);
        let slot = slots.take_free(0).unwrap();
        slots.mark_requested(slot, 7, range(100, 50), true);
        assert_eq!(slots.find(&range(99, 10)), SlotContent::Absent);
        assert_eq!(slots.find(&range(149, 10)), SlotContent::Requested);
        slots.complete(8, Ok(50));
        slots.complete(7, Ok(50));
        assert_eq!(
            slots.find(&range(120, 99)),
            SlotContent::Arrived(slot, 20, 30)
        );
        slots.begin_copy(slot);
        slots.end_copy(slot, 30);
        assert_eq!(
            slots.find(&range(100, 20)),
            SlotContent::Arrived(slot, 0, 50)
        );
        slots.begin_copy(slot);
        slots.end_copy(slot, 20);
        assert_eq!(slots.find(&range(100, 20)), SlotContent::Absent);
    }

    #[test]
    fn a_failure_is_told_once_and_one_ahead_never() {
        let mut slots = Slots::default();
        slots.mark_requested(0, 1, range(0, 10), false);
        slots.mark_requested(1, 2, range(10, 10), true);
        slots.complete(1, Err(ErrorCode::Withdrawn));
        slots.complete(2, Err(ErrorCode::Withdrawn));
        assert_eq!(
            slots.find(&range(0, 5)),
            SlotContent::Failed(ErrorCode::Withdrawn)
        );
        assert_eq!(slots.find(&range(0, 5)), SlotContent::Absent);
        assert_eq!(slots.find(&range(10, 5)), SlotContent::Absent);
        slots.mark_requested(0, 3, range(0, 10), false);
        slots.complete(3, Ok(9));
        assert_eq!(slots.find(&range(0, 5)), SlotContent::Failed(ErrorCode::Io));
    }

    #[test]
    fn bytes_fetched_ahead_give_way_and_pending_reads_do_not() {
        let mut slots = Slots::default();
        for i in 0..SLOT_COUNT as u64 {
            let slot = slots.take_free(0).unwrap();
            slots.mark_requested(slot, i, range(i * 100, 100), true);
        }
        assert_eq!(slots.take_free(0), None);
        slots.complete(5, Ok(100));
        assert_eq!(slots.take_free(4), None);
        let slot = slots.take_free(0).unwrap();
        assert_eq!(slots.find(&range(500, 1)), SlotContent::Absent);
        slots.mark_requested(slot, 99, range(0, 100), false);
        assert_eq!(slots.take_free(0), None);
    }
}

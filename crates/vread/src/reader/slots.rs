// SPDX-License-Identifier: Apache-2.0
//! What the slots of the shared memory hold, or wait for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_proto::agent::BlockKey;

use crate::peer::memory::{SLOT, SLOTS};
use crate::peer::wire::Code;

/// How long bytes that nobody has read are kept.
pub(super) const KEEP: Duration = Duration::from_secs(2);

/// Bytes of a file of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Want {
    pub(super) host: u16,
    pub(super) key: Arc<BlockKey>,
    pub(super) meta: bool,
    pub(super) offset: u64,
    /// 1 to [`SLOT`].
    pub(super) length: u32,
}

#[derive(Debug)]
enum State {
    Asked,
    Here { at: Instant },
    Failed { code: Code, at: Instant },
}

#[derive(Debug)]
struct Slot {
    id: u64,
    want: Want,
    ahead: bool,
    state: State,
    /// Threads that copy from it.
    held: u32,
    /// Bytes that were copied.
    used: u32,
}

impl Slot {
    /// Whether nobody will come for it any more.
    fn old(&self) -> bool {
        match self.state {
            State::Asked => false,
            State::Here { at } | State::Failed { at, .. } => self.held == 0 && at.elapsed() > KEEP,
        }
    }
}

/// What there is of the wanted bytes, or at least of the first of them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// In this slot, after so many bytes, so many.
    Here(usize, u32, u32),
    /// They were asked for.
    Asked,
    /// They were asked for and will not come.
    Failed(Code),
    /// They were not asked for.
    Nothing,
}

/// All slots.
#[derive(Debug)]
pub(super) struct Slots {
    slots: [Option<Slot>; SLOTS],
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            slots: [const { None }; SLOTS],
        }
    }
}

impl Slots {
    /// Looks for the first of the wanted bytes. A failure is told once.
    pub(super) fn look(&mut self, want: &Want) -> Look {
        for (number, place) in self.slots.iter_mut().enumerate() {
            let Some(slot) = place else {
                continue;
            };
            let begin = slot.want.offset;
            let is_it = slot.want.key == want.key
                && slot.want.meta == want.meta
                && slot.want.host == want.host
                && (begin..begin + u64::from(slot.want.length)).contains(&want.offset);
            if !is_it || slot.old() {
                continue;
            }
            match slot.state {
                State::Asked => return Look::Asked,
                State::Here { .. } => {
                    let skip = (want.offset - begin) as u32;
                    return Look::Here(number, skip, slot.want.length - skip);
                }
                State::Failed { code, .. } => {
                    let ahead = slot.ahead;
                    *place = None;
                    // Nobody had wanted these yet: whoever does now asks anew.
                    if !ahead {
                        return Look::Failed(code);
                    }
                }
            }
        }
        Look::Nothing
    }

    /// A slot that can be used, if more than `spare` are free. Bytes fetched ahead give way to reads that are waited
    /// for.
    pub(super) fn free(&mut self, spare: usize) -> Option<usize> {
        for place in &mut self.slots {
            if place.as_ref().is_some_and(Slot::old) {
                *place = None;
            }
        }
        let free = self.slots.iter().filter(|slot| slot.is_none()).count();
        if free > spare {
            return self.slots.iter().position(Option::is_none);
        }
        if spare > 0 {
            return None;
        }
        let ahead = |slot: &Slot| match slot.state {
            State::Here { at } if slot.ahead && slot.held == 0 => Some(at),
            _ => None,
        };
        let slots = self.slots.iter().enumerate();
        let (_, oldest) = slots
            .filter_map(|(i, slot)| Some((slot.as_ref().and_then(ahead)?, i)))
            .min()?;
        self.slots[oldest] = None;
        Some(oldest)
    }

    /// Bytes were asked for into a free slot.
    pub(super) fn asked(&mut self, slot: usize, id: u64, want: Want, ahead: bool) {
        debug_assert!(want.length as usize <= SLOT);
        self.slots[slot] = Some(Slot {
            id,
            want,
            ahead,
            state: State::Asked,
            held: 0,
            used: 0,
        });
    }

    /// An answer has come: so many bytes, or none.
    pub(super) fn answered(&mut self, id: u64, answer: Result<u32, Code>) {
        let mut slots = self.slots.iter_mut().flatten();
        let Some(slot) = slots.find(|slot| slot.id == id && matches!(slot.state, State::Asked))
        else {
            return;
        };
        let at = Instant::now();
        slot.state = match answer {
            Ok(length) if length == slot.want.length => State::Here { at },
            Ok(_) => State::Failed { code: Code::Io, at },
            Err(code) => State::Failed { code, at },
        };
    }

    /// Somebody begins to copy from a slot.
    pub(super) fn hold(&mut self, slot: usize) {
        if let Some(slot) = &mut self.slots[slot] {
            slot.held += 1;
        }
    }

    /// Somebody has copied so many bytes, after [`Slots::hold`].
    pub(super) fn used(&mut self, slot: usize, length: u32) {
        let place = &mut self.slots[slot];
        if let Some(slot) = place {
            slot.held -= 1;
            slot.used = slot.used.saturating_add(length);
            if slot.held == 0 && slot.used >= slot.want.length {
                *place = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn want(offset: u64, length: u32) -> Want {
        Want {
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
        assert_eq!(slots.look(&want(0, 10)), Look::Nothing);
        let slot = slots.free(0).unwrap();
        slots.asked(slot, 7, want(100, 50), true);
        assert_eq!(slots.look(&want(99, 10)), Look::Nothing);
        assert_eq!(slots.look(&want(149, 10)), Look::Asked);
        slots.answered(8, Ok(50));
        slots.answered(7, Ok(50));
        assert_eq!(slots.look(&want(120, 99)), Look::Here(slot, 20, 30));
        slots.hold(slot);
        slots.used(slot, 30);
        assert_eq!(slots.look(&want(100, 20)), Look::Here(slot, 0, 50));
        slots.hold(slot);
        slots.used(slot, 20);
        assert_eq!(slots.look(&want(100, 20)), Look::Nothing);
    }

    #[test]
    fn a_failure_is_told_once_and_one_ahead_never() {
        let mut slots = Slots::default();
        slots.asked(0, 1, want(0, 10), false);
        slots.asked(1, 2, want(10, 10), true);
        slots.answered(1, Err(Code::Withdrawn));
        slots.answered(2, Err(Code::Withdrawn));
        assert_eq!(slots.look(&want(0, 5)), Look::Failed(Code::Withdrawn));
        assert_eq!(slots.look(&want(0, 5)), Look::Nothing);
        assert_eq!(slots.look(&want(10, 5)), Look::Nothing);
        slots.asked(0, 3, want(0, 10), false);
        slots.answered(3, Ok(9));
        assert_eq!(slots.look(&want(0, 5)), Look::Failed(Code::Io));
    }

    #[test]
    fn what_was_fetched_ahead_gives_way_and_what_is_awaited_does_not() {
        let mut slots = Slots::default();
        for i in 0..SLOTS as u64 {
            let slot = slots.free(0).unwrap();
            slots.asked(slot, i, want(i * 100, 100), true);
        }
        assert_eq!(slots.free(0), None);
        slots.answered(5, Ok(100));
        assert_eq!(slots.free(4), None);
        let slot = slots.free(0).unwrap();
        assert_eq!(slots.look(&want(500, 1)), Look::Nothing);
        slots.asked(slot, 99, want(0, 100), false);
        assert_eq!(slots.free(0), None);
    }
}

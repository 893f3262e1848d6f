// SPDX-License-Identifier: Apache-2.0
//! The life of one block, as a pure state machine: no clock, no file.
//!
//! ```text
//! Waiting -> Linking -> Settling -> Mapping -> Ready -> Named
//!    ^                     ^                              |
//!    |                     +---- (remap) -- Withdrawing <-+
//!    +---- (relink) ---- Unlinking <------------+
//! ```
//!
//! A block may have links from `Linking` on, until `Unlinking` is done. The host may read it by a lease in `Named`
//! and `Withdrawing` only. A lease leads to `Unlinking` only after the host's confirmation that no read uses it any
//! more.

mod state;

use viola_proto::agent::{Lease, WithdrawReason};

pub use state::{Disposition, Effect, State, Timing};

use crate::clock::Millis;

/// One block and its [`State`]. `M` is the block's map of extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block<M> {
    state: State<M>,
    /// Number of the last [`Effect::Map`]; the result of an earlier one is out of date.
    attempt: u64,
}

impl<M: PartialEq> Block<M> {
    /// A block that was found now.
    pub fn new(now: Millis, times: &Timing) -> Self {
        Self {
            state: State::Waiting {
                until: now + times.quiet,
            },
            attempt: 0,
        }
    }

    /// The state.
    pub fn state(&self) -> &State<M> {
        &self.state
    }

    /// The lease by which the host may read the block.
    pub fn lease(&self) -> Option<Lease> {
        match &self.state {
            State::Named { lease, .. } | State::Withdrawing { lease, .. } => Some(*lease),
            _ => None,
        }
    }

    /// Whether the block's links may exist.
    pub fn is_linked(&self) -> bool {
        !matches!(self.state, State::Waiting { .. } | State::Refused)
    }

    /// When [`Block::tick`] has something to do, unless an event comes first.
    pub fn next_due(&self) -> Option<Millis> {
        match &self.state {
            State::Waiting { until }
            | State::Settling { until }
            | State::UnlinkFailed { until, .. } => Some(*until),
            State::Named {
                next,
                checking: false,
                ..
            }
            | State::Withdrawing { next, .. } => Some(*next),
            _ => None,
        }
    }

    /// Whether the block has been quiet long enough to be linked.
    pub fn is_ready_to_link(&self, now: Millis) -> bool {
        matches!(self.state, State::Waiting { until } if until <= now)
    }

    /// Whether the block may be named.
    pub fn is_ready_to_name(&self) -> bool {
        matches!(self.state, State::Ready { .. })
    }

    /// The linker has the job to make the links.
    pub fn start_linking(&mut self) {
        debug_assert!(matches!(self.state, State::Waiting { .. }));
        self.state = State::Linking { disturbed: None };
    }

    /// Names the block under `lease` and returns the map to send, or `None` when the block is not ready.
    pub fn start_naming(&mut self, now: Millis, times: &Timing, lease: Lease) -> Option<&M> {
        if !self.is_ready_to_name() {
            return None;
        }
        if let State::Ready { map } = std::mem::replace(&mut self.state, State::Refused) {
            self.state = State::Named {
                lease,
                map,
                answered: false,
                next: now + times.answer_timeout,
                checking: false,
            };
        }
        match &self.state {
            State::Named { map, .. } => Some(map),
            _ => None,
        }
    }

    /// An event may have changed the block: `after` says what becomes of the block.
    pub fn touched(
        &mut self,
        now: Millis,
        times: &Timing,
        after: Disposition,
        why: WithdrawReason,
    ) -> Option<Effect> {
        match &mut self.state {
            State::Waiting { until } => {
                *until = now + times.quiet;
                if after == Disposition::Forget {
                    return Some(Effect::Forget);
                }
                None
            }
            State::Refused => match after {
                Disposition::Forget => Some(Effect::Forget),
                _ => self.await_quiet(now + times.quiet),
            },
            State::Linking { disturbed } | State::Mapping { disturbed } => {
                *disturbed = (*disturbed).max(Some(after));
                None
            }
            State::Settling { until } if after == Disposition::Remap => {
                *until = now + times.quiet;
                None
            }
            State::Ready { .. } if after == Disposition::Remap => self.settle(now + times.quiet),
            State::Settling { .. } | State::Ready { .. } => self.unlink(after),
            State::Named { lease, .. } => {
                let lease = *lease;
                self.state = State::Withdrawing {
                    lease,
                    why,
                    next: now + times.repeat,
                    after,
                };
                Some(Effect::Withdraw { lease, why })
            }
            State::Withdrawing { after: then, .. }
            | State::Unlinking { after: then }
            | State::UnlinkFailed { after: then, .. } => {
                *then = (*then).max(after);
                None
            }
        }
    }

    /// The block's files were found in their directory (again).
    pub fn appeared(&mut self, now: Millis, times: &Timing) -> Option<Effect> {
        match &mut self.state {
            State::Waiting { until } => {
                *until = now + times.quiet;
                None
            }
            State::Refused => self.await_quiet(now + times.quiet),
            // the block was gone and is back, as from the trash of a rolling upgrade
            State::Linking {
                disturbed: Some(after),
            }
            | State::Mapping {
                disturbed: Some(after),
            }
            | State::Withdrawing { after, .. }
            | State::Unlinking { after }
            | State::UnlinkFailed { after, .. } => {
                if *after != Disposition::Remap {
                    *after = Disposition::Relink;
                }
                None
            }
            _ => self.touched(now, times, Disposition::Remap, WithdrawReason::Changed),
        }
    }

    /// The linker has made the links, or failed and left none.
    pub fn link_done(
        &mut self,
        now: Millis,
        times: &Timing,
        result: Result<(), Disposition>,
    ) -> Option<Effect> {
        let State::Linking { disturbed } = self.state else {
            return None;
        };
        match (result, disturbed) {
            (Ok(()), None) => self.settle(now + times.settle),
            (Ok(()), Some(Disposition::Remap)) => self.settle(now + times.quiet),
            (Ok(()), Some(after)) => self.unlink(after),
            (Err(_), Some(Disposition::Forget)) | (Err(Disposition::Forget), None) => {
                Some(Effect::Forget)
            }
            (Err(Disposition::Refuse), None) => {
                self.state = State::Refused;
                None
            }
            (Err(_), _) => self.await_quiet(now + times.retry.max(times.quiet)),
        }
    }

    /// The mapper has found the extents, or failed.
    pub fn map_done(
        &mut self,
        now: Millis,
        times: &Timing,
        attempt: u64,
        result: Result<M, Disposition>,
    ) -> Option<Effect> {
        if attempt != self.attempt {
            return None;
        }
        match &mut self.state {
            State::Mapping { disturbed } => match (result, *disturbed) {
                (Ok(map), None) => {
                    self.state = State::Ready { map };
                    None
                }
                (Ok(_) | Err(Disposition::Remap), Some(Disposition::Remap))
                | (Err(Disposition::Remap), None) => self.settle(now + times.quiet),
                (Err(failed), disturbed) => {
                    self.unlink(disturbed.map_or(failed, |s| s.max(failed)))
                }
                (Ok(_), Some(after)) => self.unlink(after),
            },
            State::Named {
                map,
                next,
                checking,
                ..
            } => {
                *checking = false;
                let after = match result {
                    Ok(new) if new == *map => {
                        *next = now + times.recheck;
                        return None;
                    }
                    Ok(_) => Disposition::Remap,
                    Err(after) => after,
                };
                self.touched(now, times, after, WithdrawReason::Relocated)
            }
            _ => None,
        }
    }

    /// The host has confirmed the name.
    pub fn host_named(&mut self, now: Millis, times: &Timing, of: Lease) {
        if let State::Named {
            lease,
            answered,
            next,
            ..
        } = &mut self.state
            && *lease == of
            && !*answered
        {
            *answered = true;
            *next = now + times.recheck;
        }
    }

    /// Makes the comparison of a named block's extents due now.
    pub fn recheck(&mut self, now: Millis) {
        if let State::Named {
            answered: true,
            next,
            checking,
            ..
        } = &mut self.state
        {
            // a mapping that is under way may be from before the event
            *checking = false;
            self.attempt += 1;
            *next = now;
        }
    }

    /// The host has refused the name: it never reads by this lease.
    pub fn host_refused(&mut self, now: Millis, times: &Timing, of: Lease) -> Option<Effect> {
        match &self.state {
            State::Named { lease, .. } if *lease == of => self.unlink(Disposition::Refuse),
            _ => self.host_withdrew(now, times, of),
        }
    }

    /// The host has confirmed the end of the lease: no read uses it any more.
    pub fn host_withdrew(&mut self, now: Millis, times: &Timing, of: Lease) -> Option<Effect> {
        match self.state {
            State::Withdrawing { lease, after, .. } if lease == of => {
                self.released(now, times, after)
            }
            // the host has ended the lease by itself; the block has not changed
            State::Named { lease, .. } if lease == of => self.settle(now + times.quiet),
            _ => None,
        }
    }

    /// A new session has begun: no read uses a lease of an earlier one.
    pub fn session_opened(&mut self, now: Millis, times: &Timing) -> Option<Effect> {
        match self.state {
            State::Refused => self.await_quiet(now + times.quiet),
            State::Named { checking: true, .. } => {
                self.state = State::Mapping { disturbed: None };
                None
            }
            State::Named { .. } => {
                if let State::Named { map, .. } = std::mem::replace(&mut self.state, State::Refused)
                {
                    self.state = State::Ready { map };
                }
                None
            }
            State::Withdrawing { after, .. } => self.released(now, times, after),
            _ => None,
        }
    }

    /// The linker has removed the links, or failed.
    pub fn unlink_done(&mut self, now: Millis, times: &Timing, done: bool) -> Option<Effect> {
        let State::Unlinking { after } = self.state else {
            return None;
        };
        if !done {
            self.state = State::UnlinkFailed {
                until: now + times.retry,
                after,
            };
            return None;
        }
        match after {
            Disposition::Forget => Some(Effect::Forget),
            Disposition::Refuse => {
                self.state = State::Refused;
                None
            }
            Disposition::Relink | Disposition::Remap => self.await_quiet(now + times.quiet),
        }
    }

    /// Does what is due at `now`.
    pub fn tick(&mut self, now: Millis, times: &Timing) -> Option<Effect> {
        if self.next_due().is_none_or(|next_due| next_due > now) {
            return None;
        }
        match &mut self.state {
            State::Settling { .. } => {
                self.state = State::Mapping { disturbed: None };
                self.attempt += 1;
                Some(Effect::Map {
                    attempt: self.attempt,
                })
            }
            State::Named {
                answered: false, ..
            } => self.touched(now, times, Disposition::Remap, WithdrawReason::Unanswered),
            State::Named { checking, .. } => {
                *checking = true;
                self.attempt += 1;
                Some(Effect::Map {
                    attempt: self.attempt,
                })
            }
            State::Withdrawing {
                lease, why, next, ..
            } => {
                *next = now + times.repeat;
                Some(Effect::Withdraw {
                    lease: *lease,
                    why: *why,
                })
            }
            State::UnlinkFailed { after, .. } => {
                let after = *after;
                self.unlink(after)
            }
            _ => None,
        }
    }

    fn released(&mut self, now: Millis, times: &Timing, after: Disposition) -> Option<Effect> {
        match after {
            Disposition::Remap => self.settle(now + times.quiet),
            _ => self.unlink(after),
        }
    }

    fn await_quiet(&mut self, until: Millis) -> Option<Effect> {
        self.state = State::Waiting { until };
        None
    }

    fn settle(&mut self, until: Millis) -> Option<Effect> {
        self.state = State::Settling { until };
        None
    }

    fn unlink(&mut self, after: Disposition) -> Option<Effect> {
        self.state = State::Unlinking { after };
        Some(Effect::Unlink)
    }
}

#[cfg(test)]
pub(crate) mod tests;

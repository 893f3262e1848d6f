// SPDX-License-Identifier: Apache-2.0
//! The life of one block, as a pure state machine: no clock, no file.
//!
//! ```text
//! Waiting -> Linking -> Settling -> Mapping -> Ready -> Naming -> Named
//!    ^                     ^                                       |
//!    |                     +--------- (again) ----- Withdrawing <--+
//!    +----- (fresh) ----- Dropping <--------------------+
//! ```
//!
//! A block has a link of ours from `Linking` on, until `Dropping` is done. It has a lease that the host
//! may read by in `Named` and `Withdrawing`, and only there. The one way from a lease to `Dropping` is the
//! host's word that no read uses it any more.

mod state;

use viola_proto::agent::{Lease, Why};

pub use state::{After, Do, Millis, State, Times};

/// One block: see [`State`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block<M> {
    state: State<M>,
    /// Number of the last [`Do::Map`]: what an earlier one finds is out of date.
    turn: u64,
}

impl<M: PartialEq> Block<M> {
    /// A block that was seen now.
    pub fn new(now: Millis, times: &Times) -> Self {
        Self {
            state: State::Waiting {
                until: now + times.quiet,
            },
            turn: 0,
        }
    }

    /// Where it is.
    pub fn state(&self) -> &State<M> {
        &self.state
    }

    /// Lease that the host may read by.
    pub fn lease(&self) -> Option<Lease> {
        match &self.state {
            State::Named { lease, .. } | State::Withdrawing { lease, .. } => Some(*lease),
            _ => None,
        }
    }

    /// Whether links of ours may exist.
    pub fn linked(&self) -> bool {
        !matches!(self.state, State::Waiting { .. } | State::Refused)
    }

    /// When [`Block::tick`] has something to do, unless something happens before.
    pub fn due(&self) -> Option<Millis> {
        match &self.state {
            State::Waiting { until } | State::Settling { until } | State::Stuck { until, .. } => {
                Some(*until)
            }
            State::Named {
                next,
                checking: false,
                ..
            }
            | State::Withdrawing { next, .. } => Some(*next),
            _ => None,
        }
    }

    /// Whether it may be linked now, if there is room for it.
    pub fn wants_link(&self, now: Millis) -> bool {
        matches!(self.state, State::Waiting { until } if until <= now)
    }

    /// Whether it may be named now.
    pub fn wants_name(&self) -> bool {
        matches!(self.state, State::Ready { .. })
    }

    /// A worker was told to make the links.
    pub fn linking(&mut self) {
        debug_assert!(matches!(self.state, State::Waiting { .. }));
        self.state = State::Linking { spoilt: None };
    }

    /// It is named by this lease; the map to send. `None` when it is not [`Block::wants_name`].
    pub fn naming(&mut self, now: Millis, times: &Times, lease: Lease) -> Option<&M> {
        if !self.wants_name() {
            return None;
        }
        if let State::Ready { map } = std::mem::replace(&mut self.state, State::Refused) {
            self.state = State::Named {
                lease,
                map,
                answered: false,
                next: now + times.answer,
                checking: false,
            };
        }
        match &self.state {
            State::Named { map, .. } => Some(map),
            _ => None,
        }
    }

    /// Something happened to it that left it where it is, but may have changed it: `after` says how much
    /// of what is known stays true.
    pub fn touched(&mut self, now: Millis, times: &Times, after: After, why: Why) -> Option<Do> {
        match &mut self.state {
            State::Waiting { until } => {
                *until = now + times.quiet;
                if after == After::Forget {
                    return Some(Do::Forget);
                }
                None
            }
            State::Refused => match after {
                After::Forget => Some(Do::Forget),
                _ => self.wait(now + times.quiet),
            },
            State::Linking { spoilt } | State::Mapping { spoilt } => {
                *spoilt = (*spoilt).max(Some(after));
                None
            }
            State::Settling { until } if after == After::Again => {
                *until = now + times.quiet;
                None
            }
            State::Ready { .. } if after == After::Again => self.settle(now + times.quiet),
            State::Settling { .. } | State::Ready { .. } => self.drop_then(after),
            State::Named { lease, .. } => {
                let lease = *lease;
                self.state = State::Withdrawing {
                    lease,
                    why,
                    next: now + times.repeat,
                    after,
                };
                Some(Do::Withdraw { lease, why })
            }
            State::Withdrawing { after: then, .. }
            | State::Dropping { after: then }
            | State::Stuck { after: then, .. } => {
                *then = (*then).max(after);
                None
            }
        }
    }

    /// It was found in its place (again).
    pub fn appeared(&mut self, now: Millis, times: &Times) -> Option<Do> {
        match &mut self.state {
            State::Waiting { until } => {
                *until = now + times.quiet;
                None
            }
            State::Refused => self.wait(now + times.quiet),
            // it was gone and is back, as from the trash of a rolling upgrade
            State::Linking {
                spoilt: Some(after),
            }
            | State::Mapping {
                spoilt: Some(after),
            }
            | State::Withdrawing { after, .. }
            | State::Dropping { after }
            | State::Stuck { after, .. } => {
                if *after != After::Again {
                    *after = After::Fresh;
                }
                None
            }
            _ => self.touched(now, times, After::Again, Why::Changed),
        }
    }

    /// The links were made, and the block was looked at again after; or not, and none are left.
    pub fn linked_now(
        &mut self,
        now: Millis,
        times: &Times,
        result: Result<(), After>,
    ) -> Option<Do> {
        let State::Linking { spoilt } = self.state else {
            return None;
        };
        match (result, spoilt) {
            (Ok(()), None) => self.settle(now + times.settle),
            (Ok(()), Some(After::Again)) => self.settle(now + times.quiet),
            (Ok(()), Some(after)) => self.drop_then(after),
            (Err(_), Some(After::Forget)) | (Err(After::Forget), None) => Some(Do::Forget),
            (Err(After::Refuse), None) => {
                self.state = State::Refused;
                None
            }
            (Err(_), _) => self.wait(now + times.retry.max(times.quiet)),
        }
    }

    /// Its extents were found, or not.
    pub fn mapped(
        &mut self,
        now: Millis,
        times: &Times,
        turn: u64,
        result: Result<M, After>,
    ) -> Option<Do> {
        if turn != self.turn {
            return None;
        }
        match &mut self.state {
            State::Mapping { spoilt } => match (result, *spoilt) {
                (Ok(map), None) => {
                    self.state = State::Ready { map };
                    None
                }
                (Ok(_) | Err(After::Again), Some(After::Again)) | (Err(After::Again), None) => {
                    self.settle(now + times.quiet)
                }
                (Err(failed), spoilt) => self.drop_then(spoilt.map_or(failed, |s| s.max(failed))),
                (Ok(_), Some(after)) => self.drop_then(after),
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
                    Ok(_) => After::Again,
                    Err(after) => after,
                };
                self.touched(now, times, after, Why::Relocated)
            }
            _ => None,
        }
    }

    /// The host reads by this lease now.
    pub fn host_named(&mut self, now: Millis, times: &Times, of: Lease) {
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

    /// Its extents are to be looked at again now.
    pub fn recheck(&mut self, now: Millis) {
        if let State::Named {
            answered: true,
            next,
            checking,
            ..
        } = &mut self.state
        {
            // what a worker just finds may be from before
            *checking = false;
            self.turn += 1;
            *next = now;
        }
    }

    /// The host does not read by this lease, and never will.
    pub fn host_refused(&mut self, now: Millis, times: &Times, of: Lease) -> Option<Do> {
        match &self.state {
            State::Named { lease, .. } if *lease == of => self.drop_then(After::Refuse),
            _ => self.host_withdrew(now, times, of),
        }
    }

    /// No read uses this lease any more.
    pub fn host_withdrew(&mut self, now: Millis, times: &Times, of: Lease) -> Option<Do> {
        match self.state {
            State::Withdrawing { lease, after, .. } if lease == of => {
                self.released(now, times, after)
            }
            // the host has ended it by itself; what was true of the block still is
            State::Named { lease, .. } if lease == of => self.settle(now + times.quiet),
            _ => None,
        }
    }

    /// A new session: no read uses any older lease.
    pub fn welcome(&mut self, now: Millis, times: &Times) -> Option<Do> {
        match self.state {
            State::Refused => self.wait(now + times.quiet),
            State::Named { checking: true, .. } => {
                self.state = State::Mapping { spoilt: None };
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

    /// The links were removed, or not.
    pub fn dropped(&mut self, now: Millis, times: &Times, done: bool) -> Option<Do> {
        let State::Dropping { after } = self.state else {
            return None;
        };
        if !done {
            self.state = State::Stuck {
                until: now + times.retry,
                after,
            };
            return None;
        }
        match after {
            After::Forget => Some(Do::Forget),
            After::Refuse => {
                self.state = State::Refused;
                None
            }
            After::Fresh | After::Again => self.wait(now + times.quiet),
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Millis, times: &Times) -> Option<Do> {
        if self.due().is_none_or(|due| due > now) {
            return None;
        }
        match &mut self.state {
            State::Settling { .. } => {
                self.state = State::Mapping { spoilt: None };
                self.turn += 1;
                Some(Do::Map { turn: self.turn })
            }
            State::Named {
                answered: false, ..
            } => self.touched(now, times, After::Again, Why::Unanswered),
            State::Named { checking, .. } => {
                *checking = true;
                self.turn += 1;
                Some(Do::Map { turn: self.turn })
            }
            State::Withdrawing {
                lease, why, next, ..
            } => {
                *next = now + times.repeat;
                Some(Do::Withdraw {
                    lease: *lease,
                    why: *why,
                })
            }
            State::Stuck { after, .. } => {
                let after = *after;
                self.drop_then(after)
            }
            _ => None,
        }
    }

    fn released(&mut self, now: Millis, times: &Times, after: After) -> Option<Do> {
        match after {
            After::Again => self.settle(now + times.quiet),
            _ => self.drop_then(after),
        }
    }

    fn wait(&mut self, until: Millis) -> Option<Do> {
        self.state = State::Waiting { until };
        None
    }

    fn settle(&mut self, until: Millis) -> Option<Do> {
        self.state = State::Settling { until };
        None
    }

    fn drop_then(&mut self, after: After) -> Option<Do> {
        self.state = State::Dropping { after };
        Some(Do::Drop)
    }
}

#[cfg(test)]
#[path = "block_tests.rs"]
mod tests;

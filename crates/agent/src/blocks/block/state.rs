// SPDX-License-Identifier: Apache-2.0
//! The states of a block, and what changes them.

use viola_proto::agent::{Lease, WithdrawReason};

use crate::clock::Millis;

/// Times in a block's life, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Time without an event before a block is linked.
    pub quiet: Millis,
    /// Time without an event between linking and mapping. A DataNode that read the link count just before the
    /// link was made changes the block within this time.
    pub settle: Millis,
    /// Time between comparisons of a named block's extents.
    pub recheck: Millis,
    /// Time after which an unanswered withdrawal is sent again.
    pub repeat: Millis,
    /// Time after which an unanswered name is withdrawn.
    pub answer_timeout: Millis,
    /// Time after which a failed link or unlink is tried again.
    pub retry: Millis,
}

/// The state of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State<M> {
    /// Found; linked when no event comes before `until`.
    Waiting {
        /// End of the quiet time.
        until: Millis,
    },
    /// The linker makes the links.
    Linking {
        /// What an event has left of the block's state meanwhile.
        disturbed: Option<Disposition>,
    },
    /// Linked; mapped when no event comes before `until`.
    Settling {
        /// End of the settling time.
        until: Millis,
    },
    /// Linked; the mapper finds the extents.
    Mapping {
        /// What an event has left of the block's state meanwhile.
        disturbed: Option<Disposition>,
    },
    /// Linked and mapped; it may be named.
    Ready {
        /// Its extents.
        map: M,
    },
    /// The host may read the block.
    Named {
        /// Its lease.
        lease: Lease,
        /// Its extents.
        map: M,
        /// Whether the host has confirmed the name.
        answered: bool,
        /// When the extents are compared again; before the host's answer: when the name is withdrawn.
        next: Millis,
        /// Whether the mapper compares the extents now.
        checking: bool,
    },
    /// The host was told to stop reading, and may still read.
    Withdrawing {
        /// The lease.
        lease: Lease,
        /// The reason.
        why: WithdrawReason,
        /// When the withdrawal is sent again.
        next: Millis,
        /// What becomes of the block afterwards.
        after: Disposition,
    },
    /// The linker removes the links.
    Unlinking {
        /// What becomes of the block afterwards.
        after: Disposition,
    },
    /// The links could not be removed; tried again at `until`.
    UnlinkFailed {
        /// Time of the next attempt.
        until: Millis,
        /// What becomes of the block afterwards.
        after: Disposition,
    },
    /// Not linked, and left alone until an event or a new session.
    Refused,
}

/// What becomes of a block that cannot stay in its state; the later variant prevails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disposition {
    /// Keep the links; map and name the block again.
    Remap,
    /// Remove the links; refuse the block.
    Refuse,
    /// Remove the links; start again from [`State::Waiting`].
    Relink,
    /// Remove the links; forget the block.
    Forget,
}

/// What the agent has to do for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Find its extents.
    Map {
        /// Comes back with the result.
        attempt: u64,
    },
    /// Tell the host to stop reading.
    Withdraw {
        /// The lease.
        lease: Lease,
        /// The reason.
        why: WithdrawReason,
    },
    /// Remove its links.
    Unlink,
    /// Forget the block.
    Forget,
}

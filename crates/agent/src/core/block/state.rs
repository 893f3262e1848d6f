// SPDX-License-Identifier: Apache-2.0
//! The states of a block, and the words for what happens to it.

use viola_proto::agent::{Lease, Why};

/// Milliseconds of a clock that only goes forward.
pub type Millis = u64;

/// How long things take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// A block is linked when nothing has happened to it for so long.
    pub quiet: Millis,
    /// A linked block is mapped when nothing has happened to it for so long: a DataNode that looked at
    /// the count of links just before changes the block within this time.
    pub settle: Millis,
    /// A named block's extents are looked at again after so long.
    pub recheck: Millis,
    /// A message without an answer is repeated after so long.
    pub repeat: Millis,
    /// A name without an answer is withdrawn after so long.
    pub answer: Millis,
    /// Something that failed is tried again after so long.
    pub retry: Millis,
}

/// Where a block is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State<M> {
    /// Seen; it must be left alone until `until`.
    Waiting {
        /// When it has been quiet for long enough.
        until: Millis,
    },
    /// A worker makes the links.
    Linking {
        /// What happened meanwhile.
        spoilt: Option<After>,
    },
    /// Linked; it must be left alone until `until`.
    Settling {
        /// When it is taken for settled.
        until: Millis,
    },
    /// Linked; a worker finds its extents.
    Mapping {
        /// What happened meanwhile.
        spoilt: Option<After>,
    },
    /// Linked and mapped; it may be named.
    Ready {
        /// Its extents.
        map: M,
    },
    /// The host may read it.
    Named {
        /// Its lease.
        lease: Lease,
        /// Its extents.
        map: M,
        /// Whether the host has answered.
        answered: bool,
        /// When the extents are looked at again, or, without an answer, when it is withdrawn.
        next: Millis,
        /// Whether a worker looks at its extents now.
        checking: bool,
    },
    /// The host was told to stop reading, and may still be at it.
    Withdrawing {
        /// The lease.
        lease: Lease,
        /// The reason.
        why: Why,
        /// When it is told again.
        next: Millis,
        /// What comes then.
        after: After,
    },
    /// A worker removes the links.
    Dropping {
        /// What comes then.
        after: After,
    },
    /// The links could not be removed; tried again at `until`.
    Stuck {
        /// When.
        until: Millis,
        /// What comes then.
        after: After,
    },
    /// Not linked, and left alone until something happens to it or a new session begins.
    Refused,
}

/// What becomes of a block that cannot stay as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum After {
    /// Its links are kept, and it is mapped and named again.
    Again,
    /// Its links are dropped, and it is refused.
    Refuse,
    /// Its links are dropped, and it begins anew.
    Fresh,
    /// Its links are dropped, and it is forgotten.
    Forget,
}

/// What is to be done for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Do {
    /// Find its extents.
    Map {
        /// To be repeated with the result.
        turn: u64,
    },
    /// Tell the host to stop reading.
    Withdraw {
        /// The lease.
        lease: Lease,
        /// The reason.
        why: Why,
    },
    /// Remove its links.
    Drop,
    /// Forget it: nothing is left of it.
    Forget,
}

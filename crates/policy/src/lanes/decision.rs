// SPDX-License-Identifier: Apache-2.0
//! A decision of the VF scheduler, with its reasons.

use std::fmt;

use super::classify::Kind;
use super::{Nic, Vf};
use crate::slices::Nanos;
use crate::text::HumanTime;

/// A change of one VF. The actions of a decision are to be carried out in order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// Take the VF from this NIC, which continues on its paravirtual path.
    Revoke {
        /// The VF.
        vf: Vf,
        /// Its holder.
        nic: Nic,
        /// The reason.
        why: Reason,
    },
    /// Give the VF to this NIC.
    Grant {
        /// The VF.
        vf: Vf,
        /// Its new holder.
        nic: Nic,
        /// The reason.
        why: Reason,
    },
}

/// Why a VF changes hands, or why a NIC has none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// The operator's setting.
    Setting,
    /// It is network-bound, and a VF was free.
    Promoted {
        /// Its IF.
        intensity: f64,
    },
    /// Its IF is higher than the lowest of a holder.
    Exchanged {
        /// Its IF (of its k-th VF, IF/k).
        intensity: f64,
        /// VM that lost the VF.
        from: u32,
        /// IF of that VM; negative: it was not network-bound.
        lowest: f64,
    },
    /// Another VM takes its place.
    GaveWay {
        /// That VM.
        to: u32,
    },
    /// It has not been network-bound for the time of [`super::Config::release`].
    Quiet,
    /// Its VM or its NIC is gone.
    Gone,
    /// The VF may no longer be granted.
    Withdrawn,
    /// It keeps the VF that it holds.
    Holds,
    /// It is not network-bound.
    NotNetworkBound(Kind),
    /// VMs of higher IF hold all VFs of its network.
    Outbid {
        /// The lowest IF among them; negative: none of the VFs may be revoked.
        lowest: f64,
    },
    /// A VM of lower IF got its VF too recently.
    Held {
        /// Time left until that VF may be revoked, ns.
        left: Nanos,
    },
    /// Its network has no VFs.
    NoPool,
    /// Granting or revoking failed, and is tried again later.
    RetryLater {
        /// Time left, ns.
        left: Nanos,
    },
    /// This decision has granted its maximum number of VFs.
    Deferred,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Setting => f.write_str("as set"),
            Reason::Promoted { intensity } => write!(f, "IF {intensity:.0}, and a VF was free"),
            Reason::Exchanged {
                intensity,
                from,
                lowest,
            } if lowest >= 0.0 => {
                write!(f, "IF {intensity:.0} against {lowest:.0} of VM {from}")
            }
            Reason::Exchanged {
                intensity, from, ..
            } => write!(f, "IF {intensity:.0}, and VM {from} had no use for its VF"),
            Reason::GaveWay { to } => write!(f, "VM {to} gains more from it"),
            Reason::Quiet => f.write_str("it has not been network-bound for long"),
            Reason::Gone => f.write_str("it is gone"),
            Reason::Withdrawn => f.write_str("this VF may no longer be granted"),
            Reason::Holds => f.write_str("it holds a VF"),
            Reason::NotNetworkBound(Kind::Cpu) => {
                f.write_str("it computes and hardly waits for I/O")
            }
            Reason::NotNetworkBound(_) => f.write_str("its NIC is quiet"),
            Reason::Outbid { lowest } if lowest >= 0.0 => {
                write!(f, "all VFs are held by VMs with an IF from {lowest:.0} up")
            }
            Reason::Outbid { .. } => f.write_str("all VFs are held by VMs that keep theirs"),
            Reason::Held { left } => {
                write!(
                    f,
                    "the VF that it would get is held for another {}",
                    HumanTime(left)
                )
            }
            Reason::NoPool => f.write_str("there are no VFs in its network"),
            Reason::RetryLater { left } => {
                write!(
                    f,
                    "the last try failed; the next one is in {}",
                    HumanTime(left)
                )
            }
            Reason::Deferred => f.write_str("other VFs change hands first"),
        }
    }
}

/// One NIC after a decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NicStatus {
    /// The NIC.
    pub nic: Nic,
    /// The kind of its VM's work.
    pub kind: Kind,
    /// IF (eq 2), at least 0; it has no unit.
    pub intensity: f64,
    /// Number of VFs it holds from now on.
    pub holds: u32,
    /// Why it holds them, or why it holds none.
    pub why: Reason,
}

/// Answer of [`super::VfScheduler::decide`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// The changes, in order.
    pub actions: Vec<Action>,
    /// All NICs, in the order of the input.
    pub nics: Vec<NicStatus>,
}

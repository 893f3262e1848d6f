// SPDX-License-Identifier: Apache-2.0
//! Messages of viola's programs.
//!
//! | module | between |
//! |---|---|
//! | this one, [`vread`], [`pipe::status`], [`lanes`] | the command line and the daemon |
//! | [`agent`] | a VM's agent and its worker on the host |
//! | [`pipe`] | the same two, for bytes that the host moves |
//! | [`pipe::library`] | a program in a VM and the VM's agent |
//! | [`lanes::guest`] | the daemon and the agent of a VM with a VF |
//! | [`fuse_stream`] | the agent of a reading VM and the VM's reader worker |
//!
//! The command line sends JSON over HTTP to the daemon's unix socket:
//!
//! | request | body | answer |
//! |---|---|---|
//! | `GET /v1/check` | | [`Check`] |
//! | `GET /v1/vms` | | [`VmList`] |
//! | `GET /v1/vms/{name}` | | [`VmReport`] |
//! | `PATCH /v1/vms/{name}` | [`Change`] | [`VmReport`] |
//! | `GET /v1/status` | | [`Status`] |
//! | `GET /v1/events` | | [`Events`] |
//! | `GET /v1/vread` | | [`vread::Vread`] |
//! | `GET /v1/pipes` | | [`pipe::status::Pipes`] |
//! | `GET /v1/lanes` | | [`lanes::Lanes`] |
//! | `PATCH /v1/lanes/{name}` | [`lanes::LaneChange`] | [`lanes::Nic`] |
//! | `POST /v1/stop`, `POST /v1/start` | | [`Done`] |
//!
//! The daemon answers a request that fails or that this table does not list with status 400 or
//! above and an [`Error`].
//!
//! `{name}` is a VM's name or identity (`uml:g1`), percent-encoded.
//!
//! Times are nanoseconds (`_ns`), shares are fractions of 1, caps are thousandths of one core (`_permille`), rates
//! are per second (`_per_s`).

pub mod agent;
mod event;
pub mod fuse_stream;
pub mod lanes;
pub mod pipe;
mod status;
mod vm;
pub mod vread;

pub use event::{Event, EventKind, Events};
pub use status::{
    Check, Core, Decisions, Done, Libvirt, Row, RowState, Stage, Status, UnmanagedVm,
};
pub use vm::{
    Change, Class, ClassSetting, CpuTime, Delay, ResidualWait, SchedulerCounts, Source, VmList,
    VmReport,
};

use serde::{Deserialize, Serialize};

/// Prefix of all paths. It changes when a message changes in a way that older programs do not understand.
pub const VERSION: &str = "v1";

/// Why a request failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// One sentence for the operator.
    pub error: String,
    /// For an unknown VM: similar names, the most similar first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nearest: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_names_only_what_it_changes() {
        let change = Change {
            class: Some(ClassSetting::Ls),
            ..Change::default()
        };
        assert_eq!(serde_json::to_string(&change).unwrap(), r#"{"class":"ls"}"#);
    }

    #[test]
    fn an_unknown_key_in_a_change_is_refused() {
        assert!(serde_json::from_str::<Change>(r#"{"clas":"ls"}"#).is_err());
    }

    #[test]
    fn an_error_without_similar_names_is_one_key() {
        let e = Error {
            error: "no".into(),
            nearest: Vec::new(),
        };
        assert_eq!(serde_json::to_string(&e).unwrap(), r#"{"error":"no"}"#);
        assert_eq!(
            serde_json::from_str::<Error>(r#"{"error":"no"}"#).unwrap(),
            e
        );
    }
}

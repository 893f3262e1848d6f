// SPDX-License-Identifier: Apache-2.0
//! What the control socket serves: the control loop builds it when somebody asks.

use std::collections::BTreeMap;

use viola_meter::{Histogram, VmSample};
use viola_proto::{Check, Status, VmList};

/// Answers to all GET requests.
#[derive(Debug, Clone)]
pub struct View {
    /// `GET /v1/status`
    pub status: Status,
    /// `GET /v1/vms`
    pub vms: VmList,
    /// `GET /v1/vread`
    pub vread: viola_proto::vread::Vread,
    /// `GET /v1/lanes`
    pub lanes: viola_proto::lanes::Lanes,
    /// `GET /v1/check`
    pub check: Check,
    /// For `GET /metrics`: what each VM spent since the daemon found it, by identity.
    pub totals: BTreeMap<String, VmSample>,
    /// For `GET /metrics`: the delays of all packets since then, of VMs whose packets are seen.
    pub packet_delays: BTreeMap<String, Histogram>,
}

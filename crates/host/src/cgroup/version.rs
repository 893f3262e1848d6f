// SPDX-License-Identifier: Apache-2.0
//! The two cgroup versions.

use serde::{Deserialize, Serialize};

/// Version of the hierarchy that has the `cpu` controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// `cpu.shares`, `cpu.cfs_quota_us`.
    V1,
    /// `cpu.weight`, `cpu.max`.
    V2,
}

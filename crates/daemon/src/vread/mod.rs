// SPDX-License-Identifier: Apache-2.0
//! vread (vRead): the host reads HDFS blocks from the disk images of a DataNode VM and serves them
//! to a reading VM. The data bypasses the DataNode VM and its network.
//!
//! | file | role |
//! |---|---|
//! | `observe` | image files of DataNode VMs; addresses of other hosts |
//! | `decide` | the cores of a reader's worker; the configuration decides who may read |
//! | `apply` | readers' workers, the worker for other hosts, and whom each of them knows |
//! | `status`, `metrics`, `check` | what the control socket, Prometheus and `viola check` show |
//! | `keys` | the key of this host |
//! | `advice` | which VMs read blocks of another VM over the network, though nobody has allowed more |
//!
//! Workers outlive the daemon, so what has to be restored are workers: see [`crate::workers`] and `supervisor/`.

pub mod advice;
pub(crate) mod apply;
pub mod check;
pub(crate) mod decide;
pub mod keys;
pub mod metrics;
pub(crate) mod observe;
pub mod status;

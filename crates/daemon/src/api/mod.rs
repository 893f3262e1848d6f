// SPDX-License-Identifier: Apache-2.0
//! The control socket.

pub mod daemon_metrics;
pub mod http;
pub mod metrics;
pub mod server;

// SPDX-License-Identifier: Apache-2.0
//! The control socket and the read socket: HTTP/JSON for `viola`, metrics for Prometheus.
//!
//! | file | does |
//! |---|---|
//! | `server` | binds the sockets, and runs the server's thread, which also takes signals |
//! | `http` | routes requests; serves connections |
//! | `view` | what GET requests answer with |
//! | `metrics`, `daemon_metrics` | `GET /metrics` |

mod daemon_metrics;
pub mod http;
pub mod metrics;
pub mod server;
pub mod view;

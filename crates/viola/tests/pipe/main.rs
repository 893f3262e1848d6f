// SPDX-License-Identifier: Apache-2.0
//! Unmodified servers in VMs whose files the host sends. The tests compare every byte and check which side sent it.
//! They need root and the lab's image.
#![allow(clippy::unwrap_used)]

mod advice;
mod client;
#[path = "../common/mod.rs"]
mod common;
mod faults;
mod filters;
mod networks;
mod pauses;
mod processes;
mod proxies;
mod rig;
mod servers;
mod uploads;
mod ways;

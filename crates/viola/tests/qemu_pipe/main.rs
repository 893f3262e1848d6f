// SPDX-License-Identifier: Apache-2.0
//! The host sends and copies files for a QEMU VM, which has a tap on a bridge and disks of two kinds. The VMs are emulated:
//! part of `make test-beds`. Needs root, TAP devices, the lab's image, and that of `scripts/qemu-image.sh --new`.
#![allow(clippy::unwrap_used)]

#[path = "../pipe/client.rs"]
mod client;
#[path = "../common/mod.rs"]
mod common;
mod copies;
#[path = "../pipe/rig.rs"]
mod rig;
mod sends;
mod vm;

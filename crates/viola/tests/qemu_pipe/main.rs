// SPDX-License-Identifier: Apache-2.0
//! Files and copies of a QEMU guest that the host moves, at a tap on a bridge and on disks of two kinds. The guests are
//! emulated: part of `make test-beds`. Needs root, TAP devices, the lab's image, and that of `scripts/qemu-image.sh --new`.
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

// SPDX-License-Identifier: Apache-2.0
//! The host sends and copies files for a QEMU VM, which has a tap on a bridge and disks of two kinds. The VMs are emulated:
//! part of `make test-beds`. Needs root, TAP devices, the lab's image, that of `scripts/qemu-image.sh --new`,
//! and for `setup` that of `scripts/debian-image.sh` and the packages of `scripts/deb.sh --debug`.
#![allow(clippy::unwrap_used)]

#[path = "../pipe/client.rs"]
mod client;
#[path = "../common/mod.rs"]
mod common;
mod copies;
#[path = "../common/first_page.rs"]
mod first_page;
#[path = "../pipe/rig.rs"]
mod rig;
mod sends;
mod setup;
mod vm;

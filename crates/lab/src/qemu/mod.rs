// SPDX-License-Identifier: Apache-2.0
//! QEMU VMs, for features that UML lacks: a PC with hot-plug, QMP, snapshots and migration. QEMU
//! emulates them (TCG), some ten times slower than UML guests; `VIOLA_QEMU_ACCEL=kvm` makes them
//! fast where `/dev/kvm` runs VMs.
//!
//! Their init is that of UML guests, on a virtio-serial port. `scripts/qemu-image.sh` makes kernel
//! and initramfs.
//!
//! ```no_run
//! use std::path::Path;
//! use viola_lab::qemu::{Image, QemuVm, VmSpec};
//!
//! let spec = VmSpec::new("dn1").disk("d0", Path::new("/tmp/d.img"), "raw").agent();
//! let vm = QemuVm::start(&spec, &Image::find()?, Path::new("/tmp"))?;
//! println!("{}", vm.sh("uname -r; ls -l /dev/vda")?);
//! vm.qmp("system_reset", None)?;
//! # Ok::<(), viola_lab::Error>(())
//! ```

mod accel;
mod guest;
mod image;
mod program;
mod qmp;
mod spec;
mod vm;

pub use accel::{Accel, check_kvm};
pub(crate) use guest::command;
pub use image::Image;
pub use program::Program;
pub use spec::VmSpec;
pub use vm::QemuVm;

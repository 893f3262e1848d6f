// SPDX-License-Identifier: Apache-2.0
//! Guests of the second kind: QEMU virtual machines, for what UML has not: a PC with hot-plug, QMP, snapshots and
//! migration. They are emulated (TCG) and some ten times slower than the lab's other guests; where `/dev/kvm` runs
//! guests, `VIOLA_QEMU_ACCEL=kvm` makes them fast.
//!
//! Their init is that of the other guests, on a virtio-serial port; kernel and initramfs come from
//! `scripts/qemu-image.sh`.
//!
//! ```no_run
//! use std::path::Path;
//! use viola_lab::qemu::{Image, QemuVm, VmSpec};
//!
//! let spec = VmSpec::new("dn1").disk("d0", Path::new("/tmp/d.img"), "raw").agent();
//! let machine = QemuVm::start(&spec, &Image::find()?, Path::new("/tmp"))?;
//! println!("{}", machine.sh("uname -r; ls -l /dev/vda")?);
//! machine.qmp("system_reset", None)?;
//! # Ok::<(), viola_lab::Error>(())
//! ```

mod image;
mod program;
mod qmp;
mod spec;
mod vm;

pub use image::Image;
pub use program::Program;
pub use spec::VmSpec;
pub use vm::QemuVm;

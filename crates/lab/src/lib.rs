// SPDX-License-Identifier: Apache-2.0
//! Real guests on this host, for the demo, tests and benchmarks.
//!
//! A lab is a few User Mode Linux guests: real Linux kernels that run as ordinary processes of the
//! host, at native speed in user code. The host's scheduler schedules them as it does KVM guests,
//! on hosts without hardware virtualisation too. With `vmm = "qemu"` they are KVM guests, or emulated
//! PCs. They are connected to bridges in a network
//! namespace of their own; the lab changes nothing in the host's network. `scripts/lab-image.sh`
//! fetches the guest kernel and makes the root file system.
//!
//! | module | does |
//! |---|---|
//! | `lab`, `guest`, `start`, `uml` | start, hold and end guests |
//! | `spec` | describe a lab, in TOML or in code |
//! | [`wire`], `channel` | talk to a guest's init by a serial line |
//! | `holder`, `net`, `netns_host`, `wan` | network namespaces, bridges and cables; a client behind a slow line |
//! | `server`, [`cli`] | let other processes use a running lab |
//! | `state`, `process`, `cgroup` | find and remove what a killed lab left |
//! | [`load`], [`media`], [`rtsp`] | clients that measure guests |
//! | [`hadoop`] | HDFS, HBase and Spark in guests |
//! | [`qemu`] | QEMU guests of a lab, and QEMU VMs for features that UML lacks |
//! | `registration` | tells viola which processes are guests |
//! | `rearm` | works around lost interrupts of UML |
//!
//! ```no_run
//! use viola_lab::{Lab, Paths, Spec};
//! use viola_lab::wire::Workload;
//!
//! let lab = Lab::up(&Spec::of_guests("demo", 4, &[1])?, &Paths::find()?)?;
//! lab.guest("vm2")?.start("burn", Workload::hog())?;
//! let output = lab.guest("vm1")?.exec(&["uname", "-r"])?;
//! println!("{}", output.stdout);
//! lab.down()?;
//! # Ok::<(), viola_lab::Error>(())
//! ```

mod cgroup;
mod channel;
pub mod cli;
mod error;
mod guest;
pub mod hadoop;
mod holder;
mod lab;
pub mod load;
pub mod media;
mod net;
mod netns_host;
mod paths;
mod process;
pub mod qemu;
mod rearm;
mod registration;
mod relay;
pub mod rtsp;
mod sched;
mod server;
mod shell;
mod spec;
mod start;
mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tun;
mod uml;
mod wan;
pub mod wire;

pub use error::{Error, Result};
pub use guest::Guest;
pub use lab::Lab;
pub use net::{nic_name, port_name};
pub use netns_host::NetnsHost;
pub use paths::{Paths, run_folder};
pub use sched::set_policy;
pub use spec::{
    BridgeSpec, DEFAULT_BRIDGE, DEFAULT_MEMORY, DEFAULT_WEIGHT, DiskSpec, GuestSpec, MAX_CPUS,
    QemuSpec, Spec, TapSpec, Vmm, parse_size,
};
pub use wan::{Delay, WanClient};

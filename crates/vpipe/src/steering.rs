// SPDX-License-Identifier: Apache-2.0
//! The BPF programs of `bpf/pipe.bpf.c` at a VM's tap.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use libbpf_rs::libbpf_sys;
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder};

use crate::{EgressGate, Error, FlowTable, Result, VmNetns};

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pipe.bpf.o"));

/// Number of programs attached for a VM.
pub const STEERING_LINKS: usize = 5;

/// The programs on a tap, on both ends of a veth, and on the outer end of the veth for held packets. The kernel detaches
/// them when this is dropped and all copies of its descriptors are closed.
#[derive(Debug)]
pub struct AttachedPrograms {
    links: [OwnedFd; STEERING_LINKS],
}

impl AttachedPrograms {
    /// The links, for a process that keeps them.
    pub fn links(&self) -> &[OwnedFd; STEERING_LINKS] {
        &self.links
    }
}

/// The programs, loaded once for each VM: a process with the [`FlowTable`] of one VM cannot steer another VM's
/// connections.
pub struct Steering {
    object: Object,
    flows: FlowTable,
    gate: EgressGate,
    taps: MapHandle,
    held_ends: MapHandle,
}

fn bpf(step: &'static str) -> impl Fn(libbpf_rs::Error) -> Error {
    move |source| Error::Bpf { step, source }
}

impl Steering {
    /// Loads the programs. Needs CAP_BPF and CAP_NET_ADMIN, and Linux 6.6 (TCX links).
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn load() -> Result<Self> {
        // libbpf reports failures in its errors
        libbpf_rs::set_print(None);
        let open = ObjectBuilder::default()
            .open_memory(PROGRAM)
            .map_err(bpf("opening the steering program"))?;
        let object = open.load().map_err(bpf("loading the steering program"))?;
        let map = |name: &str| -> Result<MapHandle> {
            let map = object.maps().find(|map| map.name() == name);
            let map = map.ok_or_else(|| bpf("looking for a map")(not_found()))?;
            MapHandle::try_from(&map).map_err(bpf("opening a map"))
        };
        let (taps, held_ends) = (map("taps")?, map("held_ends")?);
        let copy = |map: MapHandle| {
            let fd = map.as_fd().try_clone_to_owned();
            fd.map_err(Error::kernel("copying a descriptor"))
        };
        let flows = FlowTable::from(copy(map("flows")?)?);
        let gate = EgressGate::from(copy(map("gate_closed")?)?);
        Ok(Self {
            object,
            flows,
            gate,
            taps,
            held_ends,
        })
    }

    /// The table of held and redirected connections.
    pub fn flows(&self) -> &FlowTable {
        &self.flows
    }

    /// The gate of the host's sockets.
    pub fn gate(&self) -> &EgressGate {
        &self.gate
    }

    /// Attaches the programs to a tap, in the calling thread's network namespace, and to the veths of the VM's
    /// namespace.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn attach(&self, tap: u32, vm_netns: &VmNetns) -> Result<AttachedPrograms> {
        let (veth, hold_veth) = (vm_netns.veth(), vm_netns.hold_veth());
        self.taps
            .update(&veth.to_ne_bytes(), &tap.to_ne_bytes(), MapFlags::ANY)
            .map_err(bpf("entering the tap in the steering program's map"))?;
        // `struct ends` of bpf/pipe.h
        let ends = [tap.to_ne_bytes(), veth.to_ne_bytes()].concat();
        self.held_ends
            .update(&hold_veth.to_ne_bytes(), &ends, MapFlags::ANY)
            .map_err(bpf("entering the hold veth in the steering program's map"))?;
        let gate = self.program("gate")?;
        let links = [
            self.link("to_guest", tap, libbpf_sys::BPF_TCX_EGRESS)?,
            self.link("from_guest", tap, libbpf_sys::BPF_TCX_INGRESS)?,
            self.link("from_host", veth, libbpf_sys::BPF_TCX_INGRESS)?,
            self.link("deliver", hold_veth, libbpf_sys::BPF_TCX_INGRESS)?,
            vm_netns.run(|| link("gate", gate, vm_netns.inner(), libbpf_sys::BPF_TCX_EGRESS))??,
        ];
        Ok(AttachedPrograms { links })
    }

    fn link(
        &self,
        name: &'static str,
        interface: u32,
        hook: libbpf_sys::bpf_attach_type,
    ) -> Result<OwnedFd> {
        link(name, self.program(name)?, interface, hook)
    }

    fn program(&self, name: &str) -> Result<RawFd> {
        let program = self.object.progs().find(|program| program.name() == name);
        let program = program.ok_or_else(|| bpf("looking for a program")(not_found()))?;
        Ok(program.as_fd().as_raw_fd())
    }
}

/// Attaches a program to an interface of the calling thread's network namespace.
fn link(
    name: &'static str,
    program: RawFd,
    interface: u32,
    hook: libbpf_sys::bpf_attach_type,
) -> Result<OwnedFd> {
    // SAFETY: plain numbers and no options; the answer is a new descriptor, or a negated error.
    let link =
        unsafe { libbpf_sys::bpf_link_create(program, interface as i32, hook, std::ptr::null()) };
    if link < 0 {
        let source = std::io::Error::from_raw_os_error(-link);
        return Err(Error::kernel(format!(
            "attaching `{name}` to interface {interface}"
        ))(source));
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

fn not_found() -> libbpf_rs::Error {
    std::io::Error::from(std::io::ErrorKind::NotFound).into()
}

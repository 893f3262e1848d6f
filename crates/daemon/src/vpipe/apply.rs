// SPDX-License-Identifier: Apache-2.0
//! Makes the network from which a VM's files are sent, with the daemon's privileges, and hands it to the VM's worker: a network
//! namespace for sockets with the VM's addresses, and the BPF programs that steer connections there.
//!
//! The descriptors of the worker keep it alive: it stays when the daemon ends, and goes with the worker.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use viola_host::{Nic, NicKind, Vm};
use viola_netdev::{in_netns, link, rate_limiter};
use viola_vpipe::{AttachedPrograms, HoldQueue, Steering, VmNetns};
use viola_vread::control::PipeSetup;

use crate::workers::run_dir;
use viola_cli::error::chain;
use viola_config::pipe::{VmPipe, parse_mac};

/// The network of one VM.
#[derive(Debug)]
pub struct SendNetwork {
    /// What the worker is told.
    pub setup: PipeSetup,
    space: VmNetns,
    flows: OwnedFd,
    gate: OwnedFd,
    hold_queue: OwnedFd,
    attached: AttachedPrograms,
    /// The network namespace of the VM's tap.
    taps_netns: File,
}

impl SendNetwork {
    /// Makes the network beside the interface that the VM's packets pass, in the network namespace
    /// of the VM's process.
    ///
    /// # Errors
    /// What failed, in a sentence.
    pub fn make(vm: &Vm, config: &VmPipe) -> Result<Self, String> {
        let netns = File::open(format!("/proc/{}/ns/net", vm.pid))
            .map_err(|e| format!("vpipe: its network namespace: {e}"))?;
        let taps_netns =
            (netns.try_clone()).map_err(|e| format!("vpipe: its network namespace: {e}"))?;
        in_netns(netns.as_fd(), || Self::here(vm, config, taps_netns))
            .map_err(|e| format!("vpipe: its network namespace cannot be entered: {e}"))?
    }

    fn here(vm: &Vm, config: &VmPipe, taps_netns: File) -> Result<Self, String> {
        let (tap, index, mtu) = port(vm, config)?;
        let mac = mac(vm, config)?;
        let name = format!(
            "vio{:08x}",
            run_dir::random_id().map_err(|e| e.to_string())?
        );
        let made = (|| {
            let space = VmNetns::new(&name, mac, mtu)?;
            let hold_queue = HoldQueue::new(&space)?.into_descriptor();
            let steering = Steering::load()?;
            let attached = steering.attach(index, &space)?;
            let flows = steering.flows().descriptor()?;
            let gate = steering.gate().descriptor()?;
            let setup = PipeSetup {
                tap: index,
                veth: space.veth(),
                hold_veth: space.hold_veth(),
                addresses: config.addresses.clone(),
                max_pipes: config.max_connections.into(),
                rate: config.rate,
                receive_limit: receive_limit(index),
            };
            Ok(Self {
                setup,
                space,
                flows,
                gate,
                hold_queue,
                attached,
                taps_netns,
            })
        })();
        made.map_err(|e: viola_vpipe::Error| format!("vpipe at {tap}: {}", chain(&e)))
    }

    /// Whether the VM's tap has got or lost a limit for what the VM receives (`virsh domiftune`).
    pub fn has_other_limit(&self) -> bool {
        let tap = self.setup.tap;
        // A limit that cannot be read now is as it was.
        let read = in_netns(self.taps_netns.as_fd(), || rate_limiter(tap));
        matches!(read, Ok(Ok(limit)) if limit != self.setup.receive_limit)
    }

    /// The descriptors that go to the worker with [`SendNetwork::setup`].
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![
            self.space.netns().as_fd(),
            self.flows.as_fd(),
            self.gate.as_fd(),
            self.hold_queue.as_fd(),
        ];
        fds.extend(self.attached.links().iter().map(AsFd::as_fd));
        fds
    }
}

/// The NIC whose connections the host takes over.
fn nic<'a>(vm: &'a Vm, config: &VmPipe) -> Option<&'a Nic> {
    match &config.tap {
        Some(tap) => vm.nics.iter().find(|nic| nic.tap == *tap),
        None => vm.nics.first(),
    }
}

fn mac(vm: &Vm, config: &VmPipe) -> Result<[u8; 6], String> {
    let found = || parse_mac(nic(vm, config)?.mac.as_ref()?);
    let why = "vpipe: the MAC address of its NIC is not known; name it as mac in [vm.pipe]";
    config.mac.or_else(found).ok_or_else(|| why.into())
}

/// The host interface that the VM's packets pass: name of the VM's end, index, MTU. Of a VM with a tap it is the tap. Of a VM with a
/// packet socket on a veth it is the other end of the veth.
fn port(vm: &Vm, config: &VmPipe) -> Result<(String, u32, u32), String> {
    let (name, kind) = match (nic(vm, config), &config.tap) {
        (Some(nic), _) => (&nic.tap, nic.kind),
        (None, Some(tap)) => (tap, NicKind::Tap),
        (None, None) => {
            return Err(
                "vpipe: it has no NIC that viola can find; name it as tap in [vm.pipe]".into(),
            );
        }
    };
    let found = link(name).map_err(|e| format!("vpipe: interface {name}: {e}"))?;
    let index = match kind {
        NicKind::Tap => found.index,
        NicKind::Raw => found.peer.ok_or_else(|| {
            format!(
                "vpipe: {name} is no veth with both ends here, so nothing can be steered before it"
            )
        })?,
        NicKind::Macvtap => {
            return Err(format!(
                "vpipe: {name} is a macvtap, whose packets pass no interface of the host; use a bridged tap"
            ));
        }
    };
    Ok((name.clone(), index, found.mtu))
}

/// What limits the rate at which the VM receives. Bytes for a socket of the host leave the tap before its queue, so the VM has to
/// receive them itself. The same holds if the limit cannot be read.
fn receive_limit(tap: u32) -> Option<String> {
    rate_limiter(tap)
        .unwrap_or_else(|e| Some(format!("its queueing discipline cannot be read: {e}")))
}

/// Sets the nice value of all threads of a process.
///
/// # Errors
/// When its threads cannot be listed, or the kernel refuses the value.
pub fn set_nice(pid: u32, nice: i32) -> std::io::Result<()> {
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = entry?.file_name();
        let thread = name.to_str().and_then(|tid| tid.parse().ok());
        if let Some(thread) = thread.and_then(rustix::process::Pid::from_raw) {
            rustix::process::setpriority_process(Some(thread), nice)?;
        }
    }
    Ok(())
}

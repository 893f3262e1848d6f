// SPDX-License-Identifier: Apache-2.0
//! Where a VM's files are sent from: made here, with the daemon's rights, and handed to the VM's worker.
//!
//! All of it is kept by the worker's descriptors alone: it goes on when the daemon ends, and goes when the worker does.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use viola_host::{Nic, NicKind, Vm};
use viola_netdev::{in_netns, link};
use viola_vpipe::{AttachedPrograms, HoldQueue, Steering, VmNetns};
use viola_vread::control::PipeSetup;

use crate::workers::run_dir;
use viola_cli::error::chain;
use viola_config::pipe::{VmPipe, parse_mac};

/// See the module.
#[derive(Debug)]
pub struct Place {
    /// For the worker.
    pub setup: PipeSetup,
    space: VmNetns,
    flows: OwnedFd,
    gate: OwnedFd,
    park: [OwnedFd; 2],
    attached: AttachedPrograms,
}

impl Place {
    /// In the network namespace of the VM's process.
    ///
    /// # Errors
    /// Why not, in a sentence.
    pub fn make(vm: &Vm, config: &VmPipe) -> Result<Self, String> {
        let netns = File::open(format!("/proc/{}/ns/net", vm.pid))
            .map_err(|e| format!("vpipe: its network namespace: {e}"))?;
        in_netns(netns.as_fd(), || Self::here(vm, config))
            .map_err(|e| format!("vpipe: its network namespace cannot be entered: {e}"))?
    }

    fn here(vm: &Vm, config: &VmPipe) -> Result<Self, String> {
        let (tap, index, mtu) = port(vm, config)?;
        let mac = mac(vm, config)?;
        let name = format!(
            "vio{:08x}",
            run_dir::random_id().map_err(|e| e.to_string())?
        );
        let made = (|| {
            let space = VmNetns::new(&name, mac, mtu)?;
            for address in &config.addresses {
                space.add_address(*address)?;
            }
            let park = HoldQueue::new(&space, index)?.into_descriptors();
            let steering = Steering::load()?;
            let attached = steering.attach(index, &space)?;
            let flows = steering.flows().descriptor()?;
            let gate = steering.gate().descriptor()?;
            let setup = PipeSetup {
                tap: index,
                veth: space.veth(),
                parked: space.hold_veth(),
                addresses: config.addresses.clone(),
                most: config.max_connections.into(),
                rate: config.rate,
            };
            Ok(Self {
                setup,
                space,
                flows,
                gate,
                park,
                attached,
            })
        })();
        made.map_err(|e: viola_vpipe::Error| format!("vpipe at {tap}: {}", chain(&e)))
    }

    /// What goes to the worker with [`Place::setup`].
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let [from, to] = &self.park;
        let mut fds = vec![
            self.space.netns().as_fd(),
            self.flows.as_fd(),
            self.gate.as_fd(),
            from.as_fd(),
            to.as_fd(),
        ];
        fds.extend(self.attached.links().iter().map(AsFd::as_fd));
        fds
    }
}

/// The NIC whose connections are meant.
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

/// The interface at which the VM's packets pass: its name as far as it is known, its number, and its largest packet.
///
/// A tap is that itself. Behind a packet socket there is a veth, of which it is the other end.
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

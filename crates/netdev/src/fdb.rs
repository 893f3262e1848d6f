// SPDX-License-Identifier: Apache-2.0
//! Entries of forwarding databases (`bridge fdb`): behind which interface the owner of an Ethernet
//! address is.

use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::links::Mac;
use crate::netlink::{create, execute};

/// Adds or removes an entry of a NIC's embedded switch: the owner of the address is behind this
/// interface (`bridge fdb add MAC dev DEV self`). Does nothing if the entry is as wanted.
///
/// # Errors
/// The kernel's.
pub fn set_nic_fdb(index: u32, mac: Mac, present: bool) -> io::Result<()> {
    let message = entry(index, mac, NeighbourState::Permanent, NeighbourFlags::Own);
    let (done, already) = if present {
        let done = create(RouteNetlinkMessage::NewNeighbour(message));
        (done, io::ErrorKind::AlreadyExists)
    } else {
        let done = execute(RouteNetlinkMessage::DelNeighbour(message), 0);
        (done, io::ErrorKind::NotFound)
    };
    match done {
        Err(e) if e.kind() == already => Ok(()),
        done => done,
    }
}

/// Adds or removes an entry of a bridge: the owner of the address is at this port
/// (`bridge fdb replace MAC dev PORT master dynamic`). The bridge moves or forgets the entry as if
/// it had learned it from a packet. Does nothing if the entry is as wanted.
///
/// # Errors
/// The kernel's; EOPNOTSUPP if the interface is no port of a bridge, EPERM if it has no link.
pub fn set_bridge_fdb(port: u32, mac: Mac, present: bool) -> io::Result<()> {
    let (state, flags) = (NeighbourState::Reachable, NeighbourFlags::Controller);
    let message = entry(port, mac, state, flags);
    if present {
        let message = RouteNetlinkMessage::NewNeighbour(message);
        return execute(message, NLM_F_CREATE | NLM_F_REPLACE);
    }
    match execute(RouteNetlinkMessage::DelNeighbour(message), 0) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn entry(index: u32, mac: Mac, state: NeighbourState, flags: NeighbourFlags) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index;
    message.header.state = state;
    message.header.flags = flags;
    message.attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::tests::in_new_netns;
    use crate::{add_veth, device, dump, link};

    /// Ports at which a bridge looks for the owner of an address.
    fn ports_with(mac: Mac) -> Vec<u32> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Bridge;
        let all = dump(RouteNetlinkMessage::GetNeighbour(message)).unwrap();
        let wanted = NeighbourAttribute::LinkLayerAddress(mac.to_vec());
        let port = |m: RouteNetlinkMessage| match m {
            RouteNetlinkMessage::NewNeighbour(m) if m.attributes.contains(&wanted) => {
                Some(m.header.ifindex)
            }
            _ => None,
        };
        all.into_iter().filter_map(port).collect()
    }

    #[test]
    fn a_bridge_entry_is_added_moved_and_removed() {
        in_new_netns(|_| {
            device::add_bridge("br0").unwrap();
            add_veth("a0", "b0", None).unwrap();
            add_veth("c0", "d0", None).unwrap();
            for port in ["a0", "c0"] {
                device::add_port("br0", port).unwrap();
            }
            // a port without a link takes no entry
            for name in ["br0", "a0", "b0", "c0", "d0"] {
                device::up(name).unwrap();
            }
            let [a, b, c] = ["a0", "b0", "c0"].map(|name| link(name).unwrap().index);
            let mac = [0x52, 0x54, 0, 0, 9, 2];
            set_bridge_fdb(a, mac, false).unwrap();
            assert_eq!(ports_with(mac), []);
            set_bridge_fdb(a, mac, true).unwrap();
            set_bridge_fdb(a, mac, true).unwrap();
            assert_eq!(ports_with(mac), [a]);
            set_bridge_fdb(c, mac, true).unwrap();
            assert_eq!(ports_with(mac), [c]);
            // removing it at another port changes nothing
            set_bridge_fdb(a, mac, false).unwrap();
            assert_eq!(ports_with(mac), [c]);
            set_bridge_fdb(c, mac, false).unwrap();
            assert_eq!(ports_with(mac), []);
            assert!(set_bridge_fdb(b, mac, true).is_err(), "b0 is no port");
        });
    }
}

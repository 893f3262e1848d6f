// SPDX-License-Identifier: Apache-2.0
//! Network devices, addresses and routes of the calling thread's network namespace, and namespaces themselves.
//!
//! What an ioctl can do is done by one ([`NetDevices`]: works in the smallest guest), the rest by rtnetlink ([`ask`], [`look_up`]).

mod bond;
mod devices;
mod links;
mod netlink;
mod space;
mod vfs;

pub use bond::{Belongings, LinkNews, add_bond, ports_of, remove, set_alias};
pub use devices::{MAX_NAME, NetDevices, add_veth, netmask};
pub use links::{
    Counters, Link, Mac, link, links, move_to, set_active_port, set_address_of, set_at_port,
    set_behind, set_master, set_up,
};
pub use netlink::{Interface, add_address, ask, dump, interface, look_up};
pub use space::{Netns, inside, tcp_socket};
pub use vfs::{VfChange, VfState, set_vf, vfs};

// SPDX-License-Identifier: Apache-2.0
//! Network devices, addresses and routes of the calling thread's network namespace, and namespaces themselves.
//!
//! What an ioctl can do is done by one ([`NetDevices`]: works in the smallest guest), the rest by rtnetlink ([`ask`], [`look_up`]).

mod devices;
mod netlink;
mod space;

pub use devices::{MAX_NAME, NetDevices, add_veth, netmask};
pub use netlink::{Interface, add_address, ask, interface, look_up};
pub use space::{Netns, inside, tcp_socket};

// SPDX-License-Identifier: Apache-2.0
//! Network interfaces, addresses and routes of the calling thread's network namespace, and the
//! namespaces themselves. Every request goes to the kernel by rtnetlink (rtnetlink(7)).
//!
//! | module | does |
//! |---|---|
//! | `netlink` | sends one request and reads the answers |
//! | `links` | lists and changes interfaces by index |
//! | [`device`] | sets up interfaces by name, for test beds and a guest's init |
//! | `bond` | active-backup bonds |
//! | `fdb` | forwarding entries of bridges and of NICs' embedded switches |
//! | `ip_config` | addresses and routes of an interface, and moving them to another one |
//! | `monitor` | tells when an interface changes |
//! | `netns` | makes and enters network namespaces |
//! | `qdisc` | queueing disciplines that limit a rate |
//! | `vfs` | virtual functions of an SR-IOV NIC |

mod bond;
pub mod device;
mod fdb;
mod ip_config;
mod links;
mod monitor;
mod netlink;
mod netns;
mod qdisc;
mod vfs;

pub use bond::{add_bond, ports_of, set_active_port};
pub use fdb::{set_bridge_fdb, set_nic_fdb};
pub use ip_config::{IpConfig, add_address, netmask};
pub use links::{
    Counters, Link, MAX_IFNAME_BYTES, Mac, add_veth, delete_link, link, links, move_to, set_alias,
    set_mac, set_master, set_up,
};
pub use monitor::LinkMonitor;
pub use netlink::{create, delete, dump, look_up};
pub use netns::{Netns, in_netns, tcp_socket};
pub use qdisc::rate_limiter;
pub use vfs::{VfChange, VfState, set_vf, vfs};

// SPDX-License-Identifier: Apache-2.0
//! Programs that are loaded beside the accounting program for some time, and see the packets of the same NICs.

use std::os::fd::AsFd;

use libbpf_rs::{Link, Object, ObjectBuilder};

use super::{Acct, AcctError, at, map};

/// Loads and attaches a program for the NICs that `acct` watches, now and later. It is detached when the links are dropped.
pub(super) fn load(acct: &Acct, object: &[u8]) -> Result<(Object, Vec<Link>), AcctError> {
    let mut open = ObjectBuilder::default()
        .open_memory(object)
        .map_err(at("open"))?;
    for mut of in open.maps_mut().filter(|m| m.name() == "nics") {
        of.reuse_fd(map(&acct.object, "nics")?.as_fd())
            .map_err(at("sharing the NICs"))?;
    }
    let object = open.load().map_err(at("load"))?;
    let links: Result<Vec<Link>, _> = object.progs_mut().map(|prog| prog.attach()).collect();
    let links = links.map_err(at("attach"))?;
    Ok((object, links))
}

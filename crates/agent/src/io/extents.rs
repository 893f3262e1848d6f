// SPDX-License-Identifier: Apache-2.0
//! File maps of [`viola_extents`] in the form of the protocol.

use viola_proto::agent::{DiskName, Extent, FileMap};

/// The extents of a file and the disk that holds them, as the agent sends them to the host.
pub fn to_wire(map: viola_extents::FileMap) -> (FileMap, DiskName) {
    let extents = map
        .extents
        .iter()
        .map(|e| Extent {
            logical: e.logical,
            physical: e.physical,
            length: e.length,
            zero: e.zero,
        })
        .collect();
    let disk = DiskName {
        name: map.disk.name,
        serial: map.disk.serial,
        size: map.disk.size,
    };
    let size = map.size;
    (FileMap { size, extents }, disk)
}

// SPDX-License-Identifier: Apache-2.0
//! Unmodified servers with the library preloaded.

use std::path::Path;
use std::process::Command;

use crate::room::library;

/// A server that is installed on this machine, or the one of the lab's guests with its own C library.
///
/// The loader of the guest image starts the guest's server and preloads the library: `LD_PRELOAD` would load this machine's C
/// library beside the guest's.
pub fn preloaded(name: &str) -> Command {
    let mut installed = ["/usr/sbin", "/usr/local/sbin", "/usr/bin"]
        .iter()
        .map(|folder| Path::new(folder).join(name));
    if let Some(program) = installed.find(|program| program.exists()) {
        let mut server = Command::new(program);
        server.env("LD_PRELOAD", library());
        return server;
    }
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/lab/current/root");
    let program = guest.join("usr/sbin").join(name);
    assert!(
        program.exists(),
        "there is no {name} to test with: neither installed here nor in the lab's guest ({}); run scripts/lab-image.sh",
        program.display()
    );
    let libraries = guest.join("usr/lib/x86_64-linux-gnu");
    let mut server = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    server.arg("--library-path").arg(&libraries);
    server.arg("--preload").arg(library()).arg(program);
    server
}

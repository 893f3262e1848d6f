// SPDX-License-Identifier: Apache-2.0
//! `[mount]` in the configuration.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::io::channel::Address;

/// `[mount]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Mount point.
    pub path: PathBuf,
    /// Transport to the host: a virtio-serial port, any other character device, or `unix:PATH`.
    pub port: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            path: "/mnt/viola".into(),
            port: "/dev/virtio-ports/org.viola.read.0".into(),
        }
    }
}

impl Settings {
    /// Checks that the values are usable.
    ///
    /// # Errors
    /// One sentence that names the key.
    pub fn check(&self) -> Result<(), String> {
        if !self.path.is_absolute() || self.path == Path::new("/") {
            return Err(format!(
                "`path` in [mount]: `{}` must be the absolute path of a directory other than /",
                self.path.display()
            ));
        }
        Address::parse(&self.port)
            .map(|_| ())
            .map_err(|what| format!("`port` in [mount]: {what}"))
    }
}

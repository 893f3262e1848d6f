// SPDX-License-Identifier: Apache-2.0
//! The version of the running kernel.

use serde::{Deserialize, Serialize};

/// Version of the running kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch level, 0 when there is none.
    pub patch: u32,
    /// All of `uname -r`.
    pub release: String,
}

impl Kernel {
    /// Parses a release such as `6.18.44-generic` or `7.2-rc3`.
    #[must_use]
    pub fn parse(release: &str) -> Option<Self> {
        let release = release.trim();
        let mut numbers = release.split('.').map(|part| {
            let digits = part.bytes().take_while(u8::is_ascii_digit).count();
            part[..digits].parse::<u32>().ok()
        });
        Some(Self {
            major: numbers.next()??,
            minor: numbers.next()??,
            patch: numbers.next().flatten().unwrap_or(0),
            release: release.to_owned(),
        })
    }

    /// Whether this version is `major.minor` or later.
    #[must_use]
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }

    /// Whether the fair class gets up to 5 % of a core that real-time threads fill (the fair server, Linux 6.12).
    #[must_use]
    pub fn has_fair_server(&self) -> bool {
        self.is_at_least(6, 12)
    }

    /// Whether sched_setattr(2) takes a slice for a thread of the fair class (Linux 6.12).
    #[must_use]
    pub fn has_fair_slice(&self) -> bool {
        self.is_at_least(6, 12)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_of_distributions_are_understood() {
        let version = |text: &str| Kernel::parse(text).map(|k| (k.major, k.minor, k.patch));
        assert_eq!(version("6.18.44-fc-v669\n"), Some((6, 18, 44)));
        assert_eq!(version("7.2-rc3"), Some((7, 2, 0)));
        assert_eq!(version("5.14.0-503.11.1.el9_5.x86_64"), Some((5, 14, 0)));
        assert_eq!(version("6.12+deb13-amd64"), Some((6, 12, 0)));
        assert_eq!(version("linux"), None);
        assert_eq!(version("6"), None);
        assert_eq!(version("99999999999.1"), None);
        let kernel = Kernel::parse("6.12.1").unwrap();
        assert!(
            kernel.is_at_least(6, 12) && kernel.is_at_least(5, 99) && !kernel.is_at_least(7, 0)
        );
    }
}

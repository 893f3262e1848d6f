// SPDX-License-Identifier: Apache-2.0
//! Versions of the protocol between two hosts, and which one a connection has.

/// Protocol versions that this program speaks. Raise the highest one when an older program would misread a frame, and keep
/// the lowest one until no host of that version is left: then hosts can be upgraded one by one while readers read.
pub const VERSIONS: Versions = Versions {
    lowest: 1,
    highest: 1,
};
/// Versions of the protocol that a host speaks, all from the lowest to the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The lowest one.
    pub lowest: u8,
    /// The highest one.
    pub highest: u8,
}

impl Versions {
    /// The highest version that both speak.
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest.into())
    }

    /// The lowest version alone.
    pub fn only_lowest(self) -> Self {
        Self {
            highest: self.lowest,
            ..self
        }
    }

    /// Whether a version is one of them.
    pub fn contains(self, version: u16) -> bool {
        (u16::from(self.lowest)..=u16::from(self.highest)).contains(&version)
    }

    pub(super) fn encode(self) -> [u8; 2] {
        match self.lowest == self.highest {
            true => [self.lowest, 0],
            false => [self.lowest, self.highest],
        }
    }

    pub(super) fn decode([lowest, highest]: [u8; 2]) -> Self {
        match highest {
            0 => Self {
                lowest,
                highest: lowest,
            },
            _ => Self { lowest, highest },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{Message, header};
    use super::*;
    use proptest::prelude::*;

    fn versions(lowest: u8, highest: u8) -> Versions {
        Versions { lowest, highest }
    }

    #[test]
    fn hello_of_version_1_alone_is_that_of_the_first_release() {
        let mut bytes = Vec::new();
        let hello = Message::Hello {
            versions: VERSIONS.only_lowest(),
            reader: "r".into(),
        };
        hello.encode(5, &mut bytes);
        let mut released = header(5, 1, 0, 4).to_vec();
        released.extend_from_slice(&1_u16.to_le_bytes());
        released.extend_from_slice(b"\x01r");
        assert_eq!(bytes, released);
    }

    #[test]
    fn two_hosts_take_the_highest_version_that_both_speak() {
        for (one, other, common) in [
            (versions(1, 1), versions(1, 1), Some(1)),
            (versions(1, 2), versions(1, 1), Some(1)),
            (versions(1, 3), versions(2, 5), Some(3)),
            (versions(1, 1), versions(2, 3), None),
            // Of no host: 999 as the number that version 1 compared, and an empty range.
            (
                versions(1, 1),
                Versions::decode(999_u16.to_le_bytes()),
                None,
            ),
            (versions(1, 9), versions(5, 4), None),
            (versions(1, 1), versions(0, 0), None),
        ] {
            assert_eq!(one.common(other), common, "{one:?} {other:?}");
            assert_eq!(other.common(one), common, "{one:?} {other:?}");
        }
    }

    proptest! {
        #[test]
        fn the_common_version_is_one_that_both_speak(bytes: [u8; 2], others: [u8; 2]) {
            let (one, other) = (Versions::decode(bytes), Versions::decode(others));
            let best = (0..=255).rev().find(|&v| one.contains(v) && other.contains(v));
            prop_assert_eq!(one.common(other), best);
            prop_assert_eq!(Versions::decode(one.encode()), one);
        }
    }
}

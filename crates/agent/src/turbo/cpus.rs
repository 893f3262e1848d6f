// SPDX-License-Identifier: Apache-2.0
//! Sets of CPUs, as the kernel writes them: lists (`0-3,5`) and masks (`ff,00000003`).

use std::collections::BTreeSet;
use std::fmt;

/// Largest accepted CPU number.
const MAX_CPU: u32 = 65_535;

/// A set of the VM's CPUs, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpus(BTreeSet<u32>);

impl Cpus {
    /// A set of one CPU.
    pub fn one(cpu: u32) -> Self {
        Self(BTreeSet::from([cpu]))
    }

    /// Parses a list such as `0-3,5`; the empty list is the empty set.
    pub fn parse_list(text: &str) -> Option<Self> {
        let mut all = BTreeSet::new();
        for part in text.trim().split(',').filter(|p| !p.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
            if first > last || last > MAX_CPU {
                return None;
            }
            all.extend(first..=last);
        }
        Some(Self(all))
    }

    /// Parses a mask of hexadecimal 32-bit words, the highest first.
    pub fn parse_mask(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.trim().split(',').collect();
        let mut all = BTreeSet::new();
        for (word, base) in words.iter().rev().zip((0..=MAX_CPU).step_by(32)) {
            let bits = u32::from_str_radix(word, 16).ok()?;
            all.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|b| base + b));
        }
        Some(Self(all))
    }

    /// Formats it as a mask of hexadecimal words.
    pub fn to_mask(&self) -> String {
        let mut words = vec![0_u32; self.0.last().map_or(1, |last| *last as usize / 32 + 1)];
        for cpu in &self.0 {
            words[*cpu as usize / 32] |= 1 << (cpu % 32);
        }
        let words: Vec<String> = words.iter().rev().map(|w| format!("{w:08x}")).collect();
        words.join(",")
    }

    /// Whether `cpu` is in the set.
    pub fn has(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The set without `cpu`.
    #[must_use]
    pub fn without(&self, cpu: u32) -> Self {
        Self(self.0.iter().copied().filter(|c| *c != cpu).collect())
    }

    /// The CPUs that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    /// The CPUs in either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    /// The CPUs in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPU numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<u32> for Cpus {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_masks_are_read_as_the_kernel_writes_them() {
        for (list, mask) in [
            ("", "00000000"),
            ("0", "00000001"),
            ("0-1,5", "00000023"),
            ("31-33", "00000003,80000000"),
            ("64", "00000001,00000000,00000000"),
        ] {
            let set = Cpus::parse_list(&format!("{list}\n")).unwrap();
            assert_eq!(set.to_string(), list);
            assert_eq!(set.to_mask(), mask);
            assert_eq!(Cpus::parse_mask(mask), Some(set));
        }
        assert_eq!(Cpus::parse_mask("3\n"), Cpus::parse_list("0-1"));
        assert_eq!(Cpus::parse_list("0,1,2").unwrap().to_string(), "0-2");
        for bad in ["x", "3-1", "0-99999999", "-1"] {
            assert_eq!(Cpus::parse_list(bad), None, "{bad}");
        }
        assert_eq!(Cpus::parse_mask("g"), None);
    }
}

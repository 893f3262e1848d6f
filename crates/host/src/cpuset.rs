// SPDX-License-Identifier: Apache-2.0
//! A set of CPU numbers, in the kernel's list form and bit mask form (cpuset(7), "Formats").

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::thread::Tid;

/// Number of CPUs that Linux can be built for on any architecture (`NR_CPUS`).
pub const MAX_CPUS: u32 = 8192;

/// CPU numbers, `0..MAX_CPUS`. Serialized as an array of numbers; reading one drops numbers of [`MAX_CPUS`] and above.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "BTreeSet<u32>")]
pub struct CpuSet(BTreeSet<u32>);

impl From<BTreeSet<u32>> for CpuSet {
    fn from(mut cpus: BTreeSet<u32>) -> Self {
        drop(cpus.split_off(&MAX_CPUS));
        Self(cpus)
    }
}

/// A text that is not a CPU list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a CPU list such as 0-3,8")]
pub struct ParseCpuSetError(String);

impl CpuSet {
    /// The empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether `cpu` is in the set.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Number of CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no CPU is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Adds one CPU. Ignores numbers of [`MAX_CPUS`] and above.
    pub fn insert(&mut self, cpu: u32) {
        if cpu < MAX_CPUS {
            self.0.insert(cpu);
        }
    }

    /// Adds all CPUs of `other`.
    pub fn extend(&mut self, other: &Self) {
        self.0.extend(&other.0);
    }

    /// The CPUs that a thread may run on, by sched_getaffinity(2); `None` when the thread has ended.
    pub(crate) fn of_thread(tid: Tid) -> io::Result<Option<Self>> {
        let mut mask = [0u64; MAX_CPUS as usize / 64];
        // SAFETY: `mask` is writable and its size in bytes is passed along.
        let result = unsafe {
            libc::syscall(
                libc::SYS_sched_getaffinity,
                tid,
                size_of_val(&mask),
                mask.as_mut_ptr(),
            )
        };
        if result >= 0 {
            return Ok(Some(Self::from_mask(&mask)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ESRCH) => Ok(None),
            _ => Err(error),
        }
    }

    /// The bit mask of sched_setaffinity(2): bit `c % 64` of word `c / 64` is CPU `c`.
    pub(crate) fn to_mask(&self) -> Vec<u64> {
        let words = self.0.last().map_or(1, |&last| last as usize / 64 + 1);
        let mut mask = vec![0u64; words];
        for &cpu in &self.0 {
            mask[cpu as usize / 64] |= 1 << (cpu % 64);
        }
        mask
    }

    /// The set of the bit mask of sched_getaffinity(2).
    pub(crate) fn from_mask(mask: &[u64]) -> Self {
        let bits = |(i, word): (usize, &u64)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros();
                (bit < 64).then(|| {
                    rest &= rest - 1;
                    i as u32 * 64 + bit
                })
            })
        };
        mask.iter().enumerate().flat_map(bits).collect()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut set = Self::new();
        cpus.into_iter().for_each(|c| set.insert(c));
        set
    }
}

impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    /// Parses the list form of sysfs and `taskset -c`, for example `0-3,8`. Allows surrounding white space and an
    /// empty list.
    fn from_str(text: &str) -> Result<Self, ParseCpuSetError> {
        let bad = || ParseCpuSetError(text.chars().take(64).collect());
        let mut set = Self::new();
        for part in text.trim().split(',').filter(|p| !p.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u32 = first.parse().map_err(|_| bad())?;
            let last: u32 = last.parse().map_err(|_| bad())?;
            if first > last || last >= MAX_CPUS {
                return Err(bad());
            }
            set.0.extend(first..=last);
        }
        Ok(set)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while cpus.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_drops_cpus_that_cannot_exist() {
        let set: CpuSet = serde_json::from_str("[3,8191,8192,4294967295]").unwrap();
        assert_eq!(set.to_string(), "3,8191");
        // Its mask is as long as the kernel's, not half a gigabyte.
        assert_eq!(set.to_mask().len(), 128);
        assert_eq!(serde_json::to_string(&set).unwrap(), "[3,8191]");
    }
    use proptest::prelude::*;

    #[test]
    fn reads_and_prints_the_kernels_list_form() {
        let set: CpuSet = "0-2,8,10-11\n".parse().unwrap();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 8, 10, 11]);
        assert_eq!(set.to_string(), "0-2,8,10-11");
        assert_eq!("\n".parse::<CpuSet>().unwrap(), CpuSet::new());
    }

    #[test]
    fn malformed_and_huge_ranges_are_refused() {
        for text in ["0-4294967295", "8192", "3-1", "a", "1-", "-1", "0-1-2"] {
            assert!(text.parse::<CpuSet>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn list_and_mask_forms_lose_nothing(cpus in proptest::collection::btree_set(0..MAX_CPUS, 0..40)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(&set.to_string().parse::<CpuSet>().unwrap(), &set);
            prop_assert_eq!(&CpuSet::from_mask(&set.to_mask()), &set);
        }

        #[test]
        fn any_text_parses_without_a_panic(text in ".{0,40}") {
            let _ = text.parse::<CpuSet>();
        }
    }
}

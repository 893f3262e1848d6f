// SPDX-License-Identifier: Apache-2.0
//! A VM's CPU control group, read again and again.
//!
//! Weight and quotas are read each time. In which groups the threads are is read less often: threads hardly ever move, and one
//! file a thread is most of the cost.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use super::mounts::Mounts;
use super::place::{Place, min_of};
use super::version::Version;
use super::{Cgroup, vm_group};
use crate::error::HostError;
use crate::thread::Tid;

/// Groups of the threads are read again after this time.
const MEMBERSHIP_INTERVAL: Duration = Duration::from_secs(10);

/// In which groups a VM's threads are, as of the last reading.
#[derive(Debug, Default)]
pub(crate) struct GroupCache(Option<Membership>);

#[derive(Debug)]
struct Membership {
    read_at: Instant,
    vcpus: Vec<Tid>,
    /// Version of the hierarchy with the `cpu` controller, and the main process's group in it.
    version: Version,
    own: String,
    /// Groups below the VM's that vCPUs are in.
    of_vcpus: BTreeSet<String>,
    /// Whether the VM's group had a weight.
    has_weight: bool,
}

impl GroupCache {
    /// The CPU group of the VM whose main process is `pid` and whose vCPU threads are `vcpus`; `None` when the VM has ended or
    /// the host has no such groups.
    ///
    /// # Errors
    /// [`HostError::Read`].
    pub(crate) fn refresh(
        &mut self,
        mounts: &Mounts,
        pid: Tid,
        vcpus: &[Tid],
        now: Instant,
    ) -> Result<Option<Cgroup>, HostError> {
        let known = self.0.take().filter(|known| {
            known.vcpus == vcpus
                && now.saturating_duration_since(known.read_at) < MEMBERSHIP_INTERVAL
        });
        if let Some(known) = known
            && let Some(mount) = mounts.hierarchy(known.version)
        {
            let group = known.own.clone();
            let cgroup = known.limits(&Place {
                version: known.version,
                group,
                mount,
            })?;
            // Without its files the group is gone, and the VM has been moved.
            if cgroup.weight.is_some() == known.has_weight {
                self.0 = Some(known);
                return Ok(Some(cgroup));
            }
        }
        let Some(place) = mounts.place(pid)? else {
            return Ok(None);
        };
        let mut read = Membership::read(mounts, &place, vcpus, now)?;
        let cgroup = read.limits(&place)?;
        read.has_weight = cgroup.weight.is_some();
        self.0 = Some(read);
        Ok(Some(cgroup))
    }
}

impl Membership {
    fn read(
        mounts: &Mounts,
        place: &Place<'_>,
        vcpus: &[Tid],
        now: Instant,
    ) -> Result<Self, HostError> {
        let group = vm_group(&place.group);
        let mut of_vcpus = BTreeSet::new();
        for &vcpu in vcpus {
            // A vCPU that an operator moved elsewhere says nothing about this VM's group.
            let own = mounts.place(vcpu)?.map(|own| own.group);
            of_vcpus.extend(own.filter(|own| own != group && Path::new(own).starts_with(group)));
        }
        Ok(Self {
            read_at: now,
            vcpus: vcpus.to_vec(),
            version: place.version,
            own: place.group.clone(),
            of_vcpus,
            has_weight: false,
        })
    }

    /// Weight and quotas as they are now.
    fn limits(&self, place: &Place<'_>) -> Result<Cgroup, HostError> {
        let group = vm_group(&place.group);
        let mut vcpu_quota = None;
        for own in &self.of_vcpus {
            vcpu_quota = min_of(vcpu_quota, place.lowest_quota(own, Some(group))?);
        }
        Ok(Cgroup {
            version: place.version,
            path: group.to_owned(),
            weight: place.weight(group)?,
            quota_permille_of_one_core: place.lowest_quota(group, None)?,
            vcpu_quota_permille: vcpu_quota,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::place::Mount;
    use super::*;
    use std::fs;

    /// Mount points in a folder, with a group `/vm` of this weight.
    fn mounts(folder: &Path, weight: &str) -> Mounts {
        fs::create_dir_all(folder.join("vm")).unwrap();
        fs::write(folder.join("vm/cpu.weight"), weight).unwrap();
        let mount = || Mount {
            root: "/".into(),
            point: folder.into(),
        };
        Mounts {
            cpu_v1: Some(mount()),
            v2: Some(mount()),
        }
    }

    #[test]
    fn limits_are_read_each_time_and_groups_when_the_vm_may_have_moved() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let start = Instant::now();
        let cached = || {
            GroupCache(Some(Membership {
                read_at: start,
                vcpus: vec![own],
                version: Version::V2,
                own: "/vm".into(),
                of_vcpus: BTreeSet::new(),
                has_weight: true,
            }))
        };
        let group = |cache: &mut GroupCache, mounts: &Mounts, vcpus: &[Tid], after: u64| {
            let now = start + Duration::from_secs(after);
            let cgroup = cache.refresh(mounts, own, vcpus, now).unwrap().unwrap();
            (cgroup.path == "/vm", cgroup.weight)
        };
        let mut cache = cached();
        for weight in [50, 200] {
            let mounts = mounts(dir.path(), &weight.to_string());
            let scaled = Some(weight * 256 / 100);
            assert_eq!(group(&mut cache, &mounts, &[own], 9), (true, scaled));
        }
        let mounts = mounts(dir.path(), "100");
        assert!(!group(&mut cached(), &mounts, &[own], 10).0, "in time");
        assert!(!group(&mut cached(), &mounts, &[own, 1], 0).0, "new thread");
        fs::remove_dir_all(dir.path().join("vm")).unwrap();
        assert!(!group(&mut cached(), &mounts, &[own], 0).0, "it is gone");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Which file systems hold the data directories, and whether they are still what they were.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use viola_proto::agent::{FsId, Why};

use super::host::random;
use super::volume::{Identity, Volume};
use super::{Agent, FROZEN, Millis};
use crate::core::block::After;
use crate::io::mounts::{self, Mount};
use crate::io::worker::Job;
use crate::pipe::Uses;

/// Mounts are looked at so often.
const OFTEN: Millis = 1000;

/// A mount of interest.
#[derive(Debug)]
struct Place {
    mount: Mount,
    /// Its data directories.
    data: Vec<PathBuf>,
    /// What pipes may do there.
    uses: Uses,
}

/// Why a directory is named in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    Blocks,
    Reading,
    Writing,
}

impl Agent {
    /// Looks at the mounts, starts and retires volumes, starts scans.
    pub(super) fn survey(&mut self, now: Millis) {
        if self.survey_at <= now {
            self.survey_at = now + OFTEN;
            let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            let mounts = mounts::parse(&text);
            self.missing.clear();
            let places = self.places(&mounts);
            for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
                self.look_at(now, fs, &places);
            }
            if self.ends.is_none() {
                self.start_new(now, places);
            }
            let ledger = &self.ledger;
            self.volumes
                .retain(|fs, v| !v.retiring || !ledger.of_fs(*fs).is_empty());
        }
        for volume in self.volumes.values_mut() {
            if !volume.scanning && !volume.retiring && volume.scan_at <= now {
                volume.scan_at = now + self.config.rescan_s * 1000;
                volume.scanning = volume.workers.scan(volume.data.clone()).is_ok();
            }
        }
    }

    /// The mounts with data directories or files to be piped.
    fn places(&mut self, mounts: &[Mount]) -> BTreeMap<u64, Place> {
        let mut places = BTreeMap::<u64, Place>::new();
        let none: &[PathBuf] = &[];
        let (from, into) = match self.config.pipes() {
            Some(pipe) => (pipe.files.as_slice(), pipe.into.as_slice()),
            None => (none, none),
        };
        let data = self.config.data.iter().map(|path| (path, For::Blocks));
        // of such a file system nothing but the disk is of interest
        let piped = from.iter().map(|path| (path, For::Reading));
        let piped = piped.chain(into.iter().map(|path| (path, For::Writing)));
        for (path, what) in data.chain(piped) {
            let found = place(mounts, path).and_then(|(mount, path)| {
                if what == For::Writing && mount.kind != "ext4" {
                    return Err(format!("it is on {}; only ext4 is written to", mount.kind));
                }
                // its folder of links and its events would be those of the other mount
                let other = places
                    .values()
                    .map(|other| &other.mount)
                    .find(|other| other.device == mount.device && other.id != mount.id);
                match other {
                    None => Ok((mount, path)),
                    Some(other) => Err(format!(
                        "its file system is mounted at {} too; name both directories by one mount",
                        other.point.display()
                    )),
                }
            });
            match found {
                Ok((mount, path)) => {
                    let place = places.entry(mount.id).or_insert_with(|| Place {
                        mount: mount.clone(),
                        data: Vec::new(),
                        uses: Uses::default(),
                    });
                    match what {
                        For::Blocks => place.data.push(path),
                        For::Reading => place.uses.from = true,
                        For::Writing => place.uses.into = true,
                    }
                }
                Err(why) => self.missing.push(format!("{}: {why}", path.display())),
            }
        }
        places
    }

    /// A volume that is there: is it still the same?
    fn look_at(&mut self, now: Millis, fs: FsId, places: &BTreeMap<u64, Place>) {
        let Some(volume) = self.volumes.get_mut(&fs).filter(|v| !v.retiring) else {
            return;
        };
        let stuck = volume.workers.stuck(now) >= FROZEN;
        let thawed = volume.frozen && !stuck;
        volume.frozen = stuck;
        let is = places.get(&volume.mount.id);
        volume.uses = is.map_or(Uses::default(), |place| place.uses);
        let (mount, data) = match is {
            Some(place) if place.mount.point == volume.mount.point => (&place.mount, &place.data),
            _ => {
                volume.retiring = true;
                eprintln!(
                    "viola-agent: {}: not mounted any more",
                    volume.mount.point.display()
                );
                return self.withdraw_all(now, fs, After::Forget, Why::Filesystem);
            }
        };
        if *data != volume.data {
            if volume.data.is_empty()
                && let Err(e) = self.watch.add(&mount.point)
            {
                let path = mount.point.display();
                return self.missing.push(format!("{path}: cannot be watched: {e}"));
            }
            volume.data.clone_from(data);
            volume.scan_at = now;
        }
        let identity = Identity::of(&mount.point).unwrap_or(volume.identity);
        let why = if mount.options != volume.mount.options {
            "mounted with other options"
        } else if identity != volume.identity {
            "resized"
        } else if stuck && !thawed && volume.proof != super::Proof::None {
            "frozen, or too slow"
        } else {
            return;
        };
        eprintln!("viola-agent: {}: {why}", mount.point.display());
        volume.mount = mount.clone();
        volume.identity = identity;
        self.withdraw_all(now, fs, After::Again, Why::Filesystem);
    }

    /// Mounts that are not watched yet. One whose directories or file system an old volume still holds
    /// has to wait until the host has let go of that.
    fn start_new(&mut self, now: Millis, places: BTreeMap<u64, Place>) {
        for (id, Place { mount, data, uses }) in places {
            let taken = |v: &Volume| {
                v.mount.id == id
                    || v.mount.device == mount.device
                    || v.data.iter().any(|d| data.contains(d))
            };
            if self.volumes.values().any(taken) {
                continue;
            }
            let point = mount.point.clone();
            let started = Identity::of(&point).and_then(|identity| {
                // what only the host sends is watched by leases
                if !data.is_empty() {
                    self.watch.add(&point)?;
                }
                let fs = self.next_fs;
                let volume = Volume::start(
                    fs,
                    mount,
                    identity,
                    (data, uses),
                    &self.report,
                    random(),
                    now,
                )?;
                self.next_fs += 1;
                if self.session.open() {
                    // no lease of an earlier session or mount is left, see above
                    volume.workers.give(Job::Earlier(true));
                }
                self.volumes.insert(fs, volume);
                Ok(fs)
            });
            match started {
                Ok(_) => eprintln!("viola-agent: {}: watched", point.display()),
                Err(e) => self
                    .missing
                    .push(format!("{}: cannot be watched: {e}", point.display())),
            }
        }
    }
}

/// The mount that holds a directory, and the directory without links in its path.
fn place<'a>(mounts: &'a [Mount], path: &Path) -> Result<(&'a Mount, PathBuf), String> {
    let real = path.canonicalize().map_err(|e| e.to_string())?;
    let mount = mounts::holding(mounts, &real).ok_or("no mount holds it")?;
    if !matches!(mount.kind.as_str(), "ext4" | "xfs") {
        return Err(format!(
            "it is on {}; only what is on ext4 and XFS can be named",
            mount.kind
        ));
    }
    Ok((mount, real))
}

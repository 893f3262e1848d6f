// SPDX-License-Identifier: Apache-2.0
//! A running lab.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::cgroup::Controller;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::holder::{Holder, in_netns};
use crate::netns_host::NetnsHost;
use crate::paths::Paths;
use crate::qemu::{Accel, Image, check_kvm};
use crate::spec::{Spec, Vmm};
use crate::start::start;
use crate::state::{self, RunDir};
use crate::uml;

/// Guests and their network, running until [`Lab::down`] or a drop. If the process is killed, the
/// kernel ends the guests.
pub struct Lab {
    spec: Spec,
    // dropped in this order: the guests, the thread that is their parent, the folder
    guests: Vec<Guest>,
    holder: Holder,
    run: Mutex<RunDir>,
    folder: PathBuf,
}

impl Lab {
    /// Sets up the network, boots all guests and starts their workloads.
    ///
    /// Takes about a second. Needs root. Removes first what an earlier lab of this name left.
    ///
    /// # Errors
    /// [`Error::AlreadyRunning`] if a lab of this name runs; else the error of the failed step.
    /// Everything made until then is removed.
    pub fn up(spec: &Spec, paths: &Paths) -> Result<Self> {
        Self::up_with(spec, paths, &mut |_| ())
    }

    /// As [`Lab::up`], in the network of a [`NetnsHost`]. A bridge that exists there is used as it
    /// is. NICs of two labs in one host must not have the same numbers.
    ///
    /// # Errors
    /// As [`Lab::up`].
    pub fn up_in(host: &NetnsHost, spec: &Spec, paths: &Paths) -> Result<Self> {
        Self::up_at(spec, paths, Some(host), &mut |_| ())
    }

    /// As [`Lab::up`]; passes each step to `progress`.
    ///
    /// # Errors
    /// As [`Lab::up`].
    pub fn up_with(spec: &Spec, paths: &Paths, progress: &mut dyn FnMut(&str)) -> Result<Self> {
        Self::up_at(spec, paths, None, progress)
    }

    fn up_at(
        spec: &Spec,
        paths: &Paths,
        host: Option<&NetnsHost>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self> {
        spec.check()?;
        check_memory(spec)?;
        let run = RunDir::create(&paths.run, &spec.name)?;
        let folder = run.path().to_path_buf();
        let spec = &with_accel(spec, paths, &folder, progress)?;
        let holder = Holder::start(spec, host.map(NetnsHost::netns))?;
        progress(&format!(
            "network: {}",
            spec.bridges
                .iter()
                .map(|b| format!("{} {b}", b.name))
                .collect::<Vec<_>>()
                .join(", ")
        ));
        let mut lab = Self {
            spec: spec.clone(),
            guests: Vec::new(),
            holder,
            run: Mutex::new(run),
            folder,
        };
        lab.record(|state| state.netns = lab.holder.path().to_owned())?;
        for index in 0..spec.guests.len() {
            lab.start_guest(index, paths)?;
        }
        for guest in &lab.guests {
            guest.wait_boot(0)?;
            guest.start_workloads()?;
            let address = guest.address().map(|a| a.to_string()).unwrap_or_default();
            progress(&format!(
                "{}: up, pid {}, {address}",
                guest.name(),
                guest.pid()
            ));
        }
        Ok(lab)
    }

    fn start_guest(&mut self, index: usize, paths: &Paths) -> Result<()> {
        let spec = self.spec.guests[index].clone();
        if let Some((controller, _)) = Controller::of_guest(&self.spec.vmm, &spec)? {
            let group = controller.group(&self.spec.name, &spec.name);
            // recorded before it is created: a kill at any moment leaves nothing unknown
            self.record(|state| state.cgroups.push(group))?;
        }
        let (lab, vmm) = (self.spec.name.clone(), self.spec.vmm.clone());
        let (paths, folder, of) = (paths.clone(), self.folder.clone(), spec.clone());
        let started = self
            .holder
            .run(move || start(&lab, index, &of, &vmm, &paths, &folder))??;
        let guest = Guest::new(spec, started)?;
        let (name, id) = (guest.name().to_owned(), guest.id());
        self.guests.push(guest);
        self.record(|state| state.guests.push((name, id)))
    }

    fn record(&self, change: impl FnOnce(&mut state::State)) -> Result<()> {
        self.run
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .update(change)
    }

    /// Its description.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its folder below /run, with the guests' consoles and `uml/`, their management sockets.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All guests, in the order of the description.
    pub fn guests(&self) -> &[Guest] {
        &self.guests
    }

    /// The guest of this name.
    ///
    /// # Errors
    /// [`Error::NoGuest`].
    pub fn guest(&self, name: &str) -> Result<&Guest> {
        self.guests
            .iter()
            .find(|g| g.name() == name)
            .ok_or_else(|| Error::NoGuest {
                lab: self.spec.name.clone(),
                guest: name.into(),
                has: self
                    .guests
                    .iter()
                    .map(Guest::name)
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// The lab's network namespace.
    pub fn netns(&self) -> BorrowedFd<'_> {
        self.holder.netns().as_fd()
    }

    /// Runs `job` on a fresh thread inside the lab's network namespace. Sockets that it opens are
    /// on the host side of the lab's bridges.
    ///
    /// # Errors
    /// [`Error::Net`] if the thread cannot enter the namespace.
    pub fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T> {
        in_netns(self.holder.netns(), job)
    }

    /// Powers all guests off and removes the lab.
    ///
    /// # Errors
    /// [`Error::Guest`] if a guest had to be killed; the lab is removed all the same.
    pub fn down(self) -> Result<()> {
        self.shutdown_guests()
    }

    /// Powers all guests off in parallel.
    pub(crate) fn shutdown_guests(&self) -> Result<()> {
        let ends: Vec<Result<()>> = std::thread::scope(|scope| {
            let ends: Vec<_> = self
                .guests
                .iter()
                .map(|guest| scope.spawn(|| guest.shutdown()))
                .collect();
            let gone = |_| Err(Error::Ended(self.spec.name.clone()));
            ends.into_iter()
                .map(|end| end.join().unwrap_or_else(gone))
                .collect()
        });
        ends.into_iter().collect()
    }

    /// Kills the guests and removes cgroups and folder.
    pub(crate) fn remove(&self) {
        std::thread::scope(|scope| {
            for guest in &self.guests {
                scope.spawn(|| guest.kill());
            }
        });
        let run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        state::clear(run.state());
        run.remove();
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The description with what runs the instructions of its QEMU guests.
fn with_accel(
    spec: &Spec,
    paths: &Paths,
    folder: &Path,
    progress: &mut dyn FnMut(&str),
) -> Result<Spec> {
    let mut spec = spec.clone();
    if let Vmm::Qemu(qemu) = &mut spec.vmm
        && qemu.accel.is_none()
    {
        let image = Image::find_from([paths.image.as_path()], "cloud")?;
        qemu.accel = Some(match check_kvm(&image, folder) {
            Ok(()) => Accel::Kvm,
            Err(why) => {
                progress(&format!("the guests are emulated: {why}"));
                Accel::Tcg
            }
        });
    }
    Ok(spec)
}

/// Checks that the guests' memory fits into the host's memory file system, or into the host's memory.
fn check_memory(spec: &Spec) -> Result<()> {
    let needed: u64 = spec.guests.iter().map(|g| g.memory).sum();
    let (of, free) = match spec.vmm {
        Vmm::Uml => {
            let room = rustix::fs::statvfs(uml::MEMORY)
                .map_err(|e| Error::io("read its free space", uml::MEMORY)(e.into()))?;
            (uml::MEMORY, room.f_bavail.saturating_mul(room.f_frsize))
        }
        Vmm::Qemu(_) => ("this host", available_memory()?),
    };
    if needed > free {
        let what = format!(
            "the guests need {} MiB, but {of} has {} MiB free; give them less memory or enlarge it",
            needed >> 20,
            free >> 20
        );
        return Err(Error::Spec {
            origin: format!("lab `{}`", spec.name),
            what,
        });
    }
    Ok(())
}

/// Memory of the host that programs can have, in bytes.
fn available_memory() -> Result<u64> {
    let file = "/proc/meminfo";
    let text = std::fs::read_to_string(file).map_err(Error::io("read", file))?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    let unknown = || Error::io("read", file)(std::io::Error::other("no line MemAvailable"));
    kib.map(|kib| kib << 10).ok_or_else(unknown)
}

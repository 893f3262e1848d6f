// SPDX-License-Identifier: Apache-2.0
//! The guests: what each has for the roles that it gets, and the programs that run in it all the time.

use std::path::Path;

use viola_lab::hadoop::{Client, FileSystem, Hadoop, Hdfs, Options, make_disk};
use viola_lab::load::Http;
use viola_lab::{Guest, Paths, Spec};

use super::PHASES;
use super::roles::{Role, VMS};
use crate::harness::calendar::{self, Calendar};
use crate::harness::folder::Folder;
use crate::harness::guests::{self, Guests};
use crate::harness::side::lab_failure;
use crate::harness::vmm::GuestKind;
use viola_cli::error::{Failure, Outcome};

/// File of a DataNode that another guest reads, bytes. The client and the DataNode have a ninth of a core each.
const FILE: u64 = 16 << 20;
const BLOCK: u64 = 128 << 20;
/// Size of a DataNode's disk, bytes.
const DISK: u64 = 512 << 20;

/// The running guests with their programs.
pub struct Bed {
    /// The guests.
    pub guests: Guests,
    calendars: Vec<(usize, Calendar)>,
    readers: Vec<(usize, Client)>,
    _folder: Folder,
}

/// Whether a guest has a role in any phase.
fn gets(guest: usize, role: Role) -> bool {
    (0..PHASES).any(|phase| Role::of(guest, phase) == role)
}

/// The guests that get a role, by their index.
fn all_that_get(role: Role) -> impl Iterator<Item = usize> {
    (0..VMS).filter(move |guest| gets(*guest, role))
}

/// Path of the file that a DataNode's guest keeps.
fn file_of(guest: usize) -> String {
    format!("/of-{guest}")
}

impl Bed {
    /// Boots the guests on a core, and starts their programs. Only UML guests have HDFS.
    ///
    /// # Errors
    /// An image cannot be made, or a guest or a program does not start.
    pub fn boot(core: usize, kind: GuestKind) -> Outcome<Self> {
        let folder = Folder::new(format!("/dev/shm/viola-bench.{}", std::process::id()).into())?;
        let paths = Paths::find_from([Path::new(".")]).map_err(lab_failure)?;
        let has_hdfs = kind == GuestKind::Uml;
        for guest in all_that_get(Role::Calendar) {
            calendar::disk(&folder.0.join(calendar_image(guest)), &paths.image)?;
        }
        for guest in all_that_get(Role::DataNode).filter(|_| has_hdfs) {
            let image = folder.0.join(data_image(guest));
            make_disk(&image, FileSystem::Ext4, DISK).map_err(lab_failure)?;
        }
        let text = text(core, kind, has_hdfs);
        let spec = Spec::from_toml(&text, "bench-mixed", &folder.0).map_err(lab_failure)?;
        let mut bed = Self {
            guests: guests::boot_spec(&spec, core)?,
            calendars: Vec::new(),
            readers: Vec::new(),
            _folder: folder,
        };
        for at in all_that_get(Role::Calendar) {
            let guest = &bed.guests.lab.guests()[at];
            let address = guest.address().ok_or_else(no_network)?;
            let (lab, folder) = (&bed.guests.lab, &bed._folder.0);
            let calendar = Calendar::start(lab, guest, address, &kind.disk(0), folder)?;
            bed.calendars.push((at, calendar));
        }
        if has_hdfs {
            bed.readers = start_hdfs(&bed.guests)?;
        }
        Ok(bed)
    }

    /// The guest that has a role in a phase.
    pub fn guest(&self, role: Role, phase: usize) -> Outcome<&Guest> {
        let guest = super::roles::with_role(&self.guests, phase, role).next();
        guest.ok_or_else(|| Failure::run("no guest has this role"))
    }

    /// A request for a page of the calendar in a phase.
    pub fn calendar_page(&self, phase: usize) -> Outcome<Http> {
        let of = |(at, _): &&(usize, Calendar)| Role::of(*at, phase) == Role::Calendar;
        match self.calendars.iter().find(of) {
            Some((_, calendar)) => calendar.page(&self.guests.lab),
            None => Err(Failure::run("no guest has a calendar")),
        }
    }

    /// The guests; and, if they have HDFS, the client of a phase with the file that it reads.
    pub fn parts(&mut self, phase: usize) -> (&Guests, Option<(&mut Client, String)>) {
        let node = all_that_get(Role::DataNode).find(|at| Role::of(*at, phase) == Role::DataNode);
        let reader = self
            .readers
            .iter_mut()
            .find(|(at, _)| Role::of(*at, phase) == Role::Reader);
        let reader = reader
            .zip(node)
            .map(|((_, client), node)| (client, file_of(node)));
        (&self.guests, reader)
    }

    /// Shuts the guests down.
    ///
    /// # Errors
    /// A guest did not power off and was killed.
    pub fn down(self) -> Outcome {
        drop(self.readers);
        self.guests.down()
    }
}

/// The failure of a load to a guest without a network.
pub fn no_network() -> Failure {
    Failure::run("a guest has no network")
}

fn calendar_image(guest: usize) -> String {
    format!("calendar-{guest}.img")
}

fn data_image(guest: usize) -> String {
    format!("data-{guest}.img")
}

/// The lab's description. The images lie beside it.
fn text(core: usize, kind: GuestKind, has_hdfs: bool) -> String {
    let mut text = format!("[lab]\nname = \"bench-mixed\"\n{}", kind.lab_keys());
    for (at, name) in guests::names(VMS).into_iter().enumerate() {
        text.push_str(&format!(
            "\n[[guest]]\nname = \"{name}\"\ncores = [{core}]\n"
        ));
        if gets(at, Role::Calendar) {
            let image = calendar_image(at);
            text.push_str(&format!(
                "memory = \"192M\"\ndisks = [{{ image = {image:?} }}]\n"
            ));
        } else if has_hdfs && gets(at, Role::DataNode) {
            let image = data_image(at);
            text.push_str(&format!(
                "memory = \"2G\"\ndisks = [{{ image = {image:?} }}]\n"
            ));
        }
        let servers = [
            (Role::Pages, "{ kind = \"nginx\" }"),
            (Role::Voice, "{ kind = \"media\" }"),
        ];
        let servers = servers.iter().filter(|(role, _)| gets(at, *role));
        let servers: Vec<&str> = servers.map(|(_, workload)| *workload).collect();
        text.push_str(&format!("workloads = [{}]\n", servers.join(", ")));
    }
    text
}

/// A DataNode in each guest that gets that role, one NameNode, and a client in each. Each client's file is on the DataNode of its own
/// guest: HDFS writes the first copy there.
fn start_hdfs(guests: &Guests) -> Outcome<Vec<(usize, Client)>> {
    let hadoop = Hadoop::find().map_err(lab_failure)?;
    let lab = &guests.lab;
    let nodes: Vec<usize> = all_that_get(Role::DataNode).collect();
    let [first, others @ ..] = nodes.as_slice() else {
        return Err(Failure::run("no guest gets a DataNode"));
    };
    let options = Options::default();
    let mut hdfs = Hdfs::start(&hadoop, &lab.guests()[*first], &options).map_err(lab_failure)?;
    for other in others {
        let guest = &lab.guests()[*other];
        hdfs.join(guest, &options).map_err(lab_failure)?;
    }
    let mut readers = Vec::new();
    for at in nodes {
        let mut client = hdfs.client(lab, &lab.guests()[at]).map_err(lab_failure)?;
        let file = file_of(at);
        for request in [
            "open stock".to_owned(),
            format!("stock write {file} {FILE} {BLOCK} 1"),
        ] {
            client.ask(&request).map_err(lab_failure)?;
        }
        let found = guests::shell(
            &lab.guests()[at],
            "find /mnt/data -name 'blk_*' ! -name '*.meta' | wc -l",
        )?;
        if found.stdout.trim() != "1" {
            let name = lab.guests()[at].name();
            return Err(Failure::run(format!(
                "guest {name} has {} blocks of HDFS, not 1",
                found.stdout.trim()
            )));
        }
        readers.push((at, client));
    }
    Ok(readers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_guest_has_what_its_roles_need() {
        let folder = tempfile::tempdir().unwrap();
        for guest in 0..VMS {
            for image in [calendar_image(guest), data_image(guest)] {
                std::fs::write(folder.path().join(image), "").unwrap();
            }
        }
        for kind in [GuestKind::Uml, GuestKind::Kvm] {
            let text = text(1, kind, kind == GuestKind::Uml);
            let spec = Spec::from_toml(&text, "mixed", folder.path()).unwrap();
            assert_eq!(spec.guests.len(), VMS);
            for (at, guest) in spec.guests.iter().enumerate() {
                let disks = match at % 3 {
                    0 => 0,
                    1 => usize::from(kind == GuestKind::Uml),
                    _ => 1,
                };
                assert_eq!(
                    (guest.disks.len(), guest.name.as_str()),
                    (disks, names()[at].as_str())
                );
            }
        }
        for phase in 0..PHASES {
            let [node, reader] = [Role::DataNode, Role::Reader]
                .map(|role| all_that_get(role).find(|at| Role::of(*at, phase) == role));
            assert!(node.is_some() && reader.is_some() && node != reader);
        }
    }

    fn names() -> Vec<String> {
        guests::names(VMS)
    }
}

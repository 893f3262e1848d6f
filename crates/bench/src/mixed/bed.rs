// SPDX-License-Identifier: Apache-2.0
//! The guests: what each has for the roles that it gets, and the programs that run in it all the time.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;

use viola_lab::hadoop::{Client, FileSystem, Hadoop, Hdfs, Options, make_disk};
use viola_lab::load::Http;
use viola_lab::{Paths, Spec};

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
    /// By guest: a request for a page of its calendar.
    pages: BTreeMap<usize, Http>,
    /// By guest: its client of HDFS. Empty without HDFS.
    readers: BTreeMap<usize, Client>,
    /// Holds the images.
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
        make_calendars(&folder.0, &paths.image)?;
        for guest in all_that_get(Role::DataNode).filter(|_| has_hdfs) {
            let image = folder.0.join(data_image(guest));
            make_disk(&image, FileSystem::Ext4, DISK).map_err(lab_failure)?;
        }
        let text = text(core, kind, has_hdfs);
        let spec = Spec::from_toml(&text, "bench-mixed", &folder.0).map_err(lab_failure)?;
        let guests = guests::boot_spec(&spec, core)?;
        let mut pages = BTreeMap::new();
        for at in all_that_get(Role::Calendar) {
            let guest = &guests.lab.guests()[at];
            let (address, device) = (guests::address(guest)?, kind.disk(0));
            let calendar = Calendar::start(&guests.lab, guest, address, &device, &folder.0)?;
            pages.insert(at, calendar.page(&guests.lab)?);
        }
        let readers = match has_hdfs {
            true => start_hdfs(&guests)?,
            false => BTreeMap::new(),
        };
        Ok(Self {
            guests,
            pages,
            readers,
            _folder: folder,
        })
    }

    /// The address of the guest that has a role in a phase.
    pub fn address(&self, role: Role, phase: usize) -> Outcome<Ipv4Addr> {
        guests::address(&self.guests.lab.guests()[role.guest(phase)?])
    }

    /// A request for a page of the calendar in a phase.
    pub fn calendar_page(&self, phase: usize) -> Outcome<Http> {
        let page = self.pages.get(&Role::Calendar.guest(phase)?);
        page.cloned()
            .ok_or_else(|| Failure::run("the guest has no calendar"))
    }

    /// The guests; and, if they have HDFS, the client of a phase with the file that it reads.
    pub fn parts(&mut self, phase: usize) -> Outcome<(&Guests, Option<(&mut Client, String)>)> {
        let reader = self.readers.get_mut(&Role::Reader.guest(phase)?);
        let file = file_of(Role::DataNode.guest(phase)?);
        Ok((&self.guests, reader.map(|client| (client, file))))
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

fn calendar_image(guest: usize) -> String {
    format!("calendar-{guest}.img")
}

fn data_image(guest: usize) -> String {
    format!("data-{guest}.img")
}

/// A disk with the site and its database for each guest that gets a calendar; all are alike.
fn make_calendars(folder: &Path, image: &Path) -> Outcome {
    let calendars = all_that_get(Role::Calendar);
    let mut disks = calendars.map(|guest| folder.join(calendar_image(guest)));
    let Some(first) = disks.next() else {
        return Ok(());
    };
    calendar::disk(&first, image)?;
    for disk in disks {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", disk.display()));
        std::fs::copy(&first, &disk).map_err(failed)?;
    }
    Ok(())
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
fn start_hdfs(guests: &Guests) -> Outcome<BTreeMap<usize, Client>> {
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
    let mut readers = BTreeMap::new();
    for at in nodes {
        let guest = &lab.guests()[at];
        let mut client = hdfs.client(lab, guest).map_err(lab_failure)?;
        let file = file_of(at);
        for request in [
            "open stock".to_owned(),
            format!("stock write {file} {FILE} {BLOCK} 1"),
        ] {
            client.ask(&request).map_err(lab_failure)?;
        }
        let count = "find /mnt/data -name 'blk_*' ! -name '*.meta' | wc -l";
        let found = guests::shell(guest, count)?.stdout;
        let found = found.trim();
        if found != "1" {
            let what = format!("guest {} has {found} blocks of HDFS, not 1", guest.name());
            return Err(Failure::run(what));
        }
        readers.insert(at, client);
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
        let names = guests::names(VMS);
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
                    (disks, names[at].as_str())
                );
            }
        }
        for phase in 0..PHASES {
            let [node, reader] =
                [Role::DataNode, Role::Reader].map(|role| role.guest(phase).unwrap());
            assert!(gets(node, Role::DataNode) && gets(reader, Role::DataNode) && node != reader);
        }
    }
}

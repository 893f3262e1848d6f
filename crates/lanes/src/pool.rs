// SPDX-License-Identifier: Apache-2.0
//! The VFs of a physical function, by sysfs.
//!
//! They are made once. A change of their number would take all of them away first, so that is never done while there are
//! any; one who wants more takes them off himself, when nobody holds one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::LaneError;

/// How long VFs may take to appear, and drivers to take one.
const SYSFS_TIMEOUT: Duration = Duration::from_secs(10);

/// A physical function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pf {
    /// Where sysfs is.
    sys: PathBuf,
    /// Name of its interface.
    pub name: String,
}

/// A VF of a PF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfDevice {
    /// Its PF.
    pub pf: Pf,
    /// Its number, from 0.
    pub index: u32,
    /// Its PCI address (`0000:01:10.0`).
    pub address: String,
}

impl Pf {
    /// The PF with this interface.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::at(Path::new("/sys"), name)
    }

    /// The same with sysfs elsewhere.
    #[must_use]
    pub fn at(sys: &Path, name: &str) -> Self {
        Self {
            sys: sys.to_owned(),
            name: name.to_owned(),
        }
    }

    fn device(&self) -> PathBuf {
        self.sys.join("class/net").join(&self.name).join("device")
    }

    fn bus(&self, address: &str) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address)
    }

    fn number(&self, file: &str) -> Result<u32, LaneError> {
        let path = self.device().join(file);
        let text = fs::read_to_string(&path).map_err(LaneError::file(&path))?;
        let odd = || io::Error::new(io::ErrorKind::InvalidData, "no number");
        let number = text.trim().parse().map_err(|_| odd());
        number.map_err(LaneError::file(&path))
    }

    /// VFs that there are.
    ///
    /// # Errors
    /// [`LaneError::File`], for a NIC without SR-IOV as well.
    pub fn num_vfs(&self) -> Result<u32, LaneError> {
        self.number("sriov_numvfs")
    }

    /// Sees to it that there are so many VFs: makes them if there are none.
    ///
    /// # Errors
    /// [`LaneError::TooFew`] when there are others already, or the NIC cannot have so many.
    pub fn ensure_vfs(&self, wanted: u32) -> Result<Vec<VfDevice>, LaneError> {
        let few = |available, remedy| LaneError::TooFewVfs {
            pf: self.name.clone(),
            available,
            wanted,
            remedy,
        };
        let available = self.num_vfs()?;
        if available == 0 {
            let total = self.number("sriov_totalvfs")?;
            if total < wanted {
                return Err(few(total, "it cannot have more"));
            }
            let path = self.device().join("sriov_numvfs");
            fs::write(&path, wanted.to_string()).map_err(LaneError::file(&path))?;
        } else if available < wanted {
            let remedy = "viola does not change their number while there are any; revoke all, write 0 to sriov_numvfs, \
                          or configure fewer";
            return Err(few(available, remedy));
        }
        let end = Instant::now() + SYSFS_TIMEOUT;
        loop {
            let mut vfs = self.vfs()?;
            if vfs.len() as u32 >= wanted {
                vfs.truncate(wanted as usize);
                return Ok(vfs);
            }
            if Instant::now() > end {
                return Err(few(vfs.len() as u32, "the others did not appear"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The VFs that there are, in order.
    ///
    /// # Errors
    /// [`LaneError::File`].
    pub fn vfs(&self) -> Result<Vec<VfDevice>, LaneError> {
        let folder = self.device();
        let entries = fs::read_dir(&folder).map_err(LaneError::file(&folder))?;
        let mut vfs = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let number = name.to_str().and_then(|n| n.strip_prefix("virtfn"));
            let Some(Ok(index)) = number.map(str::parse) else {
                continue;
            };
            let target = fs::read_link(entry.path()).map_err(LaneError::file(&entry.path()))?;
            let address = target.file_name().and_then(|n| n.to_str());
            if let Some(address) = address {
                vfs.push(VfDevice {
                    pf: self.clone(),
                    index,
                    address: address.to_owned(),
                });
            }
        }
        vfs.sort_by_key(|p| p.index);
        Ok(vfs)
    }

    /// The driver that has a VF.
    #[must_use]
    pub fn driver(&self, address: &str) -> Option<String> {
        let target = fs::read_link(self.bus(address).join("driver")).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// The IOMMU group of a VF; none without an IOMMU.
    #[must_use]
    pub fn iommu_group(&self, address: &str) -> Option<u32> {
        let target = fs::read_link(self.bus(address).join("iommu_group")).ok()?;
        target.file_name()?.to_str()?.parse().ok()
    }

    /// Whether the VF is there at all.
    #[must_use]
    pub fn has_vf(&self, address: &str) -> bool {
        self.bus(address).exists()
    }

    /// Gives a VF to a driver, or with `None` to whichever the kernel knows for it. What has it already keeps it, unless
    /// `anew`.
    ///
    /// # Errors
    /// [`LaneError::File`]; [`LaneError::Unfit`] when no driver took it.
    pub fn bind(&self, address: &str, driver: Option<&str>, rebind: bool) -> Result<(), LaneError> {
        let device = self.bus(address);
        let has = self.driver(address);
        let fits = match (&has, driver) {
            (Some(has), Some(wanted)) => has == wanted,
            (Some(has), None) => has != "vfio-pci",
            (None, _) => false,
        };
        if fits && !rebind {
            return Ok(());
        }
        let write =
            |path: PathBuf, text: &str| fs::write(&path, text).map_err(LaneError::file(&path));
        // an end of line alone takes the wish away
        write(device.join("driver_override"), driver.unwrap_or("\n"))?;
        if has.is_some() {
            write(device.join("driver/unbind"), address)?;
        }
        write(self.sys.join("bus/pci/drivers_probe"), address)?;
        let end = Instant::now() + SYSFS_TIMEOUT;
        loop {
            match (self.driver(address), driver) {
                (Some(has), Some(wanted)) if has == wanted => return Ok(()),
                (Some(has), None) if has != "vfio-pci" => return Ok(()),
                _ if Instant::now() > end => {
                    let wanted = driver.unwrap_or("a driver");
                    let what = format!("{wanted} has not taken {address}; is its module loaded?");
                    return Err(LaneError::Unusable(what));
                }
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A tree of files as sysfs has them, with VFs made so far.
    fn tree(total: u32, made: u32) -> (tempfile::TempDir, Pf) {
        let top = tempfile::tempdir().unwrap();
        let bus = top.path().join("bus/pci/devices");
        let device = bus.join("0000:01:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(top.path().join("class/net/p0")).unwrap();
        symlink(&device, top.path().join("class/net/p0/device")).unwrap();
        fs::write(device.join("sriov_totalvfs"), format!("{total}\n")).unwrap();
        fs::write(device.join("sriov_numvfs"), format!("{made}\n")).unwrap();
        for i in 0..made {
            let address = format!("0000:01:10.{i}");
            fs::create_dir_all(bus.join(&address)).unwrap();
            symlink(format!("../{address}"), device.join(format!("virtfn{i}"))).unwrap();
        }
        let pf = Pf::at(top.path(), "p0");
        (top, pf)
    }

    #[test]
    fn vfs_that_are_there_are_taken_as_they_are() {
        let (_top, pf) = tree(7, 4);
        let vfs = pf.ensure_vfs(3).unwrap();
        assert_eq!(vfs.len(), 3);
        assert_eq!((vfs[2].index, vfs[2].address.as_str()), (2, "0000:01:10.2"));
        assert_eq!(pf.num_vfs().unwrap(), 4);
    }

    #[test]
    fn their_number_is_never_changed_while_there_are_any() {
        let (_top, pf) = tree(7, 4);
        let said = pf.ensure_vfs(6).unwrap_err().to_string();
        assert!(
            said.starts_with("p0 has 4 VFs, but 6 are configured: viola does not change"),
            "{said}"
        );
        assert_eq!(pf.num_vfs().unwrap(), 4);
        let (_top, pf) = tree(7, 0);
        let said = pf.ensure_vfs(8).unwrap_err().to_string();
        assert_eq!(
            said,
            "p0 has 7 VFs, but 8 are configured: it cannot have more"
        );
        assert_eq!(pf.num_vfs().unwrap(), 0);
    }

    #[test]
    fn a_nic_without_vfs_is_said_by_its_file() {
        let top = tempfile::tempdir().unwrap();
        let said = Pf::at(top.path(), "p0").num_vfs().unwrap_err().to_string();
        assert!(said.contains("p0/device/sriov_numvfs"), "{said}");
    }

    #[test]
    fn a_driver_that_has_it_keeps_it() {
        let (top, pf) = tree(7, 1);
        let driver = top.path().join("bus/pci/drivers/vfio-pci");
        fs::create_dir_all(&driver).unwrap();
        let device = top.path().join("bus/pci/devices/0000:01:10.0");
        symlink(&driver, device.join("driver")).unwrap();
        assert_eq!(pf.driver("0000:01:10.0").as_deref(), Some("vfio-pci"));
        pf.bind("0000:01:10.0", Some("vfio-pci"), false).unwrap();
        assert!(!device.join("driver_override").exists());
        assert_eq!(pf.iommu_group("0000:01:10.0"), None);
    }
}

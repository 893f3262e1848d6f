// SPDX-License-Identifier: Apache-2.0
//! The VFs of a physical function, by sysfs (kernel Documentation/PCI/pci-iov-howto).
//!
//! viola creates VFs once and never changes their number: the kernel would remove all VFs first. An
//! operator who wants more removes them by hand while no guest has one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::LaneError;

/// Time limit for VFs to appear, and for a driver to take a VF.
const SYSFS_TIMEOUT: Duration = Duration::from_secs(10);

/// A physical function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pf {
    /// Root of sysfs.
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
    /// The PF of this interface.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::at(Path::new("/sys"), name)
    }

    /// The same with another root of sysfs.
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
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a number");
        let number = text.trim().parse().map_err(|_| invalid());
        number.map_err(LaneError::file(&path))
    }

    /// The largest number of VFs that it can have.
    ///
    /// # Errors
    /// [`LaneError::File`], also for a NIC without SR-IOV.
    pub fn max_vfs(&self) -> Result<u32, LaneError> {
        self.number("sriov_totalvfs")
    }

    /// Number of VFs that exist.
    ///
    /// # Errors
    /// [`LaneError::File`], also for a NIC without SR-IOV.
    pub fn num_vfs(&self) -> Result<u32, LaneError> {
        self.number("sriov_numvfs")
    }

    /// Returns the first `wanted` VFs. Creates them if there are none.
    ///
    /// # Errors
    /// [`LaneError::TooFewVfs`] if some VFs exist but fewer than wanted, or the NIC cannot have so
    /// many.
    pub fn ensure_vfs(&self, wanted: u32) -> Result<Vec<VfDevice>, LaneError> {
        let few = |available, remedy| LaneError::TooFewVfs {
            pf: self.name.clone(),
            available,
            wanted,
            remedy,
        };
        let available = self.num_vfs()?;
        if available == 0 {
            let total = self.max_vfs()?;
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

    /// All VFs, ordered by number.
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

    /// Name of the driver that has a VF.
    #[must_use]
    pub fn driver(&self, address: &str) -> Option<String> {
        let target = fs::read_link(self.bus(address).join("driver")).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// The IOMMU group of a VF; `None` without an IOMMU.
    #[must_use]
    pub fn iommu_group(&self, address: &str) -> Option<u32> {
        let target = fs::read_link(self.bus(address).join("iommu_group")).ok()?;
        target.file_name()?.to_str()?.parse().ok()
    }

    /// Binds a VF to a driver, or with `None` to the one that the kernel chooses. Does nothing if
    /// the VF has that driver, unless `rebind`.
    ///
    /// # Errors
    /// [`LaneError::File`]; [`LaneError::Unusable`] if no driver took the VF.
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
        // an empty line removes the override
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
                    let what = format!("{wanted} did not bind to {address}; is its module loaded?");
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

    /// A tree of files as in sysfs, with `made` VFs of `total`.
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
    fn existing_vfs_are_used() {
        let (_top, pf) = tree(7, 4);
        let vfs = pf.ensure_vfs(3).unwrap();
        assert_eq!(vfs.len(), 3);
        assert_eq!((vfs[2].index, vfs[2].address.as_str()), (2, "0000:01:10.2"));
        assert_eq!(pf.num_vfs().unwrap(), 4);
    }

    #[test]
    fn the_number_of_vfs_is_never_changed() {
        let (_top, pf) = tree(7, 4);
        let error = pf.ensure_vfs(6).unwrap_err().to_string();
        assert!(
            error.starts_with("p0 has 4 VFs, but 6 are configured: viola does not change"),
            "{error}"
        );
        assert_eq!(pf.num_vfs().unwrap(), 4);
        let (_top, pf) = tree(7, 0);
        let error = pf.ensure_vfs(8).unwrap_err().to_string();
        assert_eq!(
            error,
            "p0 has 7 VFs, but 8 are configured: it cannot have more"
        );
        assert_eq!(pf.num_vfs().unwrap(), 0);
    }

    #[test]
    fn an_error_for_a_nic_without_sriov_names_the_file() {
        let top = tempfile::tempdir().unwrap();
        let error = Pf::at(top.path(), "p0").num_vfs().unwrap_err().to_string();
        assert!(error.contains("p0/device/sriov_numvfs"), "{error}");
    }

    #[test]
    fn bind_does_nothing_for_the_same_driver() {
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

// SPDX-License-Identifier: Apache-2.0
//! Where the guest image and the running labs' state are.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Folders that a lab uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// Guest image: holds `linux.uml` and `root/`.
    pub image: PathBuf,
    /// Holds one folder per running lab.
    pub run: PathBuf,
}

impl Paths {
    /// The image named by `VIOLA_LAB_IMAGE`, else `build/lab/current` in the working folder, the
    /// program's folder or one above either, else `/var/lib/viola/lab`; state in [`run_folder`].
    ///
    /// # Errors
    /// [`Error::NoImage`] with the first place looked at.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().ok();
        let folders = [std::env::current_dir().ok(), program];
        Self::find_from(folders.iter().flatten().map(PathBuf::as_path))
    }

    /// As [`Paths::find`], looking upwards from these folders.
    pub fn find_from<'a>(starts: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let run = run_folder();
        if let Some(image) = std::env::var_os("VIOLA_LAB_IMAGE") {
            return Self::with_image(Path::new(&image), run);
        }
        let mut first = None;
        let above = starts
            .into_iter()
            .flat_map(Path::ancestors)
            .map(|folder| folder.join("build/lab/current"));
        for image in above.chain([PathBuf::from("/var/lib/viola/lab/current")]) {
            match Self::with_image(&image, run.clone()) {
                Err(_) => first = first.or(Some(image)),
                found => return found,
            }
        }
        Err(Error::NoImage(first.unwrap_or_default()))
    }

    /// This image; symbolic links in its path are followed now, so that a running lab keeps the
    /// image it began with.
    pub fn with_image(image: &Path, run: PathBuf) -> Result<Self> {
        let missing = || Error::NoImage(image.to_path_buf());
        let real = image.canonicalize().map_err(|_| missing())?;
        if !real.join("linux.uml").is_file() || !real.join("root/usr/bin/viola-guest").is_file() {
            return Err(missing());
        }
        Ok(Self { image: real, run })
    }

    /// The kernel of a guest of so many vCPUs: the image's own for one. For several that which `VIOLA_LAB_SMP_KERNEL`
    /// names, else `uml-smp/linux.uml` beside the folder of the images.
    ///
    /// # Errors
    /// [`Error::NoSmpKernel`] with the place looked at.
    pub fn kernel(&self, cpus: u32) -> Result<PathBuf> {
        if cpus <= 1 {
            return Ok(self.image.join("linux.uml"));
        }
        let named = std::env::var_os("VIOLA_LAB_SMP_KERNEL").map(PathBuf::from);
        let kernel = named.unwrap_or_else(|| {
            // build/lab/images/HASH and build/uml-smp
            let build = self.image.ancestors().nth(3).unwrap_or(Path::new("/"));
            build.join("uml-smp/linux.uml")
        });
        match kernel.is_file() {
            true => Ok(kernel),
            false => Err(Error::NoSmpKernel(kernel)),
        }
    }
}

/// The folder named by `VIOLA_LAB_RUN`, else `/run/viola-lab` for root, else `$XDG_RUNTIME_DIR/viola-lab`, else one in the temporary folder.
pub fn run_folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("VIOLA_LAB_RUN") {
        return folder.into();
    }
    if rustix::process::geteuid().is_root() && Path::new("/run").is_dir() {
        return "/run/viola-lab".into();
    }
    std::env::var_os("XDG_RUNTIME_DIR")
        .map_or_else(std::env::temp_dir, PathBuf::from)
        .join("viola-lab")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_found_above_and_only_when_it_is_whole() {
        let top = tempfile::tempdir().unwrap();
        let image = top.path().join("build/lab/current");
        std::fs::create_dir_all(image.join("root/usr/bin")).unwrap();
        std::fs::write(image.join("linux.uml"), "").unwrap();
        let run = PathBuf::from("/r");
        assert!(matches!(
            Paths::with_image(&image, run.clone()),
            Err(Error::NoImage(_))
        ));
        std::fs::write(image.join("root/usr/bin/viola-guest"), "").unwrap();
        assert_eq!(
            Paths::with_image(&image, run).unwrap().image,
            image.canonicalize().unwrap()
        );
    }

    #[test]
    fn guests_with_several_vcpus_have_a_kernel_of_their_own() {
        let top = tempfile::tempdir().unwrap();
        let paths = Paths {
            image: top.path().join("build/lab/images/h"),
            run: "/r".into(),
        };
        assert_eq!(paths.kernel(1).unwrap(), paths.image.join("linux.uml"));
        let text = paths.kernel(2).unwrap_err().to_string();
        assert!(
            text.contains("build/uml-smp/linux.uml; run scripts/uml-smp.sh"),
            "{text}"
        );
        std::fs::create_dir_all(top.path().join("build/uml-smp")).unwrap();
        let kernel = top.path().join("build/uml-smp/linux.uml");
        std::fs::write(&kernel, "").unwrap();
        assert_eq!(paths.kernel(2).unwrap(), kernel);
    }
}

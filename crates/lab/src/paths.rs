// SPDX-License-Identifier: Apache-2.0
//! Locations of the guest image and of the running labs' state.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Folders of a lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    /// Folder of the guest image, with `linux.uml` and `root/`.
    pub image: PathBuf,
    /// Folder with one folder per running lab.
    pub run: PathBuf,
}

impl Paths {
    /// Finds the image: `VIOLA_LAB_IMAGE`, else `build/lab/current` in the working folder, the
    /// program's folder or a parent of either, else `/var/lib/viola/lab/current`. State is in
    /// [`run_folder`].
    ///
    /// # Errors
    /// [`Error::NoImage`] with the first place searched.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().ok();
        let folders = [std::env::current_dir().ok(), program];
        Self::find_from(folders.iter().flatten().map(PathBuf::as_path))
    }

    /// As [`Paths::find`], searching these folders and their parents.
    ///
    /// # Errors
    /// [`Error::NoImage`].
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

    /// Uses this image. Symbolic links in its path are resolved now, so that a running lab keeps
    /// the image that it started with.
    ///
    /// # Errors
    /// [`Error::NoImage`].
    pub fn with_image(image: &Path, run: PathBuf) -> Result<Self> {
        let missing = || Error::NoImage(image.to_path_buf());
        let real = image.canonicalize().map_err(|_| missing())?;
        if !real.join("linux.uml").is_file() || !real.join("root/usr/bin/viola-guest").is_file() {
            return Err(missing());
        }
        Ok(Self { image: real, run })
    }

    /// The kernel of a guest with `cpus` vCPUs. One vCPU: the image's kernel. Several:
    /// `VIOLA_LAB_SMP_KERNEL`, else `uml-smp/linux.uml` beside the folder of the images.
    ///
    /// # Errors
    /// [`Error::NoSmpKernel`] with the place searched.
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

/// Folder of running labs: `VIOLA_LAB_RUN`, else `/run/viola-lab` for root, else
/// `$XDG_RUNTIME_DIR/viola-lab`, else `viola-lab` in the temporary folder.
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
    fn an_incomplete_image_is_refused() {
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
    fn guests_with_several_vcpus_use_the_smp_kernel() {
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

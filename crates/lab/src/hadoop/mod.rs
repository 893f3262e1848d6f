// SPDX-License-Identifier: Apache-2.0
//! An unmodified HDFS in guests of a lab: NameNode and DataNode in one guest, clients in others.
//!
//! `scripts/hadoop.sh` makes the Hadoop that runs here. A guest's root has no Java: hostfs mounts
//! the host's `/usr`, its JDK and that Hadoop read-only, each at its own path below a new root in
//! the guest's memory.
//!
//! ```no_run
//! use viola_lab::hadoop::{FileSystem, Hadoop, Hdfs, Options};
//! use viola_lab::{Lab, Paths};
//!
//! let hadoop = Hadoop::find()?;
//! let spec = hadoop.spec("hdfs", &[1], "data.img".as_ref(), FileSystem::Ext4, 2 << 30)?;
//! let lab = Lab::up(&spec, &Paths::find()?)?;
//! let hdfs = Hdfs::start(&hadoop, lab.guest("node")?, &Options::default())?;
//! let mut client = hdfs.client(&lab, lab.guest("client")?)?;
//! client.ask("open stock")?;
//! client.ask("stock write /file 67108864 134217728 1")?;
//! # Ok::<(), viola_lab::Error>(())
//! ```

mod client;
mod config;
mod disk;
mod hbase;
mod hdfs;
mod local;
mod root;
mod stack;

pub use client::{Client, RequestStats};
pub use config::TOOLS_LOG;
pub use disk::{FileSystem, make as make_disk};
pub use hdfs::{Hdfs, Options};
pub use local::LocalHdfs;
pub use root::{ROOT, log};
pub use stack::JavaStack;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::spec::Spec;

/// The Hadoop in `build/hadoop` and the JDK that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hadoop {
    folder: PathBuf,
    java: PathBuf,
}

impl Hadoop {
    /// Finds `build/hadoop` in the working folder, the program's folder or a parent of either.
    ///
    /// # Errors
    /// [`Error::NoHadoop`] if it is missing.
    pub fn find() -> Result<Self> {
        let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
        Self::find_from(starts.iter().flatten().map(PathBuf::as_path))
    }

    /// As [`Hadoop::find`], searching these folders and their parents.
    ///
    /// # Errors
    /// [`Error::NoHadoop`] if it is missing.
    pub fn find_from<'a>(starts: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        starts
            .into_iter()
            .flat_map(Path::ancestors)
            .find_map(|above| Self::at(&above.join("build/hadoop")))
            .ok_or(Error::NoHadoop)
    }

    fn at(folder: &Path) -> Option<Self> {
        let folder = folder.canonicalize().ok()?;
        let java = folder.join("java").canonicalize().ok()?;
        let whole = folder.join("jars").is_dir()
            && folder.join("viola-hdfs.jar").is_file()
            && java.join("bin/java").is_file();
        whole.then_some(Self { folder, java })
    }

    /// Its folder, with `jars/`, `viola-hdfs.jar`, `viola-hdfs-tests.jar`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Home folder of the JDK.
    pub fn java(&self) -> &Path {
        &self.java
    }

    /// Host folders that Java needs beside `/usr`.
    fn folders(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.folder.clone()];
        // some distributions keep the JDK's configuration in /etc, linked from its home
        let conf = self.java.join("conf/net.properties").canonicalize();
        let conf = conf
            .ok()
            .and_then(|file| file.parent().map(Path::to_path_buf));
        for folder in [Some(self.java.clone()), conf].into_iter().flatten() {
            if !folder.starts_with("/usr") && !folders.iter().any(|f| folder.starts_with(f)) {
                folders.push(folder);
            }
        }
        folders
    }

    fn class_path(&self, conf: &str) -> String {
        self.class_parts(conf).join(":")
    }

    /// Parts of the class path: configuration, plug-in, benchmark client, Hadoop.
    fn class_parts(&self, conf: &str) -> [String; 4] {
        let of = |name: &str| format!("{}/{name}", self.folder.display());
        [
            conf.to_owned(),
            of("viola-hdfs.jar"),
            of("viola-hdfs-tests.jar"),
            of("jars/*"),
        ]
    }

    /// A lab of two guests on these cores: `node` with 2 GiB of memory and the disk `image`, a new
    /// file system of `size` bytes; and `client` with 1 GiB.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Spec`].
    pub fn spec(
        &self,
        name: &str,
        cores: &[usize],
        image: &Path,
        file_system: FileSystem,
        size: u64,
    ) -> Result<Spec> {
        disk::make(image, file_system, size)?;
        let image = std::path::absolute(image).map_err(Error::io("find", image))?;
        let text = format!(
            "[lab]\nname = {name:?}\n\
             [[guest]]\nname = \"node\"\ncores = {cores:?}\nmemory = \"2G\"\ndisks = [{{ image = {image:?} }}]\n\
             [[guest]]\nname = \"client\"\ncores = {cores:?}\nmemory = \"1G\"\n"
        );
        Spec::from_toml(&text, name, Path::new("."))
    }
}

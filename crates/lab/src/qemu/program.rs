// SPDX-License-Identifier: Apache-2.0
//! A host program for a QEMU guest, with the libraries that it needs.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::spec::VmSpec;
use super::vm::QemuVm;
use crate::error::{Error, Result};

/// Path of the program's loader in the guest.
const LOADER: &str = "/viola/lib/ld-linux-x86-64.so.2";

/// A program and its libraries in an archive, which is the guest's first disk.
#[derive(Debug)]
pub struct Program {
    name: String,
    archive: PathBuf,
}

impl Program {
    /// Packs a program without debugging symbols into an archive in `folder`.
    ///
    /// # Errors
    /// [`Error::Io`], also if ldd, strip, patchelf or tar fails.
    pub fn pack(program: &Path, folder: &Path) -> Result<Self> {
        Self::pack_with(program, &[], folder)
    }

    /// The same with further programs that have a loader and libraries of their own, as the UML
    /// kernel has. They have the same path in the guest as here.
    ///
    /// # Errors
    /// As [`Program::pack`], also if one of them does not run here.
    pub fn pack_with(program: &Path, further: &[PathBuf], folder: &Path) -> Result<Self> {
        Self::pack_all(&[program], further, folder)
    }

    /// The same with programs beside it that use the host's libraries too; they are in the guest's
    /// /viola/bin.
    ///
    /// # Errors
    /// As [`Program::pack`].
    pub fn pack_beside(program: &Path, beside: &[PathBuf], folder: &Path) -> Result<Self> {
        let mut all = vec![program];
        all.extend(beside.iter().map(PathBuf::as_path));
        Self::pack_all(&all, &[], folder)
    }

    /// Packs all: `programs` use the host's libraries, and the first one is what
    /// [`Program::command`] runs; `further` have their own.
    ///
    /// # Errors
    /// As [`Program::pack_with`].
    pub fn pack_all(programs: &[&Path], further: &[PathBuf], folder: &Path) -> Result<Self> {
        let root = folder.join("program");
        let (bin, lib) = (root.join("viola/bin"), root.join("viola/lib"));
        for made in [&bin, &lib] {
            fs::create_dir_all(made).map_err(Error::io("make", made))?;
        }
        let name_of = |program: &Path| {
            let name = program.file_name().unwrap_or(OsStr::new("program"));
            name.to_owned()
        };
        for program in programs {
            run(Command::new("strip")
                .arg("-o")
                .arg(bin.join(name_of(program)))
                .arg(program))?;
            // its own loader and libraries: the guest's programs use others
            run(Command::new("patchelf")
                .args(["--set-interpreter", LOADER, "--force-rpath"])
                .args(["--set-rpath", "/viola/lib"])
                .arg(bin.join(name_of(program))))?;
            let needed = run(Command::new("ldd").arg(program))?;
            let paths = needed
                .split_whitespace()
                .filter(|word| word.starts_with('/'))
                .map(Path::new);
            for path in paths {
                if let Some(name) = path.file_name() {
                    fs::copy(path, lib.join(name)).map_err(Error::io("copy", path))?;
                }
            }
        }
        let name = programs.first().map(|p| name_of(p)).unwrap_or_default();
        for program in further {
            let listed = run(Command::new(program).env("LD_TRACE_LOADED_OBJECTS", "1"))?;
            let needed = listed.split_whitespace().filter(|w| w.starts_with('/'));
            for path in needed.map(Path::new).chain([program.as_path()]) {
                let to = root.join(path.strip_prefix("/").unwrap_or(path));
                if let Some(above) = to.parent() {
                    fs::create_dir_all(above).map_err(Error::io("make", above))?;
                }
                fs::copy(path, &to).map_err(Error::io("copy", path))?;
            }
        }
        let archive = folder.join("program.tar");
        run(Command::new("tar")
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(&root)
            .arg("."))?;
        let _ = fs::remove_dir_all(&root);
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            archive,
        })
    }

    /// Adds the archive as a disk. Call it before other disks are added.
    #[must_use]
    pub fn disk(&self, spec: VmSpec) -> VmSpec {
        spec.disk("program", &self.archive, "raw")
    }

    /// Unpacks the program in the guest. [`Program::command`] runs it then.
    ///
    /// # Errors
    /// [`Error::Guest`].
    pub fn unpack(&self, vm: &QemuVm) -> Result<()> {
        vm.sh("tar -x -f /dev/vda -C /").map(drop)
    }

    /// Path of the program in the guest.
    #[must_use]
    pub fn command(&self) -> String {
        format!("/viola/bin/{}", self.name)
    }
}

/// Runs a command and returns its standard output.
fn run(command: &mut Command) -> Result<String> {
    let name = PathBuf::from(command.get_program());
    let failed = |what: String| Error::io("run", &name)(std::io::Error::other(what));
    let output = command.output().map_err(Error::io("run", &name))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(failed(reason));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

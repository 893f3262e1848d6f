// SPDX-License-Identifier: Apache-2.0
//! Headers of `bpf/` compiled for this machine, so that tests compare them with the Rust code.

use std::ffi::{CStr, CString, c_void};
use std::mem::{size_of, transmute_copy};
use std::path::Path;
use std::process::Command;

/// A C file of `bpf/` as a loaded library. It stays loaded until the process ends.
#[derive(Debug)]
pub struct Library {
    handle: *mut c_void,
}

impl Library {
    /// Compiles `bpf/SOURCE` with the compiler that CC names, or cc, and loads it.
    ///
    /// # Panics
    /// When the compiler is missing or fails, or the library cannot be loaded. The message has the
    /// compiler's output.
    #[must_use]
    pub fn compile(source: &str, flags: &[&str]) -> Self {
        let bpf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf");
        let dir = tempfile::tempdir().expect("a temporary folder");
        let library = dir.path().join("replay.so");
        let cc = std::env::var_os("CC").unwrap_or("cc".into());
        let built = Command::new(cc)
            .args(["-shared", "-fPIC", "-O2", "-Wall"])
            .args(flags)
            .arg("-I")
            .arg(&bpf)
            .arg(bpf.join(source))
            .arg("-o")
            .arg(&library)
            .output()
            .expect("the C compiler");
        assert!(built.status.success(), "{built:?}");
        let path = library.into_os_string().into_encoded_bytes();
        let path = CString::new(path).expect("a path without NUL");
        // SAFETY: a library of plain functions without constructors; it stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        Self { handle }
    }

    /// A function of the library as the pointer `F`.
    ///
    /// # Panics
    /// When the library has no function of that name, or `F` does not have the size of a pointer.
    ///
    /// # Safety
    /// `F` must be a pointer to a function with the same type as the function has in C.
    #[must_use]
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: the handle is never closed, and a CStr ends with a zero.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: both have the same size, and the caller promises that `F` is the function's type.
        unsafe { transmute_copy(&found) }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Reads blocks of a folder that stands for the mount, from Rust and from C.
#![allow(clippy::unwrap_used)]

use std::ffi::CString;
use std::io::SeekFrom;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vread::{Error, Library, ffi};

const POOL: &str = "BP-1-10.0.0.1-1";

fn mount() -> (tempfile::TempDir, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    std::fs::create_dir(folder.path().join(POOL)).unwrap();
    std::fs::write(folder.path().join(POOL).join("blk_7_1001"), &bytes).unwrap();
    std::fs::write(folder.path().join(POOL).join("blk_7_1001.meta"), b"sums").unwrap();
    (folder, bytes)
}

fn name(file: &str) -> String {
    format!("{POOL}/{file}")
}

#[test]
fn a_block_is_read_in_order_and_from_anywhere() {
    let (folder, bytes) = mount();
    let library = Library::new(folder.path());
    let block = library.open(&name("blk_7_1001"), None).unwrap();
    assert_eq!(block.size(), bytes.len() as u64);
    let mut all = Vec::new();
    let mut buffer = vec![0; 70_000];
    loop {
        let n = block.read(&mut buffer).unwrap();
        all.extend_from_slice(&buffer[..n]);
        if n < buffer.len() {
            break;
        }
    }
    assert!(all == bytes);
    assert_eq!(block.pread(&mut buffer[..10], 123_456).unwrap(), 10);
    assert_eq!(buffer[..10], bytes[123_456..][..10]);
    assert_eq!(block.pread(&mut buffer, 299_990).unwrap(), 10);
    assert_eq!(block.pread(&mut buffer, u64::MAX).unwrap(), 0);
    assert_eq!(block.seek(SeekFrom::End(-10)).unwrap(), 299_990);
    assert_eq!(block.seek(SeekFrom::Current(5)).unwrap(), 299_995);
    assert_eq!(block.read(&mut buffer).unwrap(), 5);
    assert_eq!(
        block.seek(SeekFrom::Current(i64::MIN)).unwrap_err().errno(),
        libc::EINVAL
    );
    let meta = library.open(&name("blk_7_1001.meta"), Some("dn1")).unwrap();
    assert_eq!(meta.size(), 4);
}

#[test]
fn an_invalid_name_and_a_missing_block_give_different_errors() {
    let (folder, _) = mount();
    let library = Library::new(folder.path());
    for wrong in [
        "",
        "blk_7_1001",
        "../x/blk_7_1001",
        "BP-1-x/../blk_7_1001",
        "BP-1-10.0.0.1-1/passwd",
    ] {
        assert!(
            matches!(library.open(wrong, None), Err(Error::InvalidName(_))),
            "{wrong}"
        );
    }
    let absent = library.open(&name("blk_8_1001"), None).unwrap_err();
    assert!(matches!(absent, Error::NotFound(_)) && absent.errno() == libc::ENOENT);
    // The blocks of another DataNode may be in another mount.
    let empty = tempfile::tempdir().unwrap();
    library.set_mount(empty.path(), Some("dn2"));
    assert!(library.open(&name("blk_7_1001"), Some("dn2")).is_err());
    assert!(library.open(&name("blk_7_1001"), Some("dn1")).is_ok());
}

#[test]
fn a_block_that_was_named_again_can_be_reopened() {
    let (folder, bytes) = mount();
    let path = folder.path().join(name("blk_7_1001"));
    let library = Library::new(folder.path());
    let block = library.open(&name("blk_7_1001"), None).unwrap();
    let mut buffer = [0; 100];
    block.read(&mut buffer).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(50)
        .unwrap();
    assert!(matches!(block.read(&mut buffer), Err(Error::Withdrawn)));
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(block.reopen(), Err(Error::NotFound(_))));
    std::fs::write(&path, &bytes).unwrap();
    block.reopen().unwrap();
    block.read(&mut buffer).unwrap();
    assert_eq!(buffer, bytes[100..200]);
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn a_c_caller_gets_descriptors_and_errno() {
    let (folder, bytes) = mount();
    let c = |text: &str| CString::new(text).unwrap();
    let (path, block) = (c(folder.path().to_str().unwrap()), c(&name("blk_7_1001")));
    // SAFETY: strings with their ends, buffers with their lengths.
    unsafe {
        assert_eq!(ffi::vread_mount(path.as_ptr(), std::ptr::null()), 0);
        let vd = ffi::vread_open(block.as_ptr(), std::ptr::null());
        assert!(vd > 0);
        let mut buffer = [0u8; 16];
        assert_eq!(
            ffi::vread_pread(vd, buffer.as_mut_ptr().cast(), 16, 1000),
            16
        );
        assert_eq!(buffer, bytes[1000..1016]);
        assert_eq!(ffi::vread_pread(vd, buffer.as_mut_ptr().cast(), 16, -1), -1);
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!(ffi::vread_read(vd, std::ptr::null_mut(), 16), -1);
        assert_eq!(errno(), libc::EFAULT);
        assert_eq!(ffi::vread_seek(vd, 0, libc::SEEK_END), 300_000);
        assert_eq!(ffi::vread_seek(vd, 0, 77), -1);
        assert_eq!(ffi::vread_seek(vd, -1, libc::SEEK_SET), -1);
        assert_eq!((ffi::vread_size(vd), ffi::vread_update(vd)), (300_000, 0));
        assert_eq!((ffi::vread_close(vd), ffi::vread_close(vd)), (0, -1));
        assert_eq!(errno(), libc::EBADF);
        assert_ne!(ffi::vread_open(block.as_ptr(), std::ptr::null()), vd);
        assert_eq!(ffi::vread_open(c("x").as_ptr(), std::ptr::null()), -1);
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!(ffi::vread_open(std::ptr::null(), std::ptr::null()), -1);
    }
}

/// The libraries are built beside this test.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().to_path_buf();
    assert!(folder.join("libvread.so").exists(), "{}", folder.display());
    folder
}

#[test]
fn a_c_program_writes_a_block_with_either_library() {
    let (folder, bytes) = mount();
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = libraries();
    for link in ["-l:libvread.so", "-l:libvread.a"] {
        let program = folder.path().join("cat");
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
        cc.arg(top.join("examples/cat.c"))
            .arg("-I")
            .arg(top.join("include"));
        cc.arg("-L")
            .arg(&libraries)
            .args([link, "-lpthread", "-ldl", "-lm"]);
        let built = cc.output().unwrap();
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
        let run = |block: &str| -> Output {
            let mut run = Command::new(&program);
            run.args([&name(block), folder.path().to_str().unwrap()]);
            run.env("LD_LIBRARY_PATH", &libraries).output().unwrap()
        };
        let output = run("blk_7_1001");
        assert!(
            output.status.success() && output.stdout == bytes,
            "{output:?}"
        );
        assert_eq!(run("blk_9_1001").status.code(), Some(3));
    }
}

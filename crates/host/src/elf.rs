// SPDX-License-Identifier: Apache-2.0
//! Section names of an ELF file (elf(5)), to recognise a UML kernel.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Most bytes read of the section headers, and of the section names.
const MAX_TABLE_BYTES: u64 = 1 << 20;

/// Whether a 64-bit ELF file has a section whose name starts with `prefix`. `false` for any other file.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn has_section(path: &Path, prefix: &str) -> io::Result<bool> {
    let file = File::open(path)?;
    let mut read = |offset: u64, length: u64| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length.min(MAX_TABLE_BYTES)).unwrap_or(0)];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], offset.saturating_add(filled as u64)) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => break,
                Err(e) => return Err(e),
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    };
    Ok(section_names(&mut read)?.is_some_and(|names| {
        names
            .split(|&b| b == 0)
            .any(|name| name.starts_with(prefix.as_bytes()))
    }))
}

/// The table of section names, separated by zero bytes.
fn section_names(
    read: &mut impl FnMut(u64, u64) -> io::Result<Vec<u8>>,
) -> io::Result<Option<Vec<u8>>> {
    let header = read(0, 64)?;
    // 64 bit. The byte order is the host's: the program runs here.
    if header.len() < 64 || !header.starts_with(b"\x7fELF\x02") {
        return Ok(None);
    }
    let (Some(table), Some(size), Some(count), Some(names)) = (
        word(&header, 40, 8),
        word(&header, 58, 2),
        word(&header, 60, 2),
        word(&header, 62, 2),
    ) else {
        return Ok(None);
    };
    let headers = read(table, size * count)?;
    let at = usize::try_from(names * size).unwrap_or(usize::MAX);
    let Some(entry) = headers.get(at..) else {
        return Ok(None);
    };
    match (word(entry, 24, 8), word(entry, 32, 8)) {
        (Some(offset), Some(length)) => read(offset, length).map(Some),
        _ => Ok(None),
    }
}

/// An unsigned number of `width` bytes in the host's byte order.
fn word(bytes: &[u8], offset: usize, width: usize) -> Option<u64> {
    let field = bytes.get(offset..offset.checked_add(width)?)?;
    let mut padded = [0; 8];
    if cfg!(target_endian = "little") {
        padded.get_mut(..width)?.copy_from_slice(field);
        Some(u64::from_le_bytes(padded))
    } else {
        padded.get_mut(8 - width..)?.copy_from_slice(field);
        Some(u64::from_be_bytes(padded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_the_sections_of_the_running_program() {
        let me = Path::new("/proc/self/exe");
        assert!(has_section(me, ".text").unwrap());
        assert!(!has_section(me, ".uml.").unwrap());
    }

    #[test]
    fn a_file_that_is_no_program_has_no_sections() {
        assert!(!has_section(Path::new("/proc/self/stat"), ".text").unwrap());
        assert!(!has_section(Path::new("/dev/null"), ".text").unwrap());
        assert!(has_section(Path::new("/proc/self/nothing"), ".text").is_err());
    }

    proptest! {
        #[test]
        fn any_header_is_read_without_a_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 64..400),
        ) {
            bytes[..5].copy_from_slice(b"\x7fELF\x02");
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("elf");
            std::fs::write(&path, &bytes).unwrap();
            let _ = has_section(&path, ".uml.").unwrap();
        }
    }
}

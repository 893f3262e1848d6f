// SPDX-License-Identifier: Apache-2.0
//! Prints the map of each file as a line of JSON, or the reason why the file cannot be mapped.
//!
//!     viola-extents FILE...
//!     viola-extents --writing FILE...
//!     viola-extents --compare DISK FILE...
//!
//! `--writing` accepts only files that the host could write in place. `--compare` also reads the bytes from the disk
//! past the page cache, as the host reads them from the image, and compares them with the file's content.

use std::collections::VecDeque;
use std::error::Error;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;

use viola_extents::FileMap;
use viola_extents::guest::Mapper;
use viola_extents::host::{Image, Layer};

const CHUNK: usize = 1 << 20;

/// What the program does with each file.
enum Job {
    Read,
    Write,
    Compare(OsString),
}

fn main() -> ExitCode {
    let mut args: VecDeque<OsString> = std::env::args_os().skip(1).collect();
    let option = args.front().and_then(|a| a.to_str()).map(str::to_owned);
    let job = match option.as_deref() {
        Some("--writing") => Some(Job::Write),
        Some("--compare") => args.remove(1).map(Job::Compare),
        Some(other) if other.starts_with("--") => None,
        _ => Some(Job::Read),
    };
    if let Some(Job::Write | Job::Compare(_)) = job {
        args.pop_front();
    }
    let (Some(job), false) = (job, args.is_empty()) else {
        eprintln!("usage: viola-extents [--writing | --compare DISK] FILE...");
        return ExitCode::from(2);
    };
    let mut code = ExitCode::SUCCESS;
    for path in args {
        match describe(Path::new(&path), &job) {
            Ok(line) => println!("{line}"),
            Err(why) => {
                println!("{}", serde_json::json!({ "refused": why.to_string() }));
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

fn describe(path: &Path, job: &Job) -> Result<String, Box<dyn Error>> {
    let file = File::open(path)?;
    let mapper = Mapper::new();
    let map = match job {
        Job::Write => mapper.file_extents_for_writing(&file)?,
        Job::Read | Job::Compare(_) => mapper.file_extents(&file)?,
    };
    if let Job::Compare(disk) = job {
        compare(&file, &map, Path::new(disk))?;
    }
    Ok(serde_json::to_string(&map)?)
}

fn compare(file: &File, map: &FileMap, disk: &Path) -> Result<(), Box<dyn Error>> {
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(disk)?;
    let image = Image::open(vec![Layer::raw(disk)])?;
    let checked = image.check(&map.extents, map.size)?;
    let (mut ours, mut theirs) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut at = 0;
    while at < map.size {
        let n = image.read_at(&checked, at, &mut ours)?;
        file.read_exact_at(&mut theirs[..n], at)?;
        if ours[..n] != theirs[..n] {
            return Err(format!("bytes differ within {n} bytes from {at}").into());
        }
        at += n as u64;
    }
    Ok(())
}

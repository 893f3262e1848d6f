// SPDX-License-Identifier: Apache-2.0
//! Copies from file to file that a host makes, past the file system: a real ext4, the agent's own program.
#![allow(clippy::unwrap_used)]

mod bed;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections};
use viola_proto::pipe::{Endpoint, PipeReply, PipeRequest};

use bed::Bed;
use bed::files::{bytes, is_clean, is_fixed, new};
use bed::handover::over;

/// The host copies at most `max_pipes` bytes of a pipe; returns how many.
fn copied(bed: &Bed, most: usize) -> u64 {
    let PipeRequest::Start {
        pipe,
        source: Endpoint::File { map, offset, .. },
        sink:
            Endpoint::File {
                map: to_map,
                offset: to,
                ..
            },
        length,
    } = bed.host.hear()
    else {
        panic!("no copy");
    };
    let all = bed.host.bytes(&map, offset, length);
    let some = &all[..all.len().min(most)];
    bed.host.write(&to_map, to, some);
    let sent = some.len() as u64;
    let (source, sink, errno) = (None, None, 0);
    bed.host.say(PipeReply::Finished {
        pipe,
        source,
        sink,
        sent,
        errno,
        host_us: 0,
    });
    sent
}

#[test]
fn a_file_is_copied_into_another_one() {
    let bed = Bed::full();
    let program = bed.program();
    let (from, body) = bed.file("from", 400_000);
    let path: PathBuf = bed.path("srv/to");
    let file = new(&path);
    file.write_all_at(&bytes(1000), 0).unwrap();
    let copy = |id, offset, length, to| LibraryRequest::Copy {
        id,
        offset,
        length,
        to,
    };
    let source = File::open(&from).unwrap();
    program.request(copy(1, 777, 300_000, 1000), &source, &file);
    assert_eq!(copied(&bed, usize::MAX), 300_000);
    assert_eq!(program.end(), over(1, 300_000, LostConnections::NONE));
    let wanted = [&bytes(1000)[..], &body[777..300_777]].concat();
    assert!(std::fs::read(&path).unwrap() == wanted);
    // a part only: the file ends with it
    program.request(copy(2, 0, 400_000, 301_000), &source, &file);
    assert_eq!(copied(&bed, 5001), 5001);
    assert_eq!(program.end(), over(2, 5001, LostConnections::NONE));
    assert!(std::fs::read(&path).unwrap() == [&wanted[..], &body[..5001]].concat());
    // refused: a file into itself, and bytes behind its end
    for (id, errno, range, source) in [
        (3, libc::EAGAIN, (0, 10), File::open(&path).unwrap()),
        (4, libc::EINVAL, (399_999, 2), source.try_clone().unwrap()),
    ] {
        program.request(copy(id, range.0, range.1, 0), &source, &file);
        assert_eq!(program.end(), LibraryReply::Refused { id, errno });
    }
    assert!(!is_fixed(&path) && is_clean(&bed));
    // the session ends: the program gets its answer when no host can write any more
    program.request(copy(5, 0, 400_000, 0), &source, &file);
    let PipeRequest::Start { .. } = bed.host.hear() else {
        panic!("no copy");
    };
    bed.host.hang_up();
    bed.begin_session();
    assert_eq!(program.end(), over(5, 0, LostConnections::NONE));
    assert!(!is_fixed(&path) && is_clean(&bed));
    let status = bed.status();
    assert_eq!((status.pipes, status.bytes), (3, 305_001));
}

// SPDX-License-Identifier: Apache-2.0
//! Tests of a process's table of pipes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

// Numbers that no descriptor of the test program has; the marks' own test has others.
fn table(fd: RawFd) -> (Table, Arc<AtomicUsize>) {
    piping(None, fd)
}

fn end(inode: u64, socket: Option<RawFd>) -> Endpoint {
    let id = FileId { device: 1, inode };
    Endpoint { id, socket }
}

fn piping(source: Option<RawFd>, fd: RawFd) -> (Table, Arc<AtomicUsize>) {
    let mut table = Table::default();
    let events = Arc::new(AtomicUsize::new(0));
    let count = events.clone();
    let record = Pipe {
        id: 7,
        source: end(1, source),
        sink: end(2, Some(fd)),
        range: ByteRange {
            source_offset: 10,
            length: 100,
            sink_offset: 0,
        },
        reported: 0,
        moved: 0,
        state: PipeState::Active,
        lost: LostConnections::NONE,
        idle_polls: 0,
        checked_file: None,
        checked_socket: None,
        link: 1,
        begun: None,
        watcher: Box::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        }),
        changed: Arc::default(),
    };
    // without marks: another test counts them
    for (fd, _) in record.sockets() {
        table.sockets.insert(fd, 7);
    }
    table.records.insert(7, record);
    (table, events)
}

#[test]
fn all_is_told_only_when_the_connection_is_back() {
    let (mut table, events) = table(5);
    table.apply(LibraryReply::Progress { id: 7, sent: 40 });
    table.apply(LibraryReply::Progress { id: 7, sent: 30 });
    table.apply(LibraryReply::Progress { id: 7, sent: 100 });
    table.apply(LibraryReply::Progress { id: 8, sent: 50 });
    let record = table.pipe_at(5).unwrap();
    assert_eq!((record.unreported(), record.is_active()), (40, true));
    assert_eq!(events.load(Ordering::Relaxed), 1);
    record.reported = 40;
    assert!(!record.has_update());
    let answer = LibraryReply::Finished {
        id: 7,
        sent: 1000,
        errno: 0,
        lost: LostConnections::NONE,
        host_us: 0,
    };
    table.apply(answer);
    let record = table.pipe_at(5).unwrap();
    assert_eq!(
        (record.unreported(), record.state),
        (60, PipeState::Finished(0))
    );
    assert_eq!(events.load(Ordering::Relaxed), 2);
}

#[test]
fn less_than_was_told_is_a_broken_connection() {
    let (mut table, _) = table(6);
    table.pipe_at(6).unwrap().reported = 50;
    let answer = LibraryReply::Finished {
        id: 7,
        sent: 49,
        errno: 0,
        lost: LostConnections::NONE,
        host_us: 0,
    };
    table.apply(answer);
    let record = table.pipe_at(6).unwrap();
    assert_eq!(
        (record.unreported(), record.state),
        (0, PipeState::Finished(libc::ECONNRESET))
    );
}

#[test]
fn a_lost_agent_breaks_what_it_had() {
    let (mut table, events) = table(7);
    table.agent_lost(2);
    assert!(table.pipe_at(7).unwrap().is_active());
    table.agent_lost(1);
    assert_eq!(
        table.pipe_at(7).unwrap().state,
        PipeState::Finished(libc::ECONNRESET)
    );
    table.agent_lost(1);
    assert_eq!(events.load(Ordering::Relaxed), 1);
}

#[test]
fn a_refusal_holds_for_the_socket_and_not_for_its_number() {
    let (mut table, _) = table(8);
    let errno = libc::EOPNOTSUPP;
    table.apply(LibraryReply::Refused { id: 7, errno });
    let socket = table.pipe_at(8).unwrap().sink.id;
    assert!(table.refuses((None, socket)));
    assert!(!table.refuses((None, end(99, None).id)));
}

#[test]
fn refusals_of_pairs_are_of_both_and_not_without_end() {
    let (mut table, _) = piping(Some(20), 21);
    let errno = libc::EOPNOTSUPP;
    table.apply(LibraryReply::Refused { id: 7, errno });
    let id = |inode| end(inode, None).id;
    assert!(table.refuses((Some(id(1)), id(2))));
    assert!(!table.refuses((None, id(2))) && !table.refuses((Some(id(3)), id(2))));
    for inode in 0..2 * MAX_REFUSALS as u64 {
        table.refuse((None, id(inode)), errno);
    }
    assert!(table.refusals.len() <= MAX_REFUSALS);
}

#[test]
fn a_file_is_looked_at_once_until_it_is_closed() {
    use std::os::fd::AsFd;
    let (mut table, _) = table(10);
    let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let record = table.pipe_at(10).unwrap();
    record.source.id = file_id(file.as_fd()).unwrap();
    assert!(!record.continues(other.as_fd(), 10) && record.checked_file.is_none());
    assert!(!record.continues(file.as_fd(), 11));
    assert!(record.continues(file.as_fd(), 10));
    let number = file.as_raw_fd();
    assert_eq!(marks::of(number), marks::FILE);
    // as if another one had its number
    record.source.id.inode ^= 1;
    assert!(record.continues(file.as_fd(), 10), "no look");
    marks::file_closing(number);
    assert!(!record.continues(file.as_fd(), 10) && record.checked_file.is_none());
    // nothing stays of one that is over
    record.source.id.inode ^= 1;
    assert!(record.continues(file.as_fd(), 10));
    table.remove(7);
    assert_eq!(marks::of(number), 0);
}

#[test]
fn a_number_that_another_socket_has_now_has_no_pipe() {
    let (mut table, _) = table(9);
    let socket = table.pipe_at(9).unwrap().sink.id;
    assert!(table.pipe_of(9, socket).is_some());
    assert!(table.pipe_of(9, end(99, None).id).is_none());
    assert!(table.pipe_of(9, socket).is_none());
}

#[test]
fn who_closes_one_socket_of_two_breaks_the_other() {
    for (closed, other) in [(22, 23), (23, 22)] {
        let (mut table, events) = piping(Some(22), 23);
        table.reset(closed);
        assert!(table.pipe_at(closed).is_none());
        let record = table.pipe_at(other).unwrap();
        assert_eq!(record.state, PipeState::Finished(libc::ECONNRESET));
        assert_eq!(events.load(Ordering::Relaxed), 1);
        table.reset(other);
        assert!(table.records.is_empty() && table.sockets.is_empty());
    }
}

#[test]
fn an_error_stays_where_the_connection_is_lost() {
    let (mut table, _) = piping(Some(24), 25);
    let lost = LostConnections {
        source: true,
        sink: false,
    };
    table.apply(LibraryReply::Finished {
        id: 7,
        sent: 10,
        errno: libc::ECONNRESET,
        lost,
        host_us: 0,
    });
    table.keep_error(7);
    assert!(table.pipe_at(25).is_none() && table.pipe_at(24).is_some());
    table.remove(7);
    assert!(table.pipe_at(24).is_none());
}

#[test]
fn a_pipe_between_files_has_no_sockets() {
    let (mut table, events) = piping(None, 26);
    let mut record = table.records.remove(&7).unwrap();
    table.sockets.clear();
    record.sink.socket = None;
    table.records.insert(7, record);
    table.agent_lost(1);
    assert_eq!(table.pipe(7).unwrap().state, PipeState::Finished(libc::EIO));
    table.keep_error(7);
    assert_eq!(events.load(Ordering::Relaxed), 1);
    table.remove(7);
    assert!(table.pipe(7).is_none());
}

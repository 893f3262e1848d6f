// SPDX-License-Identifier: Apache-2.0
//! Tests of a process's table of pipes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

// Numbers that no descriptor of the test program has; the marks' own test has others.
fn table(fd: RawFd) -> (Table, Arc<AtomicUsize>) {
    piping(None, fd)
}

fn end(inode: u64, socket: Option<RawFd>) -> End {
    let id = FileId { device: 1, inode };
    End { id, socket }
}

fn piping(source: Option<RawFd>, fd: RawFd) -> (Table, Arc<AtomicUsize>) {
    let mut table = Table::default();
    let heard = Arc::new(AtomicUsize::new(0));
    let count = heard.clone();
    let record = Record {
        id: 7,
        source: end(1, source),
        sink: end(2, Some(fd)),
        part: Part {
            offset: 10,
            length: 100,
            to: 0,
        },
        consumed: 0,
        sent: 0,
        state: State::Piping,
        lost: LostConnections::NONE,
        asked: 0,
        file: None,
        looked: None,
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
    (table, heard)
}

#[test]
fn all_is_told_only_when_the_connection_is_back() {
    let (mut table, heard) = table(5);
    table.hear(LibraryReply::Progress { id: 7, sent: 40 });
    table.hear(LibraryReply::Progress { id: 7, sent: 30 });
    table.hear(LibraryReply::Progress { id: 7, sent: 100 });
    table.hear(LibraryReply::Progress { id: 8, sent: 50 });
    let record = table.record(5).unwrap();
    assert_eq!((record.available(), record.is_piping()), (40, true));
    assert_eq!(heard.load(Ordering::Relaxed), 1);
    record.consumed = 40;
    assert!(!record.has_news());
    let answer = LibraryReply::Finished {
        id: 7,
        sent: 1000,
        errno: 0,
        lost: LostConnections::NONE,
        host_us: 0,
    };
    table.hear(answer);
    let record = table.record(5).unwrap();
    assert_eq!((record.available(), record.state), (60, State::Over(0)));
    assert_eq!(heard.load(Ordering::Relaxed), 2);
}

#[test]
fn less_than_was_told_is_a_broken_connection() {
    let (mut table, _) = table(6);
    table.record(6).unwrap().consumed = 50;
    let answer = LibraryReply::Finished {
        id: 7,
        sent: 49,
        errno: 0,
        lost: LostConnections::NONE,
        host_us: 0,
    };
    table.hear(answer);
    let record = table.record(6).unwrap();
    assert_eq!(
        (record.available(), record.state),
        (0, State::Over(libc::ECONNRESET))
    );
}

#[test]
fn a_lost_agent_breaks_what_it_had() {
    let (mut table, heard) = table(7);
    table.lose(2);
    assert!(table.record(7).unwrap().is_piping());
    table.lose(1);
    assert_eq!(
        table.record(7).unwrap().state,
        State::Over(libc::ECONNRESET)
    );
    table.lose(1);
    assert_eq!(heard.load(Ordering::Relaxed), 1);
}

#[test]
fn a_refusal_holds_for_the_socket_and_not_for_its_number() {
    let (mut table, _) = table(8);
    let errno = libc::EOPNOTSUPP;
    table.hear(LibraryReply::Refused { id: 7, errno });
    let socket = table.record(8).unwrap().sink.id;
    assert!(table.refuses((None, socket)));
    assert!(!table.refuses((None, end(99, None).id)));
}

#[test]
fn refusals_of_pairs_are_of_both_and_not_without_end() {
    let (mut table, _) = piping(Some(20), 21);
    let errno = libc::EOPNOTSUPP;
    table.hear(LibraryReply::Refused { id: 7, errno });
    let id = |inode| end(inode, None).id;
    assert!(table.refuses((Some(id(1)), id(2))));
    assert!(!table.refuses((None, id(2))) && !table.refuses((Some(id(3)), id(2))));
    for inode in 0..2 * REFUSALS as u64 {
        table.refuse((None, id(inode)), errno);
    }
    assert!(table.refusals.len() <= REFUSALS);
}

#[test]
fn a_file_is_looked_at_once_until_it_is_closed() {
    use std::os::fd::AsFd;
    let (mut table, _) = table(10);
    let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let record = table.record(10).unwrap();
    record.source.id = file_id(file.as_fd()).unwrap();
    assert!(!record.continues(other.as_fd(), 10) && record.file.is_none());
    assert!(!record.continues(file.as_fd(), 11));
    assert!(record.continues(file.as_fd(), 10));
    let number = file.as_raw_fd();
    assert_eq!(marks::of(number), marks::FILE);
    // as if another one had its number
    record.source.id.inode ^= 1;
    assert!(record.continues(file.as_fd(), 10), "no look");
    marks::close(number);
    assert!(!record.continues(file.as_fd(), 10) && record.file.is_none());
    // nothing stays of one that is over
    record.source.id.inode ^= 1;
    assert!(record.continues(file.as_fd(), 10));
    table.forget(7);
    assert_eq!(marks::of(number), 0);
}

#[test]
fn a_number_that_another_socket_has_now_has_no_pipe() {
    let (mut table, _) = table(9);
    let socket = table.record(9).unwrap().sink.id;
    assert!(table.record_of(9, socket).is_some());
    assert!(table.record_of(9, end(99, None).id).is_none());
    assert!(table.record_of(9, socket).is_none());
}

#[test]
fn who_closes_one_socket_of_two_breaks_the_other() {
    for (closed, other) in [(22, 23), (23, 22)] {
        let (mut table, heard) = piping(Some(22), 23);
        table.reset(closed);
        assert!(table.record(closed).is_none());
        let record = table.record(other).unwrap();
        assert_eq!(record.state, State::Over(libc::ECONNRESET));
        assert_eq!(heard.load(Ordering::Relaxed), 1);
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
    table.hear(LibraryReply::Finished {
        id: 7,
        sent: 10,
        errno: libc::ECONNRESET,
        lost,
        host_us: 0,
    });
    table.keep_error(7);
    assert!(table.record(25).is_none() && table.record(24).is_some());
    table.forget(7);
    assert!(table.record(24).is_none());
}

#[test]
fn a_pipe_between_files_has_no_sockets() {
    let (mut table, heard) = piping(None, 26);
    let mut record = table.records.remove(&7).unwrap();
    table.sockets.clear();
    record.sink.socket = None;
    table.records.insert(7, record);
    table.lose(1);
    assert_eq!(table.pipe(7).unwrap().state, State::Over(libc::EIO));
    table.keep_error(7);
    assert_eq!(heard.load(Ordering::Relaxed), 1);
    table.forget(7);
    assert!(table.pipe(7).is_none());
}

// SPDX-License-Identifier: Apache-2.0
use std::cell::Cell;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use viola_proto::agent::{
    self, BlockKey, Bytes, DiskName, Extent, FileMap, FrameReader, FromAgent, PROOF_BYTES, Why,
    encode,
};

use super::*;
use crate::control::{AgentStat, Control, Format, ImageSpec, Session};
use crate::{hazard, lookup, table};

const DISK: u64 = 1 << 20;
/// Where the proof lies on the disk.
const PROOF_AT: u64 = 64 << 10;

fn nonce() -> Vec<u8> {
    (0..PROOF_BYTES as u32)
        .map(|i| (i * 7 + i / 256) as u8)
        .collect()
}

/// A disk with the proof on it.
fn disk() -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.set_len(DISK).unwrap();
    file.seek(SeekFrom::Start(PROOF_AT)).unwrap();
    file.write_all(&nonce()).unwrap();
    file
}

fn spec(id: u32) -> ImageSpec {
    ImageSpec {
        id,
        device: "ubdb".into(),
        serial: None,
        layers: vec![Format::Raw],
        path: "/images/dn1".into(),
        file: (1, u64::from(id)),
    }
}

fn file(size: u64, extents: &[(u64, u64, u64, bool)]) -> FileMap {
    FileMap {
        size,
        extents: extents.iter().map(|e| Extent::from(*e)).collect(),
    }
}

fn hello(session: u64) -> FromAgent {
    FromAgent::Hello {
        version: agent::VERSION,
        agent_version: "0.1".into(),
        boot_id: "b".into(),
        session,
    }
}

fn proof(fs: u32, content: Vec<u8>) -> FromAgent {
    FromAgent::Proof {
        fs,
        mount: "/data".into(),
        kind: "ext4".into(),
        disk: DiskName {
            name: "ubdb".into(),
            serial: None,
            size: DISK,
        },
        content: Bytes(content),
        map: file(4096, &[(0, PROOF_AT, 4096, false)]),
    }
}

fn key(id: i64) -> BlockKey {
    BlockKey::new("BP-1", id, 1001).unwrap()
}

fn name(lease: u64, id: i64) -> FromAgent {
    FromAgent::Name {
        lease,
        fs: 0,
        key: key(id),
        data: file(4096, &[(0, 8192, 4096, false)]),
        meta: file(39, &[(0, 12288, 39, false)]),
    }
}

/// A reader that may be reading one slot.
#[derive(Default)]
struct Reading(Cell<Option<u32>>);

impl Readers for Reading {
    fn of_slot(&self, _: u32, slot: u32) -> Option<&str> {
        (self.0.get() == Some(slot)).then_some("vm1")
    }

    fn of_table(&self, _: u32) -> Option<&str> {
        self.0.get().map(|_| "vm1")
    }
}

struct Talk {
    conversation: Conversation,
    reading: Reading,
    now: Instant,
    lines: Arc<Mutex<Vec<String>>>,
    table: std::fs::File,
}

impl Talk {
    /// Channel open, disks given, nothing said yet.
    fn new(limits: Limits) -> Self {
        let table_file = tempfile::tempfile().unwrap();
        table::create(&table_file, 3, 64).unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = lines.clone();
        let sink: Sink = Box::new(move |_, line| to.lock().unwrap().push(line.to_owned()));
        let now = Instant::now();
        let table = Table::map(&table_file).unwrap();
        let mut conversation = Conversation::new(table, limits, Journal::new(sink), now);
        let disks = open_images(vec![spec(1)], vec![disk().into()]).unwrap();
        conversation.replace_disks(now, disks, "start", &mut Vec::new());
        conversation.open(now, &mut Vec::new());
        let mut talk = Self {
            conversation,
            reading: Reading::default(),
            now,
            lines,
            table: table_file,
        };
        talk.settle();
        talk
    }

    /// Welcomed and proved.
    fn proved(limits: Limits) -> Self {
        let mut talk = Self::new(limits);
        talk.hear(hello(1));
        assert!(matches!(
            talk.settle()[..],
            [ToAgent::Welcome { session: 1, .. }]
        ));
        assert_eq!(talk.hear(proof(0, nonce())), [ToAgent::ProofOk { fs: 0 }]);
        talk
    }

    fn hear(&mut self, message: FromAgent) -> Vec<ToAgent> {
        let mut out = Vec::new();
        self.conversation.hear(self.now, message, &mut out);
        out
    }

    fn settle(&mut self) -> Vec<ToAgent> {
        let mut out = Vec::new();
        self.conversation.settle(self.now, &self.reading, &mut out);
        out
    }

    fn after(&mut self, seconds: u64) -> Vec<ToAgent> {
        self.now += Duration::from_secs(seconds);
        let mut out = Vec::new();
        self.conversation.tick(self.now, &mut out);
        out
    }

    fn stat(&self) -> AgentStat {
        self.conversation.stat(self.now, &self.reading)
    }

    fn refused(&mut self, message: FromAgent) -> String {
        match &self.hear(message)[..] {
            [ToAgent::Refused { why, .. } | ToAgent::ProofBad { why, .. }] => why.clone(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_block_is_found_from_its_name_to_its_withdrawal() {
    let mut talk = Talk::proved(Limits::default());
    assert_eq!(talk.hear(name(5, 7)), [ToAgent::Named { lease: 5 }]);
    let found = talk.conversation.find(&key(7)).unwrap();
    let view = table::View::map(&talk.table).unwrap();
    assert!(view.holds(found.lease));
    assert_eq!(
        (found.image, found.data.size, found.meta.size),
        (1, 4096, 39)
    );
    assert_eq!(found.data.extents[0].physical, 8192);
    assert!(talk.conversation.find(&key(8)).is_none());
    let withdraw = FromAgent::Withdraw {
        leases: vec![5],
        why: Why::Deleted,
    };
    talk.reading.0.set(Some(found.lease.slot));
    assert_eq!(talk.hear(withdraw.clone()), []);
    assert!(!view.holds(found.lease) && talk.conversation.find(&key(7)).is_none());
    // A read is in flight; asking again does not make it end.
    assert_eq!(talk.settle(), []);
    assert_eq!(talk.hear(withdraw.clone()), []);
    talk.now += Duration::from_millis(250);
    assert_eq!(talk.stat().held_by, Some(("vm1".into(), 250)));
    talk.reading.0.set(None);
    assert_eq!(talk.settle(), [ToAgent::Withdrawn { leases: vec![5] }]);
    // The confirmation may have been lost.
    assert_eq!(
        talk.hear(withdraw),
        [ToAgent::Withdrawn { leases: vec![5] }]
    );
    let stat = talk.stat();
    assert_eq!(
        (stat.named, stat.withdrawn, stat.blocks, stat.unknown),
        (1, 1, 0, 2)
    );
    assert_eq!(stat.withdrawals["deleted"], 1);
}

#[test]
fn nobody_is_welcomed_while_the_old_epoch_is_read() {
    let mut talk = Talk::proved(Limits::default());
    talk.hear(name(5, 7));
    let lease = talk.conversation.find(&key(7)).unwrap().lease;
    let view = table::View::map(&talk.table).unwrap();
    talk.reading.0.set(Some(lease.slot));
    assert_eq!(talk.hear(hello(2)), []);
    assert!(!view.holds(lease) && talk.conversation.find(&key(7)).is_none());
    assert_eq!(talk.settle(), []);
    assert_eq!(talk.stat().session, Session::Ending);
    // It is impatient; only its last number counts.
    assert_eq!(talk.hear(hello(3)), []);
    assert_eq!(talk.hear(name(6, 7)), []);
    talk.reading.0.set(None);
    let welcome = talk.settle();
    assert!(
        matches!(welcome[..], [ToAgent::Welcome { session: 3, epoch, .. }] if epoch > lease.epoch)
    );
    assert!(talk.refused(name(6, 7)).contains("not proved"));
}

#[test]
fn a_table_taken_over_from_a_dead_worker_begins_with_a_new_epoch() {
    let mut talk = Talk::proved(Limits::default());
    talk.hear(name(5, 7));
    let lease = talk.conversation.find(&key(7)).unwrap().lease;
    let view = table::View::map(&talk.table).unwrap();
    let sink: Sink = Box::new(|_, _| {});
    let table = Table::map(&talk.table).unwrap();
    let mut next = Conversation::new(table, Limits::default(), Journal::new(sink), talk.now);
    assert!(!view.holds(lease));
    let mut out = Vec::new();
    next.open(talk.now, &mut out);
    assert_eq!(
        out,
        [ToAgent::Hail {
            version: agent::VERSION
        }]
    );
    next.hear(talk.now, hello(9), &mut out);
    talk.reading.0.set(Some(lease.slot));
    out.clear();
    next.settle(talk.now, &talk.reading, &mut out);
    assert_eq!(out, []);
    talk.reading.0.set(None);
    next.settle(talk.now, &talk.reading, &mut out);
    assert!(matches!(out[..], [ToAgent::Welcome { session: 9, .. }]));
}

#[test]
fn a_proof_has_to_be_on_the_disk() {
    let mut talk = Talk::new(Limits::default());
    talk.hear(hello(1));
    talk.settle();
    assert!(
        talk.refused(proof(0, vec![1; PROOF_BYTES]))
            .contains("no disk of the VM")
    );
    assert!(talk.refused(name(1, 1)).contains("not proved"));
    let mut with = |map: FileMap| {
        let FromAgent::Proof {
            fs,
            mount,
            kind,
            disk,
            content,
            ..
        } = proof(0, nonce())
        else {
            unreachable!()
        };
        talk.refused(FromAgent::Proof {
            fs,
            mount,
            kind,
            disk,
            content,
            map,
        })
    };
    assert!(with(file(4096, &[(0, DISK, 4096, false)])).contains("no disk"));
    assert!(with(file(4096, &[(0, u64::MAX - 10, 4096, false)])).contains("no disk"));
    assert!(with(file(4096, &[])).contains("holes"));
    assert!(with(file(4096, &[(0, PROOF_AT, 4096, true)])).contains("holes"));
    assert!(with(file(4095, &[(0, PROOF_AT, 4095, false)])).contains("4096"));
    assert_eq!(talk.hear(proof(0, nonce())), [ToAgent::ProofOk { fs: 0 }]);
    assert_eq!(talk.stat().refusals["proof"], 6);
    assert_eq!(talk.stat().proved["0"], "/data (ext4) on /images/dn1");
}

#[test]
fn extents_that_make_no_sense_are_refused_and_cost_nothing() {
    let mut talk = Talk::proved(Limits::default());
    let bad = [
        file(10, &[(0, DISK - 5, 10, false)]),
        file(u64::MAX, &[(0, 1 << 63, 1 << 63, false)]),
        file(20, &[(0, 0, 10, false), (5, 4096, 10, false)]),
        file(20, &[(10, 0, 10, false), (0, 4096, 10, false)]),
        file(5, &[(0, 0, 10, false)]),
        file(5, &[(0, 0, 0, false)]),
        file(10, &[(0, 1 << 63, 10, true)]),
    ];
    for (i, map) in bad.into_iter().enumerate() {
        for is_meta in [false, true] {
            let good = file(1, &[(0, 0, 1, false)]);
            let (data, meta) = if is_meta {
                (good, map.clone())
            } else {
                (map.clone(), good)
            };
            let lease = i as u64;
            let message = FromAgent::Name {
                lease,
                fs: 0,
                key: key(1),
                data,
                meta,
            };
            assert!(
                talk.refused(message).contains("BP-1/blk_1_1001: "),
                "{map:?}"
            );
        }
    }
    let stat = talk.stat();
    assert_eq!(
        (stat.blocks, stat.extents, stat.refusals["bad extents"]),
        (0, 0, 14)
    );
    // Fourteen refusals are one line.
    let lines = talk.lines.lock().unwrap();
    assert_eq!(
        lines.iter().filter(|l| l.contains("refused")).count(),
        1,
        "{lines:?}"
    );
}

#[test]
fn blocks_extents_and_names_a_second_are_bounded() {
    let limits = |blocks, extents, names_per_s| Limits {
        blocks,
        extents,
        names_per_s,
    };
    let mut talk = Talk::proved(limits(3, 100, 1000));
    let answers: Vec<_> = (0..5).flat_map(|i| talk.hear(name(i, i as i64))).collect();
    assert_eq!(
        answers
            .iter()
            .filter(|a| matches!(a, ToAgent::Named { .. }))
            .count(),
        3
    );
    assert_eq!(talk.stat().refusals["too many blocks"], 2);
    let mut talk = Talk::proved(limits(50, 5, 1000));
    let answers: Vec<_> = (0..5).flat_map(|i| talk.hear(name(i, i as i64))).collect();
    assert_eq!(
        answers
            .iter()
            .filter(|a| matches!(a, ToAgent::Named { .. }))
            .count(),
        2
    );
    assert_eq!(talk.stat().refusals["too many extents"], 3);
    let mut talk = Talk::proved(limits(50, 500, 2));
    let answers: Vec<_> = (0..20).flat_map(|i| talk.hear(name(i, i as i64))).collect();
    assert_eq!(
        answers
            .iter()
            .filter(|a| matches!(a, ToAgent::Named { .. }))
            .count(),
        8
    );
    talk.now += Duration::from_secs(1);
    assert_eq!(talk.hear(name(30, 30)), [ToAgent::Named { lease: 30 }]);
}

#[test]
fn a_number_in_use_is_neither_taken_nor_refused() {
    let mut talk = Talk::proved(Limits::default());
    talk.hear(name(5, 7));
    assert_eq!(talk.hear(name(5, 8)), []);
    assert!(talk.conversation.find(&key(8)).is_none());
    assert!(talk.conversation.find(&key(7)).is_some());
}

#[test]
fn a_file_system_that_is_withdrawn_has_to_be_proved_again() {
    let mut talk = Talk::proved(Limits::default());
    talk.hear(name(5, 7));
    assert_eq!(
        talk.hear(FromAgent::WithdrawAll {
            fs: 0,
            why: Why::Filesystem
        }),
        []
    );
    assert!(talk.conversation.find(&key(7)).is_none());
    assert!(talk.refused(name(6, 8)).contains("not proved"));
    assert_eq!(talk.hear(proof(0, nonce())), [ToAgent::ProofOk { fs: 0 }]);
    // Only when the agent withdraws it by its number, its slot is free again.
    let withdraw = FromAgent::Withdraw {
        leases: vec![5],
        why: Why::Filesystem,
    };
    assert_eq!(talk.hear(withdraw), []);
    assert_eq!(talk.settle(), [ToAgent::Withdrawn { leases: vec![5] }]);
}

#[test]
fn other_disks_end_the_epoch() {
    let mut talk = Talk::proved(Limits::default());
    talk.hear(name(5, 7));
    let lease = talk.conversation.find(&key(7)).unwrap().lease;
    let mut out = Vec::new();
    let disks = open_images(vec![spec(2)], vec![disk().into()]).unwrap();
    talk.conversation
        .replace_disks(talk.now, disks, "block job", &mut out);
    assert_eq!(
        out,
        [ToAgent::Hail {
            version: agent::VERSION
        }]
    );
    assert!(!table::View::map(&talk.table).unwrap().holds(lease));
    assert_eq!(talk.hear(name(6, 8)), []);
    assert_eq!(talk.stat().ends["block job"], 1);
    talk.hear(hello(2));
    talk.settle();
    talk.hear(proof(0, nonce()));
    talk.hear(name(1, 7));
    assert_eq!(talk.conversation.find(&key(7)).unwrap().image, 2);
}

#[test]
fn a_silent_agent_is_pinged_and_then_its_blocks_are_not_served() {
    let mut talk = Talk::proved(Limits::default());
    talk.hear(name(5, 7));
    assert_eq!(talk.after(1), []);
    assert_eq!(talk.after(1), [ToAgent::Ping { n: 1, session: 1 }]);
    talk.hear(FromAgent::Pong { n: 1 });
    talk.after(9);
    assert!(talk.conversation.find(&key(7)).is_some());
    assert_eq!(
        talk.after(1),
        [ToAgent::Hail {
            version: agent::VERSION
        }]
    );
    assert!(talk.conversation.find(&key(7)).is_none());
    assert_eq!(talk.stat().ends["silent agent"], 1);
    // It is hailed again and again, and may come back.
    talk.settle();
    assert_eq!(
        talk.after(2),
        [ToAgent::Hail {
            version: agent::VERSION
        }]
    );
    talk.hear(hello(2));
    assert!(matches!(
        talk.settle()[..],
        [ToAgent::Welcome { session: 2, .. }]
    ));
}

#[test]
fn another_version_is_told_and_not_served() {
    let mut talk = Talk::new(Limits::default());
    talk.hear(FromAgent::Hello {
        version: agent::VERSION + 1,
        agent_version: "9".into(),
        boot_id: String::new(),
        session: 1,
    });
    assert_eq!(talk.settle(), []);
    assert!(
        talk.lines
            .lock()
            .unwrap()
            .iter()
            .any(|l| l.contains("install the same release"))
    );
}

/// A worker in a thread of its own, with all its sockets.
struct Running {
    control: Control,
    agent: UnixStream,
    frames: FrameReader,
    reader: lookup::Client,
    cells: Arc<hazard::Cells>,
    table: std::fs::File,
    thread: std::thread::JoinHandle<io::Result<()>>,
}

fn seqpacket() -> (OwnedFd, OwnedFd) {
    socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

const PATIENCE: Duration = Duration::from_secs(10);

impl Running {
    fn new() -> Self {
        let table = tempfile::tempfile().unwrap();
        table::create(&table, 3, 64).unwrap();
        let (ours, theirs) = seqpacket();
        rustix::fs::fcntl_setfl(&ours, rustix::fs::OFlags::NONBLOCK).unwrap();
        let start = Start {
            vm: "uml:dn1".into(),
            table: table.try_clone().unwrap().into(),
            inbox: Inbox::single(Control::from_fd(theirs)),
            limits: Limits::default(),
        };
        let thread = std::thread::spawn(move || run(start, Box::new(|_, _| {})));
        let control = Control::from_fd(ours);
        let (agent, channel) = UnixStream::pair().unwrap();
        agent.set_read_timeout(Some(PATIENCE)).unwrap();
        let hazards = tempfile::tempfile().unwrap();
        hazard::create(&hazards, 4).unwrap();
        let (client, server) = seqpacket();
        let running = Self {
            control,
            agent,
            frames: FrameReader::new(),
            reader: lookup::Client::new(client),
            cells: Arc::new(hazard::Cells::map(&hazards).unwrap()),
            table,
            thread,
        };
        let image = disk();
        let images = Order::Images {
            datanode: "uml:dn1".into(),
            images: vec![spec(1)],
            why: "start".into(),
        };
        let reader = Order::Reader {
            name: "vm1".into(),
            pools: vec!["BP-1*".into()],
        };
        running.order(&images, &[image.as_fd()]);
        running.order(&reader, &[server.as_fd(), hazards.as_fd()]);
        running.order(&Order::Channel, &[channel.as_fd()]);
        running
    }

    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) {
        let report = self.control.order(order, fds, PATIENCE).unwrap();
        assert_eq!(report, Report::Done, "{order:?}");
    }

    fn stat(&self) -> AgentStat {
        match self.control.order(&Order::Stat, &[], PATIENCE).unwrap() {
            Report::Agent(stat) => stat,
            other => panic!("{other:?}"),
        }
    }

    fn say(&mut self, message: &FromAgent) {
        self.agent.write_all(&encode(message).unwrap()).unwrap();
    }

    /// What the worker says next, pings left out.
    fn hear(&mut self) -> ToAgent {
        loop {
            match self.frames.wait::<ToAgent>(&mut self.agent).unwrap() {
                Some(Ok(ToAgent::Ping { .. })) => {}
                Some(message) => return message.unwrap(),
                None => panic!("the worker hung up"),
            }
        }
    }

    fn open(&mut self) {
        assert!(matches!(self.hear(), ToAgent::Hail { .. }));
        self.say(&hello(1));
        assert!(matches!(self.hear(), ToAgent::Welcome { session: 1, .. }));
        self.say(&proof(0, nonce()));
        assert_eq!(self.hear(), ToAgent::ProofOk { fs: 0 });
    }

    fn find(&self, key: &BlockKey) -> Option<lookup::Found> {
        lookup::ask_all(&[&self.reader], key, PATIENCE).map(|(_, found)| found)
    }

    fn quit(self) {
        self.order(&Order::Quit { why: "test".into() }, &[]);
        self.thread.join().unwrap().unwrap();
    }
}

#[test]
fn a_worker_serves_a_reader_what_a_scripted_agent_names() {
    let mut w = Running::new();
    w.open();
    w.say(&name(5, 7));
    assert_eq!(w.hear(), ToAgent::Named { lease: 5 });
    let found = w.find(&key(7)).unwrap();
    assert_eq!(found.data.extents[0].physical, 8192);
    assert!(w.find(&key(8)).is_none());
    // Withdrawn while it is being read: confirmed when the read is over.
    let cells = w.cells.clone();
    let hazard = cells.publish(2, 3, found.lease.slot).unwrap();
    assert!(table::View::map(&w.table).unwrap().holds(found.lease));
    w.say(&FromAgent::Withdraw {
        leases: vec![5],
        why: Why::Deleted,
    });
    while w.stat().waiting == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!table::View::map(&w.table).unwrap().holds(found.lease));
    assert!(w.find(&key(7)).is_none());
    assert_eq!(w.stat().held_by.unwrap().0, "vm1");
    drop(hazard);
    assert_eq!(w.hear(), ToAgent::Withdrawn { leases: vec![5] });
    w.quit();
}

#[test]
fn a_pool_that_a_reader_may_not_read_is_not_known_to_it() {
    let mut w = Running::new();
    w.open();
    let other = BlockKey::new("BP-2", 7, 1001).unwrap();
    let FromAgent::Name {
        lease,
        fs,
        data,
        meta,
        ..
    } = name(5, 7)
    else {
        unreachable!()
    };
    w.say(&FromAgent::Name {
        lease,
        fs,
        key: other.clone(),
        data,
        meta,
    });
    assert_eq!(w.hear(), ToAgent::Named { lease: 5 });
    assert!(w.find(&other).is_none());
    w.quit();
}

#[test]
fn a_dead_reader_holds_nothing_up() {
    let mut w = Running::new();
    w.open();
    w.say(&name(5, 7));
    w.hear();
    let slot = w.find(&key(7)).unwrap().lease.slot;
    std::mem::forget(w.cells.publish(0, 3, slot).unwrap());
    w.say(&FromAgent::Withdraw {
        leases: vec![5],
        why: Why::Deleted,
    });
    while w.stat().waiting == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (nobody, _) = seqpacket();
    w.reader = lookup::Client::new(nobody);
    assert_eq!(w.hear(), ToAgent::Withdrawn { leases: vec![5] });
    assert_eq!(w.stat().readers, Vec::<String>::new());
    w.quit();
}

#[test]
fn a_broken_channel_ends_all_names_and_a_new_one_begins_anew() {
    let mut w = Running::new();
    w.open();
    w.say(&name(5, 7));
    w.hear();
    let lease = w.find(&key(7)).unwrap().lease;
    let (agent, channel) = UnixStream::pair().unwrap();
    agent.set_read_timeout(Some(PATIENCE)).unwrap();
    w.agent = agent;
    w.frames = FrameReader::new();
    while w.stat().session != Session::NoChannel {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!table::View::map(&w.table).unwrap().holds(lease));
    assert!(w.find(&key(7)).is_none());
    w.order(&Order::Channel, &[channel.as_fd()]);
    w.open();
    w.say(&name(5, 7));
    assert_eq!(w.hear(), ToAgent::Named { lease: 5 });
    assert!(w.find(&key(7)).unwrap().lease.epoch > lease.epoch);
    w.quit();
}

#[test]
fn an_agent_that_does_not_read_is_hung_up_on() {
    let w = Running::new();
    let mut agent = w.agent.try_clone().unwrap();
    agent.set_write_timeout(Some(PATIENCE)).unwrap();
    let unknown = encode(&FromAgent::Withdraw {
        leases: (1 << 60..(1 << 60) + 16_384).collect(),
        why: Why::Deleted,
    })
    .unwrap();
    let mut all = encode(&hello(1)).unwrap();
    agent.write_all(&all).unwrap();
    // It must be welcomed first; what it says before counts for nothing.
    while w.stat().session != Session::Welcomed {
        std::thread::sleep(Duration::from_millis(1));
    }
    all.clear();
    let mut hung_up = false;
    for _ in 0..200 {
        if agent.write_all(&unknown).is_err() {
            hung_up = true;
            break;
        }
    }
    assert!(hung_up);
    assert_eq!(w.stat().session, Session::NoChannel);
    w.quit();
}

#[test]
fn the_same_disks_twice_change_nothing_and_bad_ones_leave_none() {
    let mut w = Running::new();
    w.open();
    w.say(&name(5, 7));
    w.hear();
    let image = disk();
    let order = |id| Order::Images {
        datanode: "uml:dn1".into(),
        images: vec![spec(id)],
        why: "snapshot".into(),
    };
    w.order(&order(1), &[image.as_fd()]);
    assert!(w.find(&key(7)).is_some());
    let (pipe, _keep) = rustix::pipe::pipe().unwrap();
    let report = w
        .control
        .order(&order(2), &[pipe.as_fd()], PATIENCE)
        .unwrap();
    assert!(matches!(report, Report::Failed { why } if why.contains("/images/dn1")));
    assert!(w.find(&key(7)).is_none());
    assert!(w.stat().images.is_empty());
    w.quit();
}

#[test]
fn noise_on_the_line_is_counted_and_passed_over() {
    let mut w = Running::new();
    w.agent.write_all(b"login: \x00\xffVIO1garbage").unwrap();
    w.open();
    let mut frame = encode(&hello(1)).unwrap();
    let text = String::from_utf8_lossy(&frame[agent::HEADER..]).replace("hello", "hullo");
    frame.truncate(4);
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(agent::crc32c(text.as_bytes()).to_le_bytes());
    frame.extend(text.as_bytes());
    w.agent.write_all(&frame).unwrap();
    w.say(&name(5, 7));
    assert_eq!(w.hear(), ToAgent::Named { lease: 5 });
    assert_eq!(w.stat().refusals["no message"], 1);
    let mut rest = Vec::new();
    w.agent
        .set_read_timeout(Some(Duration::from_millis(10)))
        .unwrap();
    let _ = w.agent.read_to_end(&mut rest);
    w.quit();
}

fn any_map() -> impl Strategy<Value = FileMap> {
    let offset = prop_oneof![0u64..3 * DISK, Just(u64::MAX), Just(1 << 63), any::<u64>()];
    let extent = (
        offset.clone(),
        offset.clone(),
        offset.clone(),
        any::<bool>(),
    );
    (offset, proptest::collection::vec(extent, 0..4)).prop_map(|(size, e)| file(size, &e))
}

fn any_message() -> impl Strategy<Value = FromAgent> {
    let why = Just(Why::Moved);
    prop_oneof![
        1 => (0u64..3).prop_map(hello),
        2 => (0u32..3, any::<bool>()).prop_map(|(fs, good)| proof(fs, if good { nonce() } else { vec![0; PROOF_BYTES] })),
        6 => (0u64..8, 0i64..4).prop_map(|(lease, id)| name(lease, id)),
        3 => (0u64..8, 0u32..3, 0i64..4, any_map(), any_map())
            .prop_map(|(lease, fs, id, data, meta)| FromAgent::Name { lease, fs, key: key(id), data, meta }),
        4 => (proptest::collection::vec(0u64..9, 0..4), why).prop_map(|(leases, why)| FromAgent::Withdraw { leases, why }),
        1 => (0u32..3).prop_map(|fs| FromAgent::WithdrawAll { fs, why: Why::Filesystem }),
    ]
}

proptest! {
    /// Whatever an agent says: a lease of a block that was withdrawn or replaced never holds, what holds lies within
    /// the disk, no withdrawal is confirmed while it is read, and nobody is welcomed while anything is.
    #[test]
    fn no_agent_gets_more_than_it_may(steps in proptest::collection::vec((any_message(), proptest::option::of(0u32..4)), 0..120)) {
        let mut talk = Talk::new(Limits { blocks: 4, extents: 8, names_per_s: 1000 });
        let view = table::View::map(&talk.table).unwrap();
        let mut slots: std::collections::BTreeMap<u64, u32> = std::collections::BTreeMap::new();
        let mut unconfirmed: std::collections::BTreeMap<u64, u32> = std::collections::BTreeMap::new();
        for (message, reading) in steps {
            talk.reading.0.set(reading);
            let said = message.clone();
            let mut answers = talk.hear(message);
            if let FromAgent::Withdraw { leases, .. } = &said {
                for lease in leases {
                    unconfirmed.extend(slots.remove(lease).map(|slot| (*lease, slot)));
                }
            }
            answers.extend(talk.settle());
            for answer in answers {
                match answer {
                    ToAgent::Welcome { .. } => {
                        prop_assert_eq!(reading, None);
                        slots.clear();
                        unconfirmed.clear();
                    }
                    ToAgent::Named { lease } => {
                        let FromAgent::Name { key, .. } = &said else { panic!("named") };
                        let found = talk.conversation.find(key).unwrap();
                        prop_assert!(view.holds(found.lease));
                        for map in [&found.data, &found.meta] {
                            for e in &map.extents {
                                prop_assert!(e.physical.checked_add(e.length).is_some_and(|end| end <= DISK));
                                prop_assert!(e.logical.checked_add(e.length).is_some_and(|end| end <= map.size));
                            }
                        }
                        // No two blocks share a slot.
                        prop_assert!(!slots.values().chain(unconfirmed.values()).any(|s| *s == found.lease.slot));
                        slots.insert(lease, found.lease.slot);
                    }
                    ToAgent::Withdrawn { leases } => for lease in leases {
                        if let Some(slot) = unconfirmed.remove(&lease) {
                            prop_assert_ne!(Some(slot), reading);
                        }
                        prop_assert!(!slots.contains_key(&lease));
                    },
                    _ => {}
                }
            }
            let stat = talk.stat();
            prop_assert!(stat.blocks <= 4 && stat.extents <= 8);
        }
    }
}

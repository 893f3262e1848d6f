// SPDX-License-Identifier: Apache-2.0
//! Tests of the whole worker through its sockets.

use super::*;

/// A worker in its own thread, with all its sockets.
struct RunningWorker {
    control: Control,
    agent: UnixStream,
    frames: FrameReader,
    reader: lookup::Client,
    cells: Arc<hazard::Cells>,
    table: std::fs::File,
    disk: std::fs::File,
    thread: std::thread::JoinHandle<io::Result<()>>,
}

const TEST_TIMEOUT: Duration = Duration::from_secs(10);

impl RunningWorker {
    fn new() -> Self {
        let table = tempfile::tempfile().unwrap();
        table::create(&table, 3, 64).unwrap();
        let (ours, theirs) = socket_pair().unwrap();
        rustix::fs::fcntl_setfl(&ours, rustix::fs::OFlags::NONBLOCK).unwrap();
        let params = Params {
            vm: "uml:dn1".into(),
            table: table.try_clone().unwrap().into(),
            inbox: Inbox::single(Control::from_fd(theirs)),
            pipes: None,
            limits: Limits::default(),
        };
        let thread = std::thread::spawn(move || run(params, Box::new(|_, _| {})));
        let control = Control::from_fd(ours);
        let (agent, channel) = UnixStream::pair().unwrap();
        agent.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let hazards = tempfile::tempfile().unwrap();
        hazard::create(&hazards, 4).unwrap();
        let (client, server) = socket_pair().unwrap();
        let running = Self {
            control,
            agent,
            frames: FrameReader::new(),
            reader: lookup::Client::new(client),
            cells: Arc::new(hazard::Cells::map(&hazards).unwrap()),
            table,
            disk: disk(),
            thread,
        };
        let images = Order::Images {
            datanode: "uml:dn1".into(),
            images: vec![spec(1)],
            why: "start".into(),
        };
        let reader = Order::Reader {
            name: "vm1".into(),
            pools: vec!["BP-1*".into()],
        };
        running.order(&images, &[running.disk.as_fd()]);
        running.order(&reader, &[server.as_fd(), hazards.as_fd()]);
        running.order(&Order::Channel, &[channel.as_fd()]);
        running
    }

    fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) {
        let report = self.control.order(order, fds, TEST_TIMEOUT).unwrap();
        assert_eq!(report, Report::Done, "{order:?}");
    }

    fn stat(&self) -> AgentStat {
        match self.control.order(&Order::Stat, &[], TEST_TIMEOUT).unwrap() {
            Report::Agent(stat) => *stat,
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, message: &FromAgent) {
        self.agent.write_all(&encode(message).unwrap()).unwrap();
    }

    /// The worker's next message; pings are skipped.
    fn receive(&mut self) -> ToAgent {
        loop {
            match self.frames.wait::<ToAgent>(&mut self.agent).unwrap() {
                Some(Ok(ToAgent::Ping { .. })) => {}
                Some(message) => return message.unwrap(),
                None => panic!("the worker closed the channel"),
            }
        }
    }

    fn open(&mut self) {
        assert!(matches!(self.receive(), ToAgent::HelloRequest { .. }));
        self.send(&hello(1));
        let welcome = self.receive();
        let ToAgent::Welcome {
            session: 1,
            challenge,
            ..
        } = welcome
        else {
            panic!("{welcome:?}");
        };
        write_proof(&self.disk, 0, challenge);
        self.send(&proof(0));
        assert_eq!(self.receive(), ToAgent::ProofOk { fs: 0 });
    }

    fn find(&self, key: &BlockKey) -> Option<lookup::Found> {
        lookup::ask_all(&[&self.reader], key, TEST_TIMEOUT).map(|(_, found)| found)
    }

    fn quit(self) {
        self.order(&Order::Quit { why: "test".into() }, &[]);
        self.thread.join().unwrap().unwrap();
    }
}

#[test]
fn a_worker_serves_a_reader_what_a_scripted_agent_names() {
    let mut w = RunningWorker::new();
    w.open();
    w.send(&name(5, 7));
    assert_eq!(w.receive(), ToAgent::Named { lease: 5 });
    let found = w.find(&key(7)).unwrap();
    assert_eq!(found.data.extents[0].physical, 8192);
    assert!(w.find(&key(8)).is_none());
    // Withdrawn while it is being read: confirmed when the read is over.
    let cells = w.cells.clone();
    let hazard = cells.publish(2, 3, found.lease.slot).unwrap();
    assert!(table::View::map(&w.table).unwrap().holds(found.lease));
    w.send(&FromAgent::Withdraw {
        leases: vec![5],
        why: WithdrawReason::Deleted,
    });
    while w.stat().waiting == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!table::View::map(&w.table).unwrap().holds(found.lease));
    assert!(w.find(&key(7)).is_none());
    assert_eq!(w.stat().held_by.unwrap().0, "vm1");
    drop(hazard);
    assert_eq!(w.receive(), ToAgent::Withdrawn { leases: vec![5] });
    w.quit();
}

#[test]
fn a_pool_that_a_reader_may_not_read_is_not_known_to_it() {
    let mut w = RunningWorker::new();
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
    w.send(&FromAgent::Name {
        lease,
        fs,
        key: other.clone(),
        data,
        meta,
    });
    assert_eq!(w.receive(), ToAgent::Named { lease: 5 });
    assert!(w.find(&other).is_none());
    w.quit();
}

#[test]
fn a_dead_reader_delays_no_withdrawal() {
    let mut w = RunningWorker::new();
    w.open();
    w.send(&name(5, 7));
    w.receive();
    let slot = w.find(&key(7)).unwrap().lease.slot;
    std::mem::forget(w.cells.publish(0, 3, slot).unwrap());
    w.send(&FromAgent::Withdraw {
        leases: vec![5],
        why: WithdrawReason::Deleted,
    });
    while w.stat().waiting == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (nobody, _) = socket_pair().unwrap();
    w.reader = lookup::Client::new(nobody);
    assert_eq!(w.receive(), ToAgent::Withdrawn { leases: vec![5] });
    assert_eq!(w.stat().readers, Vec::<String>::new());
    w.quit();
}

#[test]
fn a_broken_channel_withdraws_all_blocks() {
    let mut w = RunningWorker::new();
    w.open();
    w.send(&name(5, 7));
    w.receive();
    let lease = w.find(&key(7)).unwrap().lease;
    let (agent, channel) = UnixStream::pair().unwrap();
    agent.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    w.agent = agent;
    w.frames = FrameReader::new();
    while w.stat().session != Session::NoChannel {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!table::View::map(&w.table).unwrap().holds(lease));
    assert!(w.find(&key(7)).is_none());
    w.order(&Order::Channel, &[channel.as_fd()]);
    w.open();
    w.send(&name(5, 7));
    assert_eq!(w.receive(), ToAgent::Named { lease: 5 });
    assert!(w.find(&key(7)).unwrap().lease.epoch > lease.epoch);
    w.quit();
}

#[test]
fn the_channel_of_an_agent_that_does_not_read_is_closed() {
    let w = RunningWorker::new();
    let mut agent = w.agent.try_clone().unwrap();
    agent.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
    let unknown = encode(&FromAgent::Withdraw {
        leases: (1 << 60..(1 << 60) + 16_384).collect(),
        why: WithdrawReason::Deleted,
    })
    .unwrap();
    let mut all = encode(&hello(1)).unwrap();
    agent.write_all(&all).unwrap();
    // The agent must be welcomed first; earlier messages do not count.
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

/// Unread bytes of a stream.
fn unread(stream: &UnixStream) -> u64 {
    rustix::io::ioctl_fionread(stream).unwrap()
}

#[test]
fn an_agent_on_a_serial_line_that_reads_late_gets_all_and_never_too_much_at_once() {
    let mut w = RunningWorker::new();
    assert!(matches!(w.receive(), ToAgent::HelloRequest { .. }));
    let FromAgent::Hello {
        version,
        agent_version,
        boot_id,
        session,
        ..
    } = hello(1)
    else {
        panic!("hello");
    };
    let window = agent::SERIAL_LINE_BYTES;
    w.send(&FromAgent::Hello {
        version,
        agent_version,
        boot_id,
        session,
        window,
    });
    assert!(matches!(w.receive(), ToAgent::Welcome { session: 1, .. }));
    for lease in 0..400 {
        w.send(&name(lease, 7));
    }
    let mut next = 0;
    let mut max_unread = 0;
    while next < 400 {
        // Slower than the answers come.
        std::thread::sleep(Duration::from_millis(5));
        max_unread = max_unread.max(unread(&w.agent));
        match w
            .frames
            .wait::<ToAgent>(&mut w.agent)
            .unwrap()
            .unwrap()
            .unwrap()
        {
            ToAgent::Ping { n, .. } => w.send(&FromAgent::Pong { n }),
            ToAgent::Refused { lease, .. } => {
                assert_eq!(lease, next);
                next += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        max_unread > 1000 && max_unread <= u64::from(agent::SERIAL_LINE_BYTES),
        "{max_unread}"
    );
    w.quit();
}

#[test]
fn the_same_disks_twice_change_nothing_and_bad_ones_leave_none() {
    let mut w = RunningWorker::new();
    w.open();
    w.send(&name(5, 7));
    w.receive();
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
        .order(&order(2), &[pipe.as_fd()], TEST_TIMEOUT)
        .unwrap();
    assert!(matches!(report, Report::Failed { why } if why.contains("/images/dn1")));
    assert!(w.find(&key(7)).is_none());
    assert!(w.stat().images.is_empty());
    w.quit();
}

#[test]
fn noise_on_the_line_is_counted_and_skipped() {
    let mut w = RunningWorker::new();
    w.agent.write_all(b"login: \x00\xffVIO1garbage").unwrap();
    w.open();
    let mut frame = encode(&hello(1)).unwrap();
    let text = String::from_utf8_lossy(&frame[agent::HEADER_BYTES..]).replace("hello", "hullo");
    frame.truncate(4);
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(agent::crc32c(text.as_bytes()).to_le_bytes());
    frame.extend(text.as_bytes());
    w.agent.write_all(&frame).unwrap();
    w.send(&name(5, 7));
    assert_eq!(w.receive(), ToAgent::Named { lease: 5 });
    assert_eq!(w.stat().refusals["no message"], 1);
    let mut rest = Vec::new();
    w.agent
        .set_read_timeout(Some(Duration::from_millis(10)))
        .unwrap();
    let _ = w.agent.read_to_end(&mut rest);
    w.quit();
}

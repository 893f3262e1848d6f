// SPDX-License-Identifier: Apache-2.0
//! For any order of events: one answer to the program, nothing released too early, and nothing kept.

use proptest::prelude::*;

use super::*;

const ALL: [Kind; 4] = [Kind::Send, Kind::Receive, Kind::Copy, Kind::Relay];

fn sides() -> impl Strategy<Value = Sides> {
    any::<(bool, bool)>().prop_map(|(source, sink)| Sides { source, sink })
}

fn event() -> impl Strategy<Value = Event> {
    let errno = prop_oneof![Just(0), Just(libc::EIO)];
    let few = 0..5_u64;
    prop_oneof![
        3 => Just(Event::Ready),
        3 => Just(Event::Held),
        2 => (0..1000_u64).prop_map(Event::Moved),
        1 => sides().prop_map(Event::SourceEnded),
        4 => Just(Event::HandedOver),
        1 => Just(Event::Failed(libc::EOPNOTSUPP)),
        1 => Just(Event::Refused),
        2 => few.prop_map(Event::Progress),
        2 => (sides(), 0..1000_u64, errno)
            .prop_map(|(returned, sent, errno)| Event::Returned { returned, sent, errno }),
        1 => sides().prop_map(Event::Restored),
        2 => prop_oneof![4 => Just(0), 1 => Just(libc::EIO)].prop_map(Event::Settled),
        1 => Just(Event::SessionClosed),
        1 => Just(Event::SessionOpened),
        1 => Just(Event::Stop),
        1 => Just(Event::Halt),
        1 => Just(Event::ProgramGone),
    ]
}

/// The state of a pipe's surroundings, derived from its actions.
#[derive(Default)]
struct World {
    connections: Sides,
    /// The host has the pipe.
    read: bool,
    /// The host holds the source, or was asked to.
    hold: bool,
    /// Sockets in repair mode.
    silent: Sides,
    killed: Sides,
    file_left: bool,
    settling: bool,
    settled: bool,
    /// Bytes that the agent has moved, and those of agent and host.
    moved: u64,
    total: u64,
    ends: usize,
    program_gone: bool,
    holds: usize,
    reset: usize,
    stops: usize,
    taken: usize,
    /// `Restored` is due, for the connections that returned.
    restore: bool,
    returned: Sides,
    /// No session is open.
    closed: bool,
}

impl World {
    fn new(kind: Kind) -> Self {
        Self {
            connections: kind.connections(),
            ..Self::default()
        }
    }

    fn before(&mut self, life: &Life, event: Event) {
        match event {
            Event::HandedOver if life.can_hand_over() => {
                (self.read, self.silent, self.hold) = (true, self.connections, false);
                self.total = self.moved;
            }
            Event::Moved(moved) if life.is_held() => (self.moved, self.total) = (moved, moved),
            // the host sends only in a session
            Event::Refused if !self.closed => {
                // a refusal means that it has moved nothing
                if self.read {
                    self.total = self.moved;
                }
                (self.read, self.hold) = (false, false);
            }
            Event::Progress(sent) if self.read && !self.closed => self.total = self.moved + sent,
            Event::Returned { returned, sent, .. } if !self.closed => {
                if self.read {
                    self.total = self.moved + sent;
                }
                (self.read, self.returned) = (false, returned);
            }
            Event::Settled(_) => (self.settling, self.settled) = (false, true),
            Event::SessionClosed => (self.closed, self.hold) = (true, false),
            Event::SessionOpened => (self.closed, self.read) = (false, false),
            Event::ProgramGone => self.program_gone = true,
            _ => {}
        }
    }

    fn end(&mut self, answer: LibraryReply) -> Result<(), TestCaseError> {
        self.ends += 1;
        prop_assert!(
            self.settled || !self.file_sink(),
            "the file is not right yet"
        );
        prop_assert!(!self.silent.any() && !self.hold, "{:?} too early", answer);
        match answer {
            LibraryReply::Progress { .. } => {}
            LibraryReply::Finished { sent, lost, .. } => {
                let lost = Sides {
                    source: lost.source,
                    sink: lost.sink,
                };
                prop_assert_eq!(self.killed.without(lost), Sides::NONE);
                prop_assert!(
                    sent == self.total || sent == 0,
                    "{} of {}",
                    sent,
                    self.total
                );
            }
            LibraryReply::Refused { .. } => {
                prop_assert!(!self.killed.any() && self.moved == 0, "it is not as it was");
            }
        }
        Ok(())
    }

    fn file_sink(&self) -> bool {
        !self.connections.sink
    }

    fn done(&mut self, action: Action) -> Result<(), TestCaseError> {
        match action {
            Action::Answer(answer) => {
                prop_assert_eq!(self.ends, 0, "{:?} after the end", answer);
                match answer {
                    LibraryReply::Progress { sent, .. } => prop_assert_eq!(sent, self.total),
                    end => self.end(end)?,
                }
            }
            Action::Tell(HostCommand::Hold) => {
                prop_assert!(self.connections.source && !self.closed);
                (self.hold, self.holds) = (true, self.holds + 1);
            }
            Action::Tell(HostCommand::Stop) => (self.hold, self.stops) = (false, self.stops + 1),
            Action::Tell(HostCommand::Reset) => self.reset += 1,
            Action::Tell(HostCommand::Restored) => {
                let alive = self.connections.without(self.killed).without(self.silent);
                prop_assert!(alive.any());
                self.taken += 1;
            }
            Action::Resume => {
                prop_assert_eq!((self.silent, self.killed), (self.connections, Sides::NONE));
                self.silent = Sides::NONE;
            }
            Action::Drop(sides) => {
                prop_assert!(sides.any());
                prop_assert_eq!(sides.without(self.silent), Sides::NONE);
                self.silent = self.silent.without(sides);
                self.killed = self.killed.and(sides);
            }
            Action::Reset => {
                prop_assert_eq!((self.silent, self.killed), (self.connections, Sides::NONE));
                (self.silent, self.killed) = (Sides::NONE, self.connections);
            }
            Action::Restore => {
                prop_assert!(self.silent.any() && !self.read);
                self.restore = true;
            }
            Action::ReleaseFile => {
                prop_assert!(!self.read, "the host may still read it");
                prop_assert!(!self.file_left, "left twice");
                self.file_left = true;
            }
            Action::Settle(bytes) => {
                prop_assert!(!self.read, "the host may still write to it");
                prop_assert!(!self.settling && !self.settled, "settled twice");
                prop_assert_eq!(bytes, self.total);
                self.settling = true;
            }
        }
        Ok(())
    }
}

fn happen(
    life: &mut Life,
    world: &mut World,
    event: Event,
    failed: Sides,
) -> Result<(), TestCaseError> {
    // Restored and Settled come only after their actions
    if matches!(event, Event::Restored(_)) || matches!(event, Event::Settled(_)) && !world.settling
    {
        return Ok(());
    }
    // the host confirms only a hold that it was asked for
    if event == Event::Held && !world.hold {
        return Ok(());
    }
    // a session opens only after the last one has ended
    if event == Event::SessionOpened && !world.closed {
        happen(life, world, Event::SessionClosed, failed)?;
    }
    // nothing is held without a session
    if world.closed && matches!(event, Event::Ready | Event::HandedOver) {
        return Ok(());
    }
    world.before(life, event);
    let mut actions = life.apply(event);
    loop {
        for action in actions.drain(..) {
            world.done(action)?;
        }
        if !std::mem::take(&mut world.restore) {
            break;
        }
        let returned = world.silent.without(failed);
        world.silent = world.silent.without(returned);
        actions = life.apply(Event::Restored(failed));
    }
    prop_assert!(world.stops <= 1 && world.reset <= 1 && world.taken <= 1 && world.holds <= 1);
    prop_assert!(!life.uses_files() || world.read || world.settling);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_pipe_ends_once_and_keeps_its_files_while_the_host_may_touch_them(
        kind in 0..4_usize,
        events in proptest::collection::vec((event(), sides()), 0..40)
    ) {
        let kind = ALL[kind];
        let (mut life, mut world) = (Life::new(7, kind), World::new(kind));
        for (event, failed) in events {
            happen(&mut life, &mut world, event, failed)?;
        }
        // everything ends when a session ends and another one opens, and the disk answers
        for event in [Event::SessionClosed, Event::SessionOpened, Event::Settled(0)] {
            happen(&mut life, &mut world, event, Sides::NONE)?;
        }
        prop_assert!(life.is_over(), "{life:?}");
        prop_assert!(world.file_left && world.settled && !world.silent.any() && !world.hold);
        prop_assert_eq!(world.ends + usize::from(world.program_gone && world.ends == 0), 1);
    }
}

fn run(kind: Kind, events: &[Event]) -> (Life, Vec<Action>) {
    let mut life = Life::new(7, kind);
    let actions = events.iter().flat_map(|e| life.apply(*e)).collect();
    (life, actions)
}

fn finished(sent: u64, lost: Sides) -> Action {
    let errno = if lost.any() { libc::ECONNRESET } else { 0 };
    let Sides { source, sink } = lost;
    Action::Answer(LibraryReply::Finished {
        id: 7,
        sent,
        errno,
        lost: LostConnections { source, sink },
        host_us: 0,
    })
}

const BOTH: Sides = Sides {
    source: true,
    sink: true,
};
const SOURCE: Sides = Sides {
    source: true,
    sink: false,
};
const SINK: Sides = Sides {
    source: false,
    sink: true,
};

fn back(returned: Sides, sent: u64) -> Event {
    let errno = 0;
    Event::Returned {
        returned,
        sent,
        errno,
    }
}

#[test]
fn a_file_is_sent_and_the_connection_is_restored() {
    let way = [
        Event::HandedOver,
        Event::Progress(4),
        back(SINK, 9),
        Event::Restored(Sides::NONE),
        Event::Settled(0),
    ];
    let (life, actions) = run(Kind::Send, &way);
    assert!(life.is_over());
    assert_eq!(
        actions,
        [
            Action::Answer(LibraryReply::Progress { id: 7, sent: 4 }),
            Action::ReleaseFile,
            Action::Restore,
            Action::Tell(HostCommand::Restored),
            Action::Settle(9),
            finished(9, Sides::NONE),
        ]
    );
}

#[test]
fn bytes_moved_by_agent_and_host_are_counted_together() {
    let way = [
        Event::Ready,
        Event::Held,
        Event::Moved(100),
        Event::HandedOver,
        Event::Progress(4),
        back(BOTH, 9),
        Event::Restored(Sides::NONE),
        Event::Settled(0),
    ];
    let (life, actions) = run(Kind::Relay, &way);
    assert!(life.is_over());
    assert_eq!(
        actions,
        [
            Action::Tell(HostCommand::Hold),
            Action::Answer(LibraryReply::Progress { id: 7, sent: 104 }),
            Action::ReleaseFile,
            Action::Restore,
            Action::Tell(HostCommand::Restored),
            Action::Settle(109),
            finished(109, Sides::NONE),
        ]
    );
}

#[test]
fn a_connection_that_is_not_returned_is_dropped_and_reported_lost() {
    let held = [Event::Ready, Event::Held, Event::HandedOver];
    let (mut life, _) = run(Kind::Relay, &held);
    assert_eq!(
        life.apply(back(SOURCE, 5)),
        [Action::ReleaseFile, Action::Drop(SINK), Action::Restore]
    );
    assert_eq!(
        life.apply(Event::Restored(Sides::NONE)),
        [Action::Tell(HostCommand::Restored), Action::Settle(5)]
    );
    assert_eq!(life.apply(Event::Settled(0)), [finished(5, SINK)]);
    let (mut life, _) = run(Kind::Relay, &held);
    life.apply(back(BOTH, 5));
    assert_eq!(
        life.apply(Event::Restored(BOTH)),
        [
            Action::Tell(HostCommand::Reset),
            Action::Drop(BOTH),
            Action::Settle(5)
        ]
    );
}

#[test]
fn a_held_source_that_cannot_be_handed_over_is_released() {
    let held = [Event::Ready, Event::Held];
    let (mut life, _) = run(Kind::Relay, &held);
    assert_eq!(
        life.apply(Event::Failed(libc::EAGAIN)),
        [
            Action::Tell(HostCommand::Stop),
            Action::ReleaseFile,
            Action::Settle(0)
        ]
    );
    let (id, errno) = (7, libc::EAGAIN);
    let refused = Action::Answer(LibraryReply::Refused { id, errno });
    assert_eq!(life.apply(Event::Settled(0)), [refused]);
    let (mut life, _) = run(Kind::Receive, &held);
    life.apply(Event::Moved(6));
    life.apply(Event::SourceEnded(Sides::NONE));
    assert_eq!(life.apply(Event::Settled(0)), [finished(6, Sides::NONE)]);
}

#[test]
fn a_lost_pipe_keeps_its_file_until_the_next_session() {
    let way = [Event::HandedOver, Event::Progress(4), Event::SessionClosed];
    let (mut life, actions) = run(Kind::Send, &way);
    assert_eq!(actions[1..], [Action::Reset, finished(4, SINK)]);
    assert!(life.uses_files() && !life.is_awaited());
    assert_eq!(
        life.apply(Event::SessionOpened),
        [Action::ReleaseFile, Action::Settle(4)]
    );
    assert_eq!(life.apply(Event::Settled(0)), []);
    assert!(life.is_over());
}

#[test]
fn a_sink_file_is_settled_only_in_the_next_session_after_a_loss() {
    for (kind, lost) in [(Kind::Receive, SOURCE), (Kind::Copy, Sides::NONE)] {
        let mut life = Life::new(7, kind);
        for event in [
            Event::Ready,
            Event::Held,
            Event::HandedOver,
            Event::Progress(4),
        ] {
            life.apply(event);
        }
        let reset = Vec::from_iter(lost.any().then_some(Action::Reset));
        assert_eq!(life.apply(Event::SessionClosed), reset);
        assert!(life.uses_files() && life.is_awaited());
        assert_eq!(
            life.apply(Event::SessionOpened),
            [Action::ReleaseFile, Action::Settle(4)]
        );
        assert_eq!(life.apply(Event::Settled(0)), [finished(4, lost)]);
    }
}

#[test]
fn a_dead_program_has_its_connection_reset_by_the_host() {
    let (mut life, actions) = run(
        Kind::Send,
        &[Event::HandedOver, Event::ProgramGone, Event::Halt],
    );
    assert_eq!(actions, [Action::Tell(HostCommand::Reset)]);
    assert!(life.uses_files(), "until the host says so");
    assert_eq!(
        life.apply(back(Sides::NONE, 0)),
        [Action::ReleaseFile, Action::Drop(SINK), Action::Settle(0)]
    );
}

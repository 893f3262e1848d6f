// SPDX-License-Identifier: Apache-2.0
//! Whatever happens in whatever order: one end for the program, and no lease given up too early.

use proptest::prelude::*;

use super::*;

fn event() -> impl Strategy<Value = Event> {
    let errno = prop_oneof![Just(0), Just(libc::EIO)];
    prop_oneof![
        3 => Just(Event::Given),
        1 => Just(Event::Unfit(libc::EOPNOTSUPP)),
        1 => Just(Event::Refused),
        2 => any::<u64>().prop_map(Event::Progress),
        2 => (any::<bool>(), any::<u64>(), errno)
            .prop_map(|(alive, sent, errno)| Event::Back { alive, sent, errno }),
        1 => any::<bool>().prop_map(Event::Restored),
        1 => Just(Event::Closed),
        1 => Just(Event::Opened),
        1 => Just(Event::Stop),
        1 => Just(Event::Halt),
        1 => Just(Event::Gone),
    ]
}

/// What the world knows of a pipe, told by what was done and not by the pipe itself.
#[derive(Default)]
struct World {
    /// The host was asked, and has not let go.
    read: bool,
    /// The socket is in repair mode.
    silent: bool,
    killed: bool,
    file_left: bool,
    ends: usize,
    program_gone: bool,
    reset: usize,
    stops: usize,
    taken: usize,
    restore: bool,
    /// There is no session.
    closed: bool,
}

impl World {
    fn before(&mut self, life: &Life, event: Event) {
        match event {
            Event::Given if life.is_asked() => (self.read, self.silent) = (true, true),
            // a host speaks only in a session
            Event::Refused | Event::Back { .. } if !self.closed => self.read = false,
            Event::Closed => self.closed = true,
            Event::Opened => (self.closed, self.read) = (false, false),
            Event::Gone => self.program_gone = true,
            _ => {}
        }
    }

    fn done(&mut self, action: Action) -> Result<(), TestCaseError> {
        match action {
            Action::Answer(answer) => {
                prop_assert_eq!(self.ends, 0, "{:?} after the end", answer);
                match answer {
                    Answer::Progress { .. } => {}
                    Answer::Over { errno, .. } => {
                        self.ends += 1;
                        prop_assert!(!self.silent);
                        prop_assert_eq!(self.killed, errno == libc::ECONNRESET);
                    }
                    Answer::Refused { .. } => {
                        self.ends += 1;
                        prop_assert!(!self.silent && !self.killed, "it is not as it was");
                    }
                }
            }
            Action::Tell(Word::Stop) => self.stops += 1,
            Action::Tell(Word::Reset) => self.reset += 1,
            Action::Tell(Word::Taken) => {
                prop_assert!(!self.silent && !self.killed);
                self.taken += 1;
            }
            Action::Resume => {
                prop_assert!(self.silent && !self.killed);
                self.silent = false;
            }
            Action::Kill | Action::Reset => {
                prop_assert!(self.silent && !self.killed);
                (self.silent, self.killed) = (false, true);
            }
            Action::Restore => {
                prop_assert!(self.silent && !self.killed);
                self.restore = true;
            }
            Action::LetFile => {
                prop_assert!(!self.read, "the host may still read it");
                prop_assert!(!self.file_left, "left twice");
                self.file_left = true;
            }
        }
        Ok(())
    }
}

fn happen(
    life: &mut Life,
    world: &mut World,
    event: Event,
    good: bool,
) -> Result<(), TestCaseError> {
    // only whoever puts it back says what has come of it
    if matches!(event, Event::Restored(_)) {
        return Ok(());
    }
    // and a session begins only when the one before is over
    if event == Event::Opened && !world.closed {
        happen(life, world, Event::Closed, good)?;
    }
    world.before(life, event);
    let mut actions = life.on(event);
    loop {
        for action in actions.drain(..) {
            world.done(action)?;
        }
        if !std::mem::take(&mut world.restore) {
            break;
        }
        world.silent = !good;
        actions = life.on(Event::Restored(good));
    }
    prop_assert!(world.stops <= 1 && world.reset <= 1 && world.taken <= 1);
    prop_assert!(!life.is_read() || world.read);
    Ok(())
}

proptest! {
    #[test]
    fn every_pipe_ends_once_and_keeps_its_file_while_it_may_be_read(
        events in proptest::collection::vec((event(), any::<bool>()), 0..30)
    ) {
        let (mut life, mut world) = (Life::new(7), World::default());
        for (event, good) in events {
            happen(&mut life, &mut world, event, good)?;
        }
        // all ends when a session ends and another one begins
        happen(&mut life, &mut world, Event::Closed, true)?;
        happen(&mut life, &mut world, Event::Opened, true)?;
        prop_assert!(life.is_over(), "{life:?}");
        prop_assert!(world.file_left && !world.silent);
        prop_assert_eq!(world.ends + usize::from(world.program_gone && world.ends == 0), 1);
    }
}

fn run(events: &[Event]) -> (Life, Vec<Action>) {
    let mut life = Life::new(7);
    let actions = events.iter().flat_map(|e| life.on(*e)).collect();
    (life, actions)
}

fn over(sent: u64, errno: i32) -> Action {
    Action::Answer(Answer::Over { id: 7, sent, errno })
}

#[test]
fn a_whole_file_goes_and_the_connection_comes_back() {
    let back = Event::Back {
        alive: true,
        sent: 9,
        errno: 0,
    };
    let way = [
        Event::Given,
        Event::Progress(4),
        back,
        Event::Restored(true),
    ];
    let (life, actions) = run(&way);
    assert!(life.is_over());
    assert_eq!(
        actions,
        [
            Action::Answer(Answer::Progress { id: 7, sent: 4 }),
            Action::LetFile,
            Action::Restore,
            Action::Tell(Word::Taken),
            over(9, 0),
        ]
    );
}

#[test]
fn a_lost_pipe_keeps_its_file_until_the_next_session() {
    let (mut life, actions) = run(&[Event::Given, Event::Progress(4), Event::Closed]);
    assert_eq!(actions[1..], [Action::Reset, over(4, libc::ECONNRESET)]);
    assert!(life.is_read() && !life.is_awaited());
    assert_eq!(life.on(Event::Opened), [Action::LetFile]);
    assert!(life.is_over());
}

#[test]
fn a_dead_program_has_its_connection_reset_by_the_host() {
    let (mut life, actions) = run(&[Event::Given, Event::Gone, Event::Halt]);
    assert_eq!(actions, [Action::Tell(Word::Reset)]);
    assert!(life.is_read(), "until the host says so");
    let back = Event::Back {
        alive: false,
        sent: 0,
        errno: libc::ECONNRESET,
    };
    assert_eq!(life.on(back), [Action::LetFile, Action::Kill]);
}

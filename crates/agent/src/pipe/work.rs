// SPDX-License-Identifier: Apache-2.0
//! What has the programs' connections, and does what a pipe's life asks for.
//!
//! | module | does |
//! |---|---|
//! | `ask` | from a program's wish to ends that are made ready |
//! | `held` | empties a connection that the host holds |
//! | `give` | takes connections out, and gives all to the host |

mod ask;
mod give;
mod held;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use viola_proto::pipe::library::{Answer, Ask};
use viola_proto::pipe::{Connection, FromGuest, PipeId, ToGuest};

use super::hop::Hops;
use super::lease::{FileKey, Leases};
use super::map::{ToMap, map_all};
use super::programs::{Heard, ProgramId, Programs};
use super::reason::Reason;
use super::settings::Settings;
use super::sink::Target;
use super::sink::note::Notes;
use super::socket::Stream;
use super::tally::Tally;
use super::{Facts, In, Inbox, Out};
use crate::agent::random;
use crate::core::block::Millis;
use crate::core::pipe::{Action, Event, Life, Sides, Word};

/// See the module.
#[derive(Debug)]
pub struct Work {
    most: usize,
    relays: bool,
    /// Of this run of the agent, as no other's.
    run: u64,
    programs: Programs,
    leases: Leases,
    hops: Hops,
    pipes: BTreeMap<PipeId, Pipe>,
    next: PipeId,
    facts: Facts,
    messages: Receiver<In>,
    inbox: Inbox,
    /// Devices on which nothing of earlier runs is left.
    swept: BTreeSet<String>,
    /// Programs' descriptors that are not needed any more; they are closed when nobody waits for it.
    used: Vec<OwnedFd>,
    /// For bytes that pass.
    buffer: Vec<u8>,
    mapper: Sender<ToMap>,
    /// For the host.
    words: VecDeque<Out>,
    tally: Arc<Tally>,
}

/// Who has something to say after a wait. A program waits: nothing is read that has nothing to say.
#[derive(Debug, Default)]
pub struct Woken {
    /// Programs that have said something.
    programs: Vec<ProgramId>,
    /// Another thread is done with something.
    by_thread: bool,
    /// Somebody wants to change a file.
    by_writer: bool,
    /// A program wants to connect.
    connects: bool,
}

/// Descriptors that come before those of the programs.
const FIXED: usize = 3;
/// Files that nobody needs are looked at so often.
const TIDY: Duration = Duration::from_secs(1);

/// Longest time that files need at the end of the agent; what is not done then is noted for the next.
const FAREWELL: Duration = Duration::from_millis(700);

#[derive(Debug)]
struct Pipe {
    life: Life,
    program: ProgramId,
    source: Source,
    sink: Sink,
    /// Bytes that the program wants, and those that the agent has moved itself.
    length: u64,
    moved: u64,
    /// Of a source that is to be held.
    ends: Option<(SocketAddr, SocketAddr)>,
    look: Option<held::Look>,
    /// Why it is refused, if it is.
    reason: Option<Reason>,
    /// The host had it for so long, in microseconds.
    spent: u64,
}

/// Where bytes come from.
#[derive(Debug)]
enum Source {
    File {
        key: FileKey,
        device: String,
        offset: u64,
    },
    Socket(Line),
}

/// Where they go to.
#[derive(Debug)]
enum Sink {
    File { target: Target, device: String },
    Socket(Line),
}

/// A connection's socket, and what of it has come back from the host.
#[derive(Debug)]
struct Line {
    stream: Stream,
    back: Option<Box<Connection>>,
    /// Bytes that nobody has read, and that come before those in it.
    unread: Vec<u8>,
}

impl Line {
    fn new(stream: Stream) -> Self {
        let (back, unread) = (None, Vec::new());
        Self {
            stream,
            back,
            unread,
        }
    }
}

impl Pipe {
    /// What the host is told.
    fn word(&self, pipe: PipeId, word: Word) -> Option<FromGuest> {
        Some(match word {
            Word::Hold => {
                let (local, peer) = self.ends?;
                FromGuest::Hold { pipe, local, peer }
            }
            Word::Stop => FromGuest::Stop { pipe },
            Word::Reset => FromGuest::Reset { pipe },
            Word::Taken => FromGuest::Taken { pipe },
        })
    }

    /// The connections of these sides.
    fn lines(&mut self, of: Sides) -> impl Iterator<Item = &mut Line> {
        let source = match &mut self.source {
            Source::Socket(line) if of.source => Some(line),
            _ => None,
        };
        let sink = match &mut self.sink {
            Sink::Socket(line) if of.sink => Some(line),
            _ => None,
        };
        source.into_iter().chain(sink)
    }

    /// Puts back what has come back; which could not be put.
    fn restore(&mut self, tally: &Tally) -> Sides {
        let put = |line: &mut Line| match line.back.take() {
            Some(mut connection) => {
                connection.unread.0.splice(..0, line.unread.drain(..));
                let restored = line.stream.restore(*connection);
                if let Err(e) = &restored {
                    tally.say(format!("a connection is lost: {e}"));
                }
                restored.is_err()
            }
            // it was killed
            None => false,
        };
        Sides {
            source: match &mut self.source {
                Source::Socket(line) => put(line),
                Source::File { .. } => false,
            },
            sink: match &mut self.sink {
                Sink::Socket(line) => put(line),
                Sink::File { .. } => false,
            },
        }
    }
}

const BOTH: Sides = Sides {
    source: true,
    sink: true,
};

impl Work {
    /// Listens, and starts the mapper.
    pub fn new(
        settings: &Settings,
        uids: BTreeSet<u32>,
        messages: Receiver<In>,
        inbox: &Inbox,
        tally: &Arc<Tally>,
    ) -> io::Result<Self> {
        // before the thread is started, which inherits what is blocked
        let leases = Leases::new()?;
        let (mapper, jobs) = channel();
        let (results, said) = (inbox.clone(), Arc::clone(tally));
        std::thread::Builder::new()
            .name("viola-pipe-map".into())
            .spawn(move || map_all(&jobs, &results, &said))?;
        Ok(Self {
            most: settings.most as usize,
            relays: settings.relay,
            run: random(),
            programs: Programs::listen(&settings.socket, uids)?,
            leases,
            hops: Hops::default(),
            pipes: BTreeMap::new(),
            next: 1,
            facts: Facts::default(),
            messages,
            inbox: inbox.clone(),
            swept: BTreeSet::new(),
            used: Vec::new(),
            buffer: Vec::new(),
            mapper,
            words: VecDeque::new(),
            tally: Arc::clone(tally),
        })
    }

    /// What to wait for; as [`Work::woken`] has them.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let fixed: [_; FIXED] = [
            self.inbox.wake.as_fd(),
            self.leases.signals(),
            self.programs.listener(),
        ];
        let programs = self.programs.sockets().map(|(_, socket)| socket);
        fixed.into_iter().chain(programs)
    }

    /// What it is that these have to say.
    pub fn woken(&self, mut ready: impl Iterator<Item = bool>) -> Woken {
        let mut next = || ready.next().unwrap_or(false);
        let (by_thread, by_writer, connects) = (next(), next(), next());
        let programs = self.programs.sockets().filter(|_| next());
        Woken {
            programs: programs.map(|(id, _)| id).collect(),
            by_thread,
            by_writer,
            connects,
        }
    }

    /// It is this late. In a guest the clock may be a system call.
    pub fn at(&mut self, now: Millis) {
        self.hops.at(now);
        self.leases.at(now);
    }

    /// Does what is to be done after a wait.
    pub fn turn(&mut self, woken: Woken) {
        // a writer waits
        if woken.by_writer {
            for pipe in self.leases.broken() {
                self.on(pipe, Event::Halt, Reason::Written);
            }
        }
        if woken.by_thread {
            let _ = rustix::io::read(&*self.inbox.wake, &mut [0; 8]);
            while let Ok(message) = self.messages.try_recv() {
                self.take(message);
            }
        }
        self.look();
        for program in woken.programs {
            self.hear(program);
        }
        if woken.connects {
            self.programs.accept();
        }
    }

    /// Tidies up; how long to sleep at most.
    pub fn rest(&mut self) -> Option<Duration> {
        self.used.clear();
        let awaited = self.pipes.values().filter(|p| p.life.is_awaited());
        let read = self.pipes.values().filter(|p| p.life.is_read());
        self.tally.are(awaited.count(), read.count());
        let tidy = self.leases.tidy(self.facts.halt).then_some(TIDY);
        [tidy, self.next_look()].into_iter().flatten().min()
    }

    /// A message for the host, if there is one.
    pub fn next_word(&mut self) -> Option<Out> {
        self.words.pop_front()
    }

    /// A message of this pipe could not be said: the host has never heard of it.
    pub fn unsaid(&mut self, pipe: PipeId) {
        self.on(pipe, Event::Refused, Reason::Line);
    }

    /// All ends. Files that the host does not have are given back.
    pub fn end(&mut self) {
        self.all(Event::Closed);
        let until = Instant::now() + FAREWELL;
        while self.pipes.values().any(|p| p.life.is_settling()) {
            let rest = until.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(rest) {
                Ok(message) => self.take(message),
                Err(_) => return,
            }
        }
    }

    fn take(&mut self, message: In) {
        match message {
            In::Mapped(pipe, result) => self.mapped(pipe, result),
            In::Prepared(pipe, result) => self.prepared(pipe, result),
            In::Settled(pipe, errno) => self.on(pipe, Event::Settled(errno), Reason::System),
        }
    }

    /// What is known now.
    pub fn know(&mut self, facts: Facts) {
        let before = std::mem::replace(&mut self.facts, facts);
        if before.epoch != self.facts.epoch {
            if before.epoch.is_some() {
                self.all(Event::Closed);
            }
            if self.facts.epoch.is_some() {
                self.all(Event::Opened);
            }
        }
        if self.facts.halt {
            self.all(Event::Halt);
        }
        if self.facts.epoch.is_some() {
            self.sweep();
        }
    }

    /// Lets files go that an agent before this one was killed with: its session is over when another one has begun.
    fn sweep(&mut self) {
        for (device, disk) in &self.facts.volumes {
            if !self.swept.insert(device.clone()) {
                continue;
            }
            let notes = Notes::new(&disk.point, self.run);
            let tally = Arc::clone(&self.tally);
            let work = move || match notes.sweep() {
                Ok(_) => {}
                Err(e) => tally.say(format!(
                    "a file that an earlier agent has left immutable: {e}"
                )),
            };
            // without a thread they stay as they are, which is said when they are written to
            let thread = std::thread::Builder::new().name("viola-pipe-sweep".into());
            if thread.spawn(work).is_err() {
                self.swept.clear();
                return;
            }
        }
    }

    /// What the host says.
    pub fn heard(&mut self, message: ToGuest) {
        match message {
            ToGuest::Refused { pipe, why } => {
                self.tally.say(format!("the host: {why}"));
                self.on(pipe, Event::Refused, Reason::Refused);
            }
            ToGuest::Held { pipe } => {
                self.on(pipe, Event::Held, Reason::Refused);
                self.begin_to_look(pipe);
            }
            ToGuest::Progress { pipe, sent } => {
                let sent = self.at_most(pipe, sent);
                self.on(pipe, Event::Progress(sent), Reason::Refused);
            }
            ToGuest::Unread {
                pipe,
                source,
                bytes,
            } => {
                let side = Sides {
                    source,
                    sink: !source,
                };
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    let lines = pipe.lines(side);
                    lines.for_each(|line| line.unread.extend_from_slice(&bytes.0));
                }
            }
            ToGuest::Back {
                pipe,
                source,
                sink,
                sent,
                errno,
                spent,
            } => {
                let sent = self.at_most(pipe, sent);
                let came = Sides {
                    source: source.is_some(),
                    sink: sink.is_some(),
                };
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    pipe.spent = spent;
                    if let Source::Socket(line) = &mut pipe.source {
                        line.back = source;
                    }
                    if let Sink::Socket(line) = &mut pipe.sink {
                        line.back = sink;
                    }
                }
                let event = Event::Back { came, sent, errno };
                self.on(pipe, event, Reason::Refused);
            }
        }
    }

    fn at_most(&self, pipe: PipeId, sent: u64) -> u64 {
        self.pipes
            .get(&pipe)
            .map_or(0, |p| sent.min(p.length - p.moved))
    }

    /// Reads one packet of a program.
    fn hear(&mut self, program: ProgramId) {
        match self.programs.hear(program) {
            Heard::Nothing => {}
            Heard::Gone => self.hang_up(program),
            // of one that is over it was said already
            Heard::Ask(Ask::Stop { id }, _) => {
                if let Some(pipe) = self.find(program, id) {
                    self.on(pipe, Event::Stop, Reason::Refused);
                }
            }
            Heard::Ask(Ask::Reset { id }, _) => {
                if let Some(pipe) = self.find(program, id) {
                    self.on(pipe, Event::Gone, Reason::Refused);
                }
            }
            Heard::Ask(ask, Some(fds)) => {
                let Some(wish) = ask::Wish::of(ask).filter(|w| self.find(program, w.id).is_none())
                else {
                    return self.hang_up(program);
                };
                if let Err(reason) = self.begin(program, wish, fds) {
                    self.tally.refuse(reason);
                    let (id, errno) = (wish.id, reason.errno());
                    let refused = Answer::Refused { id, errno };
                    if !self.programs.answer(program, &refused) {
                        self.hang_up(program);
                    }
                }
            }
            Heard::Ask(_, None) => self.hang_up(program),
        }
    }

    fn find(&self, program: ProgramId, id: u64) -> Option<PipeId> {
        self.pipes
            .iter()
            .find(|(_, p)| p.program == program && p.life.id() == id && p.life.is_awaited())
            .map(|(pipe, _)| *pipe)
    }

    fn tell(&mut self, message: FromGuest) {
        if let Some(epoch) = self.facts.epoch {
            self.words.push_back(Out { epoch, message });
        }
    }

    /// The same happens to all.
    fn all(&mut self, event: Event) {
        for pipe in self.pipes.keys().copied().collect::<Vec<_>>() {
            self.on(pipe, event, Reason::Host);
        }
    }

    /// A program is gone.
    fn hang_up(&mut self, program: ProgramId) {
        self.programs.remove(program);
        let its = self.pipes.iter().filter(|(_, p)| p.program == program);
        for pipe in its.map(|(pipe, _)| *pipe).collect::<Vec<_>>() {
            self.on(pipe, Event::Gone, Reason::Refused);
        }
    }

    /// Something happens to a pipe; the reason counts when it is refused for it.
    fn on(&mut self, id: PipeId, event: Event, reason: Reason) {
        let Some(pipe) = self.pipes.get_mut(&id) else {
            return;
        };
        let (mut words, mut is_deaf) = (Vec::new(), false);
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in pipe.life.on(event) {
                match action {
                    Action::Answer(mut answer) => {
                        match &mut answer {
                            Answer::Over {
                                sent, errno, spent, ..
                            } => {
                                *spent = pipe.spent;
                                self.tally.over(*sent, *errno);
                            }
                            Answer::Refused { .. } => {
                                self.tally.refuse(pipe.reason.unwrap_or(reason));
                            }
                            Answer::Progress { .. } => {}
                        }
                        is_deaf |= !self.programs.answer(pipe.program, &answer);
                    }
                    Action::Tell(word) => words.extend(pipe.word(id, word)),
                    Action::Resume => pipe.lines(BOTH).for_each(|line| line.stream.resume()),
                    Action::Kill(sides) => pipe.lines(sides).for_each(|line| {
                        line.back = None;
                        line.stream.kill();
                    }),
                    Action::Reset => pipe.lines(BOTH).for_each(|line| line.stream.reset()),
                    Action::Restore => {
                        let failed = pipe.restore(&self.tally);
                        events.push_back(Event::Restored(failed));
                    }
                    Action::LetFile => {
                        if let Source::File { key, .. } = &pipe.source {
                            self.leases.let_go(*key, id);
                        }
                    }
                    Action::Settle(bytes) => {
                        pipe.reason.get_or_insert(reason);
                        let done = match &mut pipe.sink {
                            Sink::File { target, .. } => match target.settle(bytes) {
                                true => None,
                                false => Some(libc::EIO),
                            },
                            Sink::Socket(_) => Some(0),
                        };
                        events.extend(done.map(Event::Settled));
                    }
                }
            }
        }
        let program = pipe.program;
        if pipe.life.is_over() {
            self.pipes.remove(&id);
        }
        for word in words {
            self.tell(word);
        }
        if is_deaf {
            self.hang_up(program);
        }
    }
}

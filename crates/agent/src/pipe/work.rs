// SPDX-License-Identifier: Apache-2.0
//! The thread that has the programs' connections, and does what a pipe's life asks for.

mod ask;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::pipe::library::{Answer, Ask};
use viola_proto::pipe::{Connection, FromGuest, PipeId, ToGuest};

use super::hop::Hops;
use super::lease::{FileKey, Leases};
use super::map::{ToMap, map_all};
use super::programs::{Heard, ProgramId, Programs};
use super::reason::Reason;
use super::settings::Settings;
use super::socket::Stream;
use super::tally::Tally;
use super::{Facts, In, Inbox, Out};
use crate::core::pipe::{Action, Event, Life, Word};
use crate::io::worker::{Outcome, Report};

/// See the module.
#[derive(Debug)]
pub struct Work {
    most: usize,
    programs: Programs,
    leases: Leases,
    hops: Hops,
    pipes: BTreeMap<PipeId, Pipe>,
    next: PipeId,
    facts: Facts,
    messages: Receiver<In>,
    wake: Arc<OwnedFd>,
    mapper: Sender<ToMap>,
    report: Report,
    tally: Arc<Tally>,
}

#[derive(Debug)]
struct Pipe {
    life: Life,
    program: ProgramId,
    stream: Stream,
    file: FileKey,
    device: String,
    offset: u64,
    length: u64,
    back: Option<Box<Connection>>,
}

impl Work {
    /// Listens, and starts the mapper.
    pub fn new(
        settings: &Settings,
        uids: BTreeSet<u32>,
        messages: Receiver<In>,
        inbox: &Inbox,
        report: &Report,
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
            programs: Programs::listen(&settings.socket, uids)?,
            leases,
            hops: Hops::default(),
            pipes: BTreeMap::new(),
            next: 1,
            facts: Facts::default(),
            messages,
            wake: Arc::clone(&inbox.wake),
            mapper,
            report: report.clone(),
            tally: Arc::clone(tally),
        })
    }

    /// Works until it is told to end; all pipes are ended then.
    pub fn run(mut self) {
        loop {
            let tidy = self.leases.tidy(self.facts.halt);
            let (ready, connects) = self.wait(tidy);
            // a writer waits
            for pipe in self.leases.broken() {
                self.on(pipe, Event::Halt, Reason::Written);
            }
            while let Ok(message) = self.messages.try_recv() {
                if matches!(message, In::End) {
                    return self.all(Event::Closed);
                }
                self.take(message);
            }
            for program in ready {
                self.hear(program);
            }
            if connects {
                self.programs.accept();
            }
            let awaited = self.pipes.values().filter(|p| p.life.is_awaited());
            let read = self.pipes.values().filter(|p| p.life.is_read());
            self.tally.are(awaited.count(), read.count());
        }
    }

    /// Sleeps until there is something to do, or to be tidied up; says which programs have said something, and whether one wants to connect.
    fn wait(&self, tidy: bool) -> (Vec<ProgramId>, bool) {
        let (ids, sockets): (Vec<_>, Vec<_>) = self.programs.sockets().unzip();
        let fixed = [
            self.wake.as_fd(),
            self.leases.signals(),
            self.programs.listener(),
        ];
        let mut fds: Vec<_> = fixed
            .into_iter()
            .chain(sockets)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        // an interrupted wait is as good as a short one
        let second = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        if poll(&mut fds, tidy.then_some(&second)).is_err() {
            return (Vec::new(), false);
        }
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        let is_ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let spoke = is_ready[fixed.len()..].iter().zip(ids);
        let programs = spoke.filter(|(ready, _)| **ready).map(|(_, id)| id);
        (programs.collect(), is_ready[2])
    }

    fn take(&mut self, message: In) {
        match message {
            In::Facts(facts) => self.know(facts),
            In::Unsaid(pipe) => self.on(pipe, Event::Refused, Reason::Line),
            In::Mapped(pipe, result) => self.mapped(pipe, result),
            In::Heard(message) => self.heard(message),
            In::End => {}
        }
    }

    fn know(&mut self, facts: Facts) {
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
    }

    /// What the host says.
    fn heard(&mut self, message: ToGuest) {
        match message {
            ToGuest::Refused { pipe, why } => {
                self.tally.say(format!("the host: {why}"));
                self.on(pipe, Event::Refused, Reason::Refused);
            }
            ToGuest::Progress { pipe, sent } => {
                let sent = self.at_most(pipe, sent);
                self.on(pipe, Event::Progress(sent), Reason::Refused);
            }
            ToGuest::Back {
                pipe,
                connection,
                sent,
                errno,
            } => {
                let alive = connection.is_some();
                let sent = self.at_most(pipe, sent);
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    pipe.back = connection;
                }
                let event = Event::Back { alive, sent, errno };
                self.on(pipe, event, Reason::Refused);
            }
        }
    }

    fn at_most(&self, pipe: PipeId, sent: u64) -> u64 {
        self.pipes.get(&pipe).map_or(0, |p| sent.min(p.length))
    }

    /// Reads one packet of a program.
    fn hear(&mut self, program: ProgramId) {
        match self.programs.hear(program) {
            Heard::Nothing => {}
            Heard::Gone => self.hang_up(program),
            Heard::Ask(Ask::Send { id, offset, length }, Some((file, socket))) => {
                if self.find(program, id).is_some() {
                    return self.hang_up(program);
                }
                let asked = self.begin(program, id, (offset, length), file.as_fd(), socket);
                if let Err(reason) = asked {
                    self.tally.refuse(reason);
                    let errno = reason.errno();
                    if !self
                        .programs
                        .answer(program, &Answer::Refused { id, errno })
                    {
                        self.hang_up(program);
                    }
                }
            }
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
            Heard::Ask(Ask::Send { .. }, None) => self.hang_up(program),
        }
    }

    fn find(&self, program: ProgramId, id: u64) -> Option<PipeId> {
        self.pipes
            .iter()
            .find(|(_, p)| p.program == program && p.life.id() == id && p.life.is_awaited())
            .map(|(pipe, _)| *pipe)
    }

    fn tell(&self, message: FromGuest) {
        if let Some(epoch) = self.facts.epoch {
            self.report.say(Outcome::Pipe(Out { epoch, message }));
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
                    Action::Answer(answer) => {
                        match answer {
                            Answer::Over { sent, errno, .. } => self.tally.over(sent, errno),
                            Answer::Refused { .. } => self.tally.refuse(reason),
                            Answer::Progress { .. } => {}
                        }
                        is_deaf |= !self.programs.answer(pipe.program, &answer);
                    }
                    Action::Tell(word) => words.push(word),
                    Action::Resume => pipe.stream.resume(),
                    Action::Kill => pipe.stream.kill(),
                    Action::Reset => pipe.stream.reset(),
                    Action::Restore => {
                        let back = pipe.back.take();
                        let done = back.map(|connection| pipe.stream.restore(*connection));
                        if let Some(Err(e)) = &done {
                            self.tally.say(format!("a connection is lost: {e}"));
                        }
                        events.push_back(Event::Restored(matches!(done, Some(Ok(())))));
                    }
                    Action::LetFile => self.leases.let_go(pipe.file, id),
                }
            }
        }
        let program = pipe.program;
        if pipe.life.is_over() {
            self.pipes.remove(&id);
        }
        for word in words {
            self.tell(match word {
                Word::Stop => FromGuest::Stop { pipe: id },
                Word::Reset => FromGuest::Reset { pipe: id },
                Word::Taken => FromGuest::Taken { pipe: id },
            });
        }
        if is_deaf {
            self.hang_up(program);
        }
    }
}

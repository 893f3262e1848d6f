// SPDX-License-Identifier: Apache-2.0
//! Packets of the programs.

use viola_proto::pipe::PipeId;
use viola_proto::pipe::library::{LibraryReply, LibraryRequest};

use super::Pipes;
use super::start::Request;
use crate::pipe::life::Event;
use crate::pipe::programs::{Incoming, ProgramId};
use crate::pipe::reason::Reason;

impl Pipes {
    /// Handles one packet of a program.
    pub(super) fn handle_program(&mut self, program: ProgramId) {
        match self.programs.receive_from(program) {
            Incoming::Nothing => {}
            Incoming::Gone => self.disconnect(program),
            // a pipe that has ended needs no stop
            Incoming::Ask(LibraryRequest::Stop { id }, _) => {
                if let Some(pipe) = self.find(program, id) {
                    self.apply(pipe, Event::Stop, Reason::RefusedByHost);
                }
            }
            Incoming::Ask(LibraryRequest::Reset { id }, _) => {
                if let Some(pipe) = self.find(program, id) {
                    self.apply(pipe, Event::ProgramGone, Reason::RefusedByHost);
                }
            }
            Incoming::Ask(ask, Some(fds)) => {
                let Some(request) = Request::of(ask).filter(|r| self.find(program, r.id).is_none())
                else {
                    return self.disconnect(program);
                };
                if let Err(reason) = self.start_pipe(program, request, fds) {
                    self.counters.count_refusal(reason);
                    let (id, errno) = (request.id, reason.errno());
                    let refused = LibraryReply::Refused { id, errno };
                    if !self.programs.answer(program, &refused) {
                        self.disconnect(program);
                    }
                }
            }
            Incoming::Ask(_, None) => self.disconnect(program),
        }
    }

    pub(super) fn find(&self, program: ProgramId, id: u64) -> Option<PipeId> {
        self.pipes
            .iter()
            .find(|(_, p)| p.program == program && p.life.id() == id && p.life.is_awaited())
            .map(|(pipe, _)| *pipe)
    }

    /// Disconnects a program and ends its pipes.
    pub(super) fn disconnect(&mut self, program: ProgramId) {
        self.programs.remove(program);
        let its = self.pipes.iter().filter(|(_, p)| p.program == program);
        for pipe in its.map(|(pipe, _)| *pipe).collect::<Vec<_>>() {
            self.apply(pipe, Event::ProgramGone, Reason::RefusedByHost);
        }
    }
}

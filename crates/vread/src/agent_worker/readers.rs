// SPDX-License-Identifier: Apache-2.0
//! The readers that may look blocks up, and their hazard cells.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::session::{AgentSession, Readers};
use crate::hazard;
use crate::lookup::{Incoming, Server};
use crate::pattern;

/// Questions of one reader answered before the next reader's turn.
const MAX_QUESTIONS_PER_TURN: usize = 64;

#[derive(Debug)]
struct Reader {
    name: String,
    pools: Vec<String>,
    server: Server<OwnedFd>,
    hazards: hazard::View,
}

/// The connected readers. A reader that closes its socket is removed, and its hazards no longer count.
#[derive(Debug, Default)]
pub struct ConnectedReaders {
    readers: Vec<Reader>,
}

impl ConnectedReaders {
    /// Adds a reader; replaces one with the same name. Fails if the hazard cells cannot be mapped.
    pub fn add(
        &mut self,
        name: String,
        pools: Vec<String>,
        socket: OwnedFd,
        hazards: &OwnedFd,
    ) -> io::Result<()> {
        let reader = Reader {
            pools,
            server: Server::new(socket),
            hazards: hazard::View::map(hazards)?,
            name,
        };
        self.remove(&reader.name);
        self.readers.push(reader);
        Ok(())
    }

    /// Removes a reader.
    pub fn remove(&mut self, name: &str) {
        self.readers.retain(|r| r.name != name);
    }

    /// The readers' names.
    pub fn names(&self) -> Vec<String> {
        self.readers.iter().map(|r| r.name.clone()).collect()
    }

    /// The sockets on which questions arrive.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.readers.iter().map(|r| r.server.socket().as_fd())
    }

    /// Answers pending questions. A block of a pool that the reader may not read counts as unknown.
    pub fn answer(&mut self, session: &mut AgentSession) {
        self.readers.retain_mut(|reader| {
            for _ in 0..MAX_QUESTIONS_PER_TURN {
                match reader.server.receive() {
                    Incoming::Empty => break,
                    Incoming::Closed => return false,
                    Incoming::Question(number, question) => {
                        let pool = question.key.pool();
                        let may = reader.pools.iter().any(|p| pattern::matches(p, pool));
                        let found = session.find(&question.key).filter(|_| may);
                        if reader.server.answer(number, found.as_ref()).is_err() {
                            return false;
                        }
                    }
                }
            }
            true
        });
    }
}

impl Readers for ConnectedReaders {
    fn reader_of_slot(&self, table: u32, slot: u32) -> Option<&str> {
        let reads = |r: &&Reader| r.hazards.is_reading(table, slot);
        self.readers.iter().find(reads).map(|r| r.name.as_str())
    }

    fn reader_of_table(&self, table: u32) -> Option<&str> {
        let reads = |r: &&Reader| r.hazards.is_reading_any(table);
        self.readers.iter().find(reads).map(|r| r.name.as_str())
    }
}

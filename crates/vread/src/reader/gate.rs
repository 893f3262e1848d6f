// SPDX-License-Identifier: Apache-2.0
//! Which connections to a reader's socket get blocks.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// How long after its begin a connection's requests wait for the daemon, which sees a new VM within two seconds.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(4);

/// The connections to a reader's socket, one after the other.
///
/// Any process that may open the socket can connect, and it is served as the VM would be, but finds no block until the daemon has
/// confirmed that the other end is the VM's process. Numbers keep a confirmation from counting for a later connection.
#[derive(Debug, Default)]
pub(super) struct Gate {
    now: Mutex<Connection>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Connection {
    /// Its number; 0 before the first.
    number: u64,
    accepted_at: Option<Instant>,
    is_confirmed: bool,
}

impl Gate {
    /// Awaits the next connection. Returns its number.
    pub(super) fn begin(&self) -> u64 {
        let mut now = lock(&self.now);
        let number = now.number + 1;
        *now = Connection {
            number,
            ..Connection::default()
        };
        self.changed.notify_all();
        number
    }

    /// The connection that was awaited is there.
    pub(super) fn accepted(&self) {
        lock(&self.now).accepted_at = Some(Instant::now());
    }

    /// Number of the present connection, if there is one, and whether it is confirmed.
    pub(super) fn state(&self) -> (Option<u64>, bool) {
        let now = lock(&self.now);
        (now.accepted_at.map(|_| now.number), now.is_confirmed)
    }

    /// Confirms a connection, unless another one has begun.
    pub(super) fn confirm(&self, number: u64) {
        let mut now = lock(&self.now);
        now.is_confirmed |= now.number == number;
        self.changed.notify_all();
    }

    /// Whether a connection is confirmed.
    pub(super) fn is_confirmed(&self, number: u64) -> bool {
        let now = lock(&self.now);
        now.number == number && now.is_confirmed
    }

    /// As [`Gate::is_confirmed`]. While the connection is new, waits for the daemon's word. All waits together end a few seconds
    /// after the connection's begin, whatever the other end asks for.
    pub(super) fn await_confirmation(&self, number: u64) -> bool {
        let now = lock(&self.now);
        let age = now.accepted_at.map_or(Duration::ZERO, |at| at.elapsed());
        let left = CONFIRMATION_TIMEOUT.saturating_sub(age);
        let waits = |now: &mut Connection| now.number == number && !now.is_confirmed;
        drop(self.changed.wait_timeout_while(now, left, waits));
        self.is_confirmed(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confirmation_counts_for_one_connection() {
        let gate = Gate::default();
        assert_eq!(gate.begin(), 1);
        assert_eq!(gate.state(), (None, false));
        gate.accepted();
        assert_eq!(gate.state(), (Some(1), false));
        assert!(!gate.is_confirmed(1));
        gate.confirm(1);
        assert!(gate.is_confirmed(1) && gate.await_confirmation(1));
        assert_eq!(gate.begin(), 2);
        assert!(!gate.is_confirmed(1) && !gate.is_confirmed(2));
        // It came too late.
        gate.confirm(1);
        assert!(!gate.is_confirmed(1) && !gate.is_confirmed(2));
    }

    #[test]
    fn who_waits_hears_of_the_confirmation() {
        let gate = Gate::default();
        let connection = gate.begin();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.await_confirmation(connection));
            gate.confirm(connection);
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn who_waits_for_a_connection_that_has_ended_hears_of_that() {
        let gate = Gate::default();
        let connection = gate.begin();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gate.await_confirmation(connection));
            gate.begin();
            assert!(!waits.join().unwrap());
        });
    }

    #[test]
    fn a_connection_that_is_not_new_waits_no_more() {
        let gate = Gate::default();
        let connection = gate.begin();
        lock(&gate.now).accepted_at = Instant::now().checked_sub(CONFIRMATION_TIMEOUT);
        let begin = Instant::now();
        assert!(!gate.await_confirmation(connection));
        assert!(begin.elapsed() < CONFIRMATION_TIMEOUT);
    }
}

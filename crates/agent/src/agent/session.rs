// SPDX-License-Identifier: Apache-2.0
//! The session with the host: when to say hello, and which session is valid.

use viola_proto::agent::{Challenge, Limits, ToAgent, VERSION};

use crate::clock::Millis;

/// Between two hellos to a host that does not answer.
const HELLO_INTERVAL: Millis = 3_000;
/// A host that sends pings is given up when it has been silent for this long.
const HOST_SILENCE_TIMEOUT: Millis = 30_000;

/// State of the session.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// A hello is due at `at`.
    Idle { at: Millis },
    /// A hello was sent. The next one is due at `again`.
    HelloSent { session: u64, again: Millis },
    /// The host has answered the last hello.
    Open {
        session: u64,
        epoch: u64,
        challenge: Challenge,
        last_message: Millis,
    },
    /// The host speaks another protocol version. The next hello is due at `again`.
    VersionMismatch { version: u32, again: Millis },
}

/// What the agent has to do after a message or a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Send a hello with this session number. Nothing may be named until the host answers.
    Hello(u64),
    /// A new session has begun.
    Open(Limits),
    /// Answer a ping.
    Pong(u64),
}

/// The session with the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    state: State,
}

impl Session {
    /// A session whose hello is due now.
    pub fn new(now: Millis) -> Self {
        Self {
            state: State::Idle { at: now },
        }
    }

    /// Whether a session is open.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// The host's number of the open session.
    pub fn epoch(&self) -> Option<u64> {
        match self.state {
            State::Open { epoch, .. } => Some(epoch),
            _ => None,
        }
    }

    /// What the proof files of the open session must contain.
    pub fn challenge(&self) -> Option<Challenge> {
        match self.state {
            State::Open { challenge, .. } => Some(challenge),
            _ => None,
        }
    }

    /// The state as a sentence for people.
    pub fn describe(&self) -> String {
        match self.state {
            State::Idle { .. } | State::HelloSent { .. } => "waiting for the host".into(),
            State::Open { epoch, .. } => format!("connected, epoch {epoch}"),
            State::VersionMismatch { version, .. } => format!(
                "the host speaks version {version} and this agent {VERSION}; update the older one"
            ),
        }
    }

    /// When [`Session::tick`] has something to do.
    pub fn due(&self) -> Millis {
        match self.state {
            State::Idle { at } => at,
            State::HelloSent { again, .. } | State::VersionMismatch { again, .. } => again,
            State::Open { last_message, .. } => last_message + HOST_SILENCE_TIMEOUT,
        }
    }

    /// The channel was lost or opened again.
    pub fn reset(&mut self, now: Millis) {
        self.state = State::Idle { at: now };
    }

    /// Does what is due at `now`; `session` is a fresh random number.
    pub fn tick(&mut self, now: Millis, session: u64) -> Option<Step> {
        (self.due() <= now).then(|| self.hello(now, session))
    }

    /// Handles a message of the host; `session` is a fresh random number.
    pub fn handle(&mut self, now: Millis, message: &ToAgent, session: u64) -> Option<Step> {
        if let State::Open { last_message, .. } = &mut self.state {
            *last_message = now;
        }
        match (message, &self.state) {
            (ToAgent::HelloRequest { .. }, _) => Some(self.hello(now, session)),
            (
                ToAgent::Welcome {
                    version,
                    session: theirs,
                    epoch,
                    limits,
                    challenge,
                },
                State::HelloSent { session: ours, .. },
            ) if theirs == ours => {
                if *version != VERSION {
                    self.state = State::VersionMismatch {
                        version: *version,
                        again: now + HOST_SILENCE_TIMEOUT,
                    };
                    return None;
                }
                self.state = State::Open {
                    session: *theirs,
                    epoch: *epoch,
                    challenge: *challenge,
                    last_message: now,
                };
                Some(Step::Open(*limits))
            }
            (
                ToAgent::Ping {
                    session: theirs, ..
                },
                State::Open { session: ours, .. },
            ) if theirs != ours => Some(self.hello(now, session)),
            (ToAgent::Ping { n, .. }, _) => Some(Step::Pong(*n)),
            _ => None,
        }
    }

    fn hello(&mut self, now: Millis, session: u64) -> Step {
        self.state = State::HelloSent {
            session,
            again: now + HELLO_INTERVAL,
        };
        Step::Hello(session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use viola_proto::agent::CHALLENGE_BYTES;

    const LIMITS: Limits = Limits {
        blocks: 1,
        extents: 1,
        names_per_s: 1,
    };

    fn challenge(session: u64) -> Challenge {
        Challenge([session as u8; CHALLENGE_BYTES])
    }

    fn welcome(session: u64) -> ToAgent {
        ToAgent::Welcome {
            version: VERSION,
            session,
            epoch: session * 10,
            limits: LIMITS,
            challenge: challenge(session),
        }
    }

    #[test]
    fn only_the_answer_to_the_last_hello_opens() {
        let mut s = Session::new(0);
        assert_eq!(s.tick(0, 1), Some(Step::Hello(1)));
        assert_eq!(s.tick(HELLO_INTERVAL - 1, 2), None);
        assert_eq!(s.tick(HELLO_INTERVAL, 2), Some(Step::Hello(2)));
        assert_eq!(s.handle(HELLO_INTERVAL, &welcome(1), 3), None);
        assert!(!s.is_open());
        assert_eq!(
            s.handle(HELLO_INTERVAL, &welcome(2), 3),
            Some(Step::Open(LIMITS))
        );
        assert_eq!((s.epoch(), s.challenge()), (Some(20), Some(challenge(2))));
        // an old welcome that arrives again changes nothing
        assert_eq!(s.handle(HELLO_INTERVAL, &welcome(1), 3), None);
        assert!(s.is_open());
        assert_eq!(s.challenge(), Some(challenge(2)));
        s.reset(HELLO_INTERVAL);
        assert_eq!(s.challenge(), None);
    }

    #[test]
    fn a_host_that_has_lost_the_session_gets_a_new_hello() {
        let mut s = Session::new(0);
        s.tick(0, 1);
        s.handle(0, &welcome(1), 0);
        let ping = |session| ToAgent::Ping { n: 7, session };
        assert_eq!(s.handle(1, &ping(1), 2), Some(Step::Pong(7)));
        assert_eq!(s.handle(1, &ping(0), 2), Some(Step::Hello(2)));
        assert!(!s.is_open());
        s.handle(1, &welcome(2), 0);
        assert_eq!(
            s.handle(2, &ToAgent::HelloRequest { version: VERSION }, 3),
            Some(Step::Hello(3))
        );
    }

    #[test]
    fn a_silent_host_is_given_up() {
        let mut s = Session::new(0);
        s.tick(0, 1);
        s.handle(0, &welcome(1), 0);
        assert_eq!(s.tick(HOST_SILENCE_TIMEOUT - 1, 2), None);
        assert_eq!(s.tick(HOST_SILENCE_TIMEOUT, 2), Some(Step::Hello(2)));
    }

    #[test]
    fn another_protocol_version_opens_no_session() {
        let mut s = Session::new(0);
        s.tick(0, 1);
        let foreign = ToAgent::Welcome {
            version: VERSION + 1,
            session: 1,
            epoch: 1,
            limits: LIMITS,
            challenge: challenge(1),
        };
        assert_eq!(s.handle(0, &foreign, 2), None);
        assert!(!s.is_open());
        assert!(s.describe().contains("version"), "{}", s.describe());
    }

    proptest! {
        #[test]
        fn only_the_welcome_with_the_last_session_number_opens(
            steps in proptest::collection::vec((0..4u8, 0..5u64, 0..4000u64), 0..60)
        ) {
            let (mut s, mut now, mut next, mut last) = (Session::new(0), 0, 1000, None);
            for (kind, number, wait) in steps {
                now += wait;
                next += 1;
                let number = last.map_or(number, |l: u64| l - number.min(l));
                let step = match kind {
                    0 => s.tick(now, next),
                    1 => s.handle(now, &welcome(number), next),
                    2 => s.handle(now, &ToAgent::Ping { n: 0, session: number }, next),
                    _ => { s.reset(now); None }
                };
                match step {
                    Some(Step::Hello(n)) => { prop_assert!(!s.is_open()); last = Some(n); }
                    Some(Step::Open(_)) => prop_assert_eq!(Some(number), last),
                    _ => {}
                }
            }
        }
    }
}

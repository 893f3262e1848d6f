// SPDX-License-Identifier: Apache-2.0
//! The conversation's beginning: which session is valid, and when to say hello.

use viola_proto::agent::{Limits, ToAgent, VERSION};

use super::block::Millis;

/// A hello without an answer is said again after so long.
const REPEAT: Millis = 3_000;
/// A host that pings is given up when it has been silent for so long.
const SILENT: Millis = 30_000;

/// Where the conversation is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// A hello is to be said at `at`.
    Away { at: Millis },
    /// A hello was said.
    Greeting { session: u64, again: Millis },
    /// The host has answered the last hello.
    Open {
        session: u64,
        epoch: u64,
        heard: Millis,
    },
    /// The host speaks another version; asked again from time to time.
    Foreign { version: u32, again: Millis },
}

/// What follows from a message or from time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Say hello with this session number; until it is answered nothing may be named.
    Hello(u64),
    /// A new session has begun.
    Open(Limits),
    /// Answer a ping.
    Pong(u64),
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    state: State,
}

impl Session {
    /// Not greeted yet.
    pub fn new(now: Millis) -> Self {
        Self {
            state: State::Away { at: now },
        }
    }

    /// Whether blocks may be named, as far as the session goes.
    pub fn open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// The host's number of the session.
    pub fn epoch(&self) -> Option<u64> {
        match self.state {
            State::Open { epoch, .. } => Some(epoch),
            _ => None,
        }
    }

    /// For people.
    pub fn describe(&self) -> String {
        match self.state {
            State::Away { .. } | State::Greeting { .. } => "waiting for the host".into(),
            State::Open { epoch, .. } => format!("connected, epoch {epoch}"),
            State::Foreign { version, .. } => format!(
                "the host speaks version {version} and this agent {VERSION}; update the older one"
            ),
        }
    }

    /// When [`Session::tick`] has something to do.
    pub fn due(&self) -> Millis {
        match self.state {
            State::Away { at } => at,
            State::Greeting { again, .. } | State::Foreign { again, .. } => again,
            State::Open { heard, .. } => heard + SILENT,
        }
    }

    /// The channel was lost or made anew.
    pub fn reset(&mut self, now: Millis) {
        self.state = State::Away { at: now };
    }

    /// Time has passed; `session` is a fresh random number.
    pub fn tick(&mut self, now: Millis, session: u64) -> Option<Step> {
        (self.due() <= now).then(|| self.hello(now, session))
    }

    /// The host has said something; `session` is a fresh random number.
    pub fn hear(&mut self, now: Millis, message: &ToAgent, session: u64) -> Option<Step> {
        if let State::Open { heard, .. } = &mut self.state {
            *heard = now;
        }
        match (message, &self.state) {
            (ToAgent::Hail { .. }, _) => Some(self.hello(now, session)),
            (
                ToAgent::Welcome {
                    version,
                    session: theirs,
                    epoch,
                    limits,
                },
                State::Greeting { session: ours, .. },
            ) if theirs == ours => {
                if *version != VERSION {
                    self.state = State::Foreign {
                        version: *version,
                        again: now + SILENT,
                    };
                    return None;
                }
                self.state = State::Open {
                    session: *theirs,
                    epoch: *epoch,
                    heard: now,
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
        self.state = State::Greeting {
            session,
            again: now + REPEAT,
        };
        Step::Hello(session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        blocks: 1,
        extents: 1,
        names_per_s: 1,
    };

    fn welcome(session: u64) -> ToAgent {
        ToAgent::Welcome {
            version: VERSION,
            session,
            epoch: session * 10,
            limits: LIMITS,
        }
    }

    #[test]
    fn only_the_answer_to_the_last_hello_opens() {
        let mut s = Session::new(0);
        assert_eq!(s.tick(0, 1), Some(Step::Hello(1)));
        assert_eq!(s.tick(REPEAT - 1, 2), None);
        assert_eq!(s.tick(REPEAT, 2), Some(Step::Hello(2)));
        assert_eq!(s.hear(REPEAT, &welcome(1), 3), None);
        assert!(!s.open());
        assert_eq!(s.hear(REPEAT, &welcome(2), 3), Some(Step::Open(LIMITS)));
        assert_eq!(s.epoch(), Some(20));
        // a copy of an old welcome changes nothing
        assert_eq!(s.hear(REPEAT, &welcome(1), 3), None);
        assert!(s.open());
    }

    #[test]
    fn a_host_that_has_forgotten_us_is_greeted_again() {
        let mut s = Session::new(0);
        s.tick(0, 1);
        s.hear(0, &welcome(1), 0);
        let ping = |session| ToAgent::Ping { n: 7, session };
        assert_eq!(s.hear(1, &ping(1), 2), Some(Step::Pong(7)));
        assert_eq!(s.hear(1, &ping(0), 2), Some(Step::Hello(2)));
        assert!(!s.open());
        s.hear(1, &welcome(2), 0);
        assert_eq!(
            s.hear(2, &ToAgent::Hail { version: VERSION }, 3),
            Some(Step::Hello(3))
        );
    }

    #[test]
    fn a_silent_host_is_given_up() {
        let mut s = Session::new(0);
        s.tick(0, 1);
        s.hear(0, &welcome(1), 0);
        assert_eq!(s.tick(SILENT - 1, 2), None);
        assert_eq!(s.tick(SILENT, 2), Some(Step::Hello(2)));
    }

    #[test]
    fn another_version_is_not_spoken() {
        let mut s = Session::new(0);
        s.tick(0, 1);
        let foreign = ToAgent::Welcome {
            version: VERSION + 1,
            session: 1,
            epoch: 1,
            limits: LIMITS,
        };
        assert_eq!(s.hear(0, &foreign, 2), None);
        assert!(!s.open());
        assert!(s.describe().contains("version"), "{}", s.describe());
    }

    proptest! {
        #[test]
        fn it_is_open_only_by_the_last_number(
            steps in proptest::collection::vec((0..4u8, 0..5u64, 0..4000u64), 0..60)
        ) {
            let (mut s, mut now, mut next, mut last) = (Session::new(0), 0, 1000, None);
            for (kind, number, wait) in steps {
                now += wait;
                next += 1;
                let said = last.map_or(number, |l: u64| l - number.min(l));
                let step = match kind {
                    0 => s.tick(now, next),
                    1 => s.hear(now, &welcome(said), next),
                    2 => s.hear(now, &ToAgent::Ping { n: 0, session: said }, next),
                    _ => { s.reset(now); None }
                };
                match step {
                    Some(Step::Hello(n)) => { prop_assert!(!s.open()); last = Some(n); }
                    Some(Step::Open(_)) => prop_assert_eq!(Some(said), last),
                    _ => {}
                }
            }
        }
    }
}

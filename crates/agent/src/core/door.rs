// SPDX-License-Identifier: Apache-2.0
//! Whether the DataNode gives its blocks to whoever asks: only then may others read them past it.
//!
//! Closed at the start, and again as soon as another DataNode process begins: what the one before has said does not
//! count for it. A good answer opens it, when it is repeated, and for so long as it is [`LASTS`].

use super::block::Millis;

/// A question without a useful answer is put again after so long.
const SOON: Millis = 2_000;
/// The first good answer of a DataNode is asked for once more before it counts: until a DataNode has registered with the
/// NameNode it does not know whether tokens are wanted.
const CONFIRM: Millis = 1_000;
/// Later ones.
const SELDOM: Millis = 60_000;
/// A DataNode that wants tokens is asked again after so long.
const REFUSED: Millis = 60_000;
/// A DataNode that hangs up, which an overloaded one does too.
const HUNG_UP: Millis = 15_000;
/// How long a good answer counts, when there is no other.
pub const LASTS: Millis = 600_000;

/// What came of a read without a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It gives the block.
    Open,
    /// It wants a block access token.
    Tokens,
    /// It hangs up on a plain connection, without a word.
    HungUp,
    /// It says nothing that tells; the reason.
    Unknown(String),
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Door {
    /// Whether there is nobody to be asked, because the operator says so.
    free: bool,
    /// Until when it is open without another good answer.
    open_until: Option<Millis>,
    /// Whether this DataNode has said yes, though not often enough yet.
    one_yes: bool,
    /// Whether it has said no: what is linked for it is not worth keeping.
    refused: bool,
    asking: bool,
    /// The question that is being asked was put to a DataNode process before this one.
    outdated: bool,
    ask_at: Millis,
    why: String,
}

impl Door {
    /// Closed until there is an answer, or open for ever when there is nobody to be asked.
    pub fn new(free: bool) -> Self {
        Self {
            free,
            open_until: None,
            one_yes: false,
            refused: false,
            asking: false,
            outdated: false,
            ask_at: 0,
            why: "the DataNode was not asked yet whether it demands block access tokens".into(),
        }
    }

    /// Whether blocks may be named.
    pub fn is_open(&self) -> bool {
        self.free || self.open_until.is_some()
    }

    /// Whether the DataNode has refused a read, so that nothing is to be kept ready for it either.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Why not; one sentence, empty when they may.
    pub fn why(&self) -> &str {
        if self.is_open() { "" } else { &self.why }
    }

    /// Whether the DataNode is to be asked now.
    pub fn due(&self, now: Millis) -> bool {
        !self.free && !self.asking && self.ask_at <= now
    }

    /// It is being asked.
    pub fn asked(&mut self) {
        self.asking = true;
    }

    /// There is no block to ask for.
    pub fn nothing_to_ask(&mut self, now: Millis) {
        self.ask_at = now + SOON;
        if !self.refused {
            self.why = "there is no finished block yet that the DataNode could be asked for".into();
        }
    }

    /// What it has answered.
    pub fn answered(&mut self, now: Millis, answer: Answer) {
        self.asking = false;
        if std::mem::take(&mut self.outdated) {
            self.ask_at = now;
            return;
        }
        self.ask_at = now
            + match answer {
                Answer::Open if self.one_yes || self.is_open() => {
                    self.open_until = Some(now + LASTS);
                    self.refused = false;
                    SELDOM
                }
                Answer::Open => {
                    self.one_yes = true;
                    self.why = "the DataNode is being asked once more whether it demands block access tokens"
                        .into();
                    CONFIRM
                }
                Answer::Tokens => {
                    self.refuse(
                        "the cluster demands block access tokens (dfs.block.access.token.enable), which viola does \
                         not check",
                    );
                    REFUSED
                }
                // one that gave blocks is overloaded or about to end: its configuration is still the same
                Answer::HungUp if self.is_open() => SOON,
                Answer::HungUp => {
                    self.refuse(
                        "the DataNode hangs up on a plain read, as it does where dfs.data.transfer.protection or \
                         dfs.encrypt.data.transfer is set, which viola does not serve",
                    );
                    HUNG_UP
                }
                Answer::Unknown(why) => {
                    // silence does not take back what the DataNode has refused
                    if !self.refused {
                        self.why = format!(
                            "it is not known whether the cluster demands block access tokens: {why}"
                        );
                    }
                    SOON
                }
            };
    }

    fn refuse(&mut self, why: &str) {
        self.open_until = None;
        self.one_yes = false;
        self.refused = true;
        self.why = why.into();
    }

    /// Another DataNode process has begun.
    pub fn restarted(&mut self, now: Millis) {
        self.open_until = None;
        self.one_yes = false;
        self.refused = false;
        self.outdated = self.asking;
        self.ask_at = now;
        self.why = "a DataNode process has begun that was not asked yet whether it demands block access tokens"
            .into();
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Millis) {
        if self.open_until.is_some_and(|until| until <= now) {
            self.open_until = None;
            self.one_yes = false;
            self.why = format!(
                "the DataNode has not said for {} minutes that it gives blocks without block access tokens",
                LASTS / 60_000
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent() -> Answer {
        Answer::Unknown("nobody listens".into())
    }

    /// One that is open since time 0.
    fn open() -> Door {
        let mut door = Door::new(false);
        door.answered(0, Answer::Open);
        door.answered(0, Answer::Open);
        assert!(door.is_open());
        door
    }

    #[test]
    fn nothing_is_named_before_the_datanode_has_given_a_block_twice() {
        let mut door = Door::new(false);
        assert!(!door.is_open() && door.due(0) && door.why().contains("not asked yet"));
        door.nothing_to_ask(0);
        assert!(!door.due(1_999) && door.due(2_000) && door.why().contains("no finished block"));
        door.asked();
        assert!(!door.due(1_000_000));
        door.answered(5, silent());
        assert!(!door.is_open() && door.why().contains("nobody listens"));
        assert!(!door.due(2_004) && door.due(2_005));
        door.answered(10, Answer::Open);
        assert!(!door.is_open() && door.why().contains("once more"));
        assert!(!door.due(1_009) && door.due(1_010));
        door.answered(1_010, Answer::Open);
        assert!(door.is_open() && door.why().is_empty());
        assert!(!door.due(61_009) && door.due(61_010));
    }

    #[test]
    fn tokens_close_it_with_a_sentence_and_silence_does_not_open_it() {
        let mut door = open();
        door.answered(1, Answer::Tokens);
        assert!(!door.is_open() && door.is_refused());
        assert!(door.why().contains("dfs.block.access.token.enable"));
        door.answered(2, silent());
        door.nothing_to_ask(3);
        assert!(!door.is_open() && door.why().contains("dfs.block.access.token.enable"));
        // one yes is not enough here either
        door.answered(4, Answer::Open);
        assert!(!door.is_open());
        door.answered(5, Answer::Open);
        assert!(door.is_open() && !door.is_refused());
    }

    #[test]
    fn a_protected_datanode_has_its_own_sentence() {
        let mut door = Door::new(false);
        door.answered(0, Answer::HungUp);
        assert!(!door.is_open() && door.is_refused());
        for key in ["dfs.data.transfer.protection", "dfs.encrypt.data.transfer"] {
            assert!(door.why().contains(key));
        }
        assert!(!door.due(14_999) && door.due(15_000));
    }

    #[test]
    fn a_datanode_that_is_busy_or_gone_is_believed_for_ten_minutes() {
        let mut door = open();
        for (at, answer) in [(60_000, silent()), (599_998, Answer::HungUp)] {
            door.answered(at, answer);
            door.tick(at + 1);
            assert!(door.is_open() && door.due(at + SOON));
        }
        door.tick(600_000);
        assert!(!door.is_open() && !door.is_refused() && door.why().contains("10 minutes"));
        door.answered(600_001, Answer::Open);
        assert!(!door.is_open());
        door.answered(601_001, Answer::Open);
        assert!(door.is_open());
    }

    #[test]
    fn what_one_datanode_process_has_said_does_not_count_for_the_next() {
        let mut door = open();
        door.asked();
        door.restarted(100);
        assert!(!door.is_open() && door.why().contains("process has begun"));
        // this was asked of the one before
        door.answered(110, Answer::Open);
        assert!(!door.is_open() && door.due(110));
        door.answered(120, Answer::Open);
        assert!(!door.is_open());
        // and so was a first yes
        door.restarted(130);
        door.answered(140, Answer::Open);
        assert!(!door.is_open());
        door.answered(150, Answer::Tokens);
        assert!(!door.is_open() && door.is_refused());
        door.restarted(160);
        assert!(!door.is_refused() && door.due(160));
    }

    #[test]
    fn nobody_is_asked_where_the_operator_says_so() {
        let mut door = Door::new(true);
        door.restarted(7);
        door.tick(u64::MAX);
        assert!(door.is_open() && !door.due(u64::MAX) && door.why().is_empty());
    }
}

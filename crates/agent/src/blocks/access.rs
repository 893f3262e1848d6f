// SPDX-License-Identifier: Apache-2.0
//! Whether the DataNode serves its blocks without a block access token. Only then may the host serve them to other
//! VMs.
//!
//! Access starts closed, and closes when another DataNode process starts. Two granted probes in a row open it. It
//! stays open for [`GRANT_TIMEOUT`] after the last granted probe.

use crate::clock::Millis;

/// Until the next probe after an inconclusive one.
const RETRY_INTERVAL: Millis = 2_000;
/// Between the first granted probe and the one that confirms it: before a DataNode has registered with the NameNode
/// it does not know whether tokens are required.
const CONFIRM_DELAY: Millis = 1_000;
/// Between probes while access is open.
const GRANT_RECHECK_INTERVAL: Millis = 60_000;
/// Between probes of a DataNode that requires tokens.
const TOKEN_RECHECK_INTERVAL: Millis = 60_000;
/// Between probes of a DataNode that hangs up, which an overloaded one does too.
const HANGUP_RECHECK_INTERVAL: Millis = 15_000;
/// How long access stays open after the last granted probe.
pub const GRANT_TIMEOUT: Millis = 600_000;

/// The result of a read without a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// The DataNode served the block.
    Granted,
    /// The DataNode requires a block access token.
    TokenRequired,
    /// The DataNode hung up on a plain connection without an answer.
    HungUp,
    /// Inconclusive, with the reason.
    Unknown(String),
}

/// The state of access to one DataNode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// The operator has switched the check off.
    unchecked: bool,
    /// When access closes without another granted probe.
    open_until: Option<Millis>,
    /// One probe was granted; the confirming one is due.
    granted_once: bool,
    /// The DataNode has refused a probe: links for its blocks are not worth keeping.
    refused: bool,
    probing: bool,
    /// The running probe was sent to an earlier DataNode process.
    outdated: bool,
    next_probe: Millis,
    why: String,
}

impl Access {
    /// Starts closed, or open for good when `unchecked`.
    pub fn new(unchecked: bool) -> Self {
        Self {
            unchecked,
            open_until: None,
            granted_once: false,
            refused: false,
            probing: false,
            outdated: false,
            next_probe: 0,
            why: "the DataNode was not asked yet whether it demands block access tokens".into(),
        }
    }

    /// Whether blocks may be named.
    pub fn is_open(&self) -> bool {
        self.unchecked || self.open_until.is_some()
    }

    /// Whether the DataNode has refused a probe, so that links are not worth keeping either.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Why access is closed, as one sentence; empty while it is open.
    pub fn why(&self) -> &str {
        if self.is_open() { "" } else { &self.why }
    }

    /// Whether to start a probe now.
    pub fn is_due(&self, now: Millis) -> bool {
        !self.unchecked && !self.probing && self.next_probe <= now
    }

    /// A probe has started.
    pub fn probe_started(&mut self) {
        self.probing = true;
    }

    /// There is no block to probe with.
    pub fn no_block_to_probe(&mut self, now: Millis) {
        self.next_probe = now + RETRY_INTERVAL;
        if !self.refused {
            self.why = "there is no finished block yet that the DataNode could be asked for".into();
        }
    }

    /// A probe has finished.
    pub fn probe_finished(&mut self, now: Millis, answer: Probe) {
        self.probing = false;
        if std::mem::take(&mut self.outdated) {
            self.next_probe = now;
            return;
        }
        self.next_probe = now
            + match answer {
                Probe::Granted if self.granted_once || self.is_open() => {
                    self.open_until = Some(now + GRANT_TIMEOUT);
                    self.refused = false;
                    GRANT_RECHECK_INTERVAL
                }
                Probe::Granted => {
                    self.granted_once = true;
                    self.why = "the DataNode is being asked once more whether it demands block access tokens"
                        .into();
                    CONFIRM_DELAY
                }
                Probe::TokenRequired => {
                    self.refuse(
                        "the cluster demands block access tokens (dfs.block.access.token.enable), which viola does \
                         not check",
                    );
                    TOKEN_RECHECK_INTERVAL
                }
                // a DataNode that granted before is overloaded or ending: its configuration is still
                // the same
                Probe::HungUp if self.is_open() => RETRY_INTERVAL,
                Probe::HungUp => {
                    self.refuse(
                        "the DataNode hangs up on a plain read, as it does where dfs.data.transfer.protection or \
                         dfs.encrypt.data.transfer is set, which viola does not serve",
                    );
                    HANGUP_RECHECK_INTERVAL
                }
                Probe::Unknown(why) => {
                    // an inconclusive probe does not revoke a refusal
                    if !self.refused {
                        self.why = format!(
                            "it is not known whether the cluster demands block access tokens: {why}"
                        );
                    }
                    RETRY_INTERVAL
                }
            };
    }

    fn refuse(&mut self, why: &str) {
        self.open_until = None;
        self.granted_once = false;
        self.refused = true;
        self.why = why.into();
    }

    /// Another DataNode process has started.
    pub fn datanode_restarted(&mut self, now: Millis) {
        self.open_until = None;
        self.granted_once = false;
        self.refused = false;
        self.outdated = self.probing;
        self.next_probe = now;
        self.why = "a DataNode process has begun that was not asked yet whether it demands block access tokens"
            .into();
    }

    /// Closes access when [`GRANT_TIMEOUT`] has passed.
    pub fn tick(&mut self, now: Millis) {
        if self.open_until.is_some_and(|until| until <= now) {
            self.open_until = None;
            self.granted_once = false;
            self.why = format!(
                "for {} minutes no probe has shown that the DataNode serves blocks without block access tokens",
                GRANT_TIMEOUT / 60_000
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent() -> Probe {
        Probe::Unknown("nobody listens".into())
    }

    /// Access that opened at time 0.
    fn open() -> Access {
        let mut access = Access::new(false);
        access.probe_finished(0, Probe::Granted);
        access.probe_finished(0, Probe::Granted);
        assert!(access.is_open());
        access
    }

    #[test]
    fn access_opens_after_two_granted_probes() {
        let mut access = Access::new(false);
        assert!(!access.is_open() && access.is_due(0) && access.why().contains("not asked yet"));
        access.no_block_to_probe(0);
        assert!(
            !access.is_due(1_999)
                && access.is_due(2_000)
                && access.why().contains("no finished block")
        );
        access.probe_started();
        assert!(!access.is_due(1_000_000));
        access.probe_finished(5, silent());
        assert!(!access.is_open() && access.why().contains("nobody listens"));
        assert!(!access.is_due(2_004) && access.is_due(2_005));
        access.probe_finished(10, Probe::Granted);
        assert!(!access.is_open() && access.why().contains("once more"));
        assert!(!access.is_due(1_009) && access.is_due(1_010));
        access.probe_finished(1_010, Probe::Granted);
        assert!(access.is_open() && access.why().is_empty());
        assert!(!access.is_due(61_009) && access.is_due(61_010));
    }

    #[test]
    fn required_tokens_close_access_and_inconclusive_probes_keep_it_closed() {
        let mut access = open();
        access.probe_finished(1, Probe::TokenRequired);
        assert!(!access.is_open() && access.is_refused());
        assert!(access.why().contains("dfs.block.access.token.enable"));
        access.probe_finished(2, silent());
        access.no_block_to_probe(3);
        assert!(!access.is_open() && access.why().contains("dfs.block.access.token.enable"));
        // one grant is not enough here either
        access.probe_finished(4, Probe::Granted);
        assert!(!access.is_open());
        access.probe_finished(5, Probe::Granted);
        assert!(access.is_open() && !access.is_refused());
    }

    #[test]
    fn a_datanode_that_hangs_up_names_the_hdfs_keys() {
        let mut access = Access::new(false);
        access.probe_finished(0, Probe::HungUp);
        assert!(!access.is_open() && access.is_refused());
        for key in ["dfs.data.transfer.protection", "dfs.encrypt.data.transfer"] {
            assert!(access.why().contains(key));
        }
        assert!(!access.is_due(14_999) && access.is_due(15_000));
    }

    #[test]
    fn access_stays_open_for_ten_minutes_without_a_granted_probe() {
        let mut access = open();
        for (at, answer) in [(60_000, silent()), (599_998, Probe::HungUp)] {
            access.probe_finished(at, answer);
            access.tick(at + 1);
            assert!(access.is_open() && access.is_due(at + RETRY_INTERVAL));
        }
        access.tick(600_000);
        assert!(!access.is_open() && !access.is_refused() && access.why().contains("10 minutes"));
        access.probe_finished(600_001, Probe::Granted);
        assert!(!access.is_open());
        access.probe_finished(601_001, Probe::Granted);
        assert!(access.is_open());
    }

    #[test]
    fn a_new_datanode_process_closes_access() {
        let mut access = open();
        access.probe_started();
        access.datanode_restarted(100);
        assert!(!access.is_open() && access.why().contains("process has begun"));
        // this probe was sent to the earlier process
        access.probe_finished(110, Probe::Granted);
        assert!(!access.is_open() && access.is_due(110));
        access.probe_finished(120, Probe::Granted);
        assert!(!access.is_open());
        // a first grant does not count for the next process either
        access.datanode_restarted(130);
        access.probe_finished(140, Probe::Granted);
        assert!(!access.is_open());
        access.probe_finished(150, Probe::TokenRequired);
        assert!(!access.is_open() && access.is_refused());
        access.datanode_restarted(160);
        assert!(!access.is_refused() && access.is_due(160));
    }

    #[test]
    fn an_unchecked_datanode_is_never_probed() {
        let mut access = Access::new(true);
        access.datanode_restarted(7);
        access.tick(u64::MAX);
        assert!(access.is_open() && !access.is_due(u64::MAX) && access.why().is_empty());
    }
}

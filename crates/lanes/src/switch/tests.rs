// SPDX-License-Identifier: Apache-2.0
use std::cell::RefCell;

use super::*;
use crate::Pf;

const MAC: Mac = [2, 0, 0, 0, 0, 1];

/// What was done, in order.
type Log = RefCell<Vec<&'static str>>;

fn how() -> Guest {
    Guest::Netns(crate::netns::NetnsGuest {
        netns: "/run/netns/a".into(),
        bond: "bond0".into(),
        port: "eth0".into(),
    })
}

struct FakeCard<'a>(&'a Log);

impl Card for FakeCard<'_> {
    fn admit(&self, _: u32, mac: Mac, _: Terms) -> Result<(), LaneError> {
        assert_eq!(mac, MAC);
        self.0.borrow_mut().push("admit");
        Ok(())
    }

    fn went(&self, mac: Mac) {
        assert_eq!(mac, MAC);
        self.0.borrow_mut().push("went");
    }

    fn withdraw(&self, _: u32, mac: Mac) -> Result<(), LaneError> {
        assert_eq!(mac, MAC);
        self.0.borrow_mut().push("withdraw");
        Ok(())
    }

    fn clear(&self, _: u32) -> Result<(), LaneError> {
        self.0.borrow_mut().push("clear");
        Ok(())
    }

    fn link(&self, _: u32, _: bool) -> bool {
        false
    }
}

struct FakeGuest<'a> {
    log: &'a Log,
    /// Whether it goes over before the VF goes.
    bond: bool,
    /// Whether it refuses to give, or to take.
    refuses: bool,
    presence: Presence,
}

impl Attachment for FakeGuest<'_> {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        Ok(MAC)
    }

    fn prepare(&mut self, _: &VfAt, mac: Mac, _: &mut Steps) -> Result<(), LaneError> {
        assert_eq!(mac, MAC);
        self.log.borrow_mut().push("prepare");
        Ok(())
    }

    fn plug(&mut self, _: &VfAt, _: &mut Steps) -> Result<(), LaneError> {
        self.log.borrow_mut().push("plug");
        match self.refuses {
            true => Err(LaneError::Unfit("no".into())),
            false => Ok(()),
        }
    }

    fn fail_over(&mut self, _: &VfAt) -> Result<GoesOver, LaneError> {
        self.log.borrow_mut().push("fail over");
        Ok(match self.bond {
            true => GoesOver::Now,
            false => GoesOver::WithTheVf,
        })
    }

    fn unplug(
        &mut self,
        _: &VfAt,
        released: &mut dyn FnMut(),
        _: &mut Steps,
    ) -> Result<(), LaneError> {
        self.log.borrow_mut().push("unplug");
        if self.refuses {
            return Err(LaneError::Kept { seconds: 10 });
        }
        released();
        self.log.borrow_mut().push("deleted");
        Ok(())
    }

    fn presence(&mut self, _: &VfAt) -> Result<Presence, LaneError> {
        Ok(self.presence)
    }
}

struct Bed {
    log: Log,
    vf: VfAt,
    folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        Self {
            log: Log::default(),
            vf: VfAt {
                pf: Pf::new("p0"),
                index: 3,
                address: "0000:01:10.6".into(),
            },
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn journal(&self) -> Journal {
        Journal::read(&self.folder.path().join("lanes.json")).0
    }

    fn guest(&self) -> FakeGuest<'_> {
        FakeGuest {
            log: &self.log,
            bond: true,
            refuses: false,
            presence: Presence::InUse,
        }
    }

    fn with<T>(&self, mut guest: FakeGuest<'_>, work: impl FnOnce(&mut Switch<'_>) -> T) -> T {
        let card = FakeCard(&self.log);
        work(&mut Switch {
            card: &card,
            vf: &self.vf,
            id: "netns:a",
            how: &how(),
            attachment: &mut guest,
            steps: Steps::default(),
        })
    }

    fn log(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.log.borrow_mut())
    }

    fn noted(&self) -> Vec<Stage> {
        self.journal().entries().iter().map(|e| e.stage).collect()
    }

    fn entry(&self, stage: Stage) -> Entry {
        Entry {
            pf: "p0".into(),
            vf: 3,
            address: self.vf.address.clone(),
            guest: "netns:a".into(),
            how: how(),
            mac: MAC,
            stage,
        }
    }
}

#[test]
fn the_failover_comes_first_and_the_vf_is_free_last() {
    let bed = Bed::new();
    let mut journal = bed.journal();
    let grant = |s: &mut Switch<'_>| s.grant(&mut journal, Terms::default());
    bed.with(bed.guest(), grant).unwrap();
    assert_eq!(bed.log(), ["prepare", "admit", "plug", "went"]);
    assert_eq!(bed.noted(), [Stage::Held]);
    let revoke = |s: &mut Switch<'_>| s.revoke(&mut journal, MAC, Terms::default());
    bed.with(bed.guest(), revoke).unwrap();
    assert_eq!(
        bed.log(),
        ["fail over", "withdraw", "unplug", "deleted", "clear"]
    );
    assert_eq!(bed.noted(), []);
}

#[test]
fn where_the_guest_only_goes_over_with_the_unplug_the_switch_follows_at_that_moment() {
    let bed = Bed::new();
    let mut journal = bed.journal();
    let guest = FakeGuest {
        bond: false,
        ..bed.guest()
    };
    let revoke = |s: &mut Switch<'_>| s.revoke(&mut journal, MAC, Terms::default());
    bed.with(guest, revoke).unwrap();
    assert_eq!(
        bed.log(),
        ["fail over", "unplug", "withdraw", "deleted", "clear"]
    );
}

#[test]
fn a_guest_that_keeps_its_vf_goes_on_with_it() {
    let bed = Bed::new();
    let mut journal = bed.journal();
    let guest = FakeGuest {
        refuses: true,
        ..bed.guest()
    };
    let revoke = |s: &mut Switch<'_>| s.revoke(&mut journal, MAC, Terms::default());
    let said = bed.with(guest, revoke).unwrap_err().to_string();
    assert_eq!(said, "the guest has not given it back within 10 s");
    assert_eq!(
        bed.log(),
        ["fail over", "withdraw", "unplug", "admit", "went"]
    );
    assert_eq!(bed.noted(), [Stage::Held]);
}

#[test]
fn a_vf_that_a_guest_did_not_take_is_free() {
    let bed = Bed::new();
    let mut journal = bed.journal();
    let guest = FakeGuest {
        refuses: true,
        ..bed.guest()
    };
    let grant = |s: &mut Switch<'_>| s.grant(&mut journal, Terms::default());
    bed.with(guest, grant).unwrap_err();
    assert_eq!(bed.log(), ["prepare", "admit", "plug", "withdraw", "clear"]);
    assert_eq!(bed.noted(), []);
}

#[test]
fn what_a_killed_daemon_left_comes_to_one_end() {
    let settle = |presence, stage| {
        let bed = Bed::new();
        let mut journal = bed.journal();
        journal.note(bed.entry(stage)).unwrap();
        let entry = bed.entry(stage);
        let guest = FakeGuest {
            presence,
            ..bed.guest()
        };
        let settle = |s: &mut Switch<'_>| s.settle(&mut journal, &entry, Terms::default());
        let found = bed.with(guest, settle).unwrap();
        (found, bed.log(), bed.noted().len())
    };
    let taken = vec!["fail over", "withdraw", "unplug", "deleted", "clear"];
    // Killed between two switches, between failover and unplug, after the unplug, before the guest used it.
    assert_eq!(
        settle(Presence::InUse, Stage::Held),
        (Found::Held, vec![], 1)
    );
    assert_eq!(
        settle(Presence::Idle, Stage::Revoking),
        (Found::Free, taken.clone(), 0)
    );
    assert_eq!(
        settle(Presence::Absent, Stage::Revoking),
        (Found::Free, vec!["withdraw", "clear"], 0)
    );
    assert_eq!(
        settle(Presence::Idle, Stage::Granting),
        (Found::Free, taken.clone(), 0)
    );
    // The guest's own bond went over by itself.
    assert_eq!(settle(Presence::Idle, Stage::Held), (Found::Free, taken, 0));
}

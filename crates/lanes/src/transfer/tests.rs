// SPDX-License-Identifier: Apache-2.0
use std::cell::RefCell;

use super::*;
use crate::Pf;

const MAC: Mac = [2, 0, 0, 0, 0, 1];

/// Calls in their order.
type Log = RefCell<Vec<&'static str>>;

fn access() -> GuestAccess {
    GuestAccess::Netns(crate::netns::NetnsGuest {
        netns: "/run/netns/a".into(),
        bond: "bond0".into(),
        port: "eth0".into(),
    })
}

struct FakeEswitch<'a>(&'a Log);

impl Eswitch for FakeEswitch<'_> {
    fn assign(&self, _: u32, mac: Mac, _: VfSettings) -> Result<(), LaneError> {
        assert_eq!(mac, MAC);
        self.0.borrow_mut().push("assign");
        Ok(())
    }

    fn forget_port(&self, mac: Mac) {
        assert_eq!(mac, MAC);
        self.0.borrow_mut().push("forget port");
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

    fn set_link(&self, _: u32, _: bool) -> bool {
        false
    }
}

struct FakeGuest<'a> {
    log: &'a Log,
    /// Whether it fails over before the unplug.
    bond: bool,
    /// Whether it refuses to plug and to unplug.
    refuses: bool,
    presence: Presence,
}

impl Attachment for FakeGuest<'_> {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        Ok(MAC)
    }

    fn prepare(&mut self, _: &VfDevice, mac: Mac, _: &mut StepTimes) -> Result<(), LaneError> {
        assert_eq!(mac, MAC);
        self.log.borrow_mut().push("prepare");
        Ok(())
    }

    fn plug(&mut self, _: &VfDevice, _: &mut StepTimes) -> Result<(), LaneError> {
        self.log.borrow_mut().push("plug");
        match self.refuses {
            true => Err(LaneError::Unusable("no".into())),
            false => Ok(()),
        }
    }

    fn fail_over(&mut self, _: &VfDevice) -> Result<Failover, LaneError> {
        self.log.borrow_mut().push("fail over");
        Ok(match self.bond {
            true => Failover::Done,
            false => Failover::OnUnplug,
        })
    }

    fn unplug(
        &mut self,
        _: &VfDevice,
        released: &mut dyn FnMut(),
        _: &mut StepTimes,
    ) -> Result<(), LaneError> {
        self.log.borrow_mut().push("unplug");
        if self.refuses {
            return Err(LaneError::ReleaseTimeout { seconds: 10 });
        }
        released();
        self.log.borrow_mut().push("deleted");
        Ok(())
    }

    fn presence(&mut self, _: &VfDevice) -> Result<Presence, LaneError> {
        Ok(self.presence)
    }
}

struct TestBed {
    log: Log,
    vf: VfDevice,
    folder: tempfile::TempDir,
}

impl TestBed {
    fn new() -> Self {
        Self {
            log: Log::default(),
            vf: VfDevice {
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

    fn with<T>(&self, mut guest: FakeGuest<'_>, work: impl FnOnce(&mut Transfer<'_>) -> T) -> T {
        let eswitch = FakeEswitch(&self.log);
        work(&mut Transfer {
            eswitch: &eswitch,
            vf: &self.vf,
            id: "netns:a",
            access: &access(),
            attachment: &mut guest,
            steps: StepTimes::default(),
        })
    }

    fn log(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.log.borrow_mut())
    }

    fn stages(&self) -> Vec<Stage> {
        self.journal().entries().iter().map(|e| e.stage).collect()
    }

    fn entry(&self, stage: Stage) -> Entry {
        Entry {
            pf: "p0".into(),
            vf: 3,
            address: self.vf.address.clone(),
            guest: "netns:a".into(),
            access: access(),
            mac: MAC,
            stage,
        }
    }
}

#[test]
fn a_revocation_fails_over_first_and_clears_last() {
    let bed = TestBed::new();
    let mut journal = bed.journal();
    let grant = |s: &mut Transfer<'_>| s.grant(&mut journal, VfSettings::default());
    bed.with(bed.guest(), grant).unwrap();
    assert_eq!(bed.log(), ["prepare", "assign", "plug", "forget port"]);
    assert_eq!(bed.stages(), [Stage::Held]);
    let revoke = |s: &mut Transfer<'_>| s.revoke(&mut journal, MAC, VfSettings::default());
    bed.with(bed.guest(), revoke).unwrap();
    assert_eq!(
        bed.log(),
        ["fail over", "withdraw", "unplug", "deleted", "clear"]
    );
    assert_eq!(bed.stages(), []);
}

#[test]
fn without_failover_the_address_is_withdrawn_at_the_release() {
    let bed = TestBed::new();
    let mut journal = bed.journal();
    let guest = FakeGuest {
        bond: false,
        ..bed.guest()
    };
    let revoke = |s: &mut Transfer<'_>| s.revoke(&mut journal, MAC, VfSettings::default());
    bed.with(guest, revoke).unwrap();
    assert_eq!(
        bed.log(),
        ["fail over", "unplug", "withdraw", "deleted", "clear"]
    );
}

#[test]
fn a_failed_revocation_leaves_the_vf_in_use() {
    let bed = TestBed::new();
    let mut journal = bed.journal();
    let guest = FakeGuest {
        refuses: true,
        ..bed.guest()
    };
    let revoke = |s: &mut Transfer<'_>| s.revoke(&mut journal, MAC, VfSettings::default());
    let error = bed.with(guest, revoke).unwrap_err().to_string();
    assert_eq!(error, "the guest has not released the VF within 10 s");
    assert_eq!(
        bed.log(),
        ["fail over", "withdraw", "unplug", "assign", "forget port"]
    );
    assert_eq!(bed.stages(), [Stage::Held]);
}

#[test]
fn a_failed_grant_leaves_the_vf_free() {
    let bed = TestBed::new();
    let mut journal = bed.journal();
    let guest = FakeGuest {
        refuses: true,
        ..bed.guest()
    };
    let grant = |s: &mut Transfer<'_>| s.grant(&mut journal, VfSettings::default());
    bed.with(guest, grant).unwrap_err();
    assert_eq!(
        bed.log(),
        ["prepare", "assign", "plug", "withdraw", "clear"]
    );
    assert_eq!(bed.stages(), []);
}

#[test]
fn recovery_completes_what_a_killed_daemon_left() {
    let recover = |presence, stage| {
        let bed = TestBed::new();
        let mut journal = bed.journal();
        journal.record(bed.entry(stage)).unwrap();
        let entry = bed.entry(stage);
        let guest = FakeGuest {
            presence,
            ..bed.guest()
        };
        let recover = |s: &mut Transfer<'_>| s.recover(&mut journal, &entry, VfSettings::default());
        let found = bed.with(guest, recover).unwrap();
        (found, bed.log(), bed.stages().len())
    };
    let taken = vec!["fail over", "withdraw", "unplug", "deleted", "clear"];
    // Killed between two transfers, between failover and unplug, after the unplug, before the guest
    // used the VF.
    assert_eq!(
        recover(Presence::InUse, Stage::Held),
        (Recovered::Held, vec![], 1)
    );
    assert_eq!(
        recover(Presence::Idle, Stage::Revoking),
        (Recovered::Free, taken.clone(), 0)
    );
    assert_eq!(
        recover(Presence::Absent, Stage::Revoking),
        (Recovered::Free, vec!["withdraw", "clear"], 0)
    );
    assert_eq!(
        recover(Presence::Idle, Stage::Granting),
        (Recovered::Free, taken.clone(), 0)
    );
    // The guest's bond failed over by itself.
    assert_eq!(
        recover(Presence::Idle, Stage::Held),
        (Recovered::Free, taken, 0)
    );
}

// SPDX-License-Identifier: Apache-2.0
use super::super::US;
use super::*;

const STEP: Nanos = 100 * MS;

/// A web server that also computes, on a crowded core.
const SERVER: Window = Window {
    run: 0.25,
    wait: 0.60,
    blocked: 0.15,
    wakes: 90.0,
    packets: 400.0,
};
const BATCH: Window = Window {
    run: 0.25,
    wait: 0.75,
    blocked: 0.0,
    wakes: 2.0,
    packets: 1.0,
};
const IDLE: Window = Window {
    run: 0.002,
    wait: 0.001,
    blocked: 0.997,
    wakes: 100.0,
    packets: 0.5,
};

fn feed(c: &mut Classifier, now: &mut Nanos, window: &Window, times: u32) -> Verdict {
    let mut last = None;
    for _ in 0..times {
        *now += STEP;
        last = Some(c.observe(*now, window));
    }
    last.unwrap()
}

#[test]
fn a_server_that_waits_becomes_latency_sensitive_after_five_windows() {
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    let verdict = feed(&mut c, &mut now, &SERVER, 4);
    assert_eq!((verdict.class, verdict.changed), (Class::Batch, false));
    assert_eq!(
        verdict.why,
        Reason::Confirming {
            to: Class::Ls,
            windows: 4,
            needed: 5
        }
    );
    let verdict = feed(&mut c, &mut now, &SERVER, 1);
    assert_eq!((verdict.class, verdict.changed), (Class::Ls, true));
    assert_eq!(
        verdict.why.to_string(),
        "400 packets/s, and it waits 60 % of the time"
    );
}

#[test]
fn computing_and_idle_vms_stay_batch() {
    for (window, why) in [
        (BATCH, "it computes (100 % of the time) and does little I/O"),
        (IDLE, "it neither computes nor does I/O"),
    ] {
        let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
        let verdict = feed(&mut c, &mut now, &window, 200);
        assert_eq!(verdict.class, Class::Batch);
        assert_eq!(verdict.why.to_string(), why);
    }
}

#[test]
fn short_runs_after_many_wake_ups_count_as_io() {
    let disk = Window {
        run: 0.1,
        wait: 0.2,
        blocked: 0.7,
        wakes: 800.0,
        packets: 0.0,
    };
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    let verdict = feed(&mut c, &mut now, &disk, 5);
    assert_eq!(verdict.class, Class::Ls);
    assert_eq!(
        verdict.why.to_string(),
        "800 wake-ups/s for 125 us each, and it waits 20 % of the time"
    );
}

#[test]
fn a_vm_that_does_not_wait_stays_batch() {
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    let verdict = feed(
        &mut c,
        &mut now,
        &Window {
            wait: 0.003,
            ..SERVER
        },
        100,
    );
    assert_eq!(verdict.class, Class::Batch);
    assert_eq!(verdict.why.to_string(), "it waits only 0.3 % of the time");
}

#[test]
fn a_vm_stays_latency_sensitive_after_its_wait_is_gone() {
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    feed(&mut c, &mut now, &SERVER, 5);
    let verdict = feed(
        &mut c,
        &mut now,
        &Window {
            wait: 0.0,
            ..SERVER
        },
        1_000,
    );
    assert_eq!((verdict.class, verdict.why), (Class::Ls, Reason::StillBusy));
}

#[test]
fn a_pause_keeps_the_class_and_lasting_quiet_ends_it() {
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    feed(&mut c, &mut now, &SERVER, 5);
    for _ in 0..20 {
        assert_eq!(feed(&mut c, &mut now, &IDLE, 49).class, Class::Ls);
        assert_eq!(feed(&mut c, &mut now, &SERVER, 1).class, Class::Ls);
    }
    assert_eq!(feed(&mut c, &mut now, &BATCH, 50).class, Class::Batch);
}

#[test]
fn a_class_is_held_for_ten_seconds() {
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    feed(&mut c, &mut now, &SERVER, 5);
    let verdict = feed(&mut c, &mut now, &BATCH, 60);
    assert_eq!(
        verdict.why,
        Reason::Held {
            to: Class::Batch,
            left: 4_000 * MS
        }
    );
    let verdict = feed(&mut c, &mut now, &BATCH, 40);
    assert!(verdict.changed);
    // The way back takes as long.
    assert_eq!(feed(&mut c, &mut now, &SERVER, 99).class, Class::Batch);
    assert_eq!(feed(&mut c, &mut now, &SERVER, 1).class, Class::Ls);
}

#[test]
fn a_load_at_the_threshold_does_not_flap() {
    let (mut c, mut now) = (Classifier::new(Thresholds::default()), 0);
    let mut changes = 0;
    for k in 0..10_000 {
        let packets = if k % 2 == 0 { 39.0 } else { 41.0 };
        changes += u32::from(feed(&mut c, &mut now, &Window { packets, ..BATCH }, 1).changed);
    }
    assert_eq!(changes, 0);
}

#[test]
fn advice_has_the_wait_before_and_after() {
    let delay = |ns| Some((Figure::PacketDelay, ns));
    let measured = advise(delay(17 * MS), 3, 4 * MS, (0.25, None), 300 * US, []);
    assert_eq!(
        measured.to_string(),
        "class ls would cut its packet delay p99 from 17 ms to about 900 us"
    );
    assert!(measured.is_worth_it());
    let estimated = advise(None, 3, 4 * MS, (0.25, None), 300 * US, [300 * US]);
    assert_eq!((estimated.now, estimated.after), (12 * MS, 1200 * US));
    assert!(
        estimated
            .to_string()
            .starts_with("class ls would cut its worst wait from 12 ms")
    );
    assert!(!advise(delay(MS), 1, 4 * MS, (0.5, None), 300 * US, []).is_worth_it());
    assert!(!advise(delay(3 * MS), 3, 4 * MS, (0.05, None), 300 * US, []).is_worth_it());
}

#[test]
fn a_vm_inside_its_share_waits_for_other_lsvms_only() {
    let delay = Some((Figure::PacketDelay, 5 * MS));
    let after = |used| advise(delay, 7, 4 * MS, (0.125, used), 300 * US, [300 * US]).after;
    assert_eq!(after(Some(0.06)), 600 * US);
    assert_eq!(after(Some(0.12)), after(None));
    assert_eq!(after(None), 2_400 * US);
}

#[test]
fn what_packets_meet_goes_before_the_residual_wait_and_that_before_the_mean() {
    let mut figures = Figures::default();
    assert_eq!(figures.best(), None);
    figures.mean_wait = Some(3);
    assert_eq!(figures.best(), Some((Figure::MeanWait, 3)));
    figures.residual_wait = Some(2);
    assert_eq!(figures.best(), Some((Figure::ResidualWait, 2)));
    figures.packet_delay = Some(1);
    assert_eq!(figures.best(), Some((Figure::PacketDelay, 1)));
    assert_eq!(figures.get(Figure::MeanWait), Some(3));
}

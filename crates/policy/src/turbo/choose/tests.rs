// SPDX-License-Identifier: Apache-2.0
use super::*;

const STREAM: Window = Window {
    packets: 20_000.0,
    disk: 0.0,
    wait: 0.7,
    interrupt_load: 0.0,
};

fn windows(c: &mut TurboChooser, at: &mut Nanos, n: u32, w: Window) -> Verdict {
    let mut last = None;
    for _ in 0..n {
        *at += 100 * MS;
        last = Some(c.observe(*at, &w, Setting::Auto, None));
    }
    last.unwrap()
}

#[test]
fn a_streaming_vm_that_waits_has_a_turbo_vcpu_until_the_stream_ends() {
    let (mut c, mut at) = (TurboChooser::new(Thresholds::default()), 0);
    assert!(!windows(&mut c, &mut at, 4, STREAM).turbo);
    let v = windows(&mut c, &mut at, 1, STREAM);
    assert!(v.turbo && v.changed, "{v:?}");
    let text = v.why.to_string();
    assert!(
        text.contains("20000 packets/s") && text.contains("70 %"),
        "{text}"
    );
    // With a turbo vCPU it hardly waits.
    let served = Window {
        wait: 0.01,
        ..STREAM
    };
    assert_eq!(windows(&mut c, &mut at, 200, served).why, Reason::StillBusy);
    assert!(windows(&mut c, &mut at, 99, Window::default()).turbo);
    // One busy window starts the count again.
    assert!(windows(&mut c, &mut at, 1, served).turbo);
    assert!(windows(&mut c, &mut at, 99, Window::default()).turbo);
    let v = windows(&mut c, &mut at, 1, Window::default());
    assert!(!v.turbo && v.changed);
}

#[test]
fn a_flooded_vm_loses_its_turbo_vcpu_for_longer_each_time() {
    let (mut c, mut at) = (TurboChooser::new(Thresholds::default()), 0);
    let flood = Window {
        interrupt_load: 0.95,
        ..STREAM
    };
    // It keeps it while its interrupts leave time, or while no regular vCPU waits.
    let half = Window {
        interrupt_load: 0.5,
        ..STREAM
    };
    assert!(windows(&mut c, &mut at, 300, half).turbo);
    let alone = Window { wait: 0.0, ..flood };
    assert!(windows(&mut c, &mut at, 300, alone).turbo);
    assert!(windows(&mut c, &mut at, 19, flood).turbo);
    let v = windows(&mut c, &mut at, 1, flood);
    assert!(
        !v.turbo && v.changed && matches!(v.why, Reason::Flooded { .. }),
        "{v:?}"
    );
    assert!(v.why.to_string().contains("95 %"), "{}", v.why);
    let v = windows(&mut c, &mut at, 500, STREAM);
    assert!(
        !v.turbo && v.why.to_string().contains("it was flooded"),
        "{v:?}"
    );
    // It gets one again after a minute, and then none for two minutes.
    assert!(windows(&mut c, &mut at, 110, STREAM).turbo);
    assert!(!windows(&mut c, &mut at, 20, flood).turbo);
    assert!(!windows(&mut c, &mut at, 1190, STREAM).turbo);
    assert!(windows(&mut c, &mut at, 20, STREAM).turbo);
    // After a long quiet time a flood counts as the first.
    windows(&mut c, &mut at, 5000, half);
    assert!(!windows(&mut c, &mut at, 20, flood).turbo);
    assert!(windows(&mut c, &mut at, 620, STREAM).turbo);
}

#[test]
fn disk_io_counts_as_packets_do() {
    let (mut c, mut at) = (TurboChooser::new(Thresholds::default()), 0);
    let disk = Window {
        disk: 50e6,
        wait: 0.5,
        ..Window::default()
    };
    assert!(windows(&mut c, &mut at, 5, disk).turbo);
}

#[test]
fn a_vm_that_does_not_wait_or_does_little_io_gets_none() {
    let (mut c, mut at) = (TurboChooser::new(Thresholds::default()), 0);
    let alone = Window {
        wait: 0.0,
        ..STREAM
    };
    assert_eq!(
        windows(&mut c, &mut at, 50, alone).why,
        Reason::HardlyWaits { wait: 0.0 }
    );
    let computes = Window {
        packets: 100.0,
        ..STREAM
    };
    assert_eq!(windows(&mut c, &mut at, 50, computes).why, Reason::Quiet);
    assert!(!c.turbo());
}

#[test]
fn changes_keep_a_minimum_distance() {
    let thresholds = Thresholds {
        windows: (1, 1),
        ..Thresholds::default()
    };
    let (mut c, mut at, mut changes) = (TurboChooser::new(thresholds), 0, 0);
    for k in 0..600 {
        let w = if k % 2 == 0 {
            STREAM
        } else {
            Window::default()
        };
        changes += u32::from(windows(&mut c, &mut at, 1, w).changed);
    }
    assert!((5..=7).contains(&changes), "{changes} changes in a minute");
}

#[test]
fn settings_and_obstacles_take_effect_at_once() {
    let mut c = TurboChooser::new(Thresholds::default());
    let quiet = Window::default();
    assert!(c.observe(1, &quiet, Setting::Always, None).changed);
    let v = c.observe(2, &quiet, Setting::Always, Some(Obstacle::OneVcpu));
    assert!(!v.turbo && v.why == Reason::Cannot(Obstacle::OneVcpu));
    assert!(v.why.to_string().contains("second one"));
    assert!(c.observe(3, &STREAM, Setting::Always, None).turbo);
    assert!(!c.observe(4, &STREAM, Setting::Never, None).turbo);
    let v = c.observe(5, &STREAM, Setting::Never, Some(Obstacle::NoAgent));
    assert_eq!(v.why, Reason::Setting);
    assert!(!c.observe(6, &STREAM, Setting::Auto, None).turbo);
}

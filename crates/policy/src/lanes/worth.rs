// SPDX-License-Identifier: Apache-2.0
//! Whether a VM without lanes would gain from a VF: it is network-bound by the rule of this module, and the host's part of its
//! packets, which a VF takes over, costs much CPU time.

use super::{Config, Kind, Traffic, classify};
use crate::hysteresis::{Patience, Sustained};
use crate::slices::{MS, Nanos};

/// What the meter measured of one VM in one window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// DI2 ([`super::di2`]), at least 0.
    pub di2: f64,
    /// Part of the samples with packets, percent, 0.0 ..= 100.0.
    pub freq: f64,
    /// Packets per second, sent and received.
    pub packets: f64,
    /// CPU time of its service threads (vhost, I/O threads) as a part of a core, at least 0.
    pub service: f64,
}

/// Settings of a [`VfWorth`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// What makes a VM network-bound.
    pub config: Config,
    /// Packets per second from which a VF is worth it, and below which it no longer is.
    pub packets: (f64, f64),
    /// The same for [`Window::service`].
    pub service: (f64, f64),
    /// How long it takes until it is worth it, and until it no longer is.
    pub patience: Patience,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            config: Config::default(),
            packets: (10_000.0, 3_000.0),
            service: (0.1, 0.04),
            patience: Patience {
                windows: (2, 6),
                hold: 30_000 * MS,
            },
        }
    }
}

/// Whether one VM would gain from a VF, window by window.
#[derive(Debug, Clone)]
pub struct VfWorth {
    thresholds: Thresholds,
    is_worth_it: Sustained,
}

impl VfWorth {
    /// A VM that would not, so far.
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            is_worth_it: Sustained::new(),
        }
    }

    /// Whether it would.
    pub fn is_worth_it(&self) -> bool {
        self.is_worth_it.is_there()
    }

    /// Takes a window that ended at `now` (ns, never goes back). Returns whether [`VfWorth::is_worth_it`] has changed.
    pub fn observe(&mut self, now: Nanos, window: &Window) -> bool {
        let t = &self.thresholds;
        let traffic = Traffic {
            freq: window.freq,
            avg: window.packets,
        };
        let kind: Kind = classify::classify(&t.config, window.di2, traffic);
        let begins =
            kind.network_bound() && window.packets >= t.packets.0 && window.service >= t.service.0;
        let lasts = window.packets >= t.packets.1 && window.service >= t.service.1;
        self.is_worth_it.observe(now, begins, lasts, &t.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Nanos = 5000 * MS;
    const STREAM: Window = Window {
        di2: 2.0,
        freq: 100.0,
        packets: 40_000.0,
        service: 0.4,
    };

    /// Numbers of the windows after which the answer changed.
    fn changes(worth: &mut VfWorth, windows: &[Window]) -> Vec<usize> {
        let windows = windows.iter().enumerate();
        let changed = windows.filter(|(i, w)| worth.observe(*i as u64 * WINDOW, w));
        changed.map(|(i, _)| i).collect()
    }

    #[test]
    fn a_vm_with_many_packets_is_found_after_two_windows_and_forgotten_after_six() {
        let mut worth = VfWorth::new(Thresholds::default());
        let mut windows = vec![STREAM; 8];
        windows.extend([Window::default(); 8]);
        assert_eq!(changes(&mut worth, &windows), [1, 13]);
    }

    #[test]
    fn a_vf_is_not_worth_it_for_others() {
        let others = [
            // it computes all the time
            Window { di2: 0.0, ..STREAM },
            // a database of small requests
            Window {
                packets: 2_000.0,
                ..STREAM
            },
            // large frames by offloads: few packets cost little
            Window {
                service: 0.03,
                ..STREAM
            },
            // a burst now and then
            Window {
                freq: 5.0,
                ..STREAM
            },
            Window::default(),
        ];
        for other in others {
            let mut worth = VfWorth::new(Thresholds::default());
            assert!(changes(&mut worth, &[other; 20]).is_empty(), "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn a_load_at_the_thresholds_does_not_flap(loads in prop::collection::vec((9e3..11e3_f64, 0.09..0.11_f64), 60)) {
            let windows: Vec<Window> =
                loads.iter().map(|&(packets, service)| Window { packets, service, ..STREAM }).collect();
            let mut worth = VfWorth::new(Thresholds::default());
            prop_assert!(changes(&mut worth, &windows).len() <= 1);
        }
    }
}

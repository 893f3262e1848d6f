// SPDX-License-Identifier: Apache-2.0
//! Whether the host could send a VM's files: a server that reads a file only to send it does piped I/O (vPipe).
//!
//! Bytes that a VM reads from its storage and about as many that leave by its NICs are files on their way to clients. That
//! is worth a proposal where the VM's vCPUs need time for it. Files that lie in a page cache, of the guest or of the host,
//! are not read from storage, so this sees only part of them.

use crate::hysteresis::{Patience, Sustained};
use crate::slices::{MS, Nanos};

/// What the meter measured of one VM in one window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// Bytes per second that it read from storage.
    pub read: f64,
    /// Bytes per second that it sent.
    pub sent: f64,
    /// Part of the time in which its vCPUs ran or waited for a core: 0.0 to the number of vCPUs.
    pub wanted: f64,
}

impl Window {
    /// Bytes per second that were read and sent.
    pub fn carried(&self) -> f64 {
        self.read.min(self.sent)
    }

    /// Whether at least this part of what it read was sent, and of what it sent was read.
    fn is_mostly_files(&self, part: f64) -> bool {
        self.carried() >= part * self.sent.max(self.read)
    }
}

/// Settings of a [`FileSender`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Carried bytes per second from which a VM counts as sending files, and below which it no longer does.
    pub carried: (f64, f64),
    /// The same for the part of the bytes read or sent, whichever are more, that was carried.
    pub part: (f64, f64),
    /// Minimum [`Window::wanted`] for a VM to count.
    pub wanted: f64,
    /// How long it takes until it counts, and until it no longer does.
    pub patience: Patience,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            carried: (8e6, 2e6),
            part: (0.5, 0.25),
            wanted: 0.1,
            patience: Patience {
                windows: (2, 6),
                hold: 30_000 * MS,
            },
        }
    }
}

/// Whether one VM sends files, window by window. Windows of some seconds smooth bursts of read-ahead.
#[derive(Debug, Clone)]
pub struct FileSender {
    thresholds: Thresholds,
    sends: Sustained,
}

impl FileSender {
    /// A VM that does not send files yet.
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            sends: Sustained::new(),
        }
    }

    /// Whether it sends files.
    pub fn sends(&self) -> bool {
        self.sends.is_there()
    }

    /// Takes a window that ended at `now` (ns, never goes back). Returns whether [`FileSender::sends`] has changed.
    pub fn observe(&mut self, now: Nanos, window: &Window) -> bool {
        let t = &self.thresholds;
        let begins = window.carried() >= t.carried.0
            && window.is_mostly_files(t.part.0)
            && window.wanted >= t.wanted;
        let lasts = window.carried() >= t.carried.1 && window.is_mostly_files(t.part.1);
        self.sends.observe(now, begins, lasts, &t.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Nanos = 5000 * MS;
    const FILES: Window = Window {
        read: 50e6,
        sent: 55e6,
        wanted: 0.6,
    };

    /// Numbers of the windows after which the answer changed.
    fn changes(sender: &mut FileSender, windows: &[Window]) -> Vec<usize> {
        let windows = windows.iter().enumerate();
        let changed = windows.filter(|(i, w)| sender.observe(*i as u64 * WINDOW, w));
        changed.map(|(i, _)| i).collect()
    }

    #[test]
    fn a_file_server_is_found_after_two_windows_and_forgotten_after_six() {
        let mut sender = FileSender::new(Thresholds::default());
        let mut windows = vec![FILES; 8];
        windows.extend([Window::default(); 8]);
        assert_eq!(changes(&mut sender, &windows), [1, 13]);
        // A pause is no end.
        windows = vec![FILES, FILES, Window::default(), FILES, FILES, FILES];
        sender = FileSender::new(Thresholds::default());
        assert_eq!(changes(&mut sender, &windows).len(), 1);
        assert!(sender.sends());
    }

    #[test]
    fn other_traffic_is_none_of_files() {
        let others = [
            // a database: it reads much and sends little
            Window { sent: 1e6, ..FILES },
            // one that scans tables, and sends what it finds
            Window {
                read: 200e6,
                sent: 9e6,
                ..FILES
            },
            // a page server: what it sends comes from memory
            Window { read: 1e5, ..FILES },
            // a proxy with a log
            Window { read: 9e6, ..FILES },
            // a backup without any time of its vCPUs, as by a passed-through device
            Window {
                wanted: 0.02,
                ..FILES
            },
            Window::default(),
        ];
        for other in others {
            let mut sender = FileSender::new(Thresholds::default());
            assert!(changes(&mut sender, &[other; 20]).is_empty(), "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn a_load_at_the_threshold_does_not_flap(rates in prop::collection::vec(7e6..9e6_f64, 60)) {
            let windows: Vec<Window> = rates.iter().map(|r| Window { read: *r, sent: *r, wanted: 0.5 }).collect();
            let mut sender = FileSender::new(Thresholds::default());
            prop_assert!(changes(&mut sender, &windows).len() <= 1);
        }
    }
}

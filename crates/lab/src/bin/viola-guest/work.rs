// SPDX-License-Identifier: Apache-2.0
//! The process of a built-in workload. `hog` and `forker` are here, the servers in `echo_sink` and
//! `media`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use viola_lab::wire::{Pattern, Workload};

use crate::counters::{Counters, Slot, ready};
use crate::{echo_sink, media};

pub fn run(name: &str, json: &str) -> Result<(), String> {
    let workload: Workload =
        serde_json::from_str(json).map_err(|e| format!("workload {name}: {e}"))?;
    let counters = Counters::open(name, false).map_err(|e| format!("counters of {name}: {e}"))?;
    match workload {
        Workload::Hog {
            pattern,
            footprint_kib,
            procs,
            duty,
            period_ms,
            nice,
        } => {
            if nice != 0 {
                rustix::process::setpriority_process(None, nice)
                    .map_err(|e| format!("nice {nice}: {e}"))?;
            }
            let mut memory = Memory::new(pattern, footprint_kib as usize * 1024);
            let period = Duration::from_millis(period_ms.into());
            let pace = (duty < 100).then(|| Pace {
                period,
                burst: memory.units_in(period.mul_f64(f64::from(duty) / 100.0)),
            });
            for index in 1..procs {
                // the children share nothing: each writes to its own copy of the memory
                if fork()? == 0 {
                    let _ = rustix::process::set_parent_process_death_signal(Some(
                        rustix::process::Signal::KILL,
                    ));
                    hog(&mut memory, counters.slot(index as usize), pace);
                }
            }
            ready();
            hog(&mut memory, counters.slot(0), pace)
        }
        Workload::Forker { rate } => forker(counters.slot(0), rate),
        Workload::Echo { port } => echo_sink::serve(port, counters.slot(0), true),
        Workload::Sink { port } => echo_sink::serve(port, counters.slot(0), false),
        Workload::Media { port } => media::serve(port, counters.slot(0)),
        Workload::Nginx { .. } | Workload::Apache { .. } | Workload::Agent { .. } => {
            Err(format!("{} is no built-in process", workload.kind()))
        }
    }
}

fn fork() -> Result<i32, String> {
    // SAFETY: this process has one thread.
    match unsafe { libc::fork() } {
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        pid => Ok(pid),
    }
}

/// Bursts of a hog with a duty below 100 %.
#[derive(Clone, Copy)]
struct Pace {
    period: Duration,
    /// Units in a period: a fixed amount of work, however much time the host takes away.
    burst: u64,
}

fn hog(memory: &mut Memory, slot: &Slot, pace: Option<Pace>) -> ! {
    let bytes = memory.bytes_per_unit();
    let Some(Pace { period, burst }) = pace else {
        loop {
            memory.unit();
            slot.add(1, bytes);
        }
    };
    let mut next = Instant::now();
    loop {
        for _ in 0..burst {
            memory.unit();
            slot.add(1, bytes);
        }
        next += period;
        let now = Instant::now();
        if next > now {
            std::thread::sleep(next - now);
        } else {
            next = now; // late: missed periods are lost
        }
    }
}

/// The memory of a hog.
struct Memory {
    pattern: Pattern,
    words: Vec<u64>,
    seed: u64,
}

impl Memory {
    fn new(pattern: Pattern, footprint: usize) -> Self {
        let words = if pattern == Pattern::Alu {
            0
        } else {
            footprint / 8
        };
        Self {
            pattern,
            words: (0..words as u64).collect(),
            seed: 1,
        }
    }

    fn bytes_per_unit(&self) -> u64 {
        let third = self.words.len() / 3;
        let words = match self.pattern {
            Pattern::Alu => 0,
            Pattern::Touch => self.words.len(),
            Pattern::Copy | Pattern::Scale => self.words.len() / 2 * 2,
            Pattern::Add | Pattern::Triad => third * 3,
        };
        words as u64 * 8
    }

    fn unit(&mut self) {
        let seed = self.seed;
        match self.pattern {
            Pattern::Alu => {
                let mut x = seed;
                for _ in 0..16_384 {
                    x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
                }
                self.seed = x;
            }
            Pattern::Touch => self
                .words
                .iter_mut()
                .step_by(8)
                .for_each(|w| *w = w.wrapping_add(seed)),
            Pattern::Copy => {
                let half = self.words.len() / 2;
                let (to, from) = self.words.split_at_mut(half);
                to.copy_from_slice(&from[..half]);
            }
            Pattern::Scale => {
                let half = self.words.len() / 2;
                let (b, c) = self.words.split_at_mut(half);
                for (b, c) in b.iter_mut().zip(&*c) {
                    *b = seed.wrapping_mul(*c);
                }
            }
            Pattern::Add => {
                let third = self.words.len() / 3;
                let (c, rest) = self.words.split_at_mut(third);
                let (a, b) = rest.split_at_mut(third);
                for ((c, a), b) in c.iter_mut().zip(&*a).zip(&*b) {
                    *c = a.wrapping_add(*b);
                }
            }
            Pattern::Triad => {
                let third = self.words.len() / 3;
                let (a, rest) = self.words.split_at_mut(third);
                let (b, c) = rest.split_at_mut(third);
                for ((a, b), c) in a.iter_mut().zip(&*b).zip(&*c) {
                    *a = b.wrapping_add(seed.wrapping_mul(*c));
                }
            }
        }
        black_box(&mut self.words);
    }

    /// Number of units that fit into `time` on an idle core, at least one. Uses the median of many
    /// tries, so that the few in which the host took the core away do not count.
    fn units_in(&mut self, time: Duration) -> u64 {
        let begin = Instant::now();
        let mut tries = Vec::with_capacity(2000);
        while tries.len() < 21
            || (tries.len() < 2000 && begin.elapsed() < Duration::from_millis(300))
        {
            let start = Instant::now();
            self.unit();
            tries.push(start.elapsed());
        }
        tries.sort_unstable();
        let unit = tries[tries.len() / 2].max(Duration::from_nanos(100));
        ((time.as_secs_f64() / unit.as_secs_f64()).round() as u64).max(1)
    }
}

fn forker(slot: &Slot, rate: u32) -> Result<(), String> {
    let period = Duration::from_secs(1).checked_div(rate).unwrap_or_default();
    let mut next = Instant::now();
    ready();
    loop {
        if fork()? == 0 {
            // SAFETY: ends the child at once, without handlers of the parent's runtime.
            unsafe { libc::_exit(0) };
        }
        let _ = rustix::process::wait(rustix::process::WaitOptions::empty());
        slot.add(1, 0);
        next += period;
        let now = Instant::now();
        if next > now {
            std::thread::sleep(next - now);
        } else {
            next = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_has_at_least_one_unit() {
        let mut memory = Memory::new(Pattern::Touch, 1 << 20);
        assert_eq!(memory.units_in(Duration::ZERO), 1);
        assert!(memory.units_in(Duration::from_secs(100)) > 1);
    }

    #[test]
    fn a_unit_covers_the_whole_footprint() {
        let mut touched = Memory::new(Pattern::Touch, 1024);
        touched.unit();
        let changed = touched
            .words
            .iter()
            .enumerate()
            .filter(|(i, w)| **w != *i as u64)
            .count();
        assert_eq!(changed, 1024 / 64);

        let mut copied = Memory::new(Pattern::Copy, 1024);
        copied.unit();
        assert_eq!(copied.words[..64], copied.words[64..]);

        let mut scaled = Memory::new(Pattern::Scale, 1024);
        scaled.seed = 3;
        scaled.unit();
        let half: Vec<u64> = scaled.words[64..].iter().map(|c| 3 * c).collect();
        assert_eq!(scaled.words[..64], half);

        let mut added = Memory::new(Pattern::Add, 48);
        added.unit();
        assert_eq!(added.words[..2], [2 + 4, 3 + 5]);

        let mut triad = Memory::new(Pattern::Triad, 24);
        triad.unit();
        assert_eq!(triad.words[0], 1 + 2);
    }
}

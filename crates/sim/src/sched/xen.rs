// SPDX-License-Identifier: Apache-2.0
//! Xen's own credit scheduler on one core, after its source (xen/common/sched_credit.c): the papers' baseline.
//!
//! The credit scheduler of `viola-policy` makes shares reliable; this one keeps what shaped the papers' figures:
//! - Every 30 ms an accounting hands out 30 ms of credit for every core of the host, including cores that these VMs may
//!   not use. VMs that share one of several cores therefore hardly ever run out of credits: they are UNDER and take
//!   turns.
//! - Up to Xen 3.4 the tick debits 10 ms to the VM that it finds running; since 4.0 a VM pays for what it ran.
//! - A VM that wakes while UNDER is in BOOST until a tick finds it running. A preempted VM goes behind those of its
//!   priority and begins a new slice at its next turn.
//! - A VM with more than 30 ms of credit counts as idle: it loses its credit, and earns none until a tick finds it
//!   running.
//!
//! Domain 0 has a core of its own. Caps and load balancing are not modelled.

use viola_policy::slices::{DEFAULT_WEIGHT, FOREVER, MS, Nanos, Params};

use super::{Pick, Scheduler, Views};

const TICK: Nanos = 10 * MS;
/// Number of ticks per accounting.
const TICKS: u64 = 3;
/// Maximum credit, and what one core hands out per accounting, ns.
const MOST: i64 = 30 * MS as i64;

/// Settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Slice, ns.
    pub slice: Nanos,
    /// Number of cores of the host, each of which adds to the credit handed out.
    pub cores: u32,
    /// Whether the tick debits 10 ms (up to Xen 3.4) instead of the time that was run.
    pub by_tick: bool,
    /// Whether domain 0 is so busy that ticks find it running, so that it earns credit too.
    pub domain_0: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Priority {
    Over,
    Under,
    Boost,
}

#[derive(Debug, Clone, Copy)]
struct Vcpu {
    weight: i64,
    credit: i64,
    priority: Priority,
    earns: bool,
    queued: bool,
}

/// Xen's credit scheduler on one core.
#[derive(Debug)]
pub struct Xen {
    config: Config,
    vcpus: Vec<Vcpu>,
    /// The waiting vCPUs by priority, then in turn.
    queue: Vec<usize>,
    current: Option<usize>,
    ends: Nanos,
    next_tick: Nanos,
    ticks: u64,
}

impl Xen {
    /// A core without vCPUs.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            vcpus: Vec::new(),
            queue: Vec::new(),
            current: None,
            ends: 0,
            next_tick: TICK,
            ticks: 0,
        }
    }

    /// Queues a vCPU behind all of its priority (__runq_insert).
    fn enqueue(&mut self, i: usize) {
        let of = self.vcpus[i].priority;
        let at = self
            .queue
            .iter()
            .position(|&k| self.vcpus[k].priority < of)
            .unwrap_or(self.queue.len());
        self.queue.insert(at, i);
        self.vcpus[i].queued = true;
    }

    /// csched_tick, and csched_acct at every third one.
    fn tick(&mut self) {
        if let Some(i) = self.current {
            let v = &mut self.vcpus[i];
            if v.priority == Priority::Boost {
                v.priority = Priority::Under;
            }
            if self.config.by_tick {
                v.credit -= TICK as i64;
            }
            v.earns = true;
        }
        self.ticks += 1;
        if self.ticks.is_multiple_of(TICKS) {
            self.account();
            // A stable sort, as csched_runq_sort; BOOST stays before UNDER, where it was inserted.
            let vcpus = &self.vcpus;
            self.queue
                .sort_by_key(|&i| vcpus[i].priority < Priority::Under);
        }
    }

    fn account(&mut self) {
        let earning = self.vcpus.iter().filter(|v| v.earns);
        let domain_0 = i64::from(DEFAULT_WEIGHT) * i64::from(self.config.domain_0);
        let weights = domain_0 + earning.map(|v| v.weight).sum::<i64>();
        let all = MOST * i64::from(self.config.cores);
        for v in self.vcpus.iter_mut().filter(|v| v.earns) {
            v.credit += (all * v.weight / weights.max(1)).min(MOST);
            if v.credit < 0 {
                v.priority = Priority::Over;
                v.credit = v.credit.max(-MOST);
            } else {
                v.priority = Priority::Under;
                if v.credit > MOST {
                    v.credit = 0;
                    v.earns = false;
                }
            }
        }
    }
}

impl Scheduler for Xen {
    fn configure(&mut self, now: Nanos, vcpus: &[Params]) {
        let new = Vcpu {
            weight: 1,
            credit: 0,
            priority: Priority::Under,
            earns: false,
            queued: false,
        };
        self.vcpus.resize(vcpus.len(), new);
        for (v, params) in self.vcpus.iter_mut().zip(vcpus) {
            v.weight = i64::from(params.weight.max(1));
        }
        self.next_tick = (now / TICK + 1) * TICK;
    }

    fn pick(&mut self, now: Nanos, views: &Views) -> Pick {
        let views = views.all();
        let mut again = self.current.is_none() || now >= self.ends;
        for (i, view) in views.iter().enumerate() {
            let v = &mut self.vcpus[i];
            if !self.config.by_tick {
                v.credit -= view.used as i64;
            }
            if !view.runnable {
                if v.queued {
                    v.queued = false;
                    self.queue.retain(|&k| k != i);
                }
                if self.current == Some(i) {
                    self.current = None;
                    again = true;
                }
            }
        }
        for (i, view) in views.iter().enumerate() {
            let v = &mut self.vcpus[i];
            if view.runnable && !v.queued && self.current != Some(i) {
                if v.priority == Priority::Under {
                    v.priority = Priority::Boost;
                }
                let of = v.priority;
                self.enqueue(i);
                again |= self.current.is_none_or(|c| of > self.vcpus[c].priority);
            }
        }
        while now >= self.next_tick {
            self.tick();
            self.next_tick += TICK;
        }
        if again {
            if let Some(i) = self.current.take() {
                self.enqueue(i);
            }
            if !self.queue.is_empty() {
                let i = self.queue.remove(0);
                self.vcpus[i].queued = false;
                self.current = Some(i);
                self.ends = now + self.config.slice;
            }
        }
        Pick {
            who: self.current,
            until: match self.current {
                Some(_) => self.ends.min(self.next_tick),
                None => FOREVER,
            },
            budget: FOREVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_policy::slices::Class;

    /// Three busy VMs and one that wakes: the times at which another VM runs, and that VM.
    fn turns(config: Config, wakes: Nanos, end: Nanos) -> Vec<(Nanos, usize)> {
        let mut xen = Xen::new(config);
        let params = |id| Params {
            id,
            class: Class::Batch,
            weight: 256,
            cap_permille: None,
            microslice: MS,
        };
        xen.configure(0, &[params(0), params(1), params(2), params(3)]);
        let (mut now, mut last, mut seen) = (0, None, Vec::new());
        while now < end {
            let mut views = Views::default();
            for i in 0..4 {
                views.add();
                let view = views.change(i);
                view.runnable = i < 3 || now >= wakes;
                if last.is_some_and(|(who, _)| who == i) {
                    view.used = now - last.map_or(0, |(_, at)| at);
                }
            }
            let pick = xen.pick(now, &views);
            let who = pick.who.unwrap();
            if seen.last().is_none_or(|&(_, w)| w != who) {
                seen.push((now, who));
            }
            last = Some((who, now));
            let next = if now < wakes { wakes } else { pick.until };
            now = pick.until.min(next);
        }
        seen
    }

    #[test]
    fn a_waking_vm_preempts_until_a_tick_and_then_takes_turns() {
        for by_tick in [true, false] {
            let config = Config {
                slice: 30 * MS,
                cores: 2,
                by_tick,
                domain_0: false,
            };
            let seen = turns(config, 75 * MS, 400 * MS);
            let at = |ms| ms * MS;
            assert_eq!(
                seen[..7],
                [
                    (0, 0),
                    (at(30), 1),
                    (at(60), 2),
                    (at(75), 3),
                    (at(105), 0),
                    (at(135), 1),
                    (at(165), 2)
                ],
                "{by_tick}"
            );
        }
    }
}

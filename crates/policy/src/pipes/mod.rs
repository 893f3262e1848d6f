// SPDX-License-Identifier: Apache-2.0
//! Whose pipe sends next, and how much.
//!
//! What the host sends for a VM is charged to that VM, in bytes: paper 003 (vPipe), section 2, gives each VM credits by its
//! weight, refilled by a timer. Here nobody waits for a timer while there is nobody else: VMs that want to send share by
//! weight as in start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), each with a virtual time that
//! grows by bytes over weight; the smallest is next. A VM that was idle begins at the time of the others, so it has
//! saved nothing, and owes nothing. A cap in bytes a second is a token bucket beside that.
//!
//! On a host each VM has a worker process of its own, so that the kernel's fair scheduler is what shares: [`nice`] gives it the
//! weight, and [`Cap`] is kept by the worker. [`Purse`] is the same in one account book, for hosts that are simulated.

mod cap;
mod nice;

use std::collections::BTreeMap;

pub use cap::Cap;
pub use nice::nice;

/// Bytes that a VM sends before another one may: small enough that two VMs take turns many times a second at
/// 1 GiB/s, large enough for one system call to be worth it.
pub const QUANTUM: u64 = 1 << 20;
/// A cap of less is one of this, in bytes: less than that is not worth sending.
const SMALLEST: u64 = 64 << 10;

/// Weights and virtual time are scaled so that one byte at the largest weight still counts.
const SCALE: u128 = 1 << 20;

/// What is to be done now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant<V> {
    /// This VM may send up to so many bytes; say so with [`Purse::spent`].
    Send {
        /// Which one.
        vm: V,
        /// At most.
        bytes: u64,
    },
    /// Nobody may send before this time, in nanoseconds: those who want to have reached their caps.
    Wait {
        /// Until when.
        until_ns: u64,
    },
    /// Nobody wants to send.
    Idle,
}

#[derive(Debug, Clone)]
struct Account {
    weight: u32,
    cap: Option<Cap>,
    /// Bytes over weight, scaled.
    time: u128,
    /// Pipes that want to send.
    wants: u32,
    /// Granted and not yet reported.
    lent: u64,
    sent: u64,
}

/// The accounts of all VMs of a host. Times are of any one clock, in nanoseconds, and do not go back.
#[derive(Debug, Clone)]
pub struct Purse<V> {
    accounts: BTreeMap<V, Account>,
    /// Virtual time of the one that was served last.
    time: u128,
}

impl<V> Default for Purse<V> {
    fn default() -> Self {
        Self {
            accounts: BTreeMap::new(),
            time: 0,
        }
    }
}

impl<V: Copy + Ord> Purse<V> {
    /// Opens an account, or changes one: weight from 1 up, cap in bytes a second.
    pub fn set(&mut self, vm: V, weight: u32, cap: Option<u64>, now_ns: u64) {
        let weight = weight.max(1);
        let time = self.time;
        let account = self.accounts.entry(vm).or_insert(Account {
            weight,
            cap: None,
            time,
            wants: 0,
            lent: 0,
            sent: 0,
        });
        account.weight = weight;
        let rate = cap.map(|rate| rate.max(SMALLEST));
        if account.cap.as_ref().map(Cap::rate) != rate {
            account.cap = rate.map(|rate| Cap::new(rate, now_ns));
        }
    }

    /// Closes an account; what it was granted and has not reported is forgotten.
    pub fn remove(&mut self, vm: V) {
        self.accounts.remove(&vm);
    }

    /// One more pipe of this VM wants to send.
    pub fn want(&mut self, vm: V) {
        let time = self.time;
        if let Some(account) = self.accounts.get_mut(&vm) {
            if account.wants == 0 {
                account.time = account.time.max(time);
            }
            account.wants += 1;
        }
    }

    /// One less: it is done, or its socket is full.
    pub fn rest(&mut self, vm: V) {
        if let Some(account) = self.accounts.get_mut(&vm) {
            account.wants = account.wants.saturating_sub(1);
        }
    }

    /// Who sends next. What is granted counts at once, so that several workers can ask.
    pub fn grant(&mut self, now_ns: u64) -> Grant<V> {
        let mut next: Option<(u128, V, u64)> = None;
        let mut until: Option<u64> = None;
        for (&vm, account) in &mut self.accounts {
            if account.wants == 0 {
                continue;
            }
            let bytes = match &mut account.cap {
                None => QUANTUM,
                Some(cap) => match cap.ready(now_ns, QUANTUM) {
                    Ok(bytes) => bytes,
                    Err(at) => {
                        until = Some(until.map_or(at, |before| before.min(at)));
                        continue;
                    }
                },
            };
            if next.is_none_or(|(time, _, _)| account.time < time) {
                next = Some((account.time, vm, bytes));
            }
        }
        match (next, until) {
            (Some((time, vm, bytes)), _) => {
                self.time = self.time.max(time);
                if let Some(account) = self.accounts.get_mut(&vm) {
                    account.charge(bytes);
                }
                Grant::Send { vm, bytes }
            }
            (None, Some(until_ns)) => Grant::Wait { until_ns },
            (None, None) => Grant::Idle,
        }
    }

    /// Of `granted` bytes so many were sent; the rest is given back. Nobody can have sent more than that.
    pub fn spent(&mut self, vm: V, granted: u64, sent: u64) {
        if let Some(account) = self.accounts.get_mut(&vm) {
            let granted = granted.min(account.lent);
            let sent = sent.min(granted);
            account.lent -= granted;
            account.sent += sent;
            let back = granted - sent;
            account.time = account.time.saturating_sub(account.price(back));
            if let Some(cap) = &mut account.cap {
                cap.give_back(back);
            }
        }
    }

    /// Bytes sent for this VM since its account was opened.
    pub fn sent(&self, vm: V) -> u64 {
        self.accounts.get(&vm).map_or(0, |account| account.sent)
    }
}

impl Account {
    fn price(&self, bytes: u64) -> u128 {
        u128::from(bytes) * SCALE / u128::from(self.weight)
    }

    fn charge(&mut self, bytes: u64) {
        self.time += self.price(bytes);
        self.lent += bytes;
        if let Some(cap) = &mut self.cap {
            cap.take(bytes);
        }
    }
}

#[cfg(test)]
mod tests;

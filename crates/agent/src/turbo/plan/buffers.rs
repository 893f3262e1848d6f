// SPDX-License-Identifier: Apache-2.0
//! Sizes receive buffers for what arrives while the application waits for its vCPU.

use super::Planner;
use crate::turbo::knob::{Knob, Part};

/// One socket's buffer may be at most the VM's memory divided by this number.
const MAX_MEMORY_SHARE: u64 = 8;

/// Minimum buffer in bytes for `mbit` megabits per second over `delay_ms` milliseconds (000 section 3.2, "I/O buffers
/// in guest OS").
pub fn min_buffer_bytes(mbit: u32, delay_ms: u32) -> u64 {
    u64::from(mbit) * u64::from(delay_ms) * 125
}

impl Planner<'_> {
    pub(super) fn buffers(&mut self) {
        if self.goal.delay_ms == 0 {
            return;
        }
        let fastest = self.now.nics.values().filter_map(|nic| nic.mbit).max();
        let Some(mbit) = self.goal.mbit.or(fastest) else {
            if !self.now.nics.is_empty() {
                let why = "no interface reports its speed; set `bandwidth_mbit` in [turbo]";
                self.note(Part::Buffers, why);
            }
            return;
        };
        let wanted = min_buffer_bytes(mbit, self.goal.delay_ms) * u64::from(self.goal.headroom);
        let most = (self.now.memory / MAX_MEMORY_SHARE).min(i32::MAX as u64 / 2);
        if wanted > most {
            let text = format!(
                "{} KiB are wanted; the limit is {} KiB, an eighth of this VM's memory",
                wanted >> 10,
                most >> 10
            );
            self.note(Part::Buffers, text);
        }
        let bytes = wanted.min(most);
        self.raise("net/core/rmem_max", &[0], bytes);
        if self.goal.default_buffers {
            self.raise("net/core/rmem_default", &[0], bytes);
        }
        // tcp_rmem has the minimum, initial and maximum size, also for IPv6. A window grows from its initial
        // size by what is read in a round trip. When the sender waits for the window, that is never more than
        // the window: it does not grow, so `default_buffers` raises the initial size too.
        let first = if self.goal.default_buffers { 1 } else { 2 };
        self.raise("net/ipv4/tcp_rmem", &[first, 2], bytes);
    }

    /// Raises words of a setting to at least `bytes`.
    fn raise(&mut self, name: &str, which: &[usize], bytes: u64) {
        let Some(old) = self.now.sysctls.get(name) else {
            return;
        };
        let mut words: Vec<String> = old.split(' ').map(str::to_owned).collect();
        for word in which {
            if let Some(word) = words.get_mut(*word)
                && word.parse::<u64>().is_ok_and(|now| now < bytes)
            {
                *word = bytes.to_string();
            }
        }
        let new = words.join(" ");
        if new != *old {
            let name = name.to_owned();
            self.step(Part::Buffers, Knob::Sysctl { name }, new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::min_buffer_bytes;

    #[test]
    fn the_papers_example_takes_eleven_megabytes() {
        // 1 Gb/s, four VMs on a core: (4 - 1) * 30 ms
        assert_eq!(min_buffer_bytes(1000, 90), 11_250_000);
    }
}

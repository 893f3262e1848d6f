// SPDX-License-Identifier: Apache-2.0
//! Times that the clients of VMs see, by a second BPF program (bpf/answers.bpf.c): from a request to the first byte of its answer, and
//! from a TCP SYN to the SYN-ACK.

use std::os::fd::AsFd;

use libbpf_rs::Link;

use super::layout::{HistCounters, MAX_VMS};
use super::maps::Shared;
use super::{Acct, AcctError, beside, map};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/answers.bpf.o"));

/// The times of one VM. All counters wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct AnswerCounters {
    /// From a TCP SYN to the VM until its SYN-ACK.
    pub connects: HistCounters,
    /// From the first byte of a request until the first byte of the VM's answer.
    pub answers: HistCounters,
}

/// The loaded and attached program. Dropping it detaches the program.
pub struct AnswerMeter {
    _links: Vec<Link>,
    times: Shared<AnswerCounters>,
}

impl AnswerMeter {
    /// Loads and attaches the program for the NICs that `acct` watches, now and later.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn load(acct: &Acct) -> Result<Self, AcctError> {
        let (object, links) = beside::load(acct, OBJECT)?;
        let times = map(&object, "vm_answers")?;
        Ok(Self {
            _links: links,
            times: Shared::map(times.as_fd(), MAX_VMS, false, "answer table")?,
        })
    }

    /// The times of the VM with this index (below [`MAX_VMS`]).
    pub fn vm(&self, vm: u32) -> AnswerCounters {
        self.times.read(vm as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::HIST_BUCKETS;
    use super::*;
    use std::sync::OnceLock;
    use viola_bpf_build::replay;

    /// `struct segment` of bpf/answers.h.
    #[repr(C)]
    struct Segment {
        flags: u32,
        has_data: u32,
        guest_port: u16,
        peer_port: u16,
    }

    /// `struct conversation` of bpf/answers.h.
    #[repr(C)]
    #[derive(Default)]
    struct Conversation {
        since: u64,
        state: u32,
        _pad: u32,
    }

    type Step = unsafe extern "C" fn(*mut Conversation, *const Segment, u32, u64, *mut u64) -> u32;

    const SYN: u32 = 2;
    const ACK: u32 = 16;

    #[derive(Debug, PartialEq)]
    enum Time {
        Connect(u64),
        Answer(u64),
    }

    /// Plays a conversation between port 5000 of the peer and this port of the VM: for each segment whether it goes to the VM, its
    /// flags, whether it has data, and when it comes. Returns the times that end.
    fn play(guest_port: u16, segments: &[(bool, u32, bool, u64)]) -> Vec<Time> {
        static STEP: OnceLock<Step> = OnceLock::new();
        let step = STEP.get_or_init(|| {
            let library = replay::Library::compile("answers_replay.c", &["-Werror"]);
            // SAFETY: the function has this type in answers_replay.c.
            unsafe { library.function(c"replay_conversation") }
        });
        let mut conversation = Conversation::default();
        let mut times = Vec::new();
        for (to_guest, flags, has_data, now) in segments {
            let segment = Segment {
                flags: *flags,
                has_data: u32::from(*has_data),
                guest_port,
                peer_port: 5000,
            };
            let mut time = 0;
            // SAFETY: all pointers are to values of these types that live through the call.
            let kind = unsafe {
                step(
                    &raw mut conversation,
                    &raw const segment,
                    u32::from(*to_guest),
                    *now,
                    &raw mut time,
                )
            };
            match kind {
                0 => {}
                1 => times.push(Time::Connect(time)),
                2 => times.push(Time::Answer(time)),
                other => panic!("{other}"),
            }
        }
        times
    }

    #[test]
    fn a_server_has_a_time_to_connect_and_one_for_each_answer() {
        let times = play(
            80,
            &[
                (true, SYN, false, 100),
                (true, SYN, false, 150),
                (false, SYN | ACK, false, 170),
                (true, ACK, false, 180),
                (true, ACK, true, 200),
                (true, ACK, true, 210),
                (false, ACK, false, 220),
                (false, ACK, true, 260),
                (false, ACK, true, 270),
                (true, ACK, true, 300),
                (false, ACK, true, 305),
            ],
        );
        let all = [Time::Connect(70), Time::Answer(60), Time::Answer(5)];
        assert_eq!(times, all);
    }

    #[test]
    fn a_vm_that_asks_others_has_no_answers() {
        let asks = [
            (false, SYN, false, 1),
            (true, SYN | ACK, false, 2),
            (false, ACK, true, 3),
            (true, ACK, true, 4),
            (false, ACK, true, 5),
        ];
        assert_eq!(play(80, &asks), []);
    }

    #[test]
    fn a_connection_that_began_earlier_is_served_by_the_lower_port() {
        let segments = [(true, ACK, true, 10), (false, ACK, true, 30)];
        assert_eq!(play(80, &segments), [Time::Answer(20)]);
        assert_eq!(play(40_000, &segments), []);
    }

    #[test]
    fn the_size_is_that_of_the_c_structure() {
        assert_eq!(size_of::<AnswerCounters>(), 2 * (4 + 8) * HIST_BUCKETS);
    }
}

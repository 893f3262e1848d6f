// SPDX-License-Identifier: Apache-2.0
//! A VM's packets: the accounting program's counts in the terms of policy.

use viola_meter::acct::CoreVm;
use viola_policy::slices::Packets;

/// The VM's packets as the accounting program counts them.
pub(super) fn packets_of(vm: &CoreVm) -> Packets {
    Packets {
        request_at: vm.request_at,
        reply_at: vm.reply_at,
        open: vm.open,
        answered: vm.answered,
        gap: vm.gap,
        think: vm.think,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use viola_bpf_build::replay::Library;

    use super::*;

    type OnRequest = unsafe extern "C" fn(*mut CoreVm, u64, u32);
    type OnReply = unsafe extern "C" fn(*mut CoreVm, u64, u32, u32);

    proptest! {
        /// bpf/packet_counts.h and policy count the same, whatever the order and the times.
        #[test]
        fn the_accounting_program_counts_packets_as_policy_does(
            packets in prop::collection::vec(
                // After nanoseconds to a second, of one of the connections' groups and those beyond, to the VM, from it, or
                // from it to open a connection.
                ((0..31_u32).prop_flat_map(|octave| 0..(1_u64 << octave)), 0..70_u32, 0..3),
                1..400,
            )
        ) {
            static LIBRARY: std::sync::OnceLock<(OnRequest, OnReply)> = std::sync::OnceLock::new();
            let &(count_request, count_reply) = LIBRARY.get_or_init(|| {
                let library = Library::compile("packets_replay.c", &["-Werror"]);
                // SAFETY: the functions have these types in packets_replay.c.
                unsafe {
                    (
                        library.function(c"replay_count_request"),
                        library.function(c"replay_count_reply"),
                    )
                }
            });
            let (mut program, mut policy) = (CoreVm::default(), Packets::default());
            let mut now = 1;
            for (pause, connection, kind) in packets {
                now += pause;
                // SAFETY: functions of the library on a VM that nobody else uses.
                unsafe {
                    match kind {
                        0 => count_request(&raw mut program, now, connection),
                        _ => count_reply(&raw mut program, now, connection, u32::from(kind == 1)),
                    }
                }
                match kind {
                    0 => policy.count_request(now, connection),
                    _ => policy.count_reply(now, connection, kind == 1),
                }
                prop_assert_eq!(packets_of(&program), policy);
            }
        }
    }
}

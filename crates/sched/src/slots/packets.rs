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
        gap: vm.gap,
        think: vm.think,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use viola_bpf_build::replay::Library;

    use super::*;

    type OnVm = unsafe extern "C" fn(*mut CoreVm, u64);

    proptest! {
        /// bpf/packet_counts.h and policy count the same, whatever the order and the times.
        #[test]
        fn the_accounting_program_counts_packets_as_policy_does(
            packets in prop::collection::vec(
                // From nanoseconds to a second, to the VM or from it.
                ((0..31_u32).prop_flat_map(|octave| 0..(1_u64 << octave)), any::<bool>()),
                1..400,
            )
        ) {
            static LIBRARY: std::sync::OnceLock<(OnVm, OnVm)> = std::sync::OnceLock::new();
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
            for (pause, is_to_vm) in packets {
                now += pause;
                // SAFETY: functions of the library on a VM that nobody else uses.
                unsafe {
                    match is_to_vm {
                        true => count_request(&raw mut program, now),
                        false => count_reply(&raw mut program, now),
                    }
                }
                match is_to_vm {
                    true => policy.count_requests(now, 1),
                    false => policy.count_reply(now),
                }
                prop_assert_eq!(packets_of(&program), policy);
            }
        }
    }
}

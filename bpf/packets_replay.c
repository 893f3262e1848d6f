/* SPDX-License-Identifier: GPL-2.0-only */
/* bpf/packet_counts.h as a library, for the test that compares it with policy. */
#include "packet_counts.h"

void replay_count_request(struct core_vm *cv, u64 now, u32 group)
{
	count_request(cv, now, group);
}

void replay_count_reply(struct core_vm *cv, u64 now, u32 group, u32 is_answer)
{
	count_reply(cv, now, group, is_answer);
}

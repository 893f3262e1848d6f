/* SPDX-License-Identifier: GPL-2.0-only */
/* bpf/packet_counts.h as a library, for the test that compares it with policy. */
#include "packet_counts.h"

void replay_count_request(struct core_vm *cv, u64 now, u32 bucket)
{
	count_request(cv, now, bucket);
}

void replay_count_reply(struct core_vm *cv, u64 now, u32 bucket, u32 is_answer)
{
	count_reply(cv, now, bucket, is_answer);
}

/* SPDX-License-Identifier: GPL-2.0-only */
/* bpf/answers.h as a library, for the test that plays conversations. */
#include "answers.h"

u32 replay_conversation(struct conversation *c, const struct segment *s, u32 to_guest, u64 now, u64 *time)
{
	return conversation_step(c, s, to_guest, now, time);
}

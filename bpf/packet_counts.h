/* SPDX-License-Identifier: GPL-2.0-only */
/* Counts of the packets that may need a reply: Packets of policy's slices/requests.rs. A test compares the two. */
#ifndef VIOLA_PACKET_COUNTS_H
#define VIOLA_PACKET_COUNTS_H

#include "types.h"
#include "acct.h"

enum {
	/* Without a packet to a VM for this long, open starts anew; the longest gap that counts for a mean. Both ns. */
	OPEN_TIMEOUT = 100000000,
	MAX_GAP = 10000000,
};

static __always_inline u32 moving_mean(u32 mean, u64 new)
{
	return mean - (mean >> 3) + ((u32)(new < MAX_GAP ? new : MAX_GAP) >> 3);
}

/* Counts a packet to the VM of the connection in this group: Packets::count_request. Packets of several CPUs may be
 * counted wrong; the controller bounds the error by times. */
static __always_inline void count_request(struct core_vm *cv, u64 now, u32 group)
{
	u64 gap = now - cv->request_at;

	if (gap > OPEN_TIMEOUT)
		cv->open = 0;
	cv->gap = moving_mean(cv->gap, gap);
	if (cv->reply_at > cv->request_at)
		cv->think = moving_mean(cv->think, now - cv->reply_at);
	cv->request_at = now;
	cv->open |= 1ULL << (group & 63);
}

/* Counts a packet of the VM: Packets::count_reply. */
static __always_inline void count_reply(struct core_vm *cv, u64 now, u32 group, u32 is_answer)
{
	u64 bit = 1ULL << (group & 63);

	cv->reply_at = now;
	if (is_answer && (cv->open & bit))
		cv->answered++;
	cv->open &= ~bit;
}

#endif

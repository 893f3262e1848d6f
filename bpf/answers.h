/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Times that the clients of a VM's servers see: from a request to the first byte of its answer, and from a TCP SYN to the SYN-ACK,
 * as they pass the VM's NIC. Only headers are read.
 *
 * A test compiles this file and plays conversations.
 */
#ifndef VIOLA_ANSWERS_H
#define VIOLA_ANSWERS_H

#include "types.h"

#define MAX_CONVERSATIONS 32768		/* TCP connections of all VMs that are followed; the least recent one makes room */

enum { SEGMENT_FIN = 0x01, SEGMENT_SYN = 0x02, SEGMENT_RST = 0x04, SEGMENT_ACK = 0x10 };

/* A TCP segment of a VM. */
struct segment {
	u32 flags;		/* byte 13 of the TCP header */
	u32 has_data;
	u16 guest_port;
	u16 peer_port;
};

enum conversation_state {
	CONVERSATION_NEW,
	CONVERSATION_CONNECTING,	/* since: the peer's first SYN */
	CONVERSATION_WAITING,		/* since: the first byte of the peer's request */
	CONVERSATION_ANSWERED,		/* the VM has sent last */
	CONVERSATION_OF_VM,		/* the VM is the client: nothing is measured */
};

struct conversation {
	u64 since;		/* ns */
	u32 state;
	u32 _pad;
};

enum conversation_time { TIME_NONE, TIME_CONNECT, TIME_ANSWER };

/* Who serves in a connection whose beginning was not seen: as a rule the lower port. */
static __always_inline u32 conversation_seen_late(const struct segment *s)
{
	return s->guest_port < s->peer_port ? CONVERSATION_ANSWERED : CONVERSATION_OF_VM;
}

/* A segment passes the NIC, to the VM or from it. Returns which time ends with it, and that time (ns). */
static __always_inline u32 conversation_step(struct conversation *c, const struct segment *s, u32 to_guest, u64 now, u64 *time)
{
	u32 opens = (s->flags & (SEGMENT_SYN | SEGMENT_ACK)) == SEGMENT_SYN;

	*time = now > c->since ? now - c->since : 0;
	if (opens) {
		/* A repeated SYN does not begin anew: the client waits since the first one. */
		if (!to_guest)
			c->state = CONVERSATION_OF_VM;
		else if (c->state != CONVERSATION_CONNECTING) {
			c->state = CONVERSATION_CONNECTING;
			c->since = now;
		}
		return TIME_NONE;
	}
	if (s->flags & SEGMENT_SYN) {
		if (to_guest) {
			c->state = CONVERSATION_OF_VM;
		} else if (c->state == CONVERSATION_CONNECTING) {
			c->state = CONVERSATION_ANSWERED;
			return TIME_CONNECT;
		}
		return TIME_NONE;
	}
	if (!s->has_data)
		return TIME_NONE;
	if (c->state == CONVERSATION_NEW)
		c->state = conversation_seen_late(s);
	if (to_guest && c->state == CONVERSATION_ANSWERED) {
		c->state = CONVERSATION_WAITING;
		c->since = now;
	} else if (!to_guest && c->state == CONVERSATION_WAITING) {
		c->state = CONVERSATION_ANSWERED;
		return TIME_ANSWER;
	}
	return TIME_NONE;
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/* Which packets need a reply, and of which connection they are. */
#ifndef VIOLA_PACKETS_H
#define VIOLA_PACKETS_H

#include "headers.h"

enum {
	SYN = 0x02,
	/* Ethernet, and the longest headers of IPv4 and TCP */
	HEADER_BYTES = ETH_BYTES + 60 + 60,
};

struct packet {
	u32 needs_no_reply;	/* a TCP segment without data that opens no connection; it does not count as a reply either */
	u32 is_answer;		/* a reply with it may end a request: it opens no TCP connection */
	u32 group;		/* of its connection, 0 to 63, the same in both directions */
};

static __always_inline u32 word_at(const u8 *bytes)
{
	return (u32)bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

/* Parses the packet `at` bytes after skb->data. Anything that cannot be parsed counts as a packet that needs a reply. */
static __always_inline struct packet parse_packet(const struct sk_buff *skb, u32 at)
{
	struct packet packet = { .is_answer = 1 };
	struct headers h;
	u32 hash;

	if (!read_headers(skb, at, &h))
		return packet;
	hash = h.is_ip6 ? word_at(h.ip + 20) ^ word_at(h.ip + 36) : word_at(h.ip + 12) ^ word_at(h.ip + 16);
	/* Both ports, in either order. */
	if (h.transport == TCP || h.transport == UDP)
		hash ^= source_port(&h) ^ destination_port(&h);
	if (h.transport == TCP) {
		packet.is_answer = !(h.tcp[13] & SYN);
		packet.needs_no_reply = packet.is_answer && skb->len <= HEADER_BYTES &&
					h.bytes + (h.tcp[12] >> 4) * 4 >= h.whole;
	}
	packet.group = (hash * 0x9e3779b1) >> 26;
	return packet;
}

#endif

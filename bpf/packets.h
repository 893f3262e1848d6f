/* SPDX-License-Identifier: GPL-2.0-only */
/* Which packets need a reply, and of which connection they are. */
#ifndef VIOLA_PACKETS_H
#define VIOLA_PACKETS_H

enum {
	ETH_BYTES = 14, IP4 = 0x0800, IP6 = 0x86dd, IP6_BYTES = 40, TCP = 6, TCP_BYTES = 20, UDP = 17, SYN = 0x02,
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
	u8 ip[IP6_BYTES] = {}, tcp[TCP_BYTES] = {};
	u32 header, whole, hash, transport, proto = bpf_ntohs(skb->protocol);

	if (bpf_probe_read_kernel(ip, 20, skb->data + at))
		return packet;
	if (proto == IP4 && (ip[0] & 15) >= 5) {
		hash = word_at(ip + 12) ^ word_at(ip + 16);
		transport = (ip[6] & 0x3f) || ip[7] ? 0 : ip[9]; /* 0: a fragment */
		header = (ip[0] & 15) * 4;
		whole = ip[2] << 8 | ip[3];
	} else if (proto == IP6) {
		if (bpf_probe_read_kernel(ip + 20, 20, skb->data + at + 20))
			return packet;
		hash = word_at(ip + 20) ^ word_at(ip + 36);
		transport = ip[6];
		header = IP6_BYTES;
		whole = IP6_BYTES + (ip[4] << 8 | ip[5]);
	} else {
		return packet;
	}
	if ((transport == TCP || transport == UDP) &&
	    !bpf_probe_read_kernel(tcp, TCP_BYTES, skb->data + at + header)) {
		/* Both ports, in either order. */
		hash ^= (tcp[0] << 8 | tcp[1]) ^ (tcp[2] << 8 | tcp[3]);
		if (transport == TCP) {
			packet.is_answer = !(tcp[13] & SYN);
			packet.needs_no_reply = packet.is_answer && skb->len <= HEADER_BYTES &&
						header + (tcp[12] >> 4) * 4 >= whole;
		}
	}
	packet.group = (hash * 0x9e3779b1) >> 26;
	return packet;
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/* Which packets need no reply. */
#ifndef VIOLA_PACKETS_H
#define VIOLA_PACKETS_H

enum {
	ETH_BYTES = 14, IP4 = 0x0800, IP6 = 0x86dd, IP6_BYTES = 40, TCP = 6, TCP_BYTES = 20, SYN = 0x02,
	/* Ethernet, and the longest headers of IPv4 and TCP */
	HEADER_BYTES = ETH_BYTES + 60 + 60,
};

/* Whether it is a TCP segment without data that opens no connection: such a segment needs no reply,
 * and does not count as a reply. The packet begins `at` bytes after skb->data. Anything that cannot
 * be parsed counts as a packet that needs a reply. */
static __always_inline int is_tcp_without_data(const struct sk_buff *skb, u32 at)
{
	u8 ip[IP6_BYTES] = {}, tcp[TCP_BYTES] = {};
	u32 header, whole, proto = bpf_ntohs(skb->protocol);

	if (skb->len > HEADER_BYTES || bpf_probe_read_kernel(ip, 20, skb->data + at))
		return 0;
	if (proto == IP4 && (ip[0] & 15) >= 5) {
		if (ip[9] != TCP || (ip[6] & 0x3f) || ip[7]) /* or a fragment */
			return 0;
		header = (ip[0] & 15) * 4;
		whole = ip[2] << 8 | ip[3];
	} else if (proto == IP6) {
		if (ip[6] != TCP)
			return 0;
		header = IP6_BYTES;
		whole = IP6_BYTES + (ip[4] << 8 | ip[5]);
	} else {
		return 0;
	}
	if (bpf_probe_read_kernel(tcp, TCP_BYTES, skb->data + at + header))
		return 0;
	return !(tcp[13] & SYN) && header + (tcp[12] >> 4) * 4 >= whole;
}

#endif

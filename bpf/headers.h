/* SPDX-License-Identifier: GPL-2.0-only */
/* The IP and TCP or UDP headers of a packet (RFC 791, RFC 8200, RFC 9293). Extension headers of IPv6 are not followed. */
#ifndef VIOLA_HEADERS_H
#define VIOLA_HEADERS_H

enum { ETH_BYTES = 14, IP4 = 0x0800, IP6 = 0x86dd, IP4_BYTES = 20, IP6_BYTES = 40, TCP = 6, TCP_BYTES = 20, UDP = 17 };

struct headers {
	u32 is_ip6;
	u32 transport;		/* TCP, UDP, another protocol, or 0 for a fragment and for a transport header that cannot be read */
	u32 bytes;		/* of the IP header */
	u32 whole;		/* bytes of the packet from the IP header on, as it says itself */
	u8 ip[IP6_BYTES];
	u8 tcp[TCP_BYTES];	/* the first bytes of the transport header, if that is TCP or UDP */
};

/* Reads the headers of the packet `at` bytes after skb->data. Returns 0 for what is not IP or cannot be read. */
static __always_inline int read_headers(const struct sk_buff *skb, u32 at, struct headers *h)
{
	u32 proto = bpf_ntohs(skb->protocol);

	__builtin_memset(h, 0, sizeof(*h));
	if (bpf_probe_read_kernel(h->ip, IP4_BYTES, skb->data + at))
		return 0;
	if (proto == IP4 && (h->ip[0] & 15) >= 5) {
		h->transport = (h->ip[6] & 0x3f) || h->ip[7] ? 0 : h->ip[9];
		h->bytes = (h->ip[0] & 15) * 4;
		h->whole = h->ip[2] << 8 | h->ip[3];
	} else if (proto == IP6) {
		if (bpf_probe_read_kernel(h->ip + IP4_BYTES, IP6_BYTES - IP4_BYTES, skb->data + at + IP4_BYTES))
			return 0;
		h->is_ip6 = 1;
		h->transport = h->ip[6];
		h->bytes = IP6_BYTES;
		h->whole = IP6_BYTES + (h->ip[4] << 8 | h->ip[5]);
	} else {
		return 0;
	}
	if ((h->transport == TCP || h->transport == UDP) &&
	    bpf_probe_read_kernel(h->tcp, TCP_BYTES, skb->data + at + h->bytes))
		h->transport = 0;
	return 1;
}

static __always_inline u32 source_port(const struct headers *h)
{
	return h->tcp[0] << 8 | h->tcp[1];
}

static __always_inline u32 destination_port(const struct headers *h)
{
	return h->tcp[2] << 8 | h->tcp[3];
}

/* Copies the sender's address, or the receiver's: 16 bytes, of which IPv4 takes 4. */
static __always_inline void copy_address(u8 *to, const struct headers *h, u32 of_sender)
{
	if (h->is_ip6)
		__builtin_memcpy(to, of_sender ? h->ip + 8 : h->ip + 24, 16);
	else
		__builtin_memcpy(to, of_sender ? h->ip + 12 : h->ip + 16, 4);
}

#endif

// SPDX-License-Identifier: GPL-2.0-only
/* Builds acknowledgements, and sends them from a work item. */
#include <linux/percpu.h>
#include <linux/workqueue.h>
#include <net/dst.h>
#include <net/ip.h>
#include <net/route.h>
#include <net/tcp.h>

#include "viola_ack.h"

struct outgoing {
	struct sk_buff_head packets;
	struct work_struct work;
};

static DEFINE_PER_CPU(struct outgoing, outgoing);

/* Builds the acknowledgement of a segment; NULL without memory or route. The socket is only read. */
struct sk_buff *acknowledgement(struct sock *sk, const struct segment *segment)
{
	const struct tcp_sock *tp = tcp_sk(sk);
	const struct inet_sock *inet = inet_sk(sk);
	struct dst_entry *dst = sk_dst_get(sk);
	u32 nxt = READ_ONCE(tp->snd_nxt), limit = tcp_wnd_end(tp);
	u32 window = segment->window_edge - segment->end;
	unsigned int size = sizeof(struct tcphdr);
	int hops = READ_ONCE(inet->uc_ttl);
	struct sk_buff *skb;
	struct tcphdr *th;
	struct iphdr *iph;

	if (!dst)
		return NULL;
	if (READ_ONCE(dst->obsolete) && !dst->ops->check(dst, 0))
		goto no;
	if (tp->rx_opt.tstamp_ok)
		size += TCPOLEN_TSTAMP_ALIGNED;
	skb = alloc_skb(MAX_TCP_HEADER, GFP_ATOMIC | __GFP_NOWARN);
	if (!skb)
		goto no;
	skb_reserve(skb, MAX_TCP_HEADER - size - sizeof(*iph));

	skb_reset_network_header(skb);
	iph = skb_put_zero(skb, sizeof(*iph));
	iph->version = 4;
	iph->ihl = sizeof(*iph) / 4;
	iph->tos = READ_ONCE(inet->tos);
	iph->frag_off = htons(IP_DF);
	iph->ttl = hops < 0 ? ip4_dst_hoplimit(dst) : hops;
	iph->protocol = IPPROTO_TCP;
	iph->saddr = inet->inet_saddr;
	iph->daddr = inet->inet_daddr;

	skb->transport_header = skb_tail_pointer(skb) - skb->head;
	th = skb_put_zero(skb, size);
	th->source = inet->inet_sport;
	th->dest = inet->inet_dport;
	th->seq = htonl(after(nxt, limit) ? limit : nxt);
	th->ack_seq = htonl(segment->end);
	th->doff = size / 4;
	th->ack = 1;
	th->window = htons(min(window >> tp->rx_opt.rcv_wscale, 65535U));
	if (tp->rx_opt.tstamp_ok) {
		__be32 *option = (__be32 *)(th + 1);

		option[0] = htonl((TCPOPT_NOP << 24) | (TCPOPT_NOP << 16) | (TCPOPT_TIMESTAMP << 8) | TCPOLEN_TIMESTAMP);
		option[1] = htonl((u32)tcp_clock_ts(tp->tcp_usec_ts) + tp->tsoffset);
		option[2] = htonl(segment->tsval);
	}
	th->check = ~tcp_v4_check(size, iph->saddr, iph->daddr, 0);
	skb->ip_summed = CHECKSUM_PARTIAL;
	skb->csum_start = skb_transport_header(skb) - skb->head;
	skb->csum_offset = offsetof(struct tcphdr, check);
	skb->protocol = htons(ETH_P_IP);
	skb->priority = READ_ONCE(sk->sk_priority);
	skb->mark = READ_ONCE(sk->sk_mark);
	skb->dev = READ_ONCE(dst->dev);
	skb_dst_set(skb, dst);
	return skb;
no:
	dst_release(dst);
	return NULL;
}

/* Sends the packet from a work item: sent from here it could come back to this very socket, whose lock is held. */
void send_later(struct sk_buff *skb)
{
	__skb_queue_tail(&this_cpu_ptr(&outgoing)->packets, skb);
	queue_work(system_bh_wq, &this_cpu_ptr(&outgoing)->work);
}

static void send_all(struct work_struct *work)
{
	struct outgoing *out = container_of(work, struct outgoing, work);
	struct sk_buff *skb;

	while ((skb = __skb_dequeue(&out->packets)))
		ip_local_out(dev_net(skb->dev), NULL, skb);
}

void packets_init(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		struct outgoing *out = per_cpu_ptr(&outgoing, cpu);

		__skb_queue_head_init(&out->packets);
		INIT_WORK(&out->work, send_all);
	}
}

void packets_exit(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		struct outgoing *out = per_cpu_ptr(&outgoing, cpu);

		flush_work(&out->work);
		__skb_queue_purge(&out->packets);
	}
}

// SPDX-License-Identifier: GPL-2.0-only
/*
 * viola_ack: acknowledges TCP segments that land in a socket's backlog.
 *
 * While a program is in recv() it owns the socket. Segments that come meanwhile are put on the socket's backlog and nobody
 * acknowledges them until the program gives the socket back. On a turbo core the interrupts of a VM are served at once,
 * but the vCPU of the program that owns the socket may wait for its turn behind other VMs: for all this time the sender hears
 * nothing. (vTurbo, section 3.3 and algorithm 1; a dissertation's algorithm 2.)
 *
 * This module looks at tcp_add_backlog(). When a segment with data has been put there, is in order, and will be taken
 * by the socket when its turn comes, an acknowledgement is sent from the softirq. The socket is only read: its owner may be
 * changing it on another CPU.
 *
 * It may not lie: what is acknowledged has to be kept. So a segment is acknowledged only if
 *  - it follows without a gap what the socket has, or what is on the backlog and was itself found good;
 *  - it is within the window that the socket has announced, which is not made larger and may not be made smaller;
 *  - it fits into the receive buffer together with all that is there and on the backlog;
 *  - TCP's memory is below the first number of tcp_mem, and neither the host nor the cgroup is short of it;
 *  - it passes the test of timestamps (PAWS) also after all that is on the backlog before it, acknowledges nothing that
 *    was not sent, and needs nothing that only the socket's owner can say: no ECN, MD5, TCP-AO, MPTCP, PSP, IP options,
 *    no SYN, FIN, RST, urgent data;
 *  - the sender does selective acknowledgements: another one counts the kernel's own that come later as duplicates.
 * The kernel joins segments on the backlog, and takes or drops them together: one that is not good is not joined to one
 * that is. Should the kernel drop such a segment all the same (somebody makes the receive buffer of an open connection
 * smaller, or memory runs out in between), the connection is reset, as by a host that lost its memory: no hole, no silence.
 *
 * Off until ports are named: echo 80,8000-8010 >/sys/module/viola_ack/parameters/ports. IPv4.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/fprobe.h>
#include <linux/jhash.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/percpu.h>
#include <linux/skbuff.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#include <net/dst.h>
#include <net/inet_ecn.h>
#include <net/ip.h>
#include <net/mptcp.h>
#include <net/proto_memory.h>
#include <net/route.h>
#include <net/tcp.h>
#include <trace/events/skb.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 14, 0)
#error "viola_ack needs Linux 6.14 or newer: before, probes of functions have another form"
#endif
#if IS_ENABLED(CONFIG_PREEMPT_RT)
#error "viola_ack counts on softirqs that are not preempted"
#endif
#if !IS_ENABLED(CONFIG_FPROBE)
#error "viola_ack needs a kernel with CONFIG_FPROBE"
#endif

/* Sockets whose backlog is followed; of two that share a place the later one has to wait. A power of two. */
#define PLACES 4096
#define PORTS 65536
/* After so long without a segment another socket may have the place: what was on the backlog has been taken by then. */
#define KEPT (60 * HZ)

/* What is known of a socket's backlog. */
struct place {
	raw_spinlock_t lock;
	const struct sock *sk;
	const struct sk_buff *tail; /* last of the backlog when this was written */
	struct sock *lost; /* to be reset */
	unsigned long used; /* jiffies of the last segment */
	__be32 peer;
	__be16 peer_port;
	u16 port;
	u32 next; /* all before this is in the socket or good: bl.nxt of the algorithm */
	u32 since; /* acknowledged from here to next: for the look after drops */
	u32 stamp; /* latest timestamp of what was put on the backlog */
	bool acked; /* whether anything was acknowledged */
	bool whole; /* since then nothing that is not good has been put on the backlog */
};

enum count {
	SENT,		/* acknowledgements sent */
	BYTES,		/* bytes that they acknowledged */
	GAP,		/* not sent: the segment does not follow what is there */
	WINDOW,		/* not sent: beyond the window, or it was just changing */
	BUFFER,		/* not sent: the receive buffer is full */
	MEMORY,		/* not sent: memory is short, or none for the packet */
	OTHER,		/* not sent: flags, options or a state that are left to the owner, or no place for the socket */
	RESET,		/* connections reset, since the kernel dropped what was acknowledged */
	COUNTS
};

static const char *const names[COUNTS] = {
	"sent", "bytes", "gap", "window", "buffer", "memory", "other", "reset",
};

struct outgoing {
	struct sk_buff_head packets;
	struct work_struct work;
};

static struct place places[PLACES];
static unsigned long ports[BITS_TO_LONGS(PORTS)];
static DEFINE_PER_CPU(u64[COUNTS], counts);
static DEFINE_PER_CPU(struct outgoing, outgoing);
static struct workqueue_struct *resets;

static void reset_lost(struct work_struct *work);
static DECLARE_WORK(reset_work, reset_lost);

static void add(enum count which, u64 n)
{
	this_cpu_add(counts[which], n);
}

static struct place *place_of(const struct sock *sk)
{
	return &places[jhash_1word((u32)((unsigned long)sk >> 6), 0) & (PLACES - 1)];
}

/* Whether the place is this connection's: sockets are reused. */
static bool is_of(const struct place *p, const struct sock *sk)
{
	return p->sk == sk && p->peer == sk->sk_daddr && p->peer_port == sk->sk_dport && p->port == sk->sk_num;
}

/* Whether it is or becomes the socket's. */
static bool take(struct place *p, const struct sock *sk)
{
	bool ours = is_of(p, sk);

	/*
	 * What is on the backlog already is not known; a later segment finds it empty. Another connection of the same socket has
	 * ended: a new one often gets the memory of the last.
	 */
	if (!ours && (p->lost || sk->sk_backlog.len || (p->sk && p->sk != sk && time_before(jiffies, p->used + KEPT))))
		return false;
	p->used = jiffies;
	if (!ours) {
		p->sk = sk;
		p->tail = NULL;
		p->peer = sk->sk_daddr;
		p->peer_port = sk->sk_dport;
		p->port = sk->sk_num;
		p->acked = false;
	}
	/* nothing waits, and the owner is not working through anything: the socket knows all */
	if (!sk->sk_backlog.len) {
		p->stamp = READ_ONCE(tcp_sk(sk)->rx_opt.ts_recent);
		p->whole = false;
	}
	return true;
}

/* A segment on its way to the backlog, between the probe's two halves. */
struct segment {
	struct sock *sk;
	u32 seq;
	u32 end;
	u32 stamp; /* its timestamp, to be echoed */
	u32 edge; /* right edge of the announced window */
	bool good; /* if it stays there it is as good as received */
};

/* The timestamp option where everybody has it (RFC 7323, appendix A). */
static bool timestamp(const struct tcphdr *th, u32 *value)
{
	const __be32 *option = (const __be32 *)(th + 1);

	if (th->doff < (sizeof(*th) + TCPOLEN_TSTAMP_ALIGNED) / 4 ||
	    *option != htonl((TCPOPT_NOP << 24) | (TCPOPT_NOP << 16) | (TCPOPT_TIMESTAMP << 8) | TCPOLEN_TIMESTAMP))
		return false;
	*value = ntohl(option[1]);
	return true;
}

/* States and options that are the owner's business. */
static bool is_plain(const struct sock *sk, const struct tcp_sock *tp, const struct sk_buff *skb)
{
	const struct tcphdr *th = (const struct tcphdr *)skb->data;
	u32 flags = TCP_SKB_CB(skb)->tcp_flags, acked = TCP_SKB_CB(skb)->ack_seq;

	if (sk->sk_state != TCP_ESTABLISHED || sock_flag(sk, SOCK_DEAD) || READ_ONCE(sk->sk_shutdown) & RCV_SHUTDOWN)
		return false;
	if ((flags & ~TCPHDR_PSH) != TCPHDR_ACK || tcp_ecn_mode_any(tp) || sk_is_mptcp(sk) || tp->repair)
		return false;
	if (!tcp_is_sack(tp) || rcu_access_pointer(inet_sk(sk)->inet_opt) ||
	    READ_ONCE(sock_net(sk)->ipv4.sysctl_tcp_shrink_window))
		return false;
	/* the owner may advance the first meanwhile: what was good before is good then, too */
	if (before(acked, READ_ONCE(tp->snd_una)) || after(acked, READ_ONCE(tp->snd_nxt)))
		return false;
#ifdef CONFIG_TCP_MD5SIG
	if (rcu_access_pointer(tp->md5sig_info))
		return false;
#endif
#ifdef CONFIG_TCP_AO
	if (rcu_access_pointer(tp->ao_info))
		return false;
#endif
#if IS_ENABLED(CONFIG_INET_PSP)
	if (rcu_access_pointer(sk->psp_assoc))
		return false;
#endif
	return th->doff == (sizeof(*th) + (tp->rx_opt.tstamp_ok ? TCPOLEN_TSTAMP_ALIGNED : 0)) / 4;
}

/* The right edge of the window, unless the owner is just changing it. */
static bool edge_of(const struct tcp_sock *tp, u32 *edge)
{
	u32 up = READ_ONCE(tp->rcv_wup), window;

	smp_rmb();
	window = READ_ONCE(tp->rcv_wnd);
	smp_rmb();
	*edge = up + window;
	return up == READ_ONCE(tp->rcv_wup) && window == READ_ONCE(tp->rcv_wnd) &&
	       !after(up, READ_ONCE(tp->rcv_nxt));
}

/* Whether the segment comes after what is on the backlog and good. */
static bool continues(const struct sock *sk, const struct place *p, u32 seq, u32 nxt)
{
	const struct sk_buff *tail = sk->sk_backlog.tail;

	if (!p->whole || p->next != seq)
		return false;
	if (tail) /* and nobody else has added to it */
		return tail == p->tail && TCP_SKB_CB(tail)->end_seq == seq;
	/* the owner is working through it, and has not come to the end */
	return before(nxt, seq);
}

/* Whether the segment follows what the socket has, or what is on its backlog and good. */
static bool follows(const struct sock *sk, const struct place *p, u32 seq, u32 nxt)
{
	return (!sk->sk_backlog.tail && nxt == seq) || continues(sk, p, seq, nxt);
}

static bool has_memory(const struct sock *sk, const struct sk_buff *skb)
{
	return !tcp_under_memory_pressure(sk) && !skb_pfmemalloc(skb) &&
	       sk_memory_allocated(sk) < sk_prot_mem_limits(sk, 0);
}

/* Why a segment is not to be acknowledged; SENT if it is. */
static enum count judge(const struct sock *sk, const struct sk_buff *skb, const struct place *p, struct segment *segment)
{
	const struct tcp_sock *tp = tcp_sk(sk);
	u32 nxt = READ_ONCE(tp->rcv_nxt);
	u64 filled;

	if (!follows(sk, p, segment->seq, nxt))
		return GAP;
	if (!is_plain(sk, tp, skb))
		return OTHER;
	/* the timestamp of what is before it was written before rcv_nxt */
	smp_rmb();
	if (tp->rx_opt.tstamp_ok && ((s32)(segment->stamp - READ_ONCE(tp->rx_opt.ts_recent)) < 0 ||
				     (s32)(segment->stamp - p->stamp) < 0))
		return OTHER;
	if (!edge_of(tp, &segment->edge) || after(segment->end, segment->edge))
		return WINDOW;
	filled = (u64)sk->sk_backlog.len + atomic_read(&sk->sk_rmem_alloc) + skb->truesize;
	if (filled > READ_ONCE(sk->sk_rcvbuf))
		return BUFFER;
	return has_memory(sk, skb) ? SENT : MEMORY;
}

/* Before a segment is put on the backlog; 0 when there is something to do afterwards. */
static int before_add(struct fprobe *probe, unsigned long ip, unsigned long back, struct ftrace_regs *regs, void *data)
{
	struct sock *sk = (struct sock *)ftrace_regs_get_argument(regs, 0);
	struct sk_buff *skb = (struct sk_buff *)ftrace_regs_get_argument(regs, 1);
	const struct sk_buff *tail = sk->sk_backlog.tail;
	struct segment *segment = data;
	struct place *p;
	unsigned long flags;
	enum count verdict = OTHER;
	bool taken;

	if (sk->sk_family != AF_INET || sk->sk_state != TCP_ESTABLISHED || !test_bit(sk->sk_num, ports))
		return 1;
	segment->sk = sk;
	segment->seq = TCP_SKB_CB(skb)->seq;
	segment->end = TCP_SKB_CB(skb)->end_seq;
	segment->stamp = 0;
	p = place_of(sk);
	raw_spin_lock_irqsave(&p->lock, flags);
	taken = take(p, sk);
	if (taken) {
		if (!tcp_sk(sk)->rx_opt.tstamp_ok ||
		    timestamp((const struct tcphdr *)skb->data, &segment->stamp))
			verdict = judge(sk, skb, p, segment);
		else
			/* of no known time: nothing after it is good as long as the place is this socket's */
			segment->stamp = READ_ONCE(tcp_sk(sk)->rx_opt.ts_recent) + S32_MAX;
		/* not to be taken or dropped together with one that was acknowledged */
		if (verdict != SENT && p->whole && tail && tail == p->tail)
			TCP_SKB_CB(skb)->ip_dsfield = TCP_SKB_CB(tail)->ip_dsfield ^ (INET_ECN_MASK + 1);
	}
	raw_spin_unlock_irqrestore(&p->lock, flags);
	segment->good = verdict == SENT;
	if (!segment->good && segment->seq != segment->end)
		add(verdict, 1);
	return !taken;
}

static struct sk_buff *acknowledgement(struct sock *sk, const struct segment *segment)
{
	const struct tcp_sock *tp = tcp_sk(sk);
	const struct inet_sock *inet = inet_sk(sk);
	struct dst_entry *dst = sk_dst_get(sk);
	u32 nxt = READ_ONCE(tp->snd_nxt), limit = tcp_wnd_end(tp);
	u32 window = segment->edge - segment->end;
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
		option[2] = htonl(segment->stamp);
	}
	th->check = ~tcp_v4_check(size, iph->saddr, iph->daddr, 0);
	skb->ip_summed = CHECKSUM_PARTIAL;
	skb->csum_start = skb_transport_header(skb) - skb->head;
	skb->csum_offset = offsetof(struct tcphdr, check);
	skb->protocol = htons(ETH_P_IP);
	skb->priority = READ_ONCE(sk->sk_priority);
	skb->mark = READ_ONCE(sk->sk_mark);
	skb->dev = dst_dev(dst);
	skb_dst_set(skb, dst);
	return skb;
no:
	dst_release(dst);
	return NULL;
}

/* After it: nothing but 0 means that it was dropped. The socket's spinlock is held as before. */
static void after_add(struct fprobe *probe, unsigned long ip, unsigned long back, struct ftrace_regs *regs, void *data)
{
	const struct segment *segment = data;
	struct sock *sk = segment->sk;
	struct place *p = place_of(sk);
	bool empty = segment->seq == segment->end;
	struct sk_buff *skb = NULL;
	unsigned long flags;
	bool ours;

	if ((u32)ftrace_regs_get_return_value(regs))
		return;
	if (segment->good && !empty) {
		skb = acknowledgement(sk, segment);
		if (!skb)
			add(MEMORY, 1);
	}
	raw_spin_lock_irqsave(&p->lock, flags);
	ours = is_of(p, sk);
	if (!ours)
		goto out;
	if ((s32)(segment->stamp - p->stamp) > 0)
		p->stamp = segment->stamp;
	if (skb) {
		if (!p->acked || !before(READ_ONCE(tcp_sk(sk)->rcv_nxt), p->next))
			p->since = segment->seq;
		p->acked = p->whole = true;
		p->next = segment->end;
	} else if (!segment->good || !empty || p->next != segment->seq) {
		p->whole = false;
	}
	p->tail = sk->sk_backlog.tail;
out:
	raw_spin_unlock_irqrestore(&p->lock, flags);
	if (!skb || !ours) {
		kfree_skb(skb);
		return;
	}
	add(SENT, 1);
	add(BYTES, segment->end - segment->seq);
	/* not from here: the packet may come back to this very socket */
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

static void reset_lost(struct work_struct *work)
{
	int at;

	for (at = 0; at < PLACES; at++) {
		struct sock *sk = READ_ONCE(places[at].lost);

		if (!sk)
			continue;
		tcp_abort(sk, ECONNABORTED);
		WRITE_ONCE(places[at].lost, NULL);
		sock_put(sk);
	}
}

/* The kernel drops a segment of a socket; was it acknowledged? */
static void dropped(void *unused, struct sk_buff *skb, void *location, enum skb_drop_reason reason,
		    const struct sock *sk)
{
	unsigned long flags;
	struct place *p;
	u32 seq, end, nxt;

	/* the owner works through the backlog in its own context; a softirq drops what was not acknowledged */
	if (!sk || in_serving_softirq() || reason == SKB_CONSUMED || sk->sk_family != AF_INET)
		return;
	if (sk->sk_state != TCP_ESTABLISHED || sk->sk_protocol != IPPROTO_TCP || sk->sk_type != SOCK_STREAM)
		return;
	p = place_of(sk);
	if (READ_ONCE(p->sk) != sk)
		return;
	seq = TCP_SKB_CB(skb)->seq;
	end = TCP_SKB_CB(skb)->end_seq;
	nxt = tcp_sk(sk)->rcv_nxt;
	raw_spin_lock_irqsave(&p->lock, flags);
	if (is_of(p, sk) && p->acked && before(nxt, p->next) && before(seq, p->next) && after(end, p->since) &&
	    after(end, nxt) && !p->lost && refcount_inc_not_zero((refcount_t *)&sk->sk_refcnt)) {
		p->lost = (struct sock *)sk;
		p->acked = p->whole = false;
		add(RESET, 1);
		queue_work(resets, &reset_work);
	}
	raw_spin_unlock_irqrestore(&p->lock, flags);
}

static struct fprobe probe = {
	.entry_data_size = sizeof(struct segment),
	.entry_handler = before_add,
	.exit_handler = after_add,
};

static int set_ports(const char *text, const struct kernel_param *param)
{
	unsigned long *wanted = bitmap_zalloc(PORTS, GFP_KERNEL);
	int failed;

	if (!wanted)
		return -ENOMEM;
	failed = bitmap_parselist(text, wanted, PORTS);
	if (!failed)
		bitmap_copy(ports, wanted, PORTS);
	bitmap_free(wanted);
	return failed;
}

static int get_ports(char *text, const struct kernel_param *param)
{
	return scnprintf(text, PAGE_SIZE, "%*pbl\n", PORTS, ports);
}

static int get_counts(char *text, const struct kernel_param *param)
{
	int used = 0, cpu, which;

	for (which = 0; which < COUNTS; which++) {
		u64 sum = 0;

		for_each_possible_cpu(cpu)
			sum += per_cpu(counts, cpu)[which];
		used += scnprintf(text + used, PAGE_SIZE - used, "%s %llu\n", names[which], sum);
	}
	return used;
}

static const struct kernel_param_ops ports_ops = { .set = set_ports, .get = get_ports };
static const struct kernel_param_ops counts_ops = { .get = get_counts };

module_param_cb(ports, &ports_ops, NULL, 0644);
MODULE_PARM_DESC(ports, "local TCP ports that are acknowledged early, as 80,8000-8010; none if nothing is said");
module_param_cb(counts, &counts_ops, NULL, 0444);
MODULE_PARM_DESC(counts, "what was done, and why not");

static int __init viola_ack_init(void)
{
	static const char *symbols[] = { "tcp_add_backlog" };
	int at, cpu, failed;

	for (at = 0; at < PLACES; at++)
		raw_spin_lock_init(&places[at].lock);
	for_each_possible_cpu(cpu) {
		struct outgoing *out = per_cpu_ptr(&outgoing, cpu);

		__skb_queue_head_init(&out->packets);
		INIT_WORK(&out->work, send_all);
	}
	resets = alloc_workqueue("viola_ack", WQ_UNBOUND, 0);
	if (!resets)
		return -ENOMEM;
	failed = register_trace_kfree_skb(dropped, NULL);
	if (failed)
		goto no_trace;
	failed = register_fprobe_syms(&probe, symbols, ARRAY_SIZE(symbols));
	if (failed) {
		pr_err("this kernel has no tcp_add_backlog that may be probed (%d)\n", failed);
		goto no_probe;
	}
	return 0;
no_probe:
	unregister_trace_kfree_skb(dropped, NULL);
	tracepoint_synchronize_unregister();
no_trace:
	destroy_workqueue(resets);
	return failed;
}

static void __exit viola_ack_exit(void)
{
	int cpu;

	unregister_fprobe(&probe);
	unregister_trace_kfree_skb(dropped, NULL);
	tracepoint_synchronize_unregister();
	for_each_possible_cpu(cpu) {
		struct outgoing *out = per_cpu_ptr(&outgoing, cpu);

		flush_work(&out->work);
		__skb_queue_purge(&out->packets);
	}
	destroy_workqueue(resets);
}

module_init(viola_ack_init);
module_exit(viola_ack_exit);
MODULE_DESCRIPTION("Acknowledges TCP segments that wait in a socket's backlog");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");

// SPDX-License-Identifier: GPL-2.0-only
/*
 * viola_ack: acknowledges TCP segments that the kernel puts on a socket's backlog.
 *
 * A program in recv() owns its socket. The kernel puts segments that arrive meanwhile on the socket's backlog, and
 * acknowledges them only when the program releases the socket. On a turbo core a VM's interrupts are served at once, but the
 * vCPU of the program that owns the socket may wait for its turn behind other VMs: the sender gets no acknowledgement during
 * that time. (vTurbo, section 3.3 and algorithm 1; a dissertation's algorithm 2.)
 *
 * This module probes tcp_add_backlog(). If a segment with data is now on the backlog, is in order, and will be accepted when
 * the owner processes the backlog, the module sends an acknowledgement from the softirq. It only reads the socket, which the
 * owner may be changing on another CPU.
 *
 * What is acknowledged must be kept. So the module acknowledges a segment only if
 *  - it follows without a gap what the socket has, or what is on the backlog and was itself acceptable;
 *  - it is within the window that the socket has announced. The module does not enlarge the window, and does nothing if
 *    the kernel may shrink it;
 *  - it fits into the receive buffer together with all that is there and on the backlog;
 *  - TCP uses less memory than the first number of tcp_mem, and neither the host nor the cgroup is short of memory;
 *  - it passes the timestamp test (PAWS) also after all that is on the backlog before it, acknowledges only what was sent,
 *    and needs nothing that only the socket's owner can decide: no ECN, MD5, TCP-AO, MPTCP, PSP, IP options, no SYN, FIN,
 *    RST, urgent data;
 *  - the sender uses selective acknowledgements: others count the kernel's own later acknowledgements as duplicates.
 * The kernel merges segments on the backlog, and accepts or drops merged ones together; the module keeps it from merging
 * segments that are not acceptable with those that are. If the kernel drops an acknowledged segment all the same (a program
 * shrinks the receive buffer of an open connection, or memory runs out in between), the module resets the connection, as a
 * host does that lost its memory: no hole, no silence.
 *
 * Off until ports are named: echo 80,8000-8010 >/sys/module/viola_ack/parameters/ports. IPv4 only.
 *
 * backlog.c follows the backlogs, judge.c decides, packet.c builds and sends acknowledgements.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/fprobe.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/percpu.h>
#include <linux/version.h>
#include <linux/workqueue.h>
#include <net/inet_ecn.h>
#include <net/tcp.h>
#include <trace/events/skb.h>

#include "viola_ack.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0)
#error "viola_ack needs Linux 6.12 or newer: the tracepoint of dropped packets names the socket since 6.11"
#endif
#if IS_ENABLED(CONFIG_PREEMPT_RT)
#error "viola_ack needs softirqs that are not preempted: no CONFIG_PREEMPT_RT"
#endif
#if !IS_ENABLED(CONFIG_FPROBE)
#error "viola_ack needs a kernel with CONFIG_FPROBE"
#endif

/* The registers that the handlers of an fprobe get: of another type before 6.14. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 14, 0)
#define probe_regs pt_regs
#define probe_argument(regs, n) regs_get_kernel_argument(regs, n)
#define probe_return_value(regs) regs_return_value(regs)
#else
#define probe_regs ftrace_regs
#define probe_argument(regs, n) ftrace_regs_get_argument(regs, n)
#define probe_return_value(regs) ftrace_regs_get_return_value(regs)
#endif

#define PORTS 65536

static const char *const counter_names[COUNTERS] = {
	"sent", "bytes", "gap", "window", "buffer", "memory", "other", "reset",
};

static unsigned long ports[BITS_TO_LONGS(PORTS)];
static DEFINE_PER_CPU(u64[COUNTERS], counters);
static struct workqueue_struct *resets;

static void do_resets(struct work_struct *work)
{
	reset_lost();
}

static DECLARE_WORK(reset_work, do_resets);

void count_event(enum counter which, u64 n)
{
	this_cpu_add(counters[which], n);
}

/* Before the kernel adds a segment to the backlog. Returns 0 if after_add() is to run. */
static int before_add(struct fprobe *probe, unsigned long ip, unsigned long back, struct probe_regs *regs, void *data)
{
	struct sock *sk = (struct sock *)probe_argument(regs, 0);
	struct sk_buff *skb = (struct sk_buff *)probe_argument(regs, 1);
	const struct sk_buff *tail = sk->sk_backlog.tail;
	struct segment *segment = data;
	struct backlog *b;
	unsigned long flags;
	enum counter verdict = OTHER;
	bool claimed;

	if (sk->sk_family != AF_INET || sk->sk_state != TCP_ESTABLISHED || !test_bit(sk->sk_num, ports))
		return 1;
	segment->sk = sk;
	segment->seq = TCP_SKB_CB(skb)->seq;
	segment->end = TCP_SKB_CB(skb)->end_seq;
	segment->tsval = 0;
	b = backlog_of(sk);
	raw_spin_lock_irqsave(&b->lock, flags);
	claimed = claim(b, sk);
	if (claimed) {
		if (!tcp_sk(sk)->rx_opt.tstamp_ok ||
		    timestamp((const struct tcphdr *)skb->data, &segment->tsval))
			verdict = judge(sk, skb, b, segment);
		else
			/* of unknown time: no later segment is acceptable while the socket has this entry */
			segment->tsval = READ_ONCE(tcp_sk(sk)->rx_opt.ts_recent) + S32_MAX;
		/* keeps the kernel from merging it with an acknowledged one */
		if (verdict != SENT && b->contiguous && tail && tail == b->tail)
			TCP_SKB_CB(skb)->ip_dsfield = TCP_SKB_CB(tail)->ip_dsfield ^ (INET_ECN_MASK + 1);
	}
	raw_spin_unlock_irqrestore(&b->lock, flags);
	segment->acceptable = verdict == SENT;
	if (!segment->acceptable && segment->seq != segment->end)
		count_event(verdict, 1);
	return !claimed;
}

/* After that: a return value other than 0 means that the segment was dropped. The socket's spinlock is still held. */
static void after_add(struct fprobe *probe, unsigned long ip, unsigned long back, struct probe_regs *regs, void *data)
{
	const struct segment *segment = data;
	struct sock *sk = segment->sk;
	struct backlog *b = backlog_of(sk);
	bool empty = segment->seq == segment->end;
	struct sk_buff *skb = NULL;
	unsigned long flags;
	bool ours;

	if ((u32)probe_return_value(regs))
		return;
	if (segment->acceptable && !empty) {
		skb = acknowledgement(sk, segment);
		if (!skb)
			count_event(MEMORY, 1);
	}
	raw_spin_lock_irqsave(&b->lock, flags);
	ours = belongs_to(b, sk);
	if (!ours)
		goto out;
	if ((s32)(segment->tsval - b->tsval) > 0)
		b->tsval = segment->tsval;
	if (skb) {
		if (!b->acked || !before(READ_ONCE(tcp_sk(sk)->rcv_nxt), b->next))
			b->acked_from = segment->seq;
		b->acked = b->contiguous = true;
		b->next = segment->end;
	} else if (!segment->acceptable || !empty || b->next != segment->seq) {
		b->contiguous = false;
	}
	b->tail = sk->sk_backlog.tail;
out:
	raw_spin_unlock_irqrestore(&b->lock, flags);
	if (!skb || !ours) {
		kfree_skb(skb);
		return;
	}
	count_event(SENT, 1);
	count_event(BYTES, segment->end - segment->seq);
	send_later(skb);
}

/* The kernel drops a segment: schedules a reset of the connection if the segment was acknowledged. */
static void on_drop(void *unused, struct sk_buff *skb, void *location, enum skb_drop_reason reason,
		    const struct sock *sk)
{
	unsigned long flags;
	struct backlog *b;
	u32 seq, end, nxt;

	/* the owner processes the backlog in its own context; what a softirq drops was not acknowledged */
	if (!sk || in_serving_softirq() || reason == SKB_CONSUMED || sk->sk_family != AF_INET)
		return;
	if (sk->sk_state != TCP_ESTABLISHED || sk->sk_protocol != IPPROTO_TCP || sk->sk_type != SOCK_STREAM)
		return;
	b = backlog_of(sk);
	if (READ_ONCE(b->sk) != sk)
		return;
	seq = TCP_SKB_CB(skb)->seq;
	end = TCP_SKB_CB(skb)->end_seq;
	nxt = tcp_sk(sk)->rcv_nxt;
	raw_spin_lock_irqsave(&b->lock, flags);
	if (belongs_to(b, sk) && b->acked && before(nxt, b->next) && before(seq, b->next) && after(end, b->acked_from) &&
	    after(end, nxt) && !b->lost && refcount_inc_not_zero((refcount_t *)&sk->sk_refcnt)) {
		b->lost = (struct sock *)sk;
		b->acked = b->contiguous = false;
		count_event(RESET, 1);
		queue_work(resets, &reset_work);
	}
	raw_spin_unlock_irqrestore(&b->lock, flags);
}

/* The same for kernels whose tracepoint has a socket that is not const, as that of 6.12. */
static void __maybe_unused on_drop_plain(void *unused, struct sk_buff *skb, void *location,
					 enum skb_drop_reason reason, struct sock *sk)
{
	on_drop(unused, skb, location, reason, sk);
}

#define is_socket_const                                                                                \
	__builtin_types_compatible_p(typeof(__traceiter_kfree_skb),                                    \
				     int(void *, struct sk_buff *, void *, enum skb_drop_reason, const struct sock *))
#define drop_handler __builtin_choose_expr(is_socket_const, on_drop, on_drop_plain)

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

	for (which = 0; which < COUNTERS; which++) {
		u64 sum = 0;

		for_each_possible_cpu(cpu)
			sum += per_cpu(counters, cpu)[which];
		used += scnprintf(text + used, PAGE_SIZE - used, "%s %llu\n", counter_names[which], sum);
	}
	return used;
}

static const struct kernel_param_ops ports_ops = { .set = set_ports, .get = get_ports };
static const struct kernel_param_ops counts_ops = { .get = get_counts };

module_param_cb(ports, &ports_ops, NULL, 0644);
MODULE_PARM_DESC(ports, "local TCP ports to acknowledge early, for example 80,8000-8010; none by default");
module_param_cb(counts, &counts_ops, NULL, 0444);
MODULE_PARM_DESC(counts, "acknowledgements sent, and reasons for those not sent");

static int __init viola_ack_init(void)
{
	static const char *symbols[] = { "tcp_add_backlog" };
	int failed;

	backlogs_init();
	packets_init();
	resets = alloc_workqueue("viola_ack", WQ_UNBOUND, 0);
	if (!resets)
		return -ENOMEM;
	failed = register_trace_kfree_skb(drop_handler, NULL);
	if (failed)
		goto no_trace;
	failed = register_fprobe_syms(&probe, symbols, ARRAY_SIZE(symbols));
	if (failed) {
		pr_err("cannot probe tcp_add_backlog of this kernel (%d)\n", failed);
		goto no_probe;
	}
	return 0;
no_probe:
	unregister_trace_kfree_skb(drop_handler, NULL);
	tracepoint_synchronize_unregister();
no_trace:
	destroy_workqueue(resets);
	return failed;
}

static void __exit viola_ack_exit(void)
{
	unregister_fprobe(&probe);
	unregister_trace_kfree_skb(drop_handler, NULL);
	tracepoint_synchronize_unregister();
	packets_exit();
	destroy_workqueue(resets);
}

module_init(viola_ack_init);
module_exit(viola_ack_exit);
MODULE_DESCRIPTION("Acknowledges TCP segments that wait in a socket's backlog");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");

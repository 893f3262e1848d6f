// SPDX-License-Identifier: GPL-2.0-only
/* Decides whether a segment on the backlog may be acknowledged: only if the socket is certain to keep it. */
#include <linux/version.h>
#include <net/inet_ecn.h>
#include <net/ip.h>
#include <net/mptcp.h>
#include <net/proto_memory.h>
#include <net/tcp.h>

#include "viola_ack.h"

/* Whether the connection uses any kind of ECN: there is only one before 6.15. */
static bool has_ecn(const struct tcp_sock *tp)
{
#ifdef TCP_ECN_MODE_RFC3168
	return tcp_ecn_mode_any(tp);
#else
	return tp->ecn_flags & TCP_ECN_OK;
#endif
}

/* Reads the timestamp option at its usual place (RFC 7323, appendix A). */
bool timestamp(const struct tcphdr *th, u32 *value)
{
	const __be32 *option = (const __be32 *)(th + 1);

	if (th->doff < (sizeof(*th) + TCPOLEN_TSTAMP_ALIGNED) / 4 ||
	    *option != htonl((TCPOPT_NOP << 24) | (TCPOPT_NOP << 16) | (TCPOPT_TIMESTAMP << 8) | TCPOLEN_TIMESTAMP))
		return false;
	*value = ntohl(option[1]);
	return true;
}

/* Whether the segment and the socket need nothing that only the socket's owner can decide. */
static bool is_plain(const struct sock *sk, const struct tcp_sock *tp, const struct sk_buff *skb)
{
	const struct tcphdr *th = (const struct tcphdr *)skb->data;
	u32 flags = TCP_SKB_CB(skb)->tcp_flags, acked = TCP_SKB_CB(skb)->ack_seq;

	if (sk->sk_state != TCP_ESTABLISHED || sock_flag(sk, SOCK_DEAD) || READ_ONCE(sk->sk_shutdown) & RCV_SHUTDOWN)
		return false;
	if ((flags & ~TCPHDR_PSH) != TCPHDR_ACK || has_ecn(tp) || sk_is_mptcp(sk) || tp->repair)
		return false;
	if (!tcp_is_sack(tp) || rcu_access_pointer(inet_sk(sk)->inet_opt) ||
	    READ_ONCE(sock_net(sk)->ipv4.sysctl_tcp_shrink_window))
		return false;
	/* the owner may advance snd_una meanwhile: what was acceptable stays acceptable */
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

/* Reads the right edge of the window. Fails while the owner changes it. */
static bool read_window_edge(const struct tcp_sock *tp, u32 *edge)
{
	u32 up = READ_ONCE(tp->rcv_wup), window;

	smp_rmb();
	window = READ_ONCE(tp->rcv_wnd);
	smp_rmb();
	*edge = up + window;
	return up == READ_ONCE(tp->rcv_wup) && window == READ_ONCE(tp->rcv_wnd) &&
	       !after(up, READ_ONCE(tp->rcv_nxt));
}

/* Whether the segment follows what is on the backlog and acceptable. */
static bool follows_backlog(const struct sock *sk, const struct backlog *b, u32 seq, u32 nxt)
{
	const struct sk_buff *tail = sk->sk_backlog.tail;

	if (!b->contiguous || b->next != seq)
		return false;
	if (tail) /* this module has seen the last segment */
		return tail == b->tail && TCP_SKB_CB(tail)->end_seq == seq;
	/* the owner is processing the backlog, and has not reached its end */
	return before(nxt, seq);
}

/* Whether the segment follows what the socket has, or what is on its backlog and acceptable. */
static bool follows(const struct sock *sk, const struct backlog *b, u32 seq, u32 nxt)
{
	return (!sk->sk_backlog.tail && nxt == seq) || follows_backlog(sk, b, seq, nxt);
}

static bool has_memory(const struct sock *sk, const struct sk_buff *skb)
{
	return !tcp_under_memory_pressure(sk) && !skb_pfmemalloc(skb) &&
	       sk_memory_allocated(sk) < sk_prot_mem_limits(sk, 0);
}

/* Why the segment must not be acknowledged; SENT if it may be. */
enum counter judge(const struct sock *sk, const struct sk_buff *skb, const struct backlog *b, struct segment *segment)
{
	const struct tcp_sock *tp = tcp_sk(sk);
	u32 nxt = READ_ONCE(tp->rcv_nxt);
	u64 filled;

	if (!follows(sk, b, segment->seq, nxt))
		return GAP;
	if (!is_plain(sk, tp, skb))
		return OTHER;
	/* the owner writes ts_recent before rcv_nxt */
	smp_rmb();
	if (tp->rx_opt.tstamp_ok && ((s32)(segment->tsval - READ_ONCE(tp->rx_opt.ts_recent)) < 0 ||
				     (s32)(segment->tsval - b->tsval) < 0))
		return OTHER;
	if (!read_window_edge(tp, &segment->window_edge) || after(segment->end, segment->window_edge))
		return WINDOW;
	filled = (u64)sk->sk_backlog.len + atomic_read(&sk->sk_rmem_alloc) + skb->truesize;
	if (filled > READ_ONCE(sk->sk_rcvbuf))
		return BUFFER;
	return has_memory(sk, skb) ? SENT : MEMORY;
}

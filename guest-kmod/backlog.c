// SPDX-License-Identifier: GPL-2.0-only
/* The backlogs that the module follows, and the connections that it has to reset. */
#include <linux/jhash.h>
#include <net/tcp.h>

#include "viola_ack.h"

/* Number of entries, a power of two. Of two sockets with the same entry the later one is not followed. */
#define BACKLOGS 4096
/* An entry without a segment for this time may be given to another socket: its backlog is empty by then. */
#define BACKLOG_EXPIRY (60 * HZ)

static struct backlog backlogs[BACKLOGS];

void backlogs_init(void)
{
	int at;

	for (at = 0; at < BACKLOGS; at++)
		raw_spin_lock_init(&backlogs[at].lock);
}

/* The entry of a socket. */
struct backlog *backlog_of(const struct sock *sk)
{
	return &backlogs[jhash_1word((u32)((unsigned long)sk >> 6), 0) & (BACKLOGS - 1)];
}

/* Whether the entry is this connection's: the kernel reuses sockets. */
bool belongs_to(const struct backlog *b, const struct sock *sk)
{
	return b->sk == sk && b->peer == sk->sk_daddr && b->peer_port == sk->sk_dport && b->port == sk->sk_num;
}

/* Gives the entry to the socket, if it is free. Returns whether the socket has it. */
bool claim(struct backlog *b, const struct sock *sk)
{
	bool ours = belongs_to(b, sk);

	/*
	 * The module does not know what is on the backlog already; a later segment finds it empty. Another connection of the
	 * same socket has ended: a new one often gets the memory of the last.
	 */
	if (!ours && (b->lost || sk->sk_backlog.len || (b->sk && b->sk != sk && time_before(jiffies, b->used + BACKLOG_EXPIRY))))
		return false;
	b->used = jiffies;
	if (!ours) {
		b->sk = sk;
		b->tail = NULL;
		b->peer = sk->sk_daddr;
		b->peer_port = sk->sk_dport;
		b->port = sk->sk_num;
		b->acked = false;
	}
	/* the backlog is empty and the owner is not processing it: the socket knows all */
	if (!sk->sk_backlog.len) {
		b->tsval = READ_ONCE(tcp_sk(sk)->rx_opt.ts_recent);
		b->contiguous = false;
	}
	return true;
}

/* Resets the connections of which the kernel dropped acknowledged data. */
void reset_lost(void)
{
	int at;

	for (at = 0; at < BACKLOGS; at++) {
		struct sock *sk = READ_ONCE(backlogs[at].lost);

		if (!sk)
			continue;
		tcp_abort(sk, ECONNABORTED);
		WRITE_ONCE(backlogs[at].lost, NULL);
		sock_put(sk);
	}
}

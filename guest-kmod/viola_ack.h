/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef VIOLA_ACK_H
#define VIOLA_ACK_H

#include <linux/skbuff.h>
#include <linux/spinlock.h>
#include <linux/tcp.h>
#include <linux/types.h>
#include <net/sock.h>

/* What the module knows of the backlog of one connection. */
struct backlog {
	raw_spinlock_t lock;
	const struct sock *sk;
	const struct sk_buff *tail;	/* last segment of the backlog when this was written */
	struct sock *lost;		/* to be reset */
	unsigned long used;		/* jiffies of the last segment */
	__be32 peer;
	__be16 peer_port;
	u16 port;
	u32 next;			/* all before this is in the socket or acceptable: bl.nxt of the algorithm */
	u32 acked_from;			/* the module has acknowledged from here to next: for the check of drops */
	u32 tsval;			/* latest timestamp on the backlog */
	bool acked;			/* whether the module has acknowledged anything */
	bool contiguous;		/* since then only acceptable segments were added to the backlog */
};

/* A segment on its way to the backlog, between the two handlers of the probe. */
struct segment {
	struct sock *sk;
	u32 seq;
	u32 end;
	u32 tsval;		/* its timestamp, which the acknowledgement echoes */
	u32 window_edge;	/* right edge of the announced window */
	bool acceptable;	/* once on the backlog it is as good as received */
};

/* Events that the parameter `counts` shows, in this order. */
enum counter {
	SENT,		/* acknowledgements sent */
	BYTES,		/* bytes that they acknowledged */
	GAP,		/* not sent: the segment does not follow what is there */
	WINDOW,		/* not sent: beyond the window, or the owner is changing it */
	BUFFER,		/* not sent: the receive buffer is full */
	MEMORY,		/* not sent: memory is short, or there is none for the packet */
	OTHER,		/* not sent: flags, options or a state for the owner, or no entry for the socket */
	RESET,		/* connections reset, because the kernel dropped what was acknowledged */
	COUNTERS
};

/* main.c */
void count_event(enum counter which, u64 n);

/* backlog.c */
void backlogs_init(void);
struct backlog *backlog_of(const struct sock *sk);
bool belongs_to(const struct backlog *b, const struct sock *sk);
bool claim(struct backlog *b, const struct sock *sk);
void reset_lost(void);

/* judge.c */
bool timestamp(const struct tcphdr *th, u32 *value);
enum counter judge(const struct sock *sk, const struct sk_buff *skb, const struct backlog *b, struct segment *segment);

/* packet.c */
void packets_init(void);
void packets_exit(void);
struct sk_buff *acknowledgement(struct sock *sk, const struct segment *segment);
void send_later(struct sk_buff *skb);

#endif

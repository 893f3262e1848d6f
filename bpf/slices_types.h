/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the algorithms of slices.h and turbo.h share: constants, loops and the state of a core.
 *
 * Times are nanoseconds, lags 1/1024 ns.
 */
#ifndef VIOLA_SLICES_TYPES_H
#define VIOLA_SLICES_TYPES_H

#define ROWS 64			/* VMs on one core */
#define FOREVER (~0ULL)
#define NOBODY ROWS

#define US 1000ULL
#define MS 1000000ULL
#define CAP_WINDOW (10 * MS)
#define MIN_PREEMPT_RUN ((s64)(100 * US))
#define MIN_BUDGET (2 * US)
#define MIN_MICROSLICE (10 * US)
#define MIN_CAPPED_RUN ((s64)(200 * US))
/* Unused quotas that a window gets beside its own. */
#define CARRIED_QUOTAS 2
#define LAG_ONE_SHIFT 10
#define MAX_CAP 1000000
#define MIN_SLOT (20 * US)
#define MAX_SLOT (10 * MS)
#define RESERVE_MAX_SAVED ((s64)(15 * MS))
#define MAX_INTERVAL (1LL << 50)
#define MAX_SCALED (1LL << 40)

#ifdef __bpf__
struct bpf_iter_num {
	u64 opaque[1];
} __attribute__((aligned(8)));

extern int bpf_iter_num_new(struct bpf_iter_num *it, int start, int end) __weak __ksym;
extern int *bpf_iter_num_next(struct bpf_iter_num *it) __weak __ksym;
extern void bpf_iter_num_destroy(struct bpf_iter_num *it) __weak __ksym;

/* Loops over i = 0 .. n - 1. The verifier examines the body until its state repeats, not n times. */
#define each(i, n)											\
	for (struct bpf_iter_num it_ __attribute__((aligned(8), cleanup(bpf_iter_num_destroy))),	\
	     *started_ __attribute__((unused)) =							\
		     (bpf_iter_num_new(&it_, 0, (n)), (void)bpf_iter_num_destroy, (void *)0);		\
	     ({ int *at_ = bpf_iter_num_next(&it_); at_ && ((i) = *at_, 1); });)
#define __arg_nonnull __attribute__((btf_decl_tag("arg:nonnull")))
#define __inline_fn static inline __attribute__((always_inline))
#else
#define each(i, n) for ((i) = 0; (i) < (n); (i)++)
#define __arg_nonnull
#define __inline_fn static inline
#endif

/* Rank of a VM: policy's Rank, in its order. */
enum rank { CAPPED, BACKGROUND, WAITING, OWNER, PREEMPT, BOOST };

/* Algorithm of a core: policy's Interleaved, RegularCore and TurboCore. */
enum kind { INTERLEAVED, REGULAR, TURBO };

/* Where a VM stands in its pool: policy's Position, in its order. */
enum position { HELD, BEHIND, TURN, AHEAD };

/* Parameters of one VM: policy's Params. */
struct vm_params {
	u32 id;			/* not 0; 0: the row is vacant */
	u32 ls;			/* latency-sensitive; on a turbo core: its turbo vCPU is here */
	u32 weight;		/* 1..=65535 */
	u32 cap_permille;	/* 0: none */
	u64 microslice;		/* ns */
	u32 here;		/* in a pool: number of its regular vCPUs on this core */
	u32 of;			/* the same, on all cores */
};

struct vm_row {
	struct vm_params params;
	/* since the last decision, set by the caller */
	u64 used;
	u32 runnable;
	/* the decision */
	u32 rank;
	u64 budget;		/* decide again when it has run this long */
	/* state */
	s64 lag;
	s64 weight;
	u64 micro;
	s64 credit;		/* most lag while asleep */
	s64 lag_before;		/* lag before the last charge */
	s64 stop_lag;		/* lag at which a boosted latency-sensitive VM yields */
	s64 preempt_left;	/* time that a batch VM may run before it must wait for its turn */
	u64 ticket;
	s64 quota;		/* of each window; 0: no cap */
	s64 left;
	u32 permille;
	u8 capped;
	u8 member;
	u8 ready;
	u8 slept;
	u8 boosted;
	u8 queued;
	u8 pool;		/* index of its pool */
	u8 held;		/* held back by its reserve since held_since */
	/* of the pools: turbo.h */
	u64 paid;		/* ran on other turbo cores and counts here, since the last decision */
	u64 total;		/* ran on other cores and counts against the cap */
	u64 due;		/* all time that it was ever due here */
	u64 since;		/* waits since then */
	u64 slice;
	u32 position;
	u32 pad2;
	u64 floor_since;	/* start of the wait of a regular vCPU on a turbo core */
	u64 floor_left;		/* time that it may still run before turbo vCPUs */
	/* policy's Reserve */
	s64 reserve_left;
	u64 held_since;
	u64 ran;		/* since it was last held */
	u8 regular_waits;	/* one of its regular vCPUs waits */
	u8 due_known;
	u8 moderated;
	u8 pad[5];
};

/* VMs that share by weight: all of a core, or on a turbo core its turbo vCPUs (0) and the others (1). */
struct pool {
	s64 weight;		/* of the members */
	s64 remainder;
	s64 owner_left;
	s64 ran;		/* time of its members since the last decision, as lag; stored here so that the verifier need not track it */
	u32 owner;
	u32 contenders;
	u32 vms;
	u32 needs_wake;	/* decide when a member wakes */
};

struct slices {
	/* the answer */
	u64 until;		/* latest time of the next decision */
	u32 notify_wake;	/* decide when a VM wakes */
	u32 notify_block;
	/* settings */
	u64 batch_slice;
	u64 credit_ls;
	u64 credit_batch;
	/* state */
	u64 window_next;	/* end of the caps' window; 0: none began */
	u64 floor_next;		/* earliest time of the next floor run */
	struct pool pools[2];
	u64 tickets;
	s64 owner_left;
	s64 turn_left;
	u64 wake_budget;
	s64 credit_sum;
	u32 n;			/* rows in use are below this */
	u32 vms;
	u32 n_ls;
	u32 owner;
	u32 turn;
	u32 contenders;
	u32 batch_ready;
	u32 waiting;
	u32 kind;
	u32 reserve;		/* turbo cores: part of its share that a VM keeps for its regular vCPUs, thousandths */
	struct vm_row rows[ROWS];
};

__inline_fn struct vm_row *row_at(struct slices *c, u32 i)
{
	return &c->rows[i & (ROWS - 1)];
}

__inline_fn const struct vm_row *const_row_at(const struct slices *c, u32 i)
{
	return &c->rows[i & (ROWS - 1)];
}

__inline_fn struct pool *pool_of(struct slices *c, const struct vm_row *vm)
{
	return &c->pools[vm->pool & 1];
}

__inline_fn s64 min_s64(s64 a, s64 b) { return a < b ? a : b; }
__inline_fn s64 max_s64(s64 a, s64 b) { return a > b ? a : b; }
__inline_fn u64 min_u64(u64 a, u64 b) { return a < b ? a : b; }

__inline_fn u64 add_time(u64 now, u64 span)
{
	return now + span < now ? FOREVER : now + span;
}

/* a / b rounded down, b > 0. */
__inline_fn s64 floor_div(s64 a, s64 b)
{
	if (a >= 0)
		return (s64)((u64)a / (u64)b);
	return -(s64)(((u64)-a + (u64)b - 1) / (u64)b);
}

#endif

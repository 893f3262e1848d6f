/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The state of a core, and the maps of the scheduler.
 */
#ifndef VIOLA_SCX_STATE_H
#define VIOLA_SCX_STATE_H

#include "scx_kernel.h"
#include "scx.h"

#define STRAY (ROWS + 1)	/* a thread of no VM */
#define MAX_SLICE (20 * MS)
/* Turn of a VM's thread that the kernel has chosen by itself. */
#define UNASKED_TURN MS
/* Interval at which a core of a pool reads what its VMs ran on other cores. */
#define POOL_EXCHANGE_INTERVAL MS

const volatile struct scx_knobs knobs = {
	.credit_ls = 3 * MS,
	.credit_batch = MS,
	.vcpu_turn = MS,
	.service_start = 10 * MS,
	.starved_after = 1000 * MS,
	.starved_turn = 100 * US,
};

struct thread {
	u32 id;			/* VM */
	u32 service;
	u32 made;		/* created by a thread of its VM; the daemon does not know it yet */
	u32 counted;		/* is in .runnable of this VM on counted_cpu */
	u32 counted_cpu;
	u64 since;		/* start of its wait; 0: it does not wait */
};

/* What a core has read of a VM's totals, and published itself. */
struct exchange {
	u64 all;
	u64 turbo;
	u64 due;
	u64 here;		/* time here since the last reading */
	u64 remainder;		/* remainder of a division */
	u64 published_due;
	u64 published_wait;
};

struct core {
	u64 seq;		/* sequence number of its plan */
	u64 since;		/* the running thread is charged up to then */
	u64 began;		/* start of the running thread */
	u64 cost;		/* cost of the last choice, charged to the chosen thread */
	u64 due;		/* time of the next choice */
	u64 until;		/* time of the next decision by the algorithm */
	u64 armed;		/* time at which its timer fires; 0: not armed */
	u32 running;		/* row, NOBODY or STRAY */
	u32 service;		/* the running thread is a service thread */
	u32 service_waits;	/* a service thread of the running VM waits */
	u32 last;		/* row that ran last */
	u32 must_decide;		/* the algorithm must decide at the next choice */
	u32 idle;		/* no VM was runnable at the last choice, and no thread has started since */
	u32 idle_with_capped;	/* the same, but VMs over their cap are runnable */
	u32 chosen;		/* the thread that starts next was chosen by the scheduler */
	u32 preselected;		/* row + 1 of a woken thread that runs next without a choice */
	u32 choose_again;		/* a thread of higher rank has woken since */
	u32 saved_notify_wake;		/* the running thread is alone, so notify_wake is set; this is its former value + 1 */
	u64 stray_since;	/* start of the wait of a thread of no VM; 0: none waits */
	u64 exchanged_at;		/* time of the last reading of vm_totals */
	u64 wait_since[ROWS];	/* when the row last had the core, or became runnable */
	u32 runnable[VM_IDS];	/* runnable threads by VM; another core may decrement it for a thread that moved there */
	u8 row_of[VM_IDS];	/* row + 1; 0: not on this core */
	struct exchange exchange[ROWS];
	struct slices machine;
};

struct timer {
	struct bpf_timer timer;
};

/* The loader sets max_entries of these to the number of CPUs; of plans to twice, of vm_stats to ROWS times as many. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct core);
} cores SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct timer);
} timers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32);
	__type(value, struct core_plan);
} plans SEC(".maps");

/* 0: the core is not managed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} plan_seqs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ROWS);
	__type(key, u32);
	__type(value, struct vm_stats);
} vm_stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct core_stats);
} core_stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, VM_IDS);
	__type(key, u32);
	__type(value, struct vm_total);
} vm_totals SEC(".maps");

static __always_inline u64 dsq_of(u32 cpu, u32 row)
{
	return (u64)cpu << 8 | row;
}

static __always_inline struct core *core_at(u32 cpu)
{
	u64 *seq = bpf_map_lookup_elem(&plan_seqs, &cpu);

	return seq && *seq ? bpf_map_lookup_elem(&cores, &cpu) : 0;
}

static __always_inline struct core_stats *stats_at(u32 cpu)
{
	return bpf_map_lookup_elem(&core_stats, &cpu);
}

static __always_inline struct vm_stats *vm_stats_at(u32 cpu, u32 row)
{
	u32 key = cpu * ROWS + row;

	return row < ROWS ? bpf_map_lookup_elem(&vm_stats, &key) : 0;
}

static __always_inline struct vm_total *total_of(u32 id)
{
	return bpf_map_lookup_elem(&vm_totals, &id);
}

static __always_inline struct exchange *exchange_at(struct core *c, u32 row)
{
	return &c->exchange[row & (ROWS - 1)];
}

/*
 * The row that a thread runs for. A turbo vCPU is one thread; what it creates is work for the regular cores, to which the daemon moves it.
 * Until then it runs when no VM wants to.
 */
static __always_inline u32 row_of(const struct core *c, const struct thread *t)
{
	u32 row = t ? (u32)c->row_of[t->id & (VM_IDS - 1)] - 1 : NOBODY;

	if (row < ROWS && t->made && in_slots(&c->machine, const_row_at(&c->machine, row)))
		return NOBODY;
	return row;
}

#endif

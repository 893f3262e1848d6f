/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The machine of a core: what the kernel is told about who runs there next, and until when.
 *
 * It follows the plan that the daemon has written for the core, counts the threads of each VM that want to run, charges
 * what runs, asks the algorithm (slices.h) and has the core decide again when a slice is over. All of it happens under the
 * run queue lock of that core.
 */
#ifndef VIOLA_SCX_CORE_H
#define VIOLA_SCX_CORE_H

#include "scx_kernel.h"
#include "scx.h"

#define STRAY (ROWS + 1)	/* a thread of no VM */
#define SLICE_MOST (20 * MS)
/* How often the machine of a pool hears what its VMs ran on other cores. */
#define EXCHANGE MS

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
	u32 made;		/* by a thread of its VM; the daemon has not seen it yet */
	u32 counted;		/* is in .runnable of this VM on counted_cpu */
	u32 counted_cpu;
	u64 since;		/* waits since then; 0: does not */
};

/* How far a core has heard of what a VM did elsewhere, and what it has told of that itself. */
struct exchange {
	u64 all;
	u64 turbo;
	u64 due;
	u64 here;		/* ran here since */
	u64 rest;		/* of a division */
	u64 told_due;
	u64 told_waits;
};

struct core {
	u64 seq;		/* number of the plan it follows */
	u64 since;		/* what runs now is charged up to then */
	u64 began;		/* and began then */
	u64 cost;		/* of the last choice: who was chosen pays */
	u64 due;		/* has to choose by then */
	u64 until;		/* and to ask the algorithm */
	u64 armed;		/* its timer fires then; 0: it does not */
	u32 running;		/* row, NOBODY or STRAY */
	u32 service;		/* what runs is a service thread */
	u32 service_waits;	/* and one of its VM that waits is to go before it */
	u32 last;		/* row that ran last */
	u32 ask;		/* something has happened that the algorithm wants to hear of */
	u32 idle;		/* nobody wanted it at the last choice, and nothing has begun since */
	u32 idle_beside;	/* the same, but for VMs that have to wait */
	u32 taken;		/* row + 1 of a thread that has just woken and is next, without a choice */
	u32 again;		/* one of higher rank has woken since */
	u32 lone;		/* what runs has the core to itself: notify_wake is set for that, and was this less one */
	u64 stray_since;	/* a thread of no VM waits since then; 0: none does */
	u64 heard;		/* of other cores; then */
	u64 wait_since[ROWS];	/* when the row had the core last, or became runnable */
	u32 runnable[VM_IDS];	/* threads by VM; another core takes one off that it has been given */
	u8 row_of[VM_IDS];	/* row + 1; 0: not on this core */
	struct exchange exchange[ROWS];
	struct slices machine;
};

struct timer {
	struct bpf_timer timer;
};

/* The loader sets max_entries of these to CPUs; of plans to twice, of vm_stats to ROWS times as many. */
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
 * The row that a thread runs for. A turbo vCPU is one thread: what it makes is work for the regular cores, where the daemon
 * takes it; until then it runs when no VM wants to.
 */
static __always_inline u32 row_of(const struct core *c, const struct thread *t)
{
	u32 row = t ? (u32)c->row_of[t->id & (VM_IDS - 1)] - 1 : NOBODY;

	if (row < ROWS && t->made && in_slots(&c->machine, row_seen(&c->machine, row)))
		return NOBODY;
	return row;
}

static __always_inline void kick(u32 cpu)
{
	struct core_stats *s = stats_at(cpu);

	if (s)
		s->kicks++;
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/* The other cores hear nothing of this row any more. */
__sub int untell(struct core *c __there, u32 row)
{
	struct exchange *x = exchange_at(c, row);
	struct vm_total *t = total_of(row_at(&c->machine, row)->params.id & (VM_IDS - 1));

	if (t && x->told_waits)
		__sync_fetch_and_add(&t->waits, -1);
	x->told_waits = 0;
	return 0;
}

/* From here on: which cores count, and what part of a VM's turbo time is this core's, may have changed. */
__sub int begin_hearing(struct core *c __there, u32 row)
{
	struct exchange *x = exchange_at(c, row);
	struct vm_row *vm = row_at(&c->machine, row);
	struct vm_total *t = total_of(vm->params.id & (VM_IDS - 1));

	if (!t)
		return 0;
	x->all = t->all;
	x->turbo = t->turbo;
	x->due = t->due;
	x->here = 0;
	x->rest = 0;
	x->told_due = vm->due;
	return 0;
}

/* Takes the daemon's newest plan. */
__sub int adopt(struct core *c __there, u32 cpu)
{
	u64 *seq = bpf_map_lookup_elem(&plan_seqs, &cpu);
	struct core_plan *plan;
	u64 number, now = bpf_ktime_get_ns();
	u32 i, key;

	if (!seq || *seq == c->seq)
		return 0;
	number = *(volatile u64 *)seq;
	key = cpu * 2 + (number & 1);
	plan = bpf_map_lookup_elem(&plans, &key);
	if (!plan)
		return 0;
	if (!c->seq) {
		c->running = NOBODY;
		c->last = NOBODY;
		c->due = FOREVER;
	}
	c->ask = 1;
	each(i, ROWS) {
		c->row_of[row_at(&c->machine, i)->params.id & (VM_IDS - 1)] = 0;
		untell(c, i);
	}
	slices_begin(&c->machine, plan->kind, plan->batch_slice, knobs.credit_ls, knobs.credit_batch, plan->reserve);
	each(i, ROWS) {
		struct vm_params *params = &plan->vms[i & (ROWS - 1)];
		struct vm_stats *s;

		slices_take(&c->machine, i, params, now);
		begin_hearing(c, i);
		if (params->id)
			c->row_of[params->id & (VM_IDS - 1)] = i + 1;
		s = vm_stats_at(cpu, i);
		if (s && s->id != params->id) {
			__builtin_memset(s, 0, sizeof(*s));
			s->id = params->id;
		}
	}
	c->row_of[0] = 0;
	slices_end(&c->machine);
	/* Not if it was written meanwhile: then once more, at the next occasion. */
	if (*(volatile u64 *)seq == number)
		c->seq = number;
	return 0;
}

static __always_inline void uncount(struct thread *t)
{
	struct core *c = core_at(t->counted_cpu);

	if (t->counted && c)
		__sync_fetch_and_add(&c->runnable[t->counted & (VM_IDS - 1)], -1);
	t->counted = 0;
}

/* The thread is runnable on this core, for its VM. */
static __always_inline void count(struct core *c, struct thread *t, u32 cpu)
{
	u32 row, id = t->id & (VM_IDS - 1);

	if (t->counted == id && t->counted_cpu == cpu)
		return;
	uncount(t);
	if (!id)
		return;
	row = row_of(c, t);
	if (row >= ROWS && t->made)
		return;
	if (row < ROWS && !c->runnable[id]) {
		c->wait_since[row & (ROWS - 1)] = bpf_ktime_get_ns();
		c->ask |= c->machine.notify_wake;
	}
	__sync_fetch_and_add(&c->runnable[id], 1);
	t->counted = id;
	t->counted_cpu = cpu;
}

/* Charges what runs, up to now. */
static __always_inline void charge(struct core *c, u32 cpu, u64 now)
{
	struct vm_stats *s;
	struct vm_total *t;
	struct vm_row *vm;
	u64 ran = now > c->since ? now - c->since : 0;

	if (c->running >= ROWS)
		return;
	vm = row_at(&c->machine, c->running);
	vm->used += ran;
	if (vm->budget != FOREVER && vm->used + MIN_BUDGET >= vm->budget)
		c->ask = 1;
	s = vm_stats_at(cpu, c->running);
	if (s)
		s->run += ran;
	c->since = now;
	if (c->machine.kind == INTERLEAVED)
		return;
	exchange_at(c, c->running)->here += ran;
	t = total_of(vm->params.id & (VM_IDS - 1));
	if (!t)
		return;
	__sync_fetch_and_add(&t->all, ran);
	if (c->machine.kind == TURBO)
		__sync_fetch_and_add(&t->turbo, ran);
}

static __always_inline u64 less(u64 a, u64 b)
{
	return a > b ? a - b : 0;
}

/* What the VM of a row ran on other cores since it was asked last, and what it was due there. */
__sub int hear_row(struct core *c __there, u32 row)
{
	struct exchange *x = exchange_at(c, row);
	struct vm_row *vm = row_at(&c->machine, row);
	struct vm_total *t = total_of(vm->params.id & (VM_IDS - 1));
	u64 all, turbo, due, part;

	if (!t || !vm->params.id)
		return 0;
	all = *(volatile u64 *)&t->all;
	turbo = *(volatile u64 *)&t->turbo;
	due = *(volatile u64 *)&t->due;
	part = sooner(less(turbo - x->turbo, c->machine.kind == TURBO ? x->here : 0), MAX_SCALED);
	if (vm->params.of) {
		part = part * (vm->params.here < vm->params.of ? vm->params.here : vm->params.of) + x->rest;
		x->rest = part % vm->params.of;
		part /= vm->params.of;
	} else {
		part = 0;
	}
	slices_hear(&c->machine, row, part, less(all - x->all, x->here), due - x->due, t->waits > 0);
	x->all = all;
	x->turbo = turbo;
	x->due = due;
	x->here = 0;
	return 0;
}

/* Tells turbo cores what the VM of a row is due here, on a regular one. */
__sub int tell_row(struct core *c __there, u32 row)
{
	struct exchange *x = exchange_at(c, row);
	struct vm_row *vm = row_at(&c->machine, row);
	struct vm_total *t = total_of(vm->params.id & (VM_IDS - 1));
	u64 waits = slices_waits(&c->machine, vm);

	if (!t || !vm->params.id)
		return 0;
	if (vm->due != x->told_due)
		__sync_fetch_and_add(&t->due, vm->due - x->told_due);
	x->told_due = vm->due;
	if (waits && !x->told_waits)
		__sync_fetch_and_add(&t->waits, 1);
	else if (!waits && x->told_waits)
		__sync_fetch_and_add(&t->waits, -1);
	x->told_waits = waits;
	return 0;
}

/* The core has to decide at due. A timer that fires earlier is left to: it sees, and goes on. */
static __always_inline void arm(struct core *c, u32 cpu, u64 now)
{
	struct timer *t;

	if (knobs.no_timer || c->due == FOREVER || (c->armed && c->armed <= c->due))
		return;
	t = bpf_map_lookup_elem(&timers, &cpu);
	if (t && !bpf_timer_start(&t->timer, c->due > now ? c->due - now : 0, BPF_F_TIMER_CPU_PIN))
		c->armed = c->due;
}

static int on_timer(void *map, u32 *key, struct timer *t)
{
	struct core *c = core_at(*key);
	u64 now = bpf_ktime_get_ns();
	struct core_stats *s;

	if (!c)
		return 0;
	c->armed = 0;
	if (c->due == FOREVER)
		return 0;
	if (c->due > now) {
		if (!bpf_timer_start(&t->timer, c->due - now, BPF_F_TIMER_CPU_PIN))
			c->armed = c->due;
		return 0;
	}
	s = stats_at(*key);
	if (s && now - c->due > s->late_max)
		s->late_max = now - c->due;
	c->due = FOREVER;
	kick(*key);
	return 0;
}

struct choice {
	u32 row;
	u32 starved;
	u32 kept;		/* somebody wants to run and may not */
};

/* The row that runs next. */
__sub int choose(struct core *c __there, u64 now, u32 asked, struct choice *out __there)
{
	u32 i, best = NOBODY, rank = CAPPED;
	u64 since = 0;

	out->starved = 0;
	out->kept = 0;
	each(i, c->machine.n) {
		struct vm_row *vm = row_at(&c->machine, i);
		u64 idle = c->wait_since[i & (ROWS - 1)];
		u32 starved;

		/* That is told. */
		if (asked)
			vm->used = 0;
		if (!vm->params.id || !vm->runnable)
			continue;
		if (vm->rank == CAPPED) {
			out->kept = 1;
			continue;
		}
		if (knobs.starve_id && vm->params.id == knobs.starve_id)
			continue;
		if (c->running == i)
			idle = now;
		starved = now - idle > knobs.starved_after && c->machine.contenders > 1;
		if (starved == out->starved ?
		    vm->rank < rank || (vm->rank == rank && c->running != i && (c->running == best || idle >= since)) :
		    out->starved)
			continue;
		best = i;
		rank = vm->rank;
		since = idle;
		out->starved = starved;
	}
	out->row = best;
	return 0;
}

/* Threads of no VM run when no VM wants to, or when they have waited for long. */
__sub int stray_first(struct core *c __there, u32 cpu, u64 now, u32 row)
{
	u64 dsq = dsq_of(cpu, NOBODY);

	if (scx_bpf_dsq_nr_queued(dsq) <= 0) {
		c->stray_since = 0;
		return 0;
	}
	if (!c->stray_since)
		c->stray_since = now;
	if (row < ROWS && now - c->stray_since < knobs.starved_after)
		return 0;
	c->stray_since = 0;
	return to_local(dsq);
}

/* How long the VM of a row may still run before the algorithm is asked again. */
static __always_inline u64 budget_left(const struct vm_row *vm)
{
	if (vm->budget == FOREVER)
		return FOREVER;
	return vm->budget > vm->used + MIN_BUDGET ? vm->budget - vm->used : MIN_BUDGET;
}

/* Whether a turbo vCPU that has woken is the only one on its core, and no cap has to be seen to. */
static __always_inline u32 has_idle_slot(const struct core *c, const struct vm_row *vm)
{
	return c->idle && in_slots(&c->machine, vm) && !vm->quota;
}

/* A thread of this row has the core from now on. Returns how long it may run. */
static __always_inline u64 start(struct core *c, u32 cpu, struct thread *t, u32 row, u64 now)
{
	struct vm_stats *s = vm_stats_at(cpu, row);
	struct core_stats *cs;
	struct vm_row *vm;
	u64 left;

	c->running = row;
	c->service = t->service;
	if (s) {
		s->turns++;
		if (t->since && now > t->since) {
			u64 waited = now - t->since;

			s->waits++;
			s->wait_sum += waited;
			if (waited > s->wait_max)
				s->wait_max = waited;
		}
	}
	t->since = 0;
	if (c->last != row) {
		cs = stats_at(cpu);
		if (cs)
			cs->switches++;
		c->last = row;
	}
	vm = row_at(&c->machine, row);
	left = budget_left(vm);
	if (has_idle_slot(c, vm)) {
		/*
		 * Nobody waits for its slot to end: the algorithm hears of it when another wakes, or at the tick after its reserve
		 * may have been used up. Starting a timer would be dearer than what most wake for.
		 */
		c->lone = c->machine.notify_wake + 1;
		c->machine.notify_wake = 1;
		left = c->machine.reserve ? reserve_budget(vm) : FOREVER;
	} else {
		c->due = sooner(c->due, later(now, left));
	}
	arm(c, cpu, now);
	return sooner(left, SLICE_MOST);
}

/*
 * Says who is next: by the ranks of the last decision, unless something has happened since that the algorithm wanted to hear
 * of. Then, or when its decision has come to its end, it is asked first.
 */
static __always_inline void decide(struct core *c, u32 cpu, u64 now, struct choice *next)
{
	struct core_stats *s = stats_at(cpu);
	struct vm_row *vm;
	u32 i, asked = 0;

	charge(c, cpu, now);
	each(i, c->machine.n) {
		vm = row_at(&c->machine, i);
		vm->runnable = vm->params.id && c->runnable[vm->params.id & (VM_IDS - 1)];
	}
	if (!c->ask && now < c->until)
		goto out;
	c->ask = 0;
	c->lone = 0;
	if (s)
		s->decisions++;
	if (c->machine.kind != INTERLEAVED && now - c->heard >= EXCHANGE) {
		c->heard = now;
		each(i, c->machine.n)
			hear_row(c, i);
	}
	slices_decide(&c->machine, now);
	if (c->machine.kind == REGULAR) {
		each(i, c->machine.n)
			tell_row(c, i);
	}
	asked = 1;
	c->until = c->machine.until;
out:
	c->due = c->until;
	choose(c, now, asked, next);
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The scheduling of one core: which thread runs there next, and until when.
 *
 * It adopts the plan that the daemon wrote for the core, counts the runnable threads of each VM, charges the running one, asks the
 * algorithm (slices.h), and makes the core decide again when a slice ends. All of it runs under the core's run queue lock.
 */
#ifndef VIOLA_SCX_CORE_H
#define VIOLA_SCX_CORE_H

#include "scx_pool.h"

static __always_inline void kick(u32 cpu)
{
	struct core_stats *s = stats_at(cpu);

	if (s)
		s->kicks++;
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/* Adopts the daemon's newest plan. */
__subprog int adopt_plan(struct core *c __arg_nonnull, u32 cpu)
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
	c->must_decide = 1;
	each(i, ROWS) {
		c->row_of[row_at(&c->machine, i)->params.id & (VM_IDS - 1)] = 0;
		withdraw_wait(c, i);
	}
	slices_begin(&c->machine, plan->kind, plan->batch_slice, knobs.credit_ls, knobs.credit_batch, plan->reserve);
	each(i, ROWS) {
		struct vm_params *params = &plan->vms[i & (ROWS - 1)];
		struct vm_stats *s;

		slices_set_row(&c->machine, i, params, now);
		reset_exchange(c, i);
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
	/* Only if it was not written meanwhile; else adopt it again next time. */
	if (*(volatile u64 *)seq == number)
		c->seq = number;
	return 0;
}

static __always_inline void remove_runnable(struct thread *t)
{
	struct core *c = core_at(t->counted_cpu);

	if (t->counted && c)
		__sync_fetch_and_add(&c->runnable[t->counted & (VM_IDS - 1)], -1);
	t->counted = 0;
}

/* Counts the thread as runnable on this core for its VM. */
static __always_inline void add_runnable(struct core *c, struct thread *t, u32 cpu)
{
	u32 row, id = t->id & (VM_IDS - 1);

	if (t->counted == id && t->counted_cpu == cpu)
		return;
	remove_runnable(t);
	if (!id)
		return;
	row = row_of(c, t);
	if (row >= ROWS && t->made)
		return;
	if (row < ROWS && !c->runnable[id]) {
		c->wait_since[row & (ROWS - 1)] = bpf_ktime_get_ns();
		c->must_decide |= c->machine.notify_wake;
	}
	__sync_fetch_and_add(&c->runnable[id], 1);
	t->counted = id;
	t->counted_cpu = cpu;
}

/* Charges the running thread up to now. */
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
		c->must_decide = 1;
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

/* Arms the timer for the next choice. A timer that fires earlier stays armed: it re-arms itself. */
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
	u32 capped_waits;		/* a VM over its cap is runnable */
};

/* Chooses the row that runs next. */
__subprog int choose_row(struct core *c __arg_nonnull, u64 now, u32 asked, struct choice *out __arg_nonnull)
{
	u32 i, best = NOBODY, rank = CAPPED;
	u64 since = 0;

	out->starved = 0;
	out->capped_waits = 0;
	each(i, c->machine.n) {
		struct vm_row *vm = row_at(&c->machine, i);
		u64 idle = c->wait_since[i & (ROWS - 1)];
		u32 starved;

		/* The algorithm has been told of it. */
		if (asked)
			vm->used = 0;
		if (!vm->params.id || !vm->runnable)
			continue;
		if (vm->rank == CAPPED) {
			out->capped_waits = 1;
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

/* Moves a thread of no VM to the core when no VM is runnable, or when it has waited for long. */
__subprog int run_stray_first(struct core *c __arg_nonnull, u32 cpu, u64 now, u32 row)
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

/* Time that the VM of a row may still run before the algorithm is asked again. */
static __always_inline u64 remaining_budget(const struct vm_row *vm)
{
	if (vm->budget == FOREVER)
		return FOREVER;
	return vm->budget > vm->used + MIN_BUDGET ? vm->budget - vm->used : MIN_BUDGET;
}

/* Whether a woken turbo vCPU is alone on its core and has no cap. */
static __always_inline u32 has_idle_slot(const struct core *c, const struct vm_row *vm)
{
	return c->idle && in_slots(&c->machine, vm) && !vm->quota;
}

/* Starts the run of a thread of this row. Returns how long it may run. */
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
	left = remaining_budget(vm);
	/* While the kernel bypasses the scheduler, to start or to end it, no decision renews a budget that was used up. */
	if (!c->chosen && left <= MIN_BUDGET)
		left = UNASKED_TURN;
	if (has_idle_slot(c, vm)) {
		/*
		 * No VM waits for the end of its slot: the algorithm decides when another VM wakes, or at the tick after its reserve may have been
		 * used up. Starting a timer would cost more than most such runs.
		 */
		c->saved_notify_wake = c->machine.notify_wake + 1;
		c->machine.notify_wake = 1;
		left = c->machine.reserve ? reserve_budget(vm) : FOREVER;
	} else {
		c->due = min_u64(c->due, add_time(now, left));
	}
	arm(c, cpu, now);
	return min_u64(left, MAX_SLICE);
}

/*
 * Chooses who is next, by the ranks of the last decision. Asks the algorithm first when something happened that concerns it, or when its
 * decision has expired.
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
	if (!c->must_decide && now < c->until)
		goto out;
	c->must_decide = 0;
	c->saved_notify_wake = 0;
	if (s)
		s->decisions++;
	if (c->machine.kind != INTERLEAVED && now - c->exchanged_at >= POOL_EXCHANGE_INTERVAL) {
		c->exchanged_at = now;
		each(i, c->machine.n)
			read_totals(c, i);
	}
	slices_decide(&c->machine, now);
	if (c->machine.kind == REGULAR) {
		each(i, c->machine.n)
			publish_due(c, i);
	}
	asked = 1;
	c->until = c->machine.until;
out:
	c->due = c->until;
	choose_row(c, now, asked, next);
}

#endif

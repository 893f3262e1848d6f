/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The cores of vTurbo's two pools: policy's turbo/fair_queue.rs, regular.rs, turbo_core.rs, reserve.rs and floor.rs.
 *
 * A regular core has one pool. A turbo core has two: turbo vCPUs in slots, and below them, in the gaps, regular vCPUs that are placed
 * there ("gap vCPUs").
 */
#ifndef VIOLA_TURBO_H
#define VIOLA_TURBO_H

#include "slices.h"

#define TURBO_SLOT ((s64)(100 * US))
#define ACCOUNTING_INTERVAL (30 * MS)
#define MAX_TURBO_DEBT ((s64)(2 * ACCOUNTING_INTERVAL))
#define REGULAR_CREDIT ((s64)MS)
#define REGULAR_MIN_RUN ((s64)(100 * US))
#define TURBO_MIN_RUN ((s64)(20 * US))
#define REGULAR_FLOOR ((s64)MS)
#define REGULAR_FLOOR_INTERVAL (150 * MS)
#define GAP_VCPU_FLOOR (100 * US)
#define RESERVE_MODERATION_INTERVAL (2 * MS)
#define RESERVE_RECHECK_INTERVAL (2 * MS)
#define RESERVE_MIN_LEFT (-(s64)(20 * MS))
#define RESERVE_HOLD_TIMEOUT (2 * ACCOUNTING_INTERVAL)

/* Whether the row is a turbo vCPU. */
__inline_fn u32 in_slots(const struct slices *c, const struct vm_row *vm)
{
	return c->kind == TURBO && !vm->pool;
}

/* Whether its reserve holds it back. (The flag of a gap vCPU has no meaning.) */
__inline_fn u32 is_held(const struct slices *c, const struct vm_row *vm)
{
	return vm->held && in_slots(c, vm);
}

__inline_fn s64 credit_of(const struct slices *c, const struct vm_row *vm)
{
	return in_slots(c, vm) ? TURBO_SLOT : REGULAR_CREDIT;
}

__inline_fn s64 least_run(const struct slices *c, const struct vm_row *vm)
{
	return in_slots(c, vm) ? TURBO_MIN_RUN : REGULAR_MIN_RUN;
}

__inline_fn s64 run_of(u64 used)
{
	return (s64)min_u64(used, MAX_SCALED);
}

__inline_fn u64 used_by(const struct vm_row *vm)
{
	return vm->used + vm->paid;
}

/* Reserve: policy's reserve.rs. */

__inline_fn void reserve_add_due(struct vm_row *vm, u64 due, u32 waits, u32 permille)
{
	s64 part = (s64)(min_u64(due, MAX_SCALED) * permille / 1000);

	vm->regular_waits = waits && permille < 1000;
	vm->due_known |= due > 0 && permille < 1000;
	part = min_s64(part, RESERVE_MAX_SAVED - RESERVE_MIN_LEFT);
	vm->reserve_left = vm->regular_waits ? min_s64(vm->reserve_left + part, RESERVE_MAX_SAVED) : RESERVE_MAX_SAVED;
}

__inline_fn void reserve_charge(struct vm_row *vm, u64 now)
{
	u64 waited;

	vm->reserve_left = max_s64(vm->reserve_left - run_of(vm->used), RESERVE_MIN_LEFT);
	vm->ran += vm->used;
	if (!vm->regular_waits) {
		vm->held = 0;
		vm->moderated = 0;
	} else if (vm->held) {
		waited = now - vm->held_since;
		if ((vm->reserve_left >= TURBO_SLOT && waited >= RESERVE_MODERATION_INTERVAL) || waited >= RESERVE_HOLD_TIMEOUT) {
			vm->held = 0;
			vm->ran = 0;
			vm->reserve_left = max_s64(vm->reserve_left, TURBO_SLOT);
		}
	} else if (vm->reserve_left <= 0) {
		vm->held = 1;
		vm->held_since = now;
		vm->moderated = 1;
	} else if (vm->moderated && !vm->runnable) {
		vm->moderated = vm->reserve_left < RESERVE_MAX_SAVED / 2 || vm->ran > (u64)TURBO_SLOT;
		vm->held = vm->moderated;
		vm->held_since = now;
	}
}

__inline_fn u64 reserve_budget(const struct vm_row *vm)
{
	if (vm->regular_waits)
		return (u64)max_s64(vm->reserve_left, 1);
	return vm->due_known ? RESERVE_RECHECK_INTERVAL : ACCOUNTING_INTERVAL;
}

/* Fair queue: policy's fair_queue.rs. */

__subprog int pooled_charge_row(struct slices *c __arg_nonnull, u32 i, u64 now, u64 begun)
{
	struct vm_row *vm = row_at(c, i);

	if (!vm->params.id)
		return 0;
	if (c->kind == TURBO)
		reserve_charge(vm, now);
	charge_cap(vm, vm->used + vm->total, begun);
	vm->lag_before = lag_ns(vm);
	if (used_by(vm) && vm->position != HELD)
		set_member(c, vm, 1);
	return 0;
}

__subprog int pooled_limit_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 most = 2 * (s64)vm->slice + (in_slots(c, vm) ? 0 : MAX_TURBO_DEBT);

	if (!vm->params.id)
		return 0;
	if (used_by(vm))
		limit_debt(c, i, -(most + credit_of(c, vm) * (s64)pool_of(c, vm)->vms));
	vm->paid = 0;
	vm->total = 0;
	return 0;
}

__subprog int pooled_account(struct slices *c __arg_nonnull, u64 now)
{
	u64 begun = roll_windows(c, now);
	u32 i;

	c->pools[0].ran = 0;
	c->pools[1].ran = 0;
	each(i, c->n)
		pooled_charge_row(c, i, now, begun);
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);
		s64 ran = (s64)min_u64(used_by(vm), MAX_INTERVAL) << LAG_ONE_SHIFT;

		if (!vm->params.id)
			continue;
		vm->lag -= ran;
		pool_of(c, vm)->ran += ran;
	}
	if (c->pools[0].ran)
		distribute(c, 0, c->pools[0].ran);
	if (c->pools[1].ran)
		distribute(c, 1, c->pools[1].ran);
	if (c->kind == REGULAR && c->pools[0].ran) {
		each(i, c->n) {
			struct vm_row *vm = row_at(c, i);
			s64 due = lag_ns(vm) - vm->lag_before + run_of(used_by(vm));

			if (vm->params.id && due > 0)
				vm->due += (u64)due;
		}
	}
	each(i, c->n)
		pooled_limit_row(c, i);
	return 0;
}

/* Updates the row's membership, and limits the credit of a VM that sleeps. */
__subprog int pooled_update_member_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 most = credit_of(c, vm);
	u32 full;

	if (!vm->params.id)
		return 0;
	if (vm->ready) {
		if (vm->slept && vm->position != HELD)
			limit_credit(c, i, most);
		set_member(c, vm, 1);
		return 0;
	}
	if (vm->capped)
		most = in_slots(c, vm) ? (s64)vm->slice : max_s64((s64)vm->slice, vm->quota);
	full = lag_ns(vm) >= most;
	if (full)
		limit_credit(c, i, most);
	set_member(c, vm, !full && (pool_of(c, vm)->contenders > 0 || vm->capped));
	return 0;
}

__subprog int pooled_update_members(struct slices *c __arg_nonnull, u64 now)
{
	u32 i;

	c->pools[0].contenders = 0;
	c->pools[1].contenders = 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		vm->slept = !vm->ready;
		vm->ready = vm->runnable && !vm->capped && !is_held(c, vm);
		pool_of(c, vm)->contenders += vm->ready;
		if (vm->slept || vm->used)
			vm->since = now;
	}
	each(i, c->n)
		pooled_update_member_row(c, i);
	return 0;
}

/* Updates the time that a VM may run before its turn. */
__subprog int pooled_eager_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 lag = lag_ns(vm), least = least_run(c, vm);

	if (!vm->params.id)
		return 0;
	if (vm->ready && vm->position == HELD)
		vm->preempt_left = lag >= 0 ? max_s64(lag, least) : 0;
	else if (vm->ready)
		vm->preempt_left = max_s64(vm->preempt_left - run_of(vm->used), 0);
	else if (lag >= 0)
		vm->preempt_left = max_s64(lag, least);
	else if (lag < -least)
		vm->preempt_left = 0;
	return 0;
}

/* Grants a floor run to the VM that has waited longest and that the shares leave nothing. */
__subprog int regular_floor(struct slices *c __arg_nonnull, u64 now)
{
	u32 i, found = NOBODY;
	u64 since = FOREVER;

	if (now < c->floor_next)
		return 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->ready && !vm->preempt_left && c->pools[0].owner != i && vm->since < since) {
			found = i;
			since = vm->since;
		}
	}
	if (found >= ROWS || now - since < REGULAR_FLOOR_INTERVAL)
		return 0;
	c->floor_next = now + REGULAR_FLOOR_INTERVAL;
	row_at(c, found)->preempt_left = REGULAR_FLOOR;
	return 0;
}

/* Keeps the owner of a pool's turn, or chooses the next. */
__subprog int pooled_pass_turn(struct slices *c __arg_nonnull, u32 pool, u64 now)
{
	struct pool *p = &c->pools[pool & 1];
	u32 i, best = NOBODY;

	if (p->owner < ROWS) {
		struct vm_row *vm = row_at(c, p->owner);

		p->owner_left -= run_of(vm->used);
		if (!(vm->ready && (p->owner_left > margin(vm->slice) || p->contenders <= 1)))
			p->owner = NOBODY;
	}
	if (p->contenders <= 1)
		return 0;
	if (p->owner >= ROWS) {
		each(i, c->n) {
			struct vm_row *vm = row_at(c, i);

			if (vm->params.id && vm->pool == pool && vm->ready && !vm->preempt_left &&
			    (best >= ROWS || is_behind(vm, row_at(c, best))))
				best = i;
		}
		p->owner = best;
		p->owner_left = best < ROWS ? (s64)row_at(c, best)->slice : 0;
	}
	if (c->kind == REGULAR)
		regular_floor(c, now);
	return 0;
}

__inline_fn void position_row(struct slices *c, struct vm_row *vm, u32 i)
{
	struct pool *p = pool_of(c, vm);

	if (vm->capped || is_held(c, vm))
		vm->position = HELD;
	else if (vm->preempt_left > 0)
		vm->position = AHEAD;
	else if (p->owner == i)
		vm->position = TURN;
	else if (!(p->contenders <= 1 && vm->ready && vm->position > BEHIND))
		vm->position = BEHIND;
}

__subprog u64 pooled_budget(const struct slices *c __arg_nonnull, u32 i)
{
	const struct vm_row *vm = const_row_at(c, i);
	const struct pool *p = &c->pools[vm->pool & 1];
	s64 least = (s64)MIN_BUDGET;
	u64 ns;

	if (p->contenders <= 1 && vm->ready) {
		ns = FOREVER;
	} else if (vm->preempt_left > 0) {
		if (!p->contenders)
			least = max_s64(min_s64((s64)vm->slice, credit_of(c, vm)), least);
		ns = (u64)max_s64(vm->preempt_left, least);
	} else {
		ns = p->owner == i ? to_budget(p->owner_left) : vm->slice;
	}
	return vm->quota ? min_u64(ns, (u64)max_s64(vm->left, 0)) : ns;
}

/* Whether a VM that wakes would wait behind the only runnable one, which has no budget. */
__subprog int find_needs_wake(struct slices *c __arg_nonnull, u32 pool)
{
	struct pool *p = &c->pools[pool & 1];
	u32 i, top = HELD, some = 0;

	p->needs_wake = 0;
	if (p->contenders != 1)
		return 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id || vm->pool != pool || !vm->ready)
			continue;
		some = 1;
		top = vm->position > top ? vm->position : top;
	}
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->pool == pool && !vm->ready && vm->position != HELD && vm->position <= top)
			p->needs_wake = some;
	}
	return 0;
}

/* Grants a floor run to a gap vCPU that the turbo vCPUs leave nothing. Returns whether one is granted. */
__subprog int gap_vcpu_floor(struct slices *c __arg_nonnull, u64 now)
{
	u32 i, found = NOBODY, crowded = c->pools[0].contenders > 0, granted = 0;
	u64 since = FOREVER;

	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id || !vm->pool)
			continue;
		vm->floor_left -= min_u64(vm->floor_left, vm->used);
		if (vm->used || !vm->ready || !crowded)
			vm->floor_since = now;
		if (!vm->ready || !crowded)
			vm->floor_left = 0;
		if (vm->ready && vm->floor_since < since) {
			found = i;
			since = vm->floor_since;
		}
	}
	if (now >= c->floor_next && found < ROWS && now - since >= ACCOUNTING_INTERVAL) {
		c->floor_next = now + ACCOUNTING_INTERVAL;
		row_at(c, found)->floor_left = GAP_VCPU_FLOOR;
	}
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		granted |= vm->params.id && vm->floor_left > 0;
	}
	return granted;
}

/* Fills in the VM's part of the decision. */
__subprog int pooled_fill_row(struct slices *c __arg_nonnull, u32 i, u64 now, u32 granted)
{
	struct vm_row *vm = row_at(c, i);
	u64 budget = pooled_budget(c, i);
	u32 position, rank;

	position_row(c, vm, i);
	position = vm->position;
	if (c->kind == REGULAR) {
		rank = position == AHEAD ? PREEMPT : position == TURN ? OWNER : WAITING;
	} else if (!vm->pool) {
		rank = position == AHEAD && !(granted && vm->ready) ? BOOST : position == BEHIND ? OWNER : PREEMPT;
		if (c->reserve)
			budget = min_u64(budget, reserve_budget(vm));
	} else {
		rank = vm->floor_left ? BOOST : position == BEHIND ? BACKGROUND : WAITING;
		if (vm->floor_left)
			budget = min_u64(budget, vm->floor_left);
	}
	vm->rank = position == HELD ? CAPPED : rank;
	vm->budget = budget;
	if (is_held(c, vm))
		c->until = min_u64(c->until, add_time(now, RESERVE_MODERATION_INTERVAL / 2));
	else if (position == HELD)
		c->until = min_u64(c->until, cap_refill_at(c, vm));
	return 0;
}

__subprog int pooled_fill_decision(struct slices *c __arg_nonnull, u64 now)
{
	struct pool *slots = &c->pools[0], *gap_vcpus = &c->pools[1];
	u32 i, granted = gap_vcpus->vms ? gap_vcpu_floor(c, now) : 0;

	c->until = FOREVER;
	c->notify_block = 0;
	if (c->kind == REGULAR ? slots->contenders > 1 : slots->contenders > 0 && gap_vcpus->vms > 0)
		c->until = add_time(now, ACCOUNTING_INTERVAL);
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		pooled_fill_row(c, i, now, granted);
		c->notify_block |= vm->moderated && !vm->held;
	}
	find_needs_wake(c, 0);
	if (gap_vcpus->vms)
		find_needs_wake(c, 1);
	c->notify_wake = c->kind == REGULAR || slots->contenders ? slots->needs_wake : gap_vcpus->needs_wake;
	c->contenders = slots->contenders + gap_vcpus->contenders;
	return 0;
}

/* Adds what a VM ran on other cores since the last call: policy's PoolScheduler::add_other_cores. */
__inline_fn void slices_add_other_cores(struct slices *c, u32 i, u64 turbo, u64 total, u64 due, u32 waits)
{
	struct vm_row *vm = row_at(c, i);

	if (c->kind == TURBO)
		reserve_add_due(vm, due, waits, 1000 - c->reserve);
	if (!in_slots(c, vm))
		vm->paid += turbo;
	vm->total += total;
}

/* Whether the VM is runnable while others are: with .due, policy's PoolScheduler::due. */
__inline_fn u32 slices_waits(const struct slices *c, const struct vm_row *vm)
{
	return vm->ready && c->pools[vm->pool & 1].contenders > 1;
}

__inline_fn void pooled_decide(struct slices *c, u64 now)
{
	u32 i;

	pooled_account(c, now);
	pooled_update_members(c, now);
	each(i, c->n)
		pooled_eager_row(c, i);
	pooled_pass_turn(c, 0, now);
	if (c->pools[1].vms)
		pooled_pass_turn(c, 1, now);
	pooled_fill_decision(c, now);
}

/* Decides: reads .used and .runnable of every row, and fills in rank and budget. */
__inline_fn void slices_decide(struct slices *c, u64 now)
{
	if (c->kind == INTERLEAVED)
		interleaved_decide(c, now);
	else
		pooled_decide(c, now);
}

#endif

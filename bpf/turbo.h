/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Who runs next on a core of vTurbo's two pools: the machines of crates/policy (turbo/turns.rs, regular.rs, turbo_core.rs,
 * reserve.rs, floor.rs), once more for the kernel, as slices.h is the one of ordinary cores. The same test replays random
 * histories through both, and what is said there of the why is not said again here.
 *
 * A regular core has one pool. A turbo core has two: turbo vCPUs in slots, and below them, in the gaps, regular vCPUs that
 * have their place there ("lodgers").
 */
#ifndef VIOLA_TURBO_H
#define VIOLA_TURBO_H

#include "slices.h"

#define TURBO_SLOT ((s64)(100 * US))
#define ACCOUNTING (30 * MS)
#define LUMP ((s64)(2 * ACCOUNTING))
#define REGULAR_CREDIT ((s64)MS)
#define REGULAR_LEAST ((s64)(100 * US))
#define TURBO_LEAST ((s64)(20 * US))
#define REGULAR_FLOOR ((s64)MS)
#define REGULAR_FLOOR_EVERY (150 * MS)
#define LODGER_FLOOR (100 * US)
#define RESERVE_GAP (2 * MS)
#define RESERVE_GLANCE (2 * MS)
#define RESERVE_OWED (-(s64)(20 * MS))
#define RESERVE_LONGEST (2 * ACCOUNTING)

/* Whether it is a turbo vCPU. */
__small u32 in_slots(const struct slices *c, const struct vm_row *vm)
{
	return c->kind == TURBO && !vm->pool;
}

/* Whether its reserve has it wait; that of a lodger is kept, and means nothing. */
__small u32 is_held(const struct slices *c, const struct vm_row *vm)
{
	return vm->held && in_slots(c, vm);
}

__small s64 credit_of(const struct slices *c, const struct vm_row *vm)
{
	return in_slots(c, vm) ? TURBO_SLOT : REGULAR_CREDIT;
}

__small s64 least_run(const struct slices *c, const struct vm_row *vm)
{
	return in_slots(c, vm) ? TURBO_LEAST : REGULAR_LEAST;
}

__small s64 run_of(u64 used)
{
	return (s64)sooner(used, SCALED);
}

__small u64 used_by(const struct vm_row *vm)
{
	return vm->used + vm->paid;
}

/* Reserve: policy's reserve.rs. */

__small void reserve_hear(struct vm_row *vm, u64 due, u32 waits, u32 permille)
{
	s64 part = (s64)(sooner(due, SCALED) * permille / 1000);

	vm->is_short = waits && permille < 1000;
	vm->heard |= due > 0 && permille < 1000;
	part = least_of(part, RESERVE_SAVED - RESERVE_OWED);
	vm->reserve_left = vm->is_short ? least_of(vm->reserve_left + part, RESERVE_SAVED) : RESERVE_SAVED;
}

__small void reserve_charge(struct vm_row *vm, u64 now)
{
	u64 waited;

	vm->reserve_left = most_of(vm->reserve_left - run_of(vm->used), RESERVE_OWED);
	vm->ran += vm->used;
	if (!vm->is_short) {
		vm->held = 0;
		vm->gaps = 0;
	} else if (vm->held) {
		waited = now - vm->held_since;
		if ((vm->reserve_left >= TURBO_SLOT && waited >= RESERVE_GAP) || waited >= RESERVE_LONGEST) {
			vm->held = 0;
			vm->ran = 0;
			vm->reserve_left = most_of(vm->reserve_left, TURBO_SLOT);
		}
	} else if (vm->reserve_left <= 0) {
		vm->held = 1;
		vm->held_since = now;
		vm->gaps = 1;
	} else if (vm->gaps && !vm->runnable) {
		vm->gaps = vm->reserve_left < RESERVE_SAVED / 2 || vm->ran > (u64)TURBO_SLOT;
		vm->held = vm->gaps;
		vm->held_since = now;
	}
}

__small u64 reserve_budget(const struct vm_row *vm)
{
	if (vm->is_short)
		return (u64)most_of(vm->reserve_left, 1);
	return vm->heard ? RESERVE_GLANCE : ACCOUNTING;
}

/* Turns: policy's turns.rs. */

__sub int pooled_charge_row(struct slices *c __there, u32 i, u64 now, u64 begun)
{
	struct vm_row *vm = row_at(c, i);

	if (!vm->params.id)
		return 0;
	if (c->kind == TURBO)
		reserve_charge(vm, now);
	charge_cap(vm, vm->used + vm->total, begun);
	vm->before = lag_ns(vm);
	if (used_by(vm) && vm->place != HELD)
		set_member(c, vm, 1);
	return 0;
}

__sub int pooled_limit_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 most = 2 * (s64)vm->slice + (in_slots(c, vm) ? 0 : LUMP);

	if (!vm->params.id)
		return 0;
	if (used_by(vm))
		limit_debt(c, i, -(most + credit_of(c, vm) * (s64)pool_of(c, vm)->vms));
	vm->paid = 0;
	vm->total = 0;
	return 0;
}

__sub int pooled_account(struct slices *c __there, u64 now)
{
	u64 begun = roll_windows(c, now);
	u32 i;

	c->pools[0].ran = 0;
	c->pools[1].ran = 0;
	each(i, c->n)
		pooled_charge_row(c, i, now, begun);
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);
		s64 ran = (s64)sooner(used_by(vm), LONGEST) << LAG_ONE_SHIFT;

		if (!vm->params.id)
			continue;
		vm->lag -= ran;
		pool_of(c, vm)->ran += ran;
	}
	if (c->pools[0].ran)
		share_out(c, 0, c->pools[0].ran);
	if (c->pools[1].ran)
		share_out(c, 1, c->pools[1].ran);
	if (c->kind == REGULAR && c->pools[0].ran) {
		each(i, c->n) {
			struct vm_row *vm = row_at(c, i);
			s64 due = lag_ns(vm) - vm->before + run_of(used_by(vm));

			if (vm->params.id && due > 0)
				vm->due += (u64)due;
		}
	}
	each(i, c->n)
		pooled_limit_row(c, i);
	return 0;
}

/* Who competes from now on; limits the credit of those that slept. */
__sub int pooled_gather_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 most = credit_of(c, vm);
	u32 full;

	if (!vm->params.id)
		return 0;
	if (vm->ready) {
		if (vm->slept && vm->place != HELD)
			limit_credit(c, i, most);
		set_member(c, vm, 1);
		return 0;
	}
	if (vm->capped)
		most = in_slots(c, vm) ? (s64)vm->slice : most_of((s64)vm->slice, vm->quota);
	full = lag_ns(vm) >= most;
	if (full)
		limit_credit(c, i, most);
	set_member(c, vm, !full && (pool_of(c, vm)->contenders > 0 || vm->capped));
	return 0;
}

__sub int pooled_gather(struct slices *c __there, u64 now)
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
		pooled_gather_row(c, i);
	return 0;
}

/* What a VM may run before its turn. */
__sub int pooled_eager_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 lag = lag_ns(vm), least = least_run(c, vm);

	if (!vm->params.id)
		return 0;
	if (vm->ready && vm->place == HELD)
		vm->eager = lag >= 0 ? most_of(lag, least) : 0;
	else if (vm->ready)
		vm->eager = most_of(vm->eager - run_of(vm->used), 0);
	else if (lag >= 0)
		vm->eager = most_of(lag, least);
	else if (lag < -least)
		vm->eager = 0;
	return 0;
}

/* Grants the one that has waited longest a run that the shares leave it not. */
__sub int regular_floor(struct slices *c __there, u64 now)
{
	u32 i, found = NOBODY;
	u64 since = FOREVER;

	if (now < c->floor_next)
		return 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->ready && !vm->eager && c->pools[0].owner != i && vm->since < since) {
			found = i;
			since = vm->since;
		}
	}
	if (found >= ROWS || now - since < REGULAR_FLOOR_EVERY)
		return 0;
	c->floor_next = now + REGULAR_FLOOR_EVERY;
	row_at(c, found)->eager = REGULAR_FLOOR;
	return 0;
}

/* Keeps the owner of a pool's turn or chooses the next. */
__sub int pooled_pass(struct slices *c __there, u32 pool, u64 now)
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

			if (vm->params.id && vm->pool == pool && vm->ready && !vm->eager &&
			    (best >= ROWS || behind(vm, row_at(c, best))))
				best = i;
		}
		p->owner = best;
		p->owner_left = best < ROWS ? (s64)row_at(c, best)->slice : 0;
	}
	if (c->kind == REGULAR)
		regular_floor(c, now);
	return 0;
}

__small void place_row(struct slices *c, struct vm_row *vm, u32 i)
{
	struct pool *p = pool_of(c, vm);

	if (vm->capped || is_held(c, vm))
		vm->place = HELD;
	else if (vm->eager > 0)
		vm->place = FIRST;
	else if (p->owner == i)
		vm->place = TURN;
	else if (!(p->contenders <= 1 && vm->ready && vm->place > WAITS))
		vm->place = WAITS;
}

__sub u64 pooled_budget(const struct slices *c __there, u32 i)
{
	const struct vm_row *vm = row_seen(c, i);
	const struct pool *p = &c->pools[vm->pool & 1];
	s64 least = (s64)SHORTEST;
	u64 ns;

	if (p->contenders <= 1 && vm->ready) {
		ns = FOREVER;
	} else if (vm->eager > 0) {
		if (!p->contenders)
			least = most_of(least_of((s64)vm->slice, credit_of(c, vm)), least);
		ns = (u64)most_of(vm->eager, least);
	} else {
		ns = p->owner == i ? to_budget(p->owner_left) : vm->slice;
	}
	return vm->quota ? sooner(ns, (u64)most_of(vm->left, 0)) : ns;
}

/* Whether a VM that sleeps would have to wait behind the only one that wants to run, which has no budget. */
__sub int hear_wakes(struct slices *c __there, u32 pool)
{
	struct pool *p = &c->pools[pool & 1];
	u32 i, top = HELD, some = 0;

	p->must_hear = 0;
	if (p->contenders != 1)
		return 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id || vm->pool != pool || !vm->ready)
			continue;
		some = 1;
		top = vm->place > top ? vm->place : top;
	}
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->pool == pool && !vm->ready && vm->place != HELD && vm->place <= top)
			p->must_hear = some;
	}
	return 0;
}

/* Grants a lodger a run that the turbo vCPUs would never leave it; whether there is one. */
__sub int lodger_floor(struct slices *c __there, u64 now)
{
	u32 i, found = NOBODY, crowded = c->pools[0].contenders > 0, granted = 0;
	u64 since = FOREVER;

	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id || !vm->pool)
			continue;
		vm->floor_left -= sooner(vm->floor_left, vm->used);
		if (vm->used || !vm->ready || !crowded)
			vm->floor_since = now;
		if (!vm->ready || !crowded)
			vm->floor_left = 0;
		if (vm->ready && vm->floor_since < since) {
			found = i;
			since = vm->floor_since;
		}
	}
	if (now >= c->floor_next && found < ROWS && now - since >= ACCOUNTING) {
		c->floor_next = now + ACCOUNTING;
		row_at(c, found)->floor_left = LODGER_FLOOR;
	}
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		granted |= vm->params.id && vm->floor_left > 0;
	}
	return granted;
}

/* The VM's part of the answer. */
__sub int pooled_answer_row(struct slices *c __there, u32 i, u64 now, u32 granted)
{
	struct vm_row *vm = row_at(c, i);
	u64 budget = pooled_budget(c, i);
	u32 place, rank;

	place_row(c, vm, i);
	place = vm->place;
	if (c->kind == REGULAR) {
		rank = place == FIRST ? EAGER : place == TURN ? OWNER : WAITING;
	} else if (!vm->pool) {
		rank = place == FIRST && !(granted && vm->ready) ? BOOST : place == WAITS ? OWNER : EAGER;
		if (c->reserve)
			budget = sooner(budget, reserve_budget(vm));
	} else {
		rank = vm->floor_left ? BOOST : place == WAITS ? OUT : WAITING;
		if (vm->floor_left)
			budget = sooner(budget, vm->floor_left);
	}
	vm->rank = place == HELD ? CAPPED : rank;
	vm->budget = budget;
	if (is_held(c, vm))
		c->until = sooner(c->until, later(now, RESERVE_GAP / 2));
	else if (place == HELD)
		c->until = sooner(c->until, cap_refill(c, vm));
	return 0;
}

__sub int pooled_answer(struct slices *c __there, u64 now)
{
	struct pool *slots = &c->pools[0], *lodgers = &c->pools[1];
	u32 i, granted = lodgers->vms ? lodger_floor(c, now) : 0;

	c->until = FOREVER;
	c->notify_block = 0;
	if (c->kind == REGULAR ? slots->contenders > 1 : slots->contenders > 0 && lodgers->vms > 0)
		c->until = later(now, ACCOUNTING);
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		pooled_answer_row(c, i, now, granted);
		c->notify_block |= vm->gaps && !vm->held;
	}
	hear_wakes(c, 0);
	if (lodgers->vms)
		hear_wakes(c, 1);
	c->notify_wake = c->kind == REGULAR || slots->contenders ? slots->must_hear : lodgers->must_hear;
	c->contenders = slots->contenders + lodgers->contenders;
	return 0;
}

/* Tells what a VM ran elsewhere since it was told last: policy's Pooled::elsewhere. */
__small void slices_hear(struct slices *c, u32 i, u64 turbo, u64 total, u64 due, u32 waits)
{
	struct vm_row *vm = row_at(c, i);

	if (c->kind == TURBO)
		reserve_hear(vm, due, waits, 1000 - c->reserve);
	if (!in_slots(c, vm))
		vm->paid += turbo;
	vm->total += total;
}

/* Whether the VM wants this core while others do: policy's Pooled::due has that and .due. */
__small u32 slices_waits(const struct slices *c, const struct vm_row *vm)
{
	return vm->ready && c->pools[vm->pool & 1].contenders > 1;
}

__small void pooled_decide(struct slices *c, u64 now)
{
	u32 i;

	pooled_account(c, now);
	pooled_gather(c, now);
	each(i, c->n)
		pooled_eager_row(c, i);
	pooled_pass(c, 0, now);
	if (c->pools[1].vms)
		pooled_pass(c, 1, now);
	pooled_answer(c, now);
}

/* Decides: takes .used and .runnable of every row, fills in the answers. */
__small void slices_decide(struct slices *c, u64 now)
{
	if (c->kind == INTERLEAVED)
		interleaved_decide(c, now);
	else
		pooled_decide(c, now);
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The default algorithm: policy's slices/interleaved.rs.
 */
#ifndef VIOLA_INTERLEAVED_H
#define VIOLA_INTERLEAVED_H

#include "lag.h"
#include "caps.h"

__inline_fn s64 margin(u64 slice)
{
	return slice / 32 > US ? (s64)(slice / 32) : (s64)US;
}

__inline_fn s64 min_lag(const struct slices *c, const struct vm_row *vm)
{
	s64 slice = (s64)c->batch_slice;

	if (vm->params.ls)
		return -2 * max_s64(slice, (s64)vm->micro);
	return -2 * slice - c->credit_sum;
}

__subprog int charge_row(struct slices *c __arg_nonnull, u32 i, u64 begun)
{
	struct vm_row *vm = row_at(c, i);

	if (!vm->params.id)
		return 0;
	charge_cap(vm, vm->used, begun);
	if (!vm->used)
		return 0;
	vm->lag_before = lag_ns(vm);
	if (vm->rank != CAPPED)
		set_member(c, vm, 1);
	return 0;
}

__subprog int limit_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 least = min_lag(c, vm);

	if (!vm->params.id || !vm->used)
		return 0;
	if (vm->params.ls && vm->rank == BACKGROUND)
		least = max_s64(least, min_s64(lag_after(c, vm, vm->micro), vm->lag_before));
	limit_debt(c, i, least);
	return 0;
}

__subprog int account(struct slices *c __arg_nonnull, u64 now)
{
	u64 begun = roll_windows(c, now);
	s64 total = 0;
	u32 i;

	each(i, c->n)
		charge_row(c, i, begun);
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);
		s64 ran = (s64)min_u64(vm->used, MAX_INTERVAL) << LAG_ONE_SHIFT;

		if (!vm->params.id)
			continue;
		vm->lag -= ran;
		total += ran;
	}
	if (!total)
		return 0;
	distribute(c, 0, total);
	each(i, c->n)
		limit_row(c, i);
	return 0;
}

/* Updates the row's membership, and limits the credit of a VM that sleeps. */
__subprog int update_member_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 most = vm->credit;
	u32 full;

	if (!vm->params.id)
		return 0;
	if (vm->ready) {
		if (vm->slept && vm->rank != CAPPED)
			limit_credit(c, i, vm->credit);
		set_member(c, vm, 1);
		return 0;
	}
	if (vm->capped)
		most = vm->params.ls ? 0 : (s64)c->batch_slice;
	full = lag_ns(vm) >= most;
	if (full)
		limit_credit(c, i, most);
	set_member(c, vm, !full && (c->batch_ready || vm->capped));
	return 0;
}

__subprog int update_members(struct slices *c __arg_nonnull)
{
	u32 i;

	c->contenders = 0;
	c->batch_ready = 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		vm->slept = !vm->ready;
		vm->ready = vm->runnable && !vm->capped;
		c->contenders += vm->ready;
		c->batch_ready |= vm->ready && !vm->params.ls;
	}
	each(i, c->n)
		update_member_row(c, i);
	return 0;
}

/* Returns whether the VM wants a turn at rank BOOST. */
__subprog int boost_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 lag = lag_ns(vm), near = margin(vm->micro);
	u32 queued;

	if (!vm->params.id || !vm->params.ls)
		return 0;
	vm->stop_lag = lag_after(c, vm, vm->micro);
	vm->boosted = lag >= -near || (vm->boosted && (is_alone(c, vm) || lag > vm->stop_lag + near));
	queued = vm->boosted && vm->ready;
	if (queued && !vm->queued)
		vm->ticket = ++c->tickets;
	vm->queued = queued;
	return queued;
}

__subprog int pass_boost_turn(struct slices *c __arg_nonnull)
{
	u32 i, holder = c->turn, others = 0;
	u64 first = FOREVER;

	if (holder < ROWS)
		c->turn_left -= (s64)row_at(c, holder)->used;
	each(i, c->n)
		others |= boost_row(c, i) && i != holder;
	if (holder < ROWS) {
		struct vm_row *vm = row_at(c, holder);

		if (vm->queued) {
			if (c->turn_left > margin(vm->micro))
				return 0;
			vm->ticket = ++c->tickets;
			if (!others) {
				c->turn_left = (s64)vm->micro;
				return 0;
			}
		}
	}
	c->turn = NOBODY;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->queued && vm->ticket < first) {
			first = vm->ticket;
			c->turn = i;
			c->turn_left = (s64)vm->micro;
		}
	}
	return 0;
}

/* Updates the time that a batch VM may run before its turn. Returns whether it must wait for its turn. */
__subprog int owner_row(struct slices *c __arg_nonnull, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 lag;

	if (!vm->params.id || vm->params.ls)
		return 0;
	if (vm->ready) {
		vm->preempt_left = max_s64(vm->preempt_left - (s64)vm->used, 0);
		return vm->preempt_left == 0;
	}
	lag = lag_ns(vm);
	if (lag >= 0)
		vm->preempt_left = max_s64(lag, MIN_PREEMPT_RUN);
	else if (lag < -MIN_PREEMPT_RUN)
		vm->preempt_left = 0;
	return 0;
}

__inline_fn u32 owns_before(const struct slices *c, const struct vm_row *a, const struct vm_row *b)
{
	return c->batch_ready ? is_served_before(a, b, c->batch_slice) : is_behind(a, b);
}

/* Keeps the owner or chooses the next. */
__subprog int choose_owner(struct slices *c __arg_nonnull)
{
	u32 i, owner = c->owner;

	c->waiting = 0;
	each(i, c->n)
		c->waiting += owner_row(c, i);
	if (owner < ROWS) {
		struct vm_row *vm = row_at(c, owner);
		u64 slice = c->batch_ready ? c->batch_slice : vm->micro;

		c->owner_left -= (s64)vm->used;
		if (vm->ready && (!vm->params.ls || (!c->batch_ready && c->turn >= ROWS)) &&
		    (c->owner_left > margin(slice) || c->contenders <= 1))
			return 0;
	}
	c->owner = owner = NOBODY;
	if (c->contenders <= 1 || (!c->batch_ready && c->turn < ROWS)) {
		c->owner_left = 0;
		return 0;
	}
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);
		u32 can = vm->ready && (c->batch_ready ? !vm->params.ls && vm->preempt_left == 0 : vm->params.ls);

		if (vm->params.id && can && (owner >= ROWS || owns_before(c, vm, row_at(c, owner))))
			owner = i;
	}
	c->owner = owner;
	c->owner_left = 0;
	if (owner < ROWS)
		c->owner_left = (s64)(c->batch_ready ? c->batch_slice : row_at(c, owner)->micro);
	return 0;
}

__subprog int rank_of(const struct slices *c __arg_nonnull, u32 i)
{
	const struct vm_row *vm = const_row_at(c, i);

	if (vm->capped)
		return CAPPED;
	if (vm->params.ls) {
		if (vm->boosted)
			return !vm->ready || c->turn == i ? BOOST : PREEMPT;
		return c->owner == i ? OWNER : BACKGROUND;
	}
	if (c->owner == i)
		return c->waiting > 1 || vm->rank == OWNER ? OWNER : WAITING;
	if (vm->preempt_left > 0)
		return PREEMPT;
	if (c->contenders <= 1 && vm->ready && (vm->rank == OWNER || vm->rank == PREEMPT))
		return vm->rank;
	return WAITING;
}

__inline_fn u64 to_budget(s64 ns)
{
	return (u64)max_s64(ns, (s64)MIN_BUDGET);
}

__subprog u64 budget_of(const struct slices *c __arg_nonnull, u32 i)
{
	const struct vm_row *vm = const_row_at(c, i);
	u64 ns;

	if (c->contenders <= 1 && vm->ready) {
		ns = FOREVER;
	} else if (vm->params.ls) {
		s64 turn = c->turn == i ? c->turn_left : (s64)vm->micro;

		if (vm->rank == OWNER) {
			ns = to_budget(c->owner_left);
		} else if (vm->rank == BOOST) {
			ns = run_down(c, vm);
			if (ns == FOREVER)
				ns = to_budget(max_s64(lag_ns(vm), 0) + (s64)vm->micro);
			else
				ns = to_budget(c->n_ls > 1 ? min_s64((s64)ns, turn) : (s64)ns);
		} else {
			ns = to_budget(turn);
		}
	} else {
		ns = c->owner == i ? to_budget(c->owner_left) :
		     vm->rank == PREEMPT ? to_budget(vm->preempt_left) : c->batch_slice;
		ns = min_u64(ns, c->wake_budget);
	}
	return vm->quota ? min_u64(ns, (u64)max_s64(vm->left, 0)) : ns;
}

/* While no VMs compete, no step is scheduled for the return of a latency-sensitive VM in BACKGROUND; this budget bounds the delay. */
__inline_fn u64 wake_budget_of(struct slices *c)
{
	u64 least = FOREVER, share;
	u32 i;

	if (c->contenders > 1)
		return FOREVER;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->params.ls && !vm->boosted)
			least = min_u64(least, vm->micro);
	}
	if (least == FOREVER)
		return FOREVER;
	share = least / (c->vms > c->n_ls ? c->vms - c->n_ls : 1);
	return share > MIN_MICROSLICE ? share : MIN_MICROSLICE;
}

/* Fills in the VM's part of the decision; returns its rank. */
__subprog int fill_row(struct slices *c __arg_nonnull, u32 i, u64 now)
{
	struct vm_row *vm = row_at(c, i);
	u64 back;

	vm->rank = rank_of(c, i);
	vm->budget = budget_of(c, i);
	if (vm->rank == CAPPED) {
		c->until = min_u64(c->until, cap_refill_at(c, vm));
		return CAPPED;
	}
	if (c->contenders > 1 && vm->params.ls) {
		if (!vm->boosted && vm->member && c->owner != i) {
			back = time_to_zero(c, vm);
			c->until = min_u64(c->until, add_time(now, back > MIN_BUDGET ? back : MIN_BUDGET));
		}
		c->notify_block |= vm->rank == PREEMPT;
	}
	return vm->rank;
}

__subprog int fill_decision(struct slices *c __arg_nonnull, u64 now)
{
	u32 i, rank, running = CAPPED, lowest_asleep = BOOST;

	c->wake_budget = wake_budget_of(c);
	c->until = FOREVER;
	c->notify_block = 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		rank = fill_row(c, i, now);
		if (rank == CAPPED)
			continue;
		if (vm->ready)
			running = rank > running ? rank : running;
		else
			lowest_asleep = rank < lowest_asleep ? rank : lowest_asleep;
	}
	c->notify_wake = c->contenders == 1 && c->vms > 1 && lowest_asleep <= running;
	return 0;
}

/* The default algorithm's decision. */
__inline_fn void interleaved_decide(struct slices *c, u64 now)
{
	account(c, now);
	update_members(c);
	pass_boost_turn(c);
	choose_owner(c);
	fill_decision(c, now);
}

#endif

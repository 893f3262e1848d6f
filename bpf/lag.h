/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The ledger of lags: policy's slices/lag.rs.
 *
 * BPF has no signed division: floor_div divides unsigned numbers, is_greater compares products.
 */
#ifndef VIOLA_LAG_H
#define VIOLA_LAG_H

#include "slices_types.h"

__inline_fn s64 lag_ns(const struct vm_row *vm)
{
	return vm->lag >> LAG_ONE_SHIFT;
}

/* Distributes amount to the members of a pool by weight, or keeps it while the pool has none. */
__subprog int distribute(struct slices *c __arg_nonnull, u32 pool, s64 amount)
{
	struct pool *p = &c->pools[pool & 1];
	s64 each_one;
	u32 i;

	amount += p->remainder;
	if (p->weight <= 0) {
		p->remainder = amount;
		return 0;
	}
	each_one = floor_div(amount, p->weight);
	p->remainder = amount - each_one * p->weight;
	if (!each_one)
		return 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->member && vm->pool == pool)
			vm->lag += vm->weight * each_one;
	}
	return 0;
}

__inline_fn void set_member(struct slices *c, struct vm_row *vm, u32 member)
{
	if (vm->member == member)
		return;
	vm->member = member;
	if (member)
		pool_of(c, vm)->weight += vm->weight;
	else
		pool_of(c, vm)->weight -= vm->weight;
}

/* Sets the VM's lag to ns; the other members get the difference. */
__subprog int set_lag(struct slices *c __arg_nonnull, u32 i, s64 ns)
{
	struct vm_row *vm = row_at(c, i);
	s64 to = ns * (1LL << LAG_ONE_SHIFT), was = vm->lag;
	u32 member = vm->member;

	set_member(c, vm, 0);
	vm->lag = to;
	distribute(c, vm->pool, was - to);
	set_member(c, vm, member);
	return 0;
}

__inline_fn void limit_credit(struct slices *c, u32 i, s64 most)
{
	if (row_at(c, i)->lag > most * (1LL << LAG_ONE_SHIFT))
		set_lag(c, i, most);
}

__inline_fn void limit_debt(struct slices *c, u32 i, s64 least)
{
	if (row_at(c, i)->lag < least * (1LL << LAG_ONE_SHIFT))
		set_lag(c, i, least);
}

/* Whether lag_a/weight_a > lag_b/weight_b. Compares products of 64 and 16 bits. */
__inline_fn u32 is_greater(s64 lag_a, u32 weight_a, s64 lag_b, u32 weight_b)
{
	u64 low_a = (u64)(u32)lag_a * (u64)weight_b, low_b = (u64)(u32)lag_b * (u64)weight_a;
	s64 high_a = (lag_a >> 32) * (s64)weight_b + (s64)(low_a >> 32);
	s64 high_b = (lag_b >> 32) * (s64)weight_a + (s64)(low_b >> 32);

	if (high_a != high_b)
		return high_a > high_b;
	return (u32)low_a > (u32)low_b;
}

/* Whether VM a has had less service for its weight than b. */
__inline_fn u32 is_behind(const struct vm_row *a, const struct vm_row *b)
{
	return is_greater(a->lag, (u32)a->weight, b->lag, (u32)b->weight);
}

/* Whether VM a is served before b by EEVDF: VMs with a lag of at least 0 first, then the earlier virtual deadline. */
__inline_fn u32 is_served_before(const struct vm_row *a, const struct vm_row *b, u64 slice)
{
	s64 length = (s64)slice << LAG_ONE_SHIFT;

	if ((a->lag >= 0) != (b->lag >= 0))
		return a->lag >= 0;
	return is_greater(a->lag - length, (u32)a->weight, b->lag - length, (u32)b->weight);
}

/* Weight of the members and the VM. */
__inline_fn u64 weight_with(const struct slices *c, const struct vm_row *vm)
{
	return c->pools[vm->pool & 1].weight + (vm->member ? 0 : vm->weight);
}

__inline_fn u32 is_alone(const struct slices *c, const struct vm_row *vm)
{
	return weight_with(c, vm) == (u64)vm->weight;
}

/* The lag of a VM that starts at 0 and runs for ns. */
__inline_fn s64 lag_after(const struct slices *c, const struct vm_row *vm, u64 ns)
{
	u64 all = weight_with(c, vm);

	if (!all)
		return 0;
	return -(s64)(min_u64(ns, MAX_SCALED) * (all - vm->weight) / all);
}

/* How long the VM runs until it reaches its stop_lag; FOREVER when alone. */
__inline_fn u64 run_down(const struct slices *c, const struct vm_row *vm)
{
	u64 all = weight_with(c, vm), others = all - vm->weight;
	s64 down = lag_ns(vm) - vm->stop_lag;

	if (!others)
		return FOREVER;
	return (u64)min_s64(max_s64(down, 0), MAX_SCALED) * all / others;
}

/* How long the others must run until the VM's lag is 0. */
__inline_fn u64 time_to_zero(const struct slices *c, const struct vm_row *vm)
{
	u64 missing;

	if (vm->lag >= 0 || vm->weight <= 0)
		return 0;
	missing = (u64)min_s64(-vm->lag, MAX_SCALED);
	return missing * weight_with(c, vm) / ((u64)vm->weight << LAG_ONE_SHIFT) + 1;
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The algorithms of crates/policy once more for the kernel, in plain C without a call to the kernel.
 *
 * slices_types.h: constants and the state of a core. lag.h, caps.h: the ledger and the caps. interleaved.h: the default algorithm.
 * turbo.h: the cores of vTurbo's two pools. This file: how a core gets its VMs.
 *
 * A test of crates/sched replays random histories through this copy and through policy; where they differ one of them is wrong. The
 * reasons behind the algorithms stand in policy. Two things differ: a VM keeps its row as long as it is on the core, so rows may be
 * vacant; and this copy does not see packets (policy's Io::Unknown).
 */
#ifndef VIOLA_SLICES_H
#define VIOLA_SLICES_H

#include "interleaved.h"

/* Sets the parameters of row i. Rows of VMs that left have id 0. */
__inline_fn void slices_set_row(struct slices *c, u32 i, const struct vm_params *params, u64 now)
{
	struct vm_row *vm = row_at(c, i);
	u32 ls = params->ls != 0, cap = params->cap_permille, same = vm->params.id == params->id;

	/* On a turbo core a VM's vCPU is in one of the two pools, and starts anew when it changes the pool. */
	if (!same || (c->kind == TURBO && vm->params.ls != ls)) {
		vm->lag = 0;
		vm->lag_before = 0;
		vm->stop_lag = 0;
		vm->preempt_left = 0;
		vm->ticket = 0;
		vm->quota = 0;
		vm->left = 0;
		vm->permille = 0;
		vm->capped = 0;
		vm->member = 0;
		vm->ready = 0;
		vm->slept = 1;
		vm->boosted = 0;
		vm->queued = 0;
		vm->rank = WAITING;
		vm->used = 0;
		vm->runnable = 0;
		vm->paid = 0;
		vm->total = 0;
		vm->due = 0;
		vm->since = now;
		vm->position = BEHIND;
		if (c->pools[0].owner == i)
			c->pools[0].owner = NOBODY;
		if (c->pools[1].owner == i)
			c->pools[1].owner = NOBODY;
	}
	if (!same || vm->params.ls != ls) {
		vm->boosted = 0;
		vm->queued = 0;
		if (c->kind == INTERLEAVED)
			vm->preempt_left = 0;
		if (c->owner == i)
			c->owner = NOBODY;
		if (c->turn == i)
			c->turn = NOBODY;
	}
	vm->params = *params;
	vm->params.ls = ls;
	vm->pool = c->kind == TURBO && !ls;
	if (!params->id)
		return;
	vm->weight = params->weight < 1 ? 1 : params->weight > 65535 ? 65535 : params->weight;
	vm->micro = min_u64(params->microslice > MIN_MICROSLICE ? params->microslice : MIN_MICROSLICE, 1000 * MS);
	vm->credit = (s64)(ls ? (c->credit_ls > vm->micro ? c->credit_ls : vm->micro) : c->credit_batch);
	vm->slice = c->batch_slice;
	if (c->kind == TURBO && ls)
		vm->slice = min_u64(params->microslice > MIN_SLOT ? params->microslice : MIN_SLOT, MAX_SLOT);
	vm->floor_since = now;
	vm->floor_left = 0;
	vm->reserve_left = RESERVE_MAX_SAVED;
	vm->held = 0;
	vm->held_since = 0;
	vm->ran = 0;
	vm->regular_waits = 0;
	vm->due_known = 0;
	vm->moderated = 0;
	/* A cap of a whole core limits only a VM that runs on several cores. */
	set_cap(vm, c->kind == INTERLEAVED && cap >= 1000 ? 0 : cap < MAX_CAP ? cap : MAX_CAP);
	if (vm->member)
		pool_of(c, vm)->weight += vm->weight;
	pool_of(c, vm)->vms++;
	c->credit_sum += vm->credit;
	c->vms++;
	c->n_ls += ls;
	c->n = i + 1;
}

__inline_fn void pool_begin(struct pool *p, u32 first)
{
	p->weight = 0;
	p->remainder = 0;
	p->vms = 0;
	p->needs_wake = 0;
	if (!first)
		return;
	p->owner = NOBODY;
	p->owner_left = 0;
	p->contenders = 0;
}

/* Call before slices_set_row for every row; slices_end after it. */
__inline_fn void slices_begin(struct slices *c, u32 kind, u64 batch_slice, u64 credit_ls, u64 credit_batch, u32 reserve)
{
	u64 slice = batch_slice ? batch_slice : 4 * MS;
	u32 i, first = !c->batch_slice || c->kind != kind;

	if (first) {
		/* Another algorithm starts without history. */
		each(i, ROWS) {
			row_at(c, i)->params.id = 0;
		}
		c->owner = NOBODY;
		c->turn = NOBODY;
		c->wake_budget = FOREVER;
		c->window_next = 0;
		c->floor_next = 0;
		c->tickets = 0;
		c->owner_left = 0;
		c->turn_left = 0;
		c->contenders = 0;
		c->batch_ready = 0;
	}
	c->kind = kind;
	c->reserve = reserve < 1000 ? reserve : 1000;
	c->batch_slice = min_u64(slice > 100 * US ? slice : 100 * US, 1000 * MS);
	c->credit_ls = min_u64(credit_ls, 100 * MS);
	c->credit_batch = min_u64(credit_batch > (u64)MIN_PREEMPT_RUN ? credit_batch : (u64)MIN_PREEMPT_RUN, 100 * MS);
	pool_begin(&c->pools[0], first);
	pool_begin(&c->pools[1], first);
	c->credit_sum = 0;
	c->vms = 0;
	c->n_ls = 0;
	c->n = 0;
}

__inline_fn void pool_end(struct slices *c, struct pool *p)
{
	if (p->owner < ROWS)
		p->owner_left = min_s64(p->owner_left, (s64)row_at(c, p->owner)->slice);
}

__inline_fn void slices_end(struct slices *c)
{
	c->owner_left = min_s64(c->owner_left, (s64)c->batch_slice);
	pool_end(c, &c->pools[0]);
	pool_end(c, &c->pools[1]);
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the cores of vTurbo's two pools tell each other of their VMs, through the map vm_totals.
 */
#ifndef VIOLA_SCX_POOL_H
#define VIOLA_SCX_POOL_H

#include "scx_state.h"

/* Withdraws what this core published of a row. */
__subprog int withdraw_wait(struct core *c __arg_nonnull, u32 row)
{
	struct exchange *x = exchange_at(c, row);
	struct vm_total *t = total_of(row_at(&c->machine, row)->params.id & (VM_IDS - 1));

	if (t && x->published_wait)
		__sync_fetch_and_add(&t->waits, -1);
	x->published_wait = 0;
	return 0;
}

/* Starts the exchange anew: the cores that count, and this core's part of a VM's turbo time, may have changed. */
__subprog int reset_exchange(struct core *c __arg_nonnull, u32 row)
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
	x->remainder = 0;
	x->published_due = vm->due;
	return 0;
}

static __always_inline u64 sub_time(u64 a, u64 b)
{
	return a > b ? a - b : 0;
}

/* Reads what the VM of a row ran on other cores and was due there since the last reading. */
__subprog int read_totals(struct core *c __arg_nonnull, u32 row)
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
	part = min_u64(sub_time(turbo - x->turbo, c->machine.kind == TURBO ? x->here : 0), MAX_SCALED);
	if (vm->params.of) {
		part = part * (vm->params.here < vm->params.of ? vm->params.here : vm->params.of) + x->remainder;
		x->remainder = part % vm->params.of;
		part /= vm->params.of;
	} else {
		part = 0;
	}
	slices_add_other_cores(&c->machine, row, part, sub_time(all - x->all, x->here), due - x->due, t->waits > 0);
	x->all = all;
	x->turbo = turbo;
	x->due = due;
	x->here = 0;
	return 0;
}

/* Publishes what the VM of a row is due on this regular core, for the turbo cores. */
__subprog int publish_due(struct core *c __arg_nonnull, u32 row)
{
	struct exchange *x = exchange_at(c, row);
	struct vm_row *vm = row_at(&c->machine, row);
	struct vm_total *t = total_of(vm->params.id & (VM_IDS - 1));
	u64 waits = slices_waits(&c->machine, vm);

	if (!t || !vm->params.id)
		return 0;
	if (vm->due != x->published_due)
		__sync_fetch_and_add(&t->due, vm->due - x->published_due);
	x->published_due = vm->due;
	if (waits && !x->published_wait)
		__sync_fetch_and_add(&t->waits, 1);
	else if (!waits && x->published_wait)
		__sync_fetch_and_add(&t->waits, -1);
	x->published_wait = waits;
	return 0;
}

#endif

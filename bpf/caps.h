/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Caps: policy's slices/caps.rs.
 */
#ifndef VIOLA_CAPS_H
#define VIOLA_CAPS_H

#include "slices_types.h"

/* Number of windows that have started since the last call. */
__inline_fn u64 roll_windows(struct slices *c, u64 now)
{
	u64 begun;

	if (!c->window_next)
		c->window_next = now + CAP_WINDOW;
	if (now < c->window_next)
		return 0;
	begun = 1 + (now - c->window_next) / CAP_WINDOW;
	c->window_next += begun * CAP_WINDOW;
	return begun;
}

__inline_fn s64 resume_quota(const struct vm_row *vm)
{
	return max_s64((s64)((u64)vm->quota / 2), MIN_CAPPED_RUN);
}

__inline_fn s64 max_left(const struct vm_row *vm)
{
	return (1 + CARRIED_QUOTAS) * max_s64(vm->quota, MIN_CAPPED_RUN);
}

/* Sets the cap of a VM, thousandths of a core; 0: none. */
__inline_fn void set_cap(struct vm_row *vm, u32 permille)
{
	u32 first = vm->quota == 0;

	if (permille == vm->permille)
		return;
	vm->permille = permille;
	if (!permille) {
		vm->quota = 0;
		vm->left = 0;
		vm->capped = 0;
		return;
	}
	vm->quota = (s64)(CAP_WINDOW * permille / 1000);
	vm->left = first ? vm->quota : min_s64(vm->left, max_left(vm));
}

__inline_fn void charge_cap(struct vm_row *vm, u64 used, u64 begun)
{
	if (!vm->quota)
		return;
	vm->left -= (s64)min_u64(used, MAX_INTERVAL);
	if (begun)
		vm->left = min_s64(vm->left + vm->quota * (s64)min_u64(begun, 1 << 20), max_left(vm));
	if (vm->capped)
		vm->capped = vm->left < resume_quota(vm);
	else
		vm->capped = vm->left <= (s64)((u64)vm->quota / 64);
}

__inline_fn u64 cap_refill_at(const struct slices *c, const struct vm_row *vm)
{
	s64 missing = max_s64(resume_quota(vm) - vm->left, 1);

	if (!vm->capped || !vm->quota)
		return FOREVER;
	return c->window_next + (((u64)missing + vm->quota - 1) / (u64)vm->quota - 1) * CAP_WINDOW;
}

#endif

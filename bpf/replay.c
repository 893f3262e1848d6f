/* SPDX-License-Identifier: GPL-2.0-only */
/* bpf/slices.h as a library, for a test that compares it with policy. */
#include "types.h"
#include "slices.h"

static struct slices machine;

void replay_reset(void)
{
	machine = (struct slices){};
}

void replay_configure(u64 batch_slice, u64 credit_ls, u64 credit_batch, const struct vm_params *vms)
{
	u32 i;

	slices_begin(&machine, batch_slice, credit_ls, credit_batch);
	for (i = 0; i < ROWS; i++)
		slices_take(&machine, i, &vms[i]);
	slices_end(&machine);
}

/* used, runnable, ranks and budgets have ROWS entries; notify two. Returns until. */
u64 replay_decide(u64 now, const u64 *used, const u32 *runnable, u32 *ranks, u64 *budgets, u32 *notify)
{
	u32 i;

	for (i = 0; i < machine.n; i++) {
		machine.rows[i].used = machine.rows[i].params.id ? used[i] : 0;
		machine.rows[i].runnable = runnable[i];
	}
	slices_decide(&machine, now);
	for (i = 0; i < machine.n; i++) {
		ranks[i] = machine.rows[i].rank;
		budgets[i] = machine.rows[i].budget;
	}
	notify[0] = machine.notify_wake;
	notify[1] = machine.notify_block;
	return machine.until;
}

/* SPDX-License-Identifier: GPL-2.0-only */
/* bpf/slices.h and bpf/turbo.h as a library, for the test that compares them with policy. */
#include "types.h"
#include "turbo.h"

static struct slices machine;

void replay_reset(void)
{
	machine = (struct slices){};
}

void replay_configure(u64 now, u32 kind, u64 batch_slice, u64 credit_ls, u64 credit_batch, u32 reserve,
		      const struct vm_params *vms)
{
	u32 i;

	slices_begin(&machine, kind, batch_slice, credit_ls, credit_batch, reserve);
	for (i = 0; i < ROWS; i++)
		slices_set_row(&machine, i, &vms[i], now);
	slices_end(&machine);
}

/* Reports what the VM of a row ran on other cores. */
void replay_add_other_cores(u32 row, u64 turbo, u64 total, u64 due, u32 waits)
{
	slices_add_other_cores(&machine, row, turbo, total, due, waits);
}

/* All time that the VM of a row was ever due. */
u64 replay_due(u32 row, u32 *waits)
{
	*waits = slices_waits(&machine, &machine.rows[row]);
	return machine.rows[row].due;
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

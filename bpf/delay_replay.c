/* SPDX-License-Identifier: GPL-2.0-only */
/* bpf/delay.h as a library, for the test that compares it with a list of all packets. */
#include "delay.h"

void replay_packet(struct vm_delay *d, u64 now)
{
	if (delay_packet(d, now))
		delay_drain(d, now);
}

void replay_wake(struct vm_delay *d, u64 now)
{
	delay_wake(d, now);
}

void replay_run(struct vm_delay *d, u64 now)
{
	if (delay_run(d))
		delay_drain(d, now);
}

void replay_stop(struct vm_delay *d, u32 sleeps)
{
	__sync_fetch_and_add(&d->running, -1);
	if (sleeps)
		__sync_fetch_and_add(&d->runnable, -1);
}

u32 replay_bucket(u64 ns)
{
	return bucket(ns);
}

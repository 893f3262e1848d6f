/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Delays: how long a packet for a VM, or an interrupt that wakes the VM, waits until one of the VM's vCPUs runs.
 *
 * A packet that comes while a vCPU runs has delay 0. Other packets wait until the next switch to a vCPU of the VM, and each one
 * counts with its own wait. Their arrivals are kept as a row of DELAY_STEPS counts: step i has the packets that came i steps after
 * the oldest one that waits. When the row is full, its steps become wider, at most 1/16 of the time since the oldest arrival. So a
 * packet counts as at most 1/16 of the oldest packet's wait too long, never as too short, and a packet that waits alone counts
 * exactly.
 *
 * Packets and switches happen on several CPUs at once. There is no lock: each count moves by an atomic exchange, so that no packet
 * counts twice or is lost. Packets that come within the same fraction of a microsecond as a switch, or as a widening of the steps,
 * may count as up to one step longer or shorter.
 *
 * A test compiles this file and compares it with a list of all packets.
 */
#ifndef VIOLA_DELAY_H
#define VIOLA_DELAY_H

#include "hist.h"

/* The shortest step: 2^12 ns, so that the row first covers 131 us. */
#define MIN_STEP_SHIFT 12

/* A vCPU runs: the wait of the wake-up and of the packets ends now. */
static __always_inline void delay_drain(struct vm_delay *d, u64 now)
{
	u32 shift = d->shift & 63, i, n;
	u64 oldest = __sync_lock_test_and_set(&d->oldest, 0);
	u64 waited = oldest && now > oldest ? now - oldest : 0;
	u64 woken = d->woken ? __sync_lock_test_and_set(&d->woken, 0) : 0;

	if (woken)
		hist_add(&d->wakes, now > woken ? now - woken : 0, 1);
	for (i = 0; i < DELAY_STEPS; i++) {
		u64 later = (u64)i << shift;

		if (!d->steps[i])
			continue;
		n = __sync_lock_test_and_set(&d->steps[i], 0);
		if (n)
			hist_add(&d->packets, waited > later ? waited - later : 0, n);
	}
}

/* Widens the steps so that the row covers `since` ns. Returns the new shift. */
static __always_inline u32 delay_widen(struct vm_delay *d, u32 shift, u64 since)
{
	u32 wide = highest_bit(since) - 4, by, to, i, n;

	/* Another CPU has widened them. */
	if (__sync_val_compare_and_swap(&d->shift, shift, wide) != shift)
		return d->shift;
	by = wide - shift;
	if (by > 31)
		by = 31;
	for (i = 1; i < DELAY_STEPS; i++) {
		if (!d->steps[i])
			continue;
		n = __sync_lock_test_and_set(&d->steps[i], 0);
		to = i >> by;
		barrier_var(to);
		to &= DELAY_STEPS - 1;
		__sync_fetch_and_add(&d->steps[to], n);
	}
	return wide;
}

/* A packet came. Returns 1 when the caller must call delay_drain, since a vCPU began to run meanwhile. */
static __always_inline int delay_packet(struct vm_delay *d, u64 now)
{
	u64 oldest, since, i;
	u32 shift, before;

	if (d->running > 0) {
		__sync_fetch_and_add(&d->packets.counts[0], 1);
		return 0;
	}
	oldest = d->oldest;
	if (!oldest) {
		d->shift = MIN_STEP_SHIFT;
		d->oldest = oldest = now;
	}
	since = now > oldest ? now - oldest : 0;
	shift = d->shift & 63;
	if (since >> shift >= DELAY_STEPS)
		shift = delay_widen(d, shift, since) & 63;
	i = since >> shift;
	if (i >= DELAY_STEPS)
		i = DELAY_STEPS - 1;
	barrier_var(i);
	i &= DELAY_STEPS - 1;
	/* An addition whose result is used is a full barrier, here and in delay_run: either this packet sees the vCPU, or the vCPU
	 * sees the packet. */
	before = __sync_fetch_and_add(&d->steps[i], 1);
	barrier_var(before);
	return d->running > 0;
}

/* A vCPU thread woke. It is an interrupt for the VM if no vCPU of the VM ran or waited. */
static __always_inline void delay_wake(struct vm_delay *d, u64 now)
{
	if (__sync_fetch_and_add(&d->runnable, 1) <= 0)
		d->woken = now;
}

/* A vCPU thread begins to run. Returns 1 when the caller must call delay_drain, since something waited for it. */
static __always_inline int delay_run(struct vm_delay *d)
{
	s32 before = __sync_fetch_and_add(&d->running, 1);

	barrier_var(before);
	return d->oldest || d->woken;
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/* Histograms of times: four buckets an octave from 2^10 ns on (crates/meter/src/acct/layout.rs has their bounds). */
#ifndef VIOLA_HIST_H
#define VIOLA_HIST_H

#include "types.h"
#include "acct.h"

#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

/* Index of the highest bit set, 0 for 0. */
__subprog u32 highest_bit(u64 v)
{
	u32 r = 0;

	if (v >> 32) { v >>= 32; r += 32; }
	if (v >> 16) { v >>= 16; r += 16; }
	if (v >> 8) { v >>= 8; r += 8; }
	if (v >> 4) { v >>= 4; r += 4; }
	if (v >> 2) { v >>= 2; r += 2; }
	if (v >> 1) r += 1;
	return r;
}

__subprog u32 bucket(u64 ns)
{
	u32 octave, b;

	if (ns < 1024)
		return 0;
	octave = highest_bit(ns);
	b = (octave - 10) * 4 + ((ns >> (octave - 2)) & 3);
	return b < HIST_BUCKETS ? b : HIST_BUCKETS - 1;
}

/* Adds n times of ns each. */
static __always_inline void hist_add(struct hist *h, u64 ns, u32 n)
{
	u32 b = bucket(ns);

	barrier_var(b);
	if (b >= HIST_BUCKETS)
		return;
	__sync_fetch_and_add(&h->counts[b], n);
	__sync_fetch_and_add(&h->sums[b], ns * n);
}

#endif

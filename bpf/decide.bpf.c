/* SPDX-License-Identifier: GPL-2.0-only */
/* The algorithm alone, for a test of what the verifier must examine, on kernels without sched_ext too. */
#include "types.h"

enum { BPF_MAP_TYPE_ARRAY = 2 };

#include <bpf/bpf_helpers.h>

#include "turbo.h"

char LICENSE[] SEC("license") = "GPL";

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct slices);
} machines SEC(".maps");

/* Decides by the algorithm of a turbo core if the VM has regular vCPUs, else by the default one. */
SEC("syscall")
int decide(struct vm_params *params)
{
	u32 zero = 0;
	struct slices *c = bpf_map_lookup_elem(&machines, &zero);
	u64 now = bpf_ktime_get_ns();

	if (!c)
		return 0;
	slices_begin(c, params->of ? TURBO : INTERLEAVED, 4 * MS, 3 * MS, MS, 400);
	slices_set_row(c, 0, params, now);
	slices_end(c);
	row_at(c, 0)->runnable = 1;
	slices_add_other_cores(c, 0, 0, 0, 0, 0);
	slices_decide(c, now);
	return row_at(c, 0)->rank;
}

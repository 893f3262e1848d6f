/* SPDX-License-Identifier: GPL-2.0-only */
/* Structures shared by scx.bpf.c and its loader (crates/sched/src/scx). Times are nanoseconds of CLOCK_MONOTONIC. */
#ifndef VIOLA_SCX_H
#define VIOLA_SCX_H

#include "turbo.h"

#define VM_IDS 256		/* VMs on one host: ids 1..=VM_IDS-1 */

/* The plan of a core. The daemon writes the one of two that is not in use, then increments the core's sequence number, whose lowest bit
 * selects the plan. */
struct core_plan {
	u64 batch_slice;
	u32 kind;		/* enum kind */
	u32 reserve;		/* on a turbo core: part of its share that a VM keeps for its regular vCPUs, thousandths */
	struct vm_params vms[ROWS];
};

/* What a VM ran on all cores of both pools; entry id. Only differences have a meaning. */
struct vm_total {
	u64 all;		/* ran */
	u64 turbo;		/* of that on turbo cores */
	u64 due;		/* was due on regular cores */
	u64 waits;		/* number of regular cores on which it waits for others */
};

/* What a VM used of one core; entry cpu * ROWS + row. */
struct vm_stats {
	u32 id;
	u32 runnable;		/* threads that run or wait */
	u64 run;		/* ran */
	u64 turns;		/* context switches to it */
	u64 waits;		/* waits that ended, their sum and the longest */
	u64 wait_sum;
	u64 wait_max;
	u64 boosts;		/* preempted another VM when it woke */
};

/* What scheduling cost on a core. */
struct core_stats {
	u64 decisions;
	u64 switches;		/* from one VM to another */
	u64 kicks;		/* interrupts that made the core decide */
	u64 decide_ns;		/* time spent in decisions */
	u64 late_max;		/* longest lateness of a slice's end */
	u64 starved;		/* runs given to a VM only because it had waited for starved_after */
};

/* How the scheduler ended. */
struct scx_end {
	u32 kind;		/* the kernel's scx_exit_kind; 0: it runs */
	u32 pad;
	char reason[128];
	char message[256];
};

/* Argument of the "enrol" program. */
struct scx_enrol {
	u32 tid;
	u32 id;			/* VM; 0: none */
	u32 service;		/* runs before the vCPUs of its VM */
};

/* Knobs; fixed once the scheduler is loaded. */
struct scx_knobs {
	/* Most service that a sleeping latency-sensitive VM is owed. More lets it answer longer bursts at once, and makes others wait longer. */
	u64 credit_ls;
	/* The same for other VMs. */
	u64 credit_batch;
	/* Longest run of a vCPU while another vCPU of its VM waits on the same core. */
	u64 vcpu_turn;
	/* Head start of a VM's service threads over its vCPUs. They queue by time, so none starves. */
	u64 service_start;
	/* A VM that has waited for this time runs next for starved_turn, whatever its weight. The kernel ends a scheduler that lets a
	 * thread wait for 5 s. */
	u64 starved_after;
	u64 starved_turn;
	/* For tests: this VM never runs, so that the kernel's watchdog fires. */
	u32 starve_id;
	/* For tests: slices end at the tick, not by timer. */
	u32 no_timer;
	/* Possible CPUs. */
	u32 cpus;
	u32 pad;
};

#endif

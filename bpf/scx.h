/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shapes shared by scx.bpf.c and its loader (crates/sched/src/scx). Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef VIOLA_SCX_H
#define VIOLA_SCX_H

#include "turbo.h"

#define VM_IDS 256		/* VMs on one host: ids 1..=VM_IDS-1 */

/* The controls of a core, as the daemon wants them. It writes the one of two that is not in use, then counts the
 * core's number up, whose lowest bit says which one holds. */
struct core_plan {
	u64 batch_slice;
	u32 kind;		/* enum kind */
	u32 reserve;		/* on a turbo core: what a VM keeps for its regular vCPUs, thousandths */
	struct vm_params vms[ROWS];
};

/* What a VM did on all cores of both pools; entry id. Only differences mean anything. */
struct vm_total {
	u64 all;		/* ran */
	u64 turbo;		/* of that on turbo cores */
	u64 due;		/* was due on regular cores */
	u64 waits;		/* regular cores on which it wants to run while others do */
};

/* What a VM got on one core; entry cpu * ROWS + row. */
struct vm_stats {
	u32 id;
	u32 runnable;		/* threads that run or wait */
	u64 run;		/* ran */
	u64 turns;		/* was put on the core */
	u64 waits;		/* waits that ended, their sum and the longest */
	u64 wait_sum;
	u64 wait_max;
	u64 boosts;		/* took the core from another when it woke */
};

/* What a core's scheduling cost. */
struct core_stats {
	u64 decisions;
	u64 switches;		/* from one VM to another */
	u64 kicks;		/* interrupts that made the core decide */
	u64 decide_ns;		/* time spent in decisions */
	u64 late_max;		/* longest time by which a slice's end came late */
	u64 starved;		/* turns given only because a VM had waited so long */
};

/* How it ended. */
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
	u32 service;		/* goes before the vCPUs of its VM */
};

/* Knobs; fixed once the scheduler is loaded. */
struct scx_knobs {
	/* Most service a sleeping LSVM is owed. More: it may answer longer bursts at once; others wait longer then. */
	u64 credit_ls;
	/* The same of other VMs. */
	u64 credit_batch;
	/* How long a vCPU may run while another one of its VM waits on the same core. */
	u64 vcpu_turn;
	/* Head start of a VM's service threads before its vCPUs; they queue by time, so none waits for ever. */
	u64 service_start;
	/* A VM that waited so long runs next whatever its weight, for starved_turn. The kernel ends a scheduler that
	 * lets a thread wait for 5 s. */
	u64 starved_after;
	u64 starved_turn;
	/* Test only: this VM is never run, so that the kernel's watchdog has something to do. */
	u32 starve_id;
	/* Test only: slices end at the tick, not by timer. */
	u32 no_timer;
	/* CPUs that this machine can have. */
	u32 cpus;
	u32 pad;
};

#endif

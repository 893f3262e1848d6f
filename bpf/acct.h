/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shapes shared by acct.bpf.c and its reader (crates/meter/src/acct). Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef VIOLA_ACCT_H
#define VIOLA_ACCT_H

#define MAX_VMS 256		/* VMs on one host that are accounted per core */
#define MAX_SLOTS 2048		/* accounting slots: one per vCPU, one per VM for its service threads */
#define HIST_BUCKETS 80		/* wait histogram: 4 buckets an octave, from 1.02 us (2^10 ns) on */
#define NO_BUDGET (~0ULL)
#define NO_VM 0xffffffffu

/* Time accounting of one vCPU (all of its host threads), after XenMon: gotten, waiting, blocked. */
struct slot_acct {
	u64 run;		/* on a CPU */
	u64 wait;		/* runnable, but another ran */
	u64 wakes;		/* became runnable */
	u64 switches;		/* was put on a CPU */
	u64 preempted;		/* lost the CPU while it wanted to go on */
	u64 on_since;		/* on a CPU since then; 0: not now */
	u32 hist[HIST_BUCKETS];	/* waits by length */
};

/* One VM on one core: what the slot controller decides on. Row cpu * MAX_VMS + vm. */
struct core_vm {
	u64 used;		/* ran on this core */
	u64 on_since;		/* on this core since then; 0: not now */
	u64 budget;		/* may still run so long before the controller is called; NO_BUDGET: no limit */
	u64 wakes;		/* went from "nothing to run" to runnable */
	u32 blocks;		/* went from runnable to "nothing to run" */
	s32 runnable;		/* threads that run or wait here */
};

/* One core, written by its controller. */
struct core_ctl {
	u32 managed;		/* a controller listens */
	u32 notify_wake;	/* call it when a VM becomes runnable */
	u32 notify_block;	/* call it when the running VM blocks */
	u32 lost;		/* events that did not fit into the ring */
};

enum event_kind {
	EVENT_BUDGET = 1,	/* a VM has used its budget */
	EVENT_WAKE,
	EVENT_BLOCK,
	EVENT_FORK,		/* tid is a new thread of vm */
	EVENT_EXIT,
};

struct event {
	u32 kind;
	u32 vm;
	u32 slot;
	u32 tid;
	u64 now;
};

/* Argument of the "enrol" program. */
struct enrol_args {
	u32 tid;
	u32 vm;			/* NO_VM: forget the thread */
	u32 slot;
};

#endif

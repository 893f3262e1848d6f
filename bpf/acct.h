/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shapes shared by acct.bpf.c and its reader (crates/meter/src/acct). Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef VIOLA_ACCT_H
#define VIOLA_ACCT_H

#define MAX_VMS 1024		/* VMs on one host that are accounted per core */
#define MAX_ACCOUNTS 8192		/* accounts: one per vCPU, one per VM for its service threads */
#define HIST_BUCKETS 80		/* wait histogram: 4 buckets an octave, from 1.02 us (2^10 ns) on */
#define NO_VM 0xffffffffu

/* Time accounting of one vCPU (all of its host threads), after XenMon: gotten, waiting, blocked. */
struct account {
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
	u64 wakes;		/* went from "nothing to run" to runnable */
	u32 blocks;		/* went from runnable to "nothing to run" */
	s32 runnable;		/* threads that run or wait here */
	u32 notify_io;		/* call the controller, once, when a packet comes for this VM */
	u32 _pad;
	u64 request_at;		/* when the last packet came that may want an answer */
	u64 reply_at;	/* when it sent the last one that may be an answer */
};

/* One core, written by its controller. */
struct core_ctl {
	u32 managed;		/* a controller listens */
	u32 notify_wake;	/* call it, once, when a VM becomes runnable */
	u32 notify_block;	/* call it when the running VM blocks */
	u32 lost;		/* events that did not fit into the ring */
};

enum event_kind {
	EVENT_IO = 1,		/* a packet came for a VM that waits for the core */
	EVENT_WAKE,		/* a VM became runnable */
	EVENT_BLOCK,		/* the running VM blocked */
	EVENT_FORK,		/* tid is a new thread of vm */
};

struct event {
	u32 kind;
	u32 vm;
	u32 account;
	u32 tid;
	u64 now;
};

/* Argument of the "enrol" program. */
struct enrol_args {
	u32 tid;
	u32 vm;			/* NO_VM: forget the thread */
	u32 account;
};

/* A tap: which VM, and on which core it takes interrupts. */
struct nic_key {
	u32 ifindex;
	u32 netns;		/* inode number of its network namespace */
};

/* Which packets of an interface go to the VM: those sent to a tap, or those that arrive where the VM listens. The
 * others come from it. */
enum { PACKET_TRANSMITTED = 0, PACKET_RECEIVED = 1 };

struct nic_owner {
	u32 vm;
	u32 cpu;
	u32 to_guest;		/* PACKET_TRANSMITTED or PACKET_RECEIVED */
};

#endif

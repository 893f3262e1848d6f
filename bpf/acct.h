/* SPDX-License-Identifier: GPL-2.0-only */
/* Structures shared by acct.bpf.c and its reader (crates/meter/src/acct). Times are nanoseconds of CLOCK_MONOTONIC. */
#ifndef VIOLA_ACCT_H
#define VIOLA_ACCT_H

#define MAX_VMS 1024		/* VMs on one host that are accounted per core */
#define MAX_ACCOUNTS 8192		/* accounts: one per vCPU, one per VM for its service threads */
#define MAX_NICS 4096		/* interfaces of all VMs */
#define HIST_BUCKETS 80		/* histograms: 4 buckets an octave, from 1.02 us (2^10 ns) on */
#define DELAY_STEPS 32		/* arrivals of waiting packets, see delay.h */
#define NO_VM 0xffffffffu
#define NO_CPU 0xffffffffu

/* Times by length. All counters wrap. */
struct hist {
	u32 counts[HIST_BUCKETS];
	u64 sums[HIST_BUCKETS];	/* of the times in each bucket, ns */
};

/* The time account of one vCPU (all its host threads), after XenMon: gotten, waiting, blocked. */
struct account {
	u64 run;		/* on a CPU */
	u64 wait;		/* runnable while another thread ran */
	u64 wakes;		/* became runnable */
	u64 switches;		/* context switches to it */
	u64 preempted;		/* lost the CPU while runnable */
	u64 on_since;		/* on a CPU since then; 0: not now */
	struct hist waits;	/* that have ended */
};

/* One VM on one core, for the slot controller. Row cpu * MAX_VMS + vm. */
struct core_vm {
	u64 used;		/* ran on this core */
	u64 on_since;		/* on this core since then; 0: not now */
	u64 wakes;		/* became runnable */
	u32 blocks;		/* became not runnable */
	s32 runnable;		/* threads that run or wait here */
	u32 notify_io;		/* enum notify_io: the packet for which to send one event */
	u32 answered;		/* requests that the VM has answered, packet_counts.h */
	u64 open;		/* connections with an open request, a bit for each group */
	u64 ignored;		/* groups whose packets need no reply; the controller writes them */
	u64 request_at;		/* time of the last packet that may need a reply */
	u64 reply_at;	/* time of the VM's last packet that may be a reply */
	u32 gap;		/* moving mean of the gaps between packets to the VM, ns */
	u32 think;		/* moving mean of the time from its packet to the next to it, ns */
	u32 service_wakes;	/* wake-ups of its service threads here; wraps */
	u32 _pad;
};

/* What events for one VM wait until one of its vCPUs runs (delay.h). Events are packets that may need a reply, and wake-ups of a
 * VM none of whose vCPUs ran or waited. */
struct vm_delay {
	u64 oldest;		/* arrival of the oldest packet that waits; 0: none waits */
	u64 woken;		/* the wake-up, until a vCPU runs; 0: none */
	s32 running;		/* vCPU threads that run */
	s32 runnable;		/* vCPU threads that run or wait */
	u32 shift;		/* a step is 2^shift ns long */
	u32 _pad;
	u32 steps[DELAY_STEPS];	/* packets that wait, by arrival after the oldest */
	struct hist packets;	/* their delays */
	struct hist wakes;	/* the wake-ups' delays */
};

/* One core, written by its controller. */
struct core_ctl {
	u32 managed;		/* a controller reads the events */
	u32 notify_wake;	/* send one event when a VM becomes runnable */
	u32 notify_block;	/* send an event when the running VM blocks */
	u32 lost;		/* events that did not fit into the ring */
};

enum notify_io {
	NOTIFY_REQUEST = 1,	/* the next packet to the VM */
	NOTIFY_REPLY,		/* the VM's packet after which none is open */
};

enum event_kind {
	EVENT_IO = 1,		/* the packet of notify_io */
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
	u32 vcpu;		/* it is a vCPU's thread, not a service thread */
};

/* Argument of the "begin_vm" program. */
struct begin_args {
	u32 vm;
};

/* An interface, and its VM. */
struct nic_key {
	u32 ifindex;
	u32 netns;		/* inode number of its network namespace */
};

/* Which packets of an interface go to the VM: those that the host transmits on it (a tap), or receives on it. The others come
 * from the VM. */
enum { PACKET_TRANSMITTED = 0, PACKET_RECEIVED = 1 };

struct nic_owner {
	u32 vm;
	u32 cpu;		/* the core on which the VM takes interrupts, if a controller is to be notified; else NO_CPU */
	u32 to_guest;		/* PACKET_TRANSMITTED or PACKET_RECEIVED */
};

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/* The parts of the kernel's sched_ext that scx.bpf.c uses, under the names of this kernel's version. */
#ifndef VIOLA_SCX_KERNEL_H
#define VIOLA_SCX_KERNEL_H

#include "types.h"

struct sched_ext_entity {
	u32 flags;
	u64 slice;
} __attribute__((preserve_access_index));

struct task_struct {
	int pid;
	struct sched_ext_entity scx;
} __attribute__((preserve_access_index));

struct scx_init_task_args {
	_Bool fork;
} __attribute__((preserve_access_index));

enum scx_exit_kind { SCX_EXIT_NONE };

struct scx_exit_info {
	enum scx_exit_kind kind;
	const char *reason;
	char *msg;
} __attribute__((preserve_access_index));

struct scx_bpf_dsq_insert_vtime_args {
	u64 dsq_id;
	u64 slice;
	u64 vtime;
	u64 enq_flags;
};

struct bpf_timer {
	u64 opaque[2];
} __attribute__((aligned(8)));

/* The operations that the scheduler implements; the loader finds them by name. */
struct sched_ext_ops {
	s32 (*select_cpu)(struct task_struct *p, s32 prev_cpu, u64 wake_flags);
	void (*enqueue)(struct task_struct *p, u64 enq_flags);
	void (*dispatch)(s32 cpu, struct task_struct *prev);
	void (*runnable)(struct task_struct *p, u64 enq_flags);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, _Bool runnable);
	void (*quiescent)(struct task_struct *p, u64 deq_flags);
	s32 (*init_task)(struct task_struct *p, struct scx_init_task_args *args);
	s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	u64 flags;
	u32 timeout_ms;
	char name[128];
};

enum {
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum {
	BPF_F_NO_PREALLOC = 1U << 0,
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1,
	BPF_F_TIMER_CPU_PIN = 2,
	CLOCK_MONOTONIC = 1,
};

/* From the kernel's include/linux/sched/ext.h; unchanged since 6.12. */
#define SCX_DSQ_LOCAL ((1ULL << 63) | 2)
#define SCX_TASK_QUEUED 1
#define SCX_KICK_PREEMPT 2ULL
#define SCX_ENQ_HEAD (1ULL << 4)
#define SCX_ENQ_PREEMPT (1ULL << 32)
#define SCX_OPS_ENQ_LAST 2
#define SCX_OPS_SWITCH_PARTIAL 8

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

s32 scx_bpf_create_dsq(u64 dsq_id, s32 node) __ksym;
s32 scx_bpf_dsq_nr_queued(u64 dsq_id) __ksym;
void scx_bpf_kick_cpu(s32 cpu, u64 flags) __ksym;
s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
/* The names have changed between versions. Linux 6.12: */
void scx_bpf_dispatch(struct task_struct *p, u64 dsq_id, u64 slice, u64 enq_flags) __ksym __weak;
void scx_bpf_dispatch_vtime(struct task_struct *p, u64 dsq_id, u64 slice, u64 vtime, u64 enq_flags) __ksym __weak;
_Bool scx_bpf_consume(u64 dsq_id) __ksym __weak;
/* later: */
void scx_bpf_dsq_insert(struct task_struct *p, u64 dsq_id, u64 slice, u64 enq_flags) __ksym __weak;
void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 dsq_id, u64 slice, u64 vtime, u64 enq_flags) __ksym __weak;
_Bool scx_bpf_dsq_move_to_local(u64 dsq_id) __ksym __weak;
/* and later still: */
_Bool __scx_bpf_dsq_insert_vtime(struct task_struct *p, struct scx_bpf_dsq_insert_vtime_args *args) __ksym __weak;
_Bool scx_bpf_task_set_slice(struct task_struct *p, u64 slice) __ksym __weak;
struct task_struct *bpf_task_from_pid(s32 pid) __ksym;
void bpf_task_release(struct task_struct *task) __ksym;

#define OPS(name, args...) SEC("struct_ops/" #name) BPF_PROG(name, ##args)
#define OPS_SLEEPABLE(name, args...) SEC("struct_ops.s/" #name) BPF_PROG(name, ##args)

static __always_inline void set_slice(struct task_struct *p, u64 slice)
{
	if (scx_bpf_task_set_slice)
		scx_bpf_task_set_slice(p, slice);
	else
		p->scx.slice = slice;
}

static __always_inline void insert(struct task_struct *p, u64 dsq, u64 slice, u64 vtime, u64 flags)
{
	if (__scx_bpf_dsq_insert_vtime) {
		struct scx_bpf_dsq_insert_vtime_args args = {
			.dsq_id = dsq, .slice = slice, .vtime = vtime, .enq_flags = flags,
		};

		__scx_bpf_dsq_insert_vtime(p, &args);
	} else if (scx_bpf_dsq_insert_vtime) {
		scx_bpf_dsq_insert_vtime(p, dsq, slice, vtime, flags);
	} else if (scx_bpf_dispatch_vtime) {
		scx_bpf_dispatch_vtime(p, dsq, slice, vtime, flags);
	}
}

static __always_inline void insert_local(struct task_struct *p, u64 slice, u64 flags)
{
	if (scx_bpf_dsq_insert)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice, flags);
	else if (scx_bpf_dispatch)
		scx_bpf_dispatch(p, SCX_DSQ_LOCAL, slice, flags);
}

static __always_inline u32 to_local(u64 dsq)
{
	if (scx_bpf_dsq_move_to_local)
		return scx_bpf_dsq_move_to_local(dsq);
	return scx_bpf_consume && scx_bpf_consume(dsq);
}

#endif

/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Slices of VMs on their cores, as a sched_ext scheduler.
 *
 * It schedules only threads that were given SCHED_EXT (partial switch); all others stay in the kernel's own classes, of which the fair
 * one takes precedence. The kernel asks the state machine of a managed core (scx_core.h) whenever the core must choose: it ranks the
 * VMs and says how long each may run. A thread that wakes preempts a VM of lower rank at once. A timer of the core's own ends slices
 * exactly; the kernel would end them at its tick. The cores of vTurbo's two pools tell each other what their VMs ran, through the map
 * vm_totals.
 *
 * Everything that touches a core's state runs under that core's run queue lock: its threads are pinned there. Threads on cores without a
 * plan run in the order in which they come; threads of no VM run on a managed core when no VM wants it.
 */
#include "scx_core.h"

#define WATCHDOG_MS 5000

char LICENSE[] SEC("license") = "GPL";

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct scx_end);
} end SEC(".maps");

static __always_inline struct thread *thread_of(struct task_struct *p)
{
	return bpf_task_storage_get(&threads, p, 0, 0);
}

s32 OPS(scx_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	return prev_cpu;
}

/*
 * Whether a VM's thread that has woken runs next for certain: the core is idle or runs a VM of lower rank, and the algorithm need not be
 * asked. The running thread was the best of those that were runnable, so no choice is needed.
 */
static __always_inline u32 is_next(const struct core *c, const struct thread *t, u32 row, u64 now)
{
	u32 rank = const_row_at(&c->machine, row)->rank;

	if (c->must_decide || now >= c->until || c->preselected || c->runnable[t->id & (VM_IDS - 1)] != 1 || rank == CAPPED)
		return 0;
	if (c->running == NOBODY)
		return c->idle;
	return c->running < ROWS && rank > const_row_at(&c->machine, c->running)->rank;
}

void OPS(scx_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct thread *t = thread_of(p);
	u32 cpu = scx_bpf_task_cpu(p), row, running;
	struct core *c = core_at(cpu);
	struct vm_stats *s;
	u64 now;

	if (!c) {
		/* It may have come from a core that still counts it. */
		if (t)
			remove_runnable(t);
		insert_local(p, MAX_SLICE, enq_flags);
		return;
	}
	adopt_plan(c, cpu);
	row = row_of(c, t);
	now = bpf_ktime_get_ns();
	if (!t || row >= ROWS) {
		insert(p, dsq_of(cpu, NOBODY), MAX_SLICE, now, enq_flags);
		return;
	}
	/* It may have become runnable before it was assigned to the VM. */
	add_runnable(c, t, cpu);
	t->since = now;
	if (is_next(c, t, row, now)) {
		s = vm_stats_at(cpu, row);
		if (s && c->running != NOBODY)
			s->boosts++;
		c->preselected = row + 1;
		c->chosen = 1;
		c->due = c->until;
		c->cost = 0;
		insert_local(p, MAX_SLICE, enq_flags | SCX_ENQ_HEAD | SCX_ENQ_PREEMPT);
		return;
	}
	if (c->preselected && const_row_at(&c->machine, row)->rank > const_row_at(&c->machine, c->preselected - 1)->rank)
		c->choose_again = 1;
	insert(p, dsq_of(cpu, row), MAX_SLICE, t->service ? now - knobs.service_start : now, enq_flags);
	running = c->running;
	/* NOBODY: the core is idle, and the kernel makes it choose; or its thread has just stopped,
	 * and the core chooses in any case. */
	if (running == NOBODY)
		return;
	if (running == STRAY) {
		kick(cpu);
	} else if (running == row) {
		if (t->service && !c->service) {
			c->service_waits = 1;
			kick(cpu);
		}
	} else if (row_at(&c->machine, row)->rank > row_at(&c->machine, running)->rank) {
		s = vm_stats_at(cpu, row);
		if (s)
			s->boosts++;
		kick(cpu);
	} else if (c->machine.notify_wake) {
		kick(cpu);
	}
}

void OPS(scx_runnable, struct task_struct *p, u64 enq_flags)
{
	struct thread *t = thread_of(p);
	u32 cpu = scx_bpf_task_cpu(p);
	struct core *c = core_at(cpu);

	if (!t || !c)
		return;
	adopt_plan(c, cpu);
	add_runnable(c, t, cpu);
}

void OPS(scx_quiescent, struct task_struct *p, u64 deq_flags)
{
	struct thread *t = thread_of(p);

	if (!t)
		return;
	remove_runnable(t);
	t->since = 0;
}

void OPS(scx_running, struct task_struct *p)
{
	struct thread *t = thread_of(p);
	u32 cpu = scx_bpf_task_cpu(p), row;
	struct core *c = core_at(cpu);
	u64 now;

	if (!c)
		return;
	now = bpf_ktime_get_ns();
	row = row_of(c, t);
	c->since = now - c->cost;
	c->cost = 0;
	c->began = now;
	if (t && row < ROWS)
		set_slice(p, start(c, cpu, t, row, now));
	else
		c->running = STRAY;
	/*
	 * A thread of higher rank than the preselected one makes the core choose again. And when a thread is moved to the local queue of an idle
	 * core, the kernel (7.2, 7.3) takes that for a wake-up and skips the next update of its clock, at the end of this run, which would then
	 * be charged to no thread. The kick moves the skipped update to a point where it does not matter.
	 */
	if (c->choose_again)
		kick(cpu);
	else if (c->idle_with_capped)
		scx_bpf_kick_cpu(cpu, 0);
	c->chosen = 0;
	c->idle = 0;
	c->idle_with_capped = 0;
	c->preselected = 0;
	c->choose_again = 0;
}

void OPS(scx_stopping, struct task_struct *p, _Bool runnable)
{
	u32 cpu = scx_bpf_task_cpu(p);
	struct core *c = core_at(cpu);
	u64 now;

	if (!c)
		return;
	now = bpf_ktime_get_ns();
	charge(c, cpu, now - c->cost);
	if (!runnable)
		c->must_decide |= c->machine.notify_block;
	if (c->saved_notify_wake)
		c->machine.notify_wake = c->saved_notify_wake - 1;
	c->saved_notify_wake = 0;
	if (c->running < ROWS)
		c->wait_since[c->running & (ROWS - 1)] = now;
	c->running = NOBODY;
}

void OPS(scx_dispatch, s32 cpu, struct task_struct *prev)
{
	struct core *c = core_at(cpu);
	struct core_stats *s = stats_at(cpu);
	struct choice choice = {};
	u32 row, is_runnable, goes_on = 0;
	u64 now, budget, cost, most = FOREVER;

	if (!c || !s)
		return;
	adopt_plan(c, cpu);
	now = bpf_ktime_get_ns();
	decide(c, cpu, now, &choice);
	row = choice.row;
	is_runnable = prev && (prev->scx.flags & SCX_TASK_QUEUED);
	if (run_stray_first(c, cpu, now, row)) {
		if (row < ROWS)
			most = knobs.starved_turn;
	} else if (row >= ROWS) {
		if (is_runnable && c->running == STRAY)
			set_slice(prev, MAX_SLICE);
	} else {
		budget = remaining_budget(row_at(&c->machine, row));
		if (choice.starved) {
			most = knobs.starved_turn;
			s->starved++;
		}
		goes_on = is_runnable && c->running == row;
		if (scx_bpf_dsq_nr_queued(dsq_of(cpu, row)) > 0) {
			/* Another thread of the same VM waits. */
			goes_on = goes_on && !c->service_waits && now - c->began < knobs.vcpu_turn;
			most = min_u64(most, knobs.vcpu_turn);
		}
		c->service_waits = 0;
		if (!goes_on && !to_local(dsq_of(cpu, row))) {
			/* No thread of it can move here now; try again soon. */
			goes_on = is_runnable && c->running == row;
			most = min_u64(most, MS);
		}
		/* Another thread's budget starts with its run. */
		if (goes_on) {
			most = min_u64(most, budget);
			set_slice(prev, min_u64(most, MAX_SLICE));
		}
	}
	c->due = min_u64(c->due, add_time(now, most));
	arm(c, cpu, now);
	cost = bpf_ktime_get_ns() - now;
	s->decide_ns += cost;
	/* The kernel reads its clock before it asks, so in its accounts too the next thread has run since then. */
	c->cost = goes_on ? 0 : cost;
	c->chosen = row < ROWS;
	/* Until the next thread starts. */
	if (row >= ROWS)
		c->idle_with_capped = choice.capped_waits;
	c->idle = row >= ROWS && !choice.capped_waits && !is_runnable;
}

/* A thread inherits the VM of the thread that created it. */
s32 OPS_SLEEPABLE(scx_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct thread *from, *to;

	if (!args->fork)
		return 0;
	from = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	if (!from || !from->id)
		return 0;
	to = bpf_task_storage_get(&threads, p, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (to) {
		to->id = from->id;
		to->made = 1;
	}
	return 0;
}

s32 OPS_SLEEPABLE(scx_init)
{
	s32 cpu, row, error;

	each(cpu, knobs.cpus) {
		u32 key = cpu;
		struct timer *t = bpf_map_lookup_elem(&timers, &key);
		struct core *c = core_at(key);

		if (!c || !t)
			continue;
		bpf_timer_init(&t->timer, &timers, CLOCK_MONOTONIC);
		bpf_timer_set_callback(&t->timer, on_timer);
		each(row, ROWS + 1) {
			error = scx_bpf_create_dsq(dsq_of(key, row), -1);
			if (error)
				return error;
		}
	}
	return 0;
}

void OPS(scx_exit, struct scx_exit_info *info)
{
	u32 zero = 0;
	struct scx_end *e = bpf_map_lookup_elem(&end, &zero);

	if (!e)
		return;
	bpf_probe_read_kernel_str(e->reason, sizeof(e->reason), info->reason);
	bpf_probe_read_kernel_str(e->message, sizeof(e->message), info->msg);
	e->kind = info->kind;
}

/* Called from user space: assigns a thread to a VM, or to none. Returns 1 if the thread exists. */
SEC("syscall")
int enrol(struct scx_enrol *args)
{
	struct task_struct *task = bpf_task_from_pid(args->tid);
	struct thread *t;

	if (!task)
		return 0;
	t = bpf_task_storage_get(&threads, task, 0, args->id ? BPF_LOCAL_STORAGE_GET_F_CREATE : 0);
	if (t) {
		t->id = args->id & (VM_IDS - 1);
		t->service = args->service;
		t->made = 0;
	}
	bpf_task_release(task);
	return 1;
}

/* Without cpu_online and cpu_offline: the kernel ends the scheduler when a CPU comes or goes, and the daemon starts it again. Otherwise the
 * kernel would no longer ask a CPU that goes offline, and the threads queued there would block it. */
SEC(".struct_ops.link")
struct sched_ext_ops viola_ops = {
	.select_cpu = (void *)scx_select_cpu,
	.enqueue = (void *)scx_enqueue,
	.dispatch = (void *)scx_dispatch,
	.runnable = (void *)scx_runnable,
	.running = (void *)scx_running,
	.stopping = (void *)scx_stopping,
	.quiescent = (void *)scx_quiescent,
	.init_task = (void *)scx_init_task,
	.init = (void *)scx_init,
	.exit = (void *)scx_exit,
	.flags = SCX_OPS_SWITCH_PARTIAL | SCX_OPS_ENQ_LAST,
	.timeout_ms = WATCHDOG_MS,
	.name = "viola",
};

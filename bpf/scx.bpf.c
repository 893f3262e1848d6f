/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Slices of VMs on their cores, as a sched_ext scheduler.
 *
 * Only threads that were given SCHED_EXT are scheduled here (partial switch); all else stays in the kernel's own
 * classes, the fair one of which goes before. Each managed core has a machine (slices.h) that is asked whenever
 * the core has to choose: it ranks the VMs and says how long each may run. A thread that wakes interrupts a VM of
 * lower rank at once. Slices end exactly, by a timer of the core's own: the kernel would end them at its tick.
 *
 * All that touches a core's state runs under that core's run queue lock: its threads are pinned there. Threads on
 * cores without a plan, and threads of no VM, are run as they come; on a managed core when no VM wants it.
 */
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

/* Those of the kernel's operations that are used; the loader finds them by name. */
struct sched_ext_ops {
	s32 (*select_cpu)(struct task_struct *p, s32 prev_cpu, u64 wake_flags);
	void (*enqueue)(struct task_struct *p, u64 enq_flags);
	void (*dispatch)(s32 cpu, struct task_struct *prev);
	void (*runnable)(struct task_struct *p, u64 enq_flags);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, _Bool runnable);
	void (*quiescent)(struct task_struct *p, u64 deq_flags);
	s32 (*init_task)(struct task_struct *p, struct scx_init_task_args *args);
	void (*cpu_online)(s32 cpu);
	void (*cpu_offline)(s32 cpu);
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
#define SCX_OPS_ENQ_LAST 2
#define SCX_OPS_SWITCH_PARTIAL 8
#define STRAY (ROWS + 1)	/* a thread of no VM */
#define SLICE_MOST (20 * MS)
#define WATCHDOG_MS 5000

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

#include "scx.h"

char LICENSE[] SEC("license") = "GPL";

s32 scx_bpf_create_dsq(u64 dsq_id, s32 node) __ksym;
s32 scx_bpf_dsq_nr_queued(u64 dsq_id) __ksym;
void scx_bpf_kick_cpu(s32 cpu, u64 flags) __ksym;
s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
/* Names have changed; whichever the kernel has. Linux 6.12: */
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

const volatile struct scx_knobs knobs = {
	.credit_ls = 3 * MS,
	.credit_batch = MS,
	.vcpu_turn = MS,
	.service_start = 10 * MS,
	.starved_after = 1000 * MS,
	.starved_turn = 100 * US,
};

struct thread {
	u32 id;			/* VM */
	u32 service;
	u32 counted;		/* is in .runnable of this VM on counted_cpu */
	u32 counted_cpu;
	u64 since;		/* waits since then; 0: does not */
};

struct core {
	u64 seq;		/* number of the plan it follows */
	u64 since;		/* what runs now is charged up to then */
	u64 began;		/* and began then */
	u64 due;		/* has to decide by then */
	u64 armed;		/* its timer fires then; 0: it does not */
	u32 running;		/* row, NOBODY or STRAY */
	u32 service;		/* what runs is a service thread */
	u32 service_waits;	/* and one of its VM that waits is to go before it */
	u32 last;		/* row that ran last */
	u64 stray_since;	/* a thread of no VM waits since then; 0: none does */
	u64 wait_since[ROWS];	/* when the row had the core last, or became runnable */
	u16 runnable[VM_IDS];	/* threads by VM */
	u8 row_of[VM_IDS];	/* row + 1; 0: not on this core */
	struct slices machine;
};

struct timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

/* The loader sets max_entries of these to CPUs; of plans to twice, of vm_stats to ROWS times as many. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct core);
} cores SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct timer);
} timers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32);
	__type(value, struct core_plan);
} plans SEC(".maps");

/* 0: the core is not managed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} plan_seqs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ROWS);
	__type(key, u32);
	__type(value, struct vm_stats);
} vm_stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct core_stats);
} core_stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct scx_end);
} end SEC(".maps");

#define OPS(name, args...) SEC("struct_ops/" #name) BPF_PROG(name, ##args)
#define OPS_SLEEPABLE(name, args...) SEC("struct_ops.s/" #name) BPF_PROG(name, ##args)

static __always_inline u64 dsq_of(u32 cpu, u32 row)
{
	return (u64)cpu << 8 | row;
}

static __always_inline struct thread *thread_of(struct task_struct *p)
{
	return bpf_task_storage_get(&threads, p, 0, 0);
}

static __always_inline struct core *core_at(u32 cpu)
{
	u64 *seq = bpf_map_lookup_elem(&plan_seqs, &cpu);

	return seq && *seq ? bpf_map_lookup_elem(&cores, &cpu) : 0;
}

static __always_inline struct core_stats *stats_at(u32 cpu)
{
	return bpf_map_lookup_elem(&core_stats, &cpu);
}

static __always_inline struct vm_stats *vm_stats_at(u32 cpu, u32 row)
{
	u32 key = cpu * ROWS + row;

	return row < ROWS ? bpf_map_lookup_elem(&vm_stats, &key) : 0;
}

static __always_inline u32 row_of(const struct core *c, const struct thread *t)
{
	return t ? (u32)c->row_of[t->id & (VM_IDS - 1)] - 1 : NOBODY;
}

static __always_inline void set_slice(struct task_struct *p, u64 slice)
{
	slice = sooner(slice, SLICE_MOST);
	if (scx_bpf_task_set_slice)
		scx_bpf_task_set_slice(p, slice);
	else
		p->scx.slice = slice;
}

static __always_inline void insert(struct task_struct *p, u64 dsq, u64 vtime, u64 flags)
{
	if (__scx_bpf_dsq_insert_vtime) {
		struct scx_bpf_dsq_insert_vtime_args args = {
			.dsq_id = dsq, .slice = SLICE_MOST, .vtime = vtime, .enq_flags = flags,
		};

		__scx_bpf_dsq_insert_vtime(p, &args);
	} else if (scx_bpf_dsq_insert_vtime) {
		scx_bpf_dsq_insert_vtime(p, dsq, SLICE_MOST, vtime, flags);
	} else if (scx_bpf_dispatch_vtime) {
		scx_bpf_dispatch_vtime(p, dsq, SLICE_MOST, vtime, flags);
	}
}

static __always_inline void insert_local(struct task_struct *p, u64 flags)
{
	if (scx_bpf_dsq_insert)
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, SLICE_MOST, flags);
	else if (scx_bpf_dispatch)
		scx_bpf_dispatch(p, SCX_DSQ_LOCAL, SLICE_MOST, flags);
}

static __always_inline u32 to_local(u64 dsq)
{
	if (scx_bpf_dsq_move_to_local)
		return scx_bpf_dsq_move_to_local(dsq);
	return scx_bpf_consume && scx_bpf_consume(dsq);
}

static __always_inline void kick(u32 cpu)
{
	struct core_stats *s = stats_at(cpu);

	if (s)
		s->kicks++;
	scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/* Takes the daemon's newest plan. */
static __attribute__((noinline)) int adopt(struct core *c, u32 cpu)
{
	u64 *seq = bpf_map_lookup_elem(&plan_seqs, &cpu);
	struct core_plan *plan;
	u64 number;
	u32 i, key;

	if (!seq || *seq == c->seq)
		return 0;
	number = *(volatile u64 *)seq;
	key = cpu * 2 + (number & 1);
	plan = bpf_map_lookup_elem(&plans, &key);
	if (!plan)
		return 0;
	if (!c->seq) {
		c->running = NOBODY;
		c->last = NOBODY;
		c->due = FOREVER;
	}
	slices_begin(&c->machine, plan->batch_slice, knobs.credit_ls, knobs.credit_batch);
	each(i, ROWS) {
		c->row_of[row_at(&c->machine, i)->params.id & (VM_IDS - 1)] = 0;
	}
	each(i, ROWS) {
		struct vm_params *params = &plan->vms[i & (ROWS - 1)];
		struct vm_stats *s;

		slices_take(&c->machine, i, params);
		if (params->id)
			c->row_of[params->id & (VM_IDS - 1)] = i + 1;
		s = vm_stats_at(cpu, i);
		if (s && s->id != params->id) {
			__builtin_memset(s, 0, sizeof(*s));
			s->id = params->id;
		}
	}
	c->row_of[0] = 0;
	slices_end(&c->machine);
	/* Not if it was written meanwhile: then once more, at the next occasion. */
	if (*(volatile u64 *)seq == number)
		c->seq = number;
	return 0;
}

static __always_inline void uncount(struct thread *t)
{
	struct core *c = core_at(t->counted_cpu);

	if (t->counted && c)
		c->runnable[t->counted & (VM_IDS - 1)]--;
	t->counted = 0;
}

/* The thread is runnable on this core, for its VM. */
static __always_inline void count(struct core *c, struct thread *t, u32 cpu)
{
	u32 row, id = t->id & (VM_IDS - 1);

	if (t->counted == id && t->counted_cpu == cpu)
		return;
	uncount(t);
	if (!id)
		return;
	row = row_of(c, t);
	if (row < ROWS && !c->runnable[id])
		c->wait_since[row & (ROWS - 1)] = bpf_ktime_get_ns();
	c->runnable[id]++;
	t->counted = id;
	t->counted_cpu = cpu;
}

/* Charges what runs, up to now. */
static __always_inline void charge(struct core *c, u32 cpu, u64 now)
{
	struct vm_stats *s;
	u64 ran = now - c->since;

	if (c->running >= ROWS)
		return;
	row_at(&c->machine, c->running)->used += ran;
	s = vm_stats_at(cpu, c->running);
	if (s)
		s->run += ran;
	c->since = now;
}

/* The core has to decide at due. A timer that fires earlier is left to: it sees, and goes on. */
static __always_inline void arm(struct core *c, u32 cpu, u64 now)
{
	struct timer *t;

	if (knobs.no_timer || c->due == FOREVER || (c->armed && c->armed <= c->due))
		return;
	t = bpf_map_lookup_elem(&timers, &cpu);
	if (t && !bpf_timer_start(&t->timer, c->due > now ? c->due - now : 0, BPF_F_TIMER_CPU_PIN))
		c->armed = c->due;
}

static int on_timer(void *map, u32 *key, struct timer *t)
{
	struct core *c = core_at(*key);
	u64 now = bpf_ktime_get_ns();
	struct core_stats *s;

	if (!c)
		return 0;
	c->armed = 0;
	if (c->due == FOREVER)
		return 0;
	if (c->due > now) {
		if (!bpf_timer_start(&t->timer, c->due - now, BPF_F_TIMER_CPU_PIN))
			c->armed = c->due;
		return 0;
	}
	s = stats_at(*key);
	if (s && now - c->due > s->late_max)
		s->late_max = now - c->due;
	c->due = FOREVER;
	kick(*key);
	return 0;
}

s32 OPS(scx_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	return prev_cpu;
}

void OPS(scx_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct thread *t = thread_of(p);
	u32 cpu = scx_bpf_task_cpu(p), row, running;
	struct core *c = core_at(cpu);
	struct vm_stats *s;
	u64 now;

	if (!c) {
		insert_local(p, enq_flags);
		return;
	}
	adopt(c, cpu);
	row = row_of(c, t);
	now = bpf_ktime_get_ns();
	if (!t || row >= ROWS) {
		insert(p, dsq_of(cpu, NOBODY), now, enq_flags);
		return;
	}
	/* One that ran before it was a VM's. */
	count(c, t, cpu);
	t->since = now;
	insert(p, dsq_of(cpu, row), t->service ? now - knobs.service_start : now, enq_flags);
	running = c->running;
	/* Nobody's: idle, which the kernel ends by itself, or one that has just stopped, after which the core chooses. */
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
	adopt(c, cpu);
	count(c, t, cpu);
}

void OPS(scx_quiescent, struct task_struct *p, u64 deq_flags)
{
	struct thread *t = thread_of(p);

	if (!t)
		return;
	uncount(t);
	t->since = 0;
}

void OPS(scx_running, struct task_struct *p)
{
	struct thread *t = thread_of(p);
	u32 cpu = scx_bpf_task_cpu(p), row;
	struct core *c = core_at(cpu);
	struct core_stats *cs;
	struct vm_stats *s;
	struct vm_row *vm;
	u64 now, left;

	if (!c)
		return;
	now = bpf_ktime_get_ns();
	row = row_of(c, t);
	c->since = now;
	c->began = now;
	if (!t || row >= ROWS) {
		c->running = STRAY;
		return;
	}
	c->running = row;
	c->service = t->service;
	s = vm_stats_at(cpu, row);
	if (s) {
		s->turns++;
		if (t->since && now > t->since) {
			u64 waited = now - t->since;

			s->waits++;
			s->wait_sum += waited;
			if (waited > s->wait_max)
				s->wait_max = waited;
		}
	}
	t->since = 0;
	if (c->last != row) {
		cs = stats_at(cpu);
		if (cs)
			cs->switches++;
		c->last = row;
	}
	vm = row_at(&c->machine, row);
	left = vm->budget;
	/* It was interrupted by another class, and goes on without a decision. */
	if (left != FOREVER)
		left = left > vm->used + SHORTEST ? left - vm->used : SHORTEST;
	set_slice(p, left);
	c->due = sooner(c->due, later(now, left));
	arm(c, cpu, now);
}

void OPS(scx_stopping, struct task_struct *p, _Bool runnable)
{
	u32 cpu = scx_bpf_task_cpu(p);
	struct core *c = core_at(cpu);
	u64 now;

	if (!c)
		return;
	now = bpf_ktime_get_ns();
	charge(c, cpu, now);
	if (c->running < ROWS)
		c->wait_since[c->running & (ROWS - 1)] = now;
	c->running = NOBODY;
}

struct choice {
	u32 row;
	u32 starved;
};

/* The row that runs next. */
static __attribute__((noinline)) int choose(struct core *c, u64 now, struct choice *out)
{
	u32 i, best = NOBODY, rank = CAPPED;
	u64 since = 0;

	out->starved = 0;
	each(i, c->machine.n) {
		struct vm_row *vm = row_at(&c->machine, i);
		u64 idle = c->wait_since[i & (ROWS - 1)];
		u32 starved;

		vm->used = 0;
		if (!vm->params.id || !vm->runnable || vm->rank == CAPPED)
			continue;
		if (knobs.starve_id && vm->params.id == knobs.starve_id)
			continue;
		if (c->running == i)
			idle = now;
		starved = now - idle > knobs.starved_after && c->machine.contenders > 1;
		if (starved == out->starved ?
		    vm->rank < rank || (vm->rank == rank && c->running != i && (c->running == best || idle >= since)) :
		    out->starved)
			continue;
		best = i;
		rank = vm->rank;
		since = idle;
		out->starved = starved;
	}
	out->row = best;
	return 0;
}

/* Threads of no VM run when no VM wants to, or when they have waited for long. */
static __attribute__((noinline)) int stray_first(struct core *c, u32 cpu, u64 now, u32 row)
{
	u64 dsq = dsq_of(cpu, NOBODY);

	if (scx_bpf_dsq_nr_queued(dsq) <= 0) {
		c->stray_since = 0;
		return 0;
	}
	if (!c->stray_since)
		c->stray_since = now;
	if (row < ROWS && now - c->stray_since < knobs.starved_after)
		return 0;
	c->stray_since = 0;
	return to_local(dsq);
}

void OPS(scx_dispatch, s32 cpu, struct task_struct *prev)
{
	struct core *c = core_at(cpu);
	struct core_stats *s = stats_at(cpu);
	struct choice choice = {};
	u32 i, row, is_runnable, goes_on;
	struct vm_row *vm;
	u64 now, budget;

	if (!c || !s)
		return;
	adopt(c, cpu);
	now = bpf_ktime_get_ns();
	charge(c, cpu, now);
	each(i, c->machine.n) {
		vm = row_at(&c->machine, i);
		vm->runnable = vm->params.id && c->runnable[vm->params.id & (VM_IDS - 1)];
	}
	slices_decide(&c->machine, now);
	s->decisions++;
	choose(c, now, &choice);
	row = choice.row;
	is_runnable = prev && (prev->scx.flags & SCX_TASK_QUEUED);
	c->due = c->machine.until;
	budget = FOREVER;
	if (stray_first(c, cpu, now, row)) {
		if (row < ROWS)
			budget = knobs.starved_turn;
	} else if (row >= ROWS) {
		if (is_runnable && c->running == STRAY)
			set_slice(prev, SLICE_MOST);
	} else {
		vm = row_at(&c->machine, row);
		budget = vm->budget;
		if (choice.starved) {
			budget = sooner(budget, knobs.starved_turn);
			s->starved++;
		}
		goes_on = is_runnable && c->running == row;
		if (scx_bpf_dsq_nr_queued(dsq_of(cpu, row)) > 0) {
			/* Another thread of the same VM waits. */
			goes_on = goes_on && !c->service_waits && now - c->began < knobs.vcpu_turn;
			budget = sooner(budget, knobs.vcpu_turn);
		}
		c->service_waits = 0;
		if (!goes_on && !to_local(dsq_of(cpu, row))) {
			/* It cannot come now; once more soon. */
			goes_on = is_runnable && c->running == row;
			budget = sooner(budget, MS);
		}
		if (goes_on)
			set_slice(prev, budget);
	}
	c->due = sooner(c->due, later(now, budget));
	arm(c, cpu, now);
	s->decide_ns += bpf_ktime_get_ns() - now;
}

/* What a thread of a VM makes is of that VM. */
s32 OPS_SLEEPABLE(scx_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct thread *from, *to;

	if (!args->fork)
		return 0;
	from = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), 0, 0);
	if (!from || !from->id)
		return 0;
	to = bpf_task_storage_get(&threads, p, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (to)
		to->id = from->id;
	return 0;
}

/* A core that goes takes its threads elsewhere, where they run as they come. */
void OPS(scx_cpu_online, s32 cpu)
{
}

void OPS(scx_cpu_offline, s32 cpu)
{
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

/* Called from user space: a thread belongs to a VM from now on (or to none). Returns 1 if there is such a thread. */
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
	}
	bpf_task_release(task);
	return 1;
}

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
	.cpu_online = (void *)scx_cpu_online,
	.cpu_offline = (void *)scx_cpu_offline,
	.init = (void *)scx_init,
	.exit = (void *)scx_exit,
	.flags = SCX_OPS_SWITCH_PARTIAL | SCX_OPS_ENQ_LAST,
	.timeout_ms = WATCHDOG_MS,
	.name = "viola",
};

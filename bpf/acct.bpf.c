/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Accounting of VM threads at context switches.
 *
 * Each thread of a VM has a small state in task storage: its VM, its account, and whether it runs, waits or sleeps. From the
 * scheduler's tracepoints the program derives, exactly and without polling, the run time and the waits of each vCPU (also as a
 * histogram), and the time that each VM used of each core; for each VM also the time from a packet's arrival at its tap until one
 * of its vCPUs runs (delay.h). It notifies the slot controller of a managed core when a VM wakes or blocks, and when a packet
 * reaches the tap of a VM that waits for the core. New threads inherit VM and account from the thread that created them.
 *
 * A switch between tasks of no VM costs two look-ups of a null pointer.
 */
#include "types.h"
#include "acct_kernel.h"

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#include "acct.h"
#include "delay.h"
#include "packet_counts.h"
#include "packets.h"
#include "nics.h"

char LICENSE[] SEC("license") = "GPL";

enum { SLEEPS = 0, QUEUED, RUNS };

struct thread {
	u32 vm;
	u32 account;
	u32 state;
	u32 counted;		/* is in .runnable of (cpu, counted_vm) */
	u32 cpu;
	u32 counted_vm;
	u64 since;
	u32 vcpu;		/* is a vCPU's thread */
	u32 runs;		/* VM + 1 in whose .running it counts; 0: none */
	u32 wants;		/* VM + 1 in whose .runnable it counts; 0: none */
	u32 _pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_ACCOUNTS);
	__type(key, u32);
	__type(value, struct account);
} accounts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_VMS);
	__type(key, u32);
	__type(value, struct vm_delay);
} vm_delays SEC(".maps");

/* The loader sets max_entries to CPUs * MAX_VMS. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_VMS);
	__type(key, u32);
	__type(value, struct core_vm);
} core_vms SEC(".maps");

/* The loader sets max_entries to CPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct core_ctl);
} core_ctls SEC(".maps");

struct ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
};

/* One ring per managed core; the loader adds it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, u32);
	__array(values, struct ring);
} rings SEC(".maps");

static __always_inline void send_event(u32 cpu, u32 kind, u32 vm, u32 account, u32 tid, u64 now, u64 flags)
{
	struct event e = { .kind = kind, .vm = vm, .account = account, .tid = tid, .now = now };
	void *ring = bpf_map_lookup_elem(&rings, &cpu);

	if (!ring)
		return;
	if (bpf_ringbuf_output(ring, &e, sizeof(e), flags)) {
		struct core_ctl *ctl = bpf_map_lookup_elem(&core_ctls, &cpu);

		if (ctl)
			__sync_fetch_and_add(&ctl->lost, 1);
	}
}

static __always_inline struct core_vm *core_vm(u32 cpu, u32 vm)
{
	u32 key = cpu * MAX_VMS + vm;

	if (vm >= MAX_VMS)
		return 0;
	return bpf_map_lookup_elem(&core_vms, &key);
}

static __always_inline struct vm_delay *vm_delay(u32 vm)
{
	if (vm >= MAX_VMS)
		return 0;
	return bpf_map_lookup_elem(&vm_delays, &vm);
}

/* Counts the thread as runnable on cpu. Returns 1 if its VM was not runnable there. */
static __always_inline int add_runnable(struct thread *t, u32 cpu, struct core_vm *cv)
{
	if (t->counted)
		return 0;
	t->counted = 1;
	t->cpu = cpu;
	t->counted_vm = t->vm;
	return __sync_fetch_and_add(&cv->runnable, 1) == 0;
}

/* Counts the thread as not runnable. Returns 1 if its VM is no longer runnable either. */
static __always_inline int remove_runnable(struct thread *t)
{
	struct core_vm *cv;

	if (!t->counted)
		return 0;
	t->counted = 0;
	cv = core_vm(t->cpu, t->counted_vm);
	return cv && __sync_fetch_and_add(&cv->runnable, -1) == 1;
}

__subprog int count_delays(u32 vm, u64 now)
{
	struct vm_delay *d = vm_delay(vm);

	if (d)
		delay_drain(d, now);
	return 0;
}

__subprog int count_packet(u32 vm, u64 now)
{
	struct vm_delay *d = vm_delay(vm);

	if (d && delay_packet(d, now))
		count_delays(vm, now);
	return 0;
}

/* Counts a vCPU thread as running or waiting. now is the time of its wake-up, 0 if it did not wake just now. */
static __always_inline void vcpu_wants(struct thread *t, u64 now)
{
	struct vm_delay *d = vm_delay(t->vm);

	if (!d || t->wants || __sync_val_compare_and_swap(&t->wants, 0, t->vm + 1))
		return;
	if (now)
		delay_wake(d, now);
	else
		__sync_fetch_and_add(&d->runnable, 1);
}

/* Counts a vCPU thread as running. */
static __always_inline void vcpu_runs(struct thread *t, u64 now)
{
	struct vm_delay *d = vm_delay(t->vm);

	vcpu_wants(t, 0);
	if (!d || __sync_val_compare_and_swap(&t->runs, 0, t->vm + 1))
		return;
	if (delay_run(d))
		count_delays(t->vm, now);
}

/* Undoes vcpu_runs and, if the thread sleeps, vcpu_wants. The exchanges, here and there, keep the counts right when `enrol` moves
 * the thread at the same time. */
static __always_inline void vcpu_stops(struct thread *t, int sleeps)
{
	u32 ran = __sync_lock_test_and_set(&t->runs, 0), wanted;
	struct vm_delay *d = ran ? vm_delay(ran - 1) : 0;

	if (d)
		__sync_fetch_and_add(&d->running, -1);
	if (!sleeps)
		return;
	wanted = __sync_lock_test_and_set(&t->wants, 0);
	d = wanted ? vm_delay(wanted - 1) : 0;
	if (d)
		__sync_fetch_and_add(&d->runnable, -1);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, _Bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	struct thread *p = bpf_task_storage_get(&threads, prev, 0, 0);
	struct thread *n = bpf_task_storage_get(&threads, next, 0, 0);
	u32 cpu, pvm = NO_VM, blocked = 0;
	struct core_vm *cv;
	struct account *a;
	u64 now;

	if (!p) {
		/* Keeps clang from or-ing the two pointers, which the verifier rejects. */
		asm volatile("" ::: "memory");
		if (!n)
			return 0;
	}
	cpu = bpf_get_smp_processor_id();
	now = bpf_ktime_get_ns();

	if (p && p->vm != NO_VM) {
		cv = core_vm(cpu, p->vm);
		a = bpf_map_lookup_elem(&accounts, &p->account);
		if (!cv || !a)
			return 0;
		pvm = p->vm;
		/* Readers add the time since on_since to the counters, so clear it first: a reader in between misses
		 * the run until its next reading, instead of counting it twice. The atomic addition keeps the order. */
		a->on_since = 0;
		cv->on_since = 0;
		if (p->state == RUNS) {
			u64 ran = now - p->since;

			__sync_fetch_and_add(&a->run, ran);
			__sync_fetch_and_add(&cv->used, ran);
		}
		p->since = now;
		/* A task preempted on its way to sleep stays on the run queue, whatever its state. */
		if (preempt || prev_state == 0) {
			p->state = QUEUED;
			a->preempted++;
			add_runnable(p, cpu, cv);
		} else {
			p->state = SLEEPS;
			blocked = remove_runnable(p);
		}
		if (p->vcpu)
			vcpu_stops(p, p->state == SLEEPS);
	}

	if (n && n->vm != NO_VM) {
		cv = core_vm(cpu, n->vm);
		a = bpf_map_lookup_elem(&accounts, &n->account);
		if (!cv || !a)
			return 0;
		if (n->state == QUEUED) {
			u64 waited = now - n->since;

			__sync_fetch_and_add(&a->wait, waited);
			hist_add(&a->waits, waited, 1);
		}
		if (n->counted && n->cpu != cpu)
			remove_runnable(n);
		add_runnable(n, cpu, cv);
		a->switches++;
		a->on_since = now;
		cv->on_since = now;
		n->state = RUNS;
		n->since = now;
		if (n->vcpu)
			vcpu_runs(n, now);
		if (n->vm == pvm)
			blocked = 0;
	}

	if (blocked && pvm < MAX_VMS) {
		struct core_ctl *ctl = bpf_map_lookup_elem(&core_ctls, &cpu);

		cv = core_vm(cpu, pvm);
		if (cv)
			cv->blocks++;
		if (ctl && ctl->notify_block)
			send_event(cpu, EVENT_BLOCK, pvm, 0, 0, now, BPF_RB_FORCE_WAKEUP);
	}
	return 0;
}

static __always_inline int on_woken(struct task_struct *task)
{
	struct thread *t = bpf_task_storage_get(&threads, task, 0, 0);
	struct core_ctl *ctl;
	struct account *a;
	struct core_vm *cv;
	u64 now;
	u32 cpu;

	if (!t || t->vm == NO_VM || t->state != SLEEPS)
		return 0;
	cpu = task->thread_info.cpu;
	cv = core_vm(cpu, t->vm);
	a = bpf_map_lookup_elem(&accounts, &t->account);
	if (!cv || !a)
		return 0;
	now = bpf_ktime_get_ns();
	t->state = QUEUED;
	t->since = now;
	__sync_fetch_and_add(&a->wakes, 1);
	if (t->vcpu)
		vcpu_wants(t, now);
	else
		cv->service_wakes++;
	if (!add_runnable(t, cpu, cv))
		return 0;
	__sync_fetch_and_add(&cv->wakes, 1);
	ctl = bpf_map_lookup_elem(&core_ctls, &cpu);
	if (!ctl || !ctl->notify_wake)
		return 0;
	ctl->notify_wake = 0;
	send_event(cpu, EVENT_WAKE, t->vm, t->account, task->pid, now, BPF_RB_FORCE_WAKEUP);
	return 0;
}

SEC("tp_btf/sched_wakeup")
int BPF_PROG(on_wakeup, struct task_struct *task)
{
	return on_woken(task);
}

SEC("tp_btf/sched_wakeup_new")
int BPF_PROG(on_wakeup_new, struct task_struct *task)
{
	return on_woken(task);
}

SEC("tp_btf/sched_migrate_task")
int BPF_PROG(on_migrate, struct task_struct *task, int dest)
{
	struct thread *t = bpf_task_storage_get(&threads, task, 0, 0);
	struct core_vm *cv;

	if (!t || t->vm == NO_VM || !t->counted)
		return 0;
	remove_runnable(t);
	cv = core_vm(dest, t->vm);
	if (cv)
		add_runnable(t, dest, cv);
	return 0;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(on_fork, struct task_struct *parent, struct task_struct *child)
{
	struct thread *p = bpf_task_storage_get(&threads, parent, 0, 0);
	struct core_ctl *ctl;
	struct thread *c;
	u64 wake;
	u32 cpu;

	if (!p || p->vm == NO_VM)
		return 0;
	c = bpf_task_storage_get(&threads, child, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!c)
		return 0;
	c->vm = p->vm;
	c->account = p->account;
	c->state = SLEEPS;
	c->counted = 0;
	c->vcpu = p->vcpu;
	cpu = bpf_get_smp_processor_id();
	ctl = bpf_map_lookup_elem(&core_ctls, &cpu);
	/* With SCHED_RESET_ON_FORK the child begins in the fair class, where it would wait behind all VMs until the next step. */
	wake = child->policy != parent->policy ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
	if (ctl && ctl->managed)
		send_event(cpu, EVENT_FORK, p->vm, p->account, child->pid, bpf_ktime_get_ns(), wake);
	return 0;
}

struct task_struct *bpf_task_from_pid(s32 pid) __ksym;
void bpf_task_release(struct task_struct *task) __ksym;

/* The field is 4 bytes long in 6.12 and has another size in 7.3; a plain access to a signed field cannot follow that. */
static __always_inline int is_on_cpu(struct task_struct *task)
{
	return bpf_core_field_exists(task->on_cpu) && BPF_CORE_READ_BITFIELD_PROBED(task, on_cpu);
}

/* Called from user space: assigns a thread to a VM and account, or to none. */
SEC("syscall")
int enrol(struct enrol_args *args)
{
	struct task_struct *task = bpf_task_from_pid(args->tid);
	struct thread *t;
	int found = 0;

	if (!task)
		return 0;
	t = bpf_task_storage_get(&threads, task, 0,
				 args->vm == NO_VM ? 0 : BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (t) {
		/* The counts follow at the thread's next switch; a move between VMs is settled here. */
		if (t->counted && t->counted_vm != args->vm)
			remove_runnable(t);
		if (!args->vcpu || t->vm != args->vm)
			vcpu_stops(t, 1);
		t->vm = args->vm;
		t->account = args->account;
		t->vcpu = args->vcpu;
		/* A busy vCPU may run on for seconds before its next switch. */
		if (t->vcpu && t->vm != NO_VM && is_on_cpu(task))
			vcpu_runs(t, bpf_ktime_get_ns());
		found = 1;
	}
	bpf_task_release(task);
	return found;
}

/* Called from user space before a VM gets this index: drops packets that wait for the index's last VM. */
SEC("syscall")
int begin_vm(struct begin_args *args)
{
	struct vm_delay *d = vm_delay(args->vm);
	u32 i;

	if (!d)
		return 0;
	d->oldest = 0;
	d->woken = 0;
	for (i = 0; i < DELAY_STEPS; i++)
		d->steps[i] = 0;
	return 1;
}

/* Handles a packet of a VM: counts it and its delay. A packet to a VM that sleeps wakes the VM. The controller, if there is one,
 * must be notified of a packet to a VM that waits for the core, and of the last reply of a VM that runs to reply. Sends one event
 * until the controller requests the next. */
static __always_inline int on_packet(const struct sk_buff *skb, const struct net_device *dev, u32 seen)
{
	struct nic_owner *owner = owner_of(dev);
	struct packet packet = {};
	struct core_vm *cv;
	u64 now;

	if (!owner)
		return 0;
	if (owner->cpu == NO_CPU && owner->to_guest != seen)
		return 0;
	/* A long packet has data; only a controller must know more of it. */
	if (owner->cpu != NO_CPU || skb->len <= HEADER_BYTES)
		packet = parse_packet(skb, link_bytes(seen));
	if (packet.needs_no_reply)
		return 0;
	now = bpf_ktime_get_ns();
	if (owner->to_guest == seen)
		count_packet(owner->vm, now);
	if (owner->cpu == NO_CPU)
		return 0;
	cv = core_vm(owner->cpu, owner->vm);
	if (!cv)
		return 0;
	if (owner->to_guest != seen) {
		count_reply(cv, now, packet.group, packet.is_answer);
		if (cv->notify_io != NOTIFY_REPLY || (cv->open & ~cv->ignored))
			return 0;
	} else {
		count_request(cv, now, packet.group);
		if (cv->notify_io != NOTIFY_REQUEST)
			return 0;
	}
	cv->notify_io = 0;
	send_event(owner->cpu, EVENT_IO, owner->vm, 0, 0, now, BPF_RB_FORCE_WAKEUP);
	return 0;
}

SEE_PACKETS(on_packet)

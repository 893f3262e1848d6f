/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Who runs on a core next, and until when: the default algorithm of crates/policy (slices/interleaved.rs, lag.rs,
 * caps.rs), once more for the kernel. Where the two differ one of them is wrong; a test of crates/sched replays random
 * histories through both. What is said there of the why is not said again here. The machines of cores with turbo vCPUs
 * (turbo.h) are made of the same ledger and caps.
 *
 * Plain C without a call to the kernel, so that the test can compile it too. What differs from policy: a VM keeps its
 * row as long as it is on the core, so rows may be vacant; and packets are not seen (policy's Io::Unseen).
 *
 * Times are nanoseconds, lags 1/1024 ns. BPF has no signed division, hence the detours.
 */
#ifndef VIOLA_SLICES_H
#define VIOLA_SLICES_H

#define ROWS 64			/* VMs on one core */
#define FOREVER (~0ULL)
#define NOBODY ROWS

#define US 1000ULL
#define MS 1000000ULL
#define CAP_WINDOW (10 * MS)
#define MIN_PREEMPT_RUN ((s64)(100 * US))
#define MIN_BUDGET (2 * US)
#define MIN_MICROSLICE (10 * US)
#define MIN_CAPPED_RUN ((s64)(200 * US))
#define LAG_ONE_SHIFT 10
#define MAX_CAP 1000000
#define MIN_SLOT (20 * US)
#define MAX_SLOT (10 * MS)
#define RESERVE_MAX_SAVED ((s64)(15 * MS))
#define MAX_INTERVAL (1LL << 50)
#define MAX_SCALED (1LL << 40)

#ifdef __bpf__
struct bpf_iter_num {
	u64 opaque[1];
} __attribute__((aligned(8)));

extern int bpf_iter_num_new(struct bpf_iter_num *it, int start, int end) __weak __ksym;
extern int *bpf_iter_num_next(struct bpf_iter_num *it) __weak __ksym;
extern void bpf_iter_num_destroy(struct bpf_iter_num *it) __weak __ksym;

/* i = 0 .. n - 1. The verifier looks at the body until nothing new comes of it, not n times. */
#define each(i, n)											\
	for (struct bpf_iter_num it_ __attribute__((aligned(8), cleanup(bpf_iter_num_destroy))),	\
	     *started_ __attribute__((unused)) =							\
		     (bpf_iter_num_new(&it_, 0, (n)), (void)bpf_iter_num_destroy, (void *)0);		\
	     ({ int *at_ = bpf_iter_num_next(&it_); at_ && ((i) = *at_, 1); });)
/* Not static: the verifier looks at it once, not at each of its calls. */
#define __sub __attribute__((noinline))
#define __there __attribute__((btf_decl_tag("arg:nonnull")))
#define __small static inline __attribute__((always_inline))
#else
#define each(i, n) for ((i) = 0; (i) < (n); (i)++)
#define __sub static
#define __there
#define __small static inline
#endif

/* Precedence of a VM: policy's Rank, in its order. */
enum rank { CAPPED, BACKGROUND, WAITING, OWNER, PREEMPT, BOOST };

/* Who decides on a core: policy's Interleaved, RegularCore and TurboCore. */
enum kind { INTERLEAVED, REGULAR, TURBO };

/* Where a VM stands in its pool: policy's Position, in its order. */
enum position { HELD, BEHIND, TURN, AHEAD };

/* Controls of one VM: policy's Params. */
struct vm_params {
	u32 id;			/* not 0; 0: the row is vacant */
	u32 ls;			/* on a turbo core: its turbo vCPU is there */
	u32 weight;		/* 1..=65535 */
	u32 cap_permille;	/* 0: none */
	u64 microslice;
	u32 here;		/* in a pool: its regular vCPUs on this core */
	u32 of;			/* and on all */
};

struct vm_row {
	struct vm_params params;
	/* seen since the last decision, filled in by the caller */
	u64 used;
	u32 runnable;
	/* the answer */
	u32 rank;
	u64 budget;		/* decide again when it has run so long */
	/* state */
	s64 lag;
	s64 weight;
	u64 micro;
	s64 credit;		/* most lag while asleep */
	s64 lag_before;		/* lag before the last charge */
	s64 stop_lag;		/* lag at which a boosted LSVM gives the core up */
	s64 preempt_left;	/* what a batch VM may run before it must wait for its turn */
	u64 ticket;
	s64 quota;		/* of each window; 0: no cap */
	s64 left;
	u32 permille;
	u8 capped;
	u8 member;
	u8 ready;
	u8 slept;
	u8 boosted;
	u8 queued;
	u8 pool;		/* among whose members it is */
	u8 held;		/* its reserve has it wait since held_since */
	/* of the pools: turbo.h */
	u64 paid;		/* ran on turbo cores elsewhere and counts here, since the last decision */
	u64 total;		/* ran elsewhere and counts against the cap */
	u64 due;		/* all it was ever due here and what it pays for here */
	u64 since;		/* waits since then */
	u64 slice;
	u32 position;
	u32 pad2;
	u64 floor_since;	/* a regular vCPU on a turbo core waits since then */
	u64 floor_left;		/* and may still run so long before turbo vCPUs */
	/* policy's Reserve */
	s64 reserve_left;
	u64 held_since;
	u64 ran;		/* since its last gap */
	u8 regular_waits;	/* a regular vCPU of it waits */
	u8 due_known;
	u8 moderated;
	u8 pad[5];
};

/* Those who share by weight: all of a core, or on a turbo core its turbo vCPUs (0) and the others (1). */
struct pool {
	s64 weight;		/* of the members */
	s64 remainder;
	s64 owner_left;
	s64 ran;		/* by them since the last decision, as lag; here, so that the verifier need not follow it */
	u32 owner;
	u32 contenders;
	u32 vms;
	u32 needs_wake;	/* of one that wakes */
};

struct slices {
	/* the answer */
	u64 until;		/* decide again at this time at the latest */
	u32 notify_wake;	/* and when a VM wakes */
	u32 notify_block;
	/* settings */
	u64 batch_slice;
	u64 credit_ls;
	u64 credit_batch;
	/* state */
	u64 window_next;	/* end of the caps' window; 0: none began */
	u64 floor_next;		/* the next run that is granted to who gets nothing, at the earliest */
	struct pool pools[2];
	u64 tickets;
	s64 owner_left;
	s64 turn_left;
	u64 wake_budget;
	s64 credit_sum;
	u32 n;			/* rows in use are below */
	u32 vms;
	u32 n_ls;
	u32 owner;
	u32 turn;
	u32 contenders;
	u32 batch_ready;
	u32 waiting;
	u32 kind;
	u32 reserve;		/* turbo cores: what a VM keeps for its regular vCPUs, thousandths */
	struct vm_row rows[ROWS];
};

__small struct vm_row *row_at(struct slices *c, u32 i)
{
	return &c->rows[i & (ROWS - 1)];
}

__small const struct vm_row *row_seen(const struct slices *c, u32 i)
{
	return &c->rows[i & (ROWS - 1)];
}

__small struct pool *pool_of(struct slices *c, const struct vm_row *vm)
{
	return &c->pools[vm->pool & 1];
}

__small s64 least_of(s64 a, s64 b) { return a < b ? a : b; }
__small s64 most_of(s64 a, s64 b) { return a > b ? a : b; }
__small u64 sooner(u64 a, u64 b) { return a < b ? a : b; }

__small u64 later(u64 now, u64 span)
{
	return now + span < now ? FOREVER : now + span;
}

/* a / b rounded down, b > 0. */
__small s64 floor_div(s64 a, s64 b)
{
	if (a >= 0)
		return (s64)((u64)a / (u64)b);
	return -(s64)(((u64)-a + (u64)b - 1) / (u64)b);
}

/* The ledger of lags: policy's lag.rs. */

__small s64 lag_ns(const struct vm_row *vm)
{
	return vm->lag >> LAG_ONE_SHIFT;
}

/* Credits amount to the members of a pool by weight; it waits while there is none. */
__sub int distribute(struct slices *c __there, u32 pool, s64 amount)
{
	struct pool *p = &c->pools[pool & 1];
	s64 each_one;
	u32 i;

	amount += p->remainder;
	if (p->weight <= 0) {
		p->remainder = amount;
		return 0;
	}
	each_one = floor_div(amount, p->weight);
	p->remainder = amount - each_one * p->weight;
	if (!each_one)
		return 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->member && vm->pool == pool)
			vm->lag += vm->weight * each_one;
	}
	return 0;
}

__small void set_member(struct slices *c, struct vm_row *vm, u32 member)
{
	if (vm->member == member)
		return;
	vm->member = member;
	if (member)
		pool_of(c, vm)->weight += vm->weight;
	else
		pool_of(c, vm)->weight -= vm->weight;
}

/* The VM's lag becomes ns; the other members have the difference. */
__sub int set_lag(struct slices *c __there, u32 i, s64 ns)
{
	struct vm_row *vm = row_at(c, i);
	s64 to = ns * (1LL << LAG_ONE_SHIFT), was = vm->lag;
	u32 member = vm->member;

	set_member(c, vm, 0);
	vm->lag = to;
	distribute(c, vm->pool, was - to);
	set_member(c, vm, member);
	return 0;
}

__small void limit_credit(struct slices *c, u32 i, s64 most)
{
	if (row_at(c, i)->lag > most * (1LL << LAG_ONE_SHIFT))
		set_lag(c, i, most);
}

__small void limit_debt(struct slices *c, u32 i, s64 least)
{
	if (row_at(c, i)->lag < least * (1LL << LAG_ONE_SHIFT))
		set_lag(c, i, least);
}

/* Whether VM a has had less service for its weight than b: products of 64 and 16 bits. */
__small u32 is_behind(const struct vm_row *a, const struct vm_row *b)
{
	u64 low_a = (u64)(u32)a->lag * (u64)b->weight, low_b = (u64)(u32)b->lag * (u64)a->weight;
	s64 high_a = (a->lag >> 32) * b->weight + (s64)(low_a >> 32);
	s64 high_b = (b->lag >> 32) * a->weight + (s64)(low_b >> 32);

	if (high_a != high_b)
		return high_a > high_b;
	return (u32)low_a > (u32)low_b;
}

/* Weight of the members, counting the VM as one. */
__small u64 weight_with(const struct slices *c, const struct vm_row *vm)
{
	return c->pools[vm->pool & 1].weight + (vm->member ? 0 : vm->weight);
}

__small u32 is_alone(const struct slices *c, const struct vm_row *vm)
{
	return weight_with(c, vm) == (u64)vm->weight;
}

/* The lag that a VM starting at 0 has after running ns in one go. */
__small s64 lag_after(const struct slices *c, const struct vm_row *vm, u64 ns)
{
	u64 all = weight_with(c, vm);

	if (!all)
		return 0;
	return -(s64)(sooner(ns, MAX_SCALED) * (all - vm->weight) / all);
}

/* How long the VM runs in one go down to its stop; FOREVER when alone. */
__small u64 run_down(const struct slices *c, const struct vm_row *vm)
{
	u64 all = weight_with(c, vm), others = all - vm->weight;
	s64 down = lag_ns(vm) - vm->stop_lag;

	if (!others)
		return FOREVER;
	return (u64)least_of(most_of(down, 0), MAX_SCALED) * all / others;
}

/* How long the others must run until the VM's lag is up to 0. */
__small u64 time_to_zero(const struct slices *c, const struct vm_row *vm)
{
	u64 missing;

	if (vm->lag >= 0 || vm->weight <= 0)
		return 0;
	missing = (u64)least_of(-vm->lag, MAX_SCALED);
	return missing * weight_with(c, vm) / ((u64)vm->weight << LAG_ONE_SHIFT) + 1;
}

/* Caps: policy's caps.rs. */

/* Number of windows that began since the last call. */
__small u64 roll_windows(struct slices *c, u64 now)
{
	u64 begun;

	if (!c->window_next)
		c->window_next = now + CAP_WINDOW;
	if (now < c->window_next)
		return 0;
	begun = 1 + (now - c->window_next) / CAP_WINDOW;
	c->window_next += begun * CAP_WINDOW;
	return begun;
}

__small s64 resume_quota(const struct vm_row *vm)
{
	return most_of((s64)((u64)vm->quota / 2), MIN_CAPPED_RUN);
}

__small s64 max_left(const struct vm_row *vm)
{
	return most_of(2 * vm->quota, 2 * MIN_CAPPED_RUN);
}

/* 1000 is one whole core. */
__small void set_cap(struct vm_row *vm, u32 permille)
{
	u32 first = vm->quota == 0;

	if (permille == vm->permille)
		return;
	vm->permille = permille;
	if (!permille) {
		vm->quota = 0;
		vm->left = 0;
		vm->capped = 0;
		return;
	}
	vm->quota = (s64)(CAP_WINDOW * permille / 1000);
	vm->left = first ? vm->quota : least_of(vm->left, max_left(vm));
}

__small void charge_cap(struct vm_row *vm, u64 used, u64 begun)
{
	if (!vm->quota)
		return;
	vm->left -= (s64)sooner(used, MAX_INTERVAL);
	if (begun)
		vm->left = least_of(vm->left + vm->quota * (s64)sooner(begun, 1 << 20), max_left(vm));
	if (vm->capped)
		vm->capped = vm->left < resume_quota(vm);
	else
		vm->capped = vm->left <= (s64)((u64)vm->quota / 64);
}

__small u64 cap_refill_at(const struct slices *c, const struct vm_row *vm)
{
	s64 missing = most_of(resume_quota(vm) - vm->left, 1);

	if (!vm->capped || !vm->quota)
		return FOREVER;
	return c->window_next + (((u64)missing + vm->quota - 1) / (u64)vm->quota - 1) * CAP_WINDOW;
}

/* The algorithm: policy's interleaved.rs. */

__small s64 margin(u64 slice)
{
	return slice / 32 > US ? (s64)(slice / 32) : (s64)US;
}

__small s64 min_lag(const struct slices *c, const struct vm_row *vm)
{
	s64 slice = (s64)c->batch_slice;

	if (vm->params.ls)
		return -2 * most_of(slice, (s64)vm->micro);
	return -2 * slice - c->credit_sum;
}

__sub int charge_row(struct slices *c __there, u32 i, u64 begun)
{
	struct vm_row *vm = row_at(c, i);

	if (!vm->params.id)
		return 0;
	charge_cap(vm, vm->used, begun);
	if (!vm->used)
		return 0;
	vm->lag_before = lag_ns(vm);
	if (vm->rank != CAPPED)
		set_member(c, vm, 1);
	return 0;
}

__sub int limit_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 least = min_lag(c, vm);

	if (!vm->params.id || !vm->used)
		return 0;
	if (vm->params.ls && vm->rank == BACKGROUND)
		least = most_of(least, least_of(lag_after(c, vm, vm->micro), vm->lag_before));
	limit_debt(c, i, least);
	return 0;
}

__sub int account(struct slices *c __there, u64 now)
{
	u64 begun = roll_windows(c, now);
	s64 total = 0;
	u32 i;

	each(i, c->n)
		charge_row(c, i, begun);
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);
		s64 ran = (s64)sooner(vm->used, MAX_INTERVAL) << LAG_ONE_SHIFT;

		if (!vm->params.id)
			continue;
		vm->lag -= ran;
		total += ran;
	}
	if (!total)
		return 0;
	distribute(c, 0, total);
	each(i, c->n)
		limit_row(c, i);
	return 0;
}

/* Who belongs to those that are served, and what is left to one that sleeps. */
__sub int update_member_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 most = vm->credit;
	u32 full;

	if (!vm->params.id)
		return 0;
	if (vm->ready) {
		if (vm->slept && vm->rank != CAPPED)
			limit_credit(c, i, vm->credit);
		set_member(c, vm, 1);
		return 0;
	}
	if (vm->capped)
		most = vm->params.ls ? 0 : (s64)c->batch_slice;
	full = lag_ns(vm) >= most;
	if (full)
		limit_credit(c, i, most);
	set_member(c, vm, !full && (c->batch_ready || vm->capped));
	return 0;
}

__sub int update_members(struct slices *c __there)
{
	u32 i;

	c->contenders = 0;
	c->batch_ready = 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		vm->slept = !vm->ready;
		vm->ready = vm->runnable && !vm->capped;
		c->contenders += vm->ready;
		c->batch_ready |= vm->ready && !vm->params.ls;
	}
	each(i, c->n)
		update_member_row(c, i);
	return 0;
}

/* Whether the VM is to have a turn at the top. */
__sub int boost_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 lag = lag_ns(vm), near = margin(vm->micro);
	u32 queued;

	if (!vm->params.id || !vm->params.ls)
		return 0;
	vm->stop_lag = lag_after(c, vm, vm->micro);
	vm->boosted = lag >= -near || (vm->boosted && (is_alone(c, vm) || lag > vm->stop_lag + near));
	queued = vm->boosted && vm->ready;
	if (queued && !vm->queued)
		vm->ticket = ++c->tickets;
	vm->queued = queued;
	return queued;
}

__sub int pass_boost_turn(struct slices *c __there)
{
	u32 i, holder = c->turn, others = 0;
	u64 first = FOREVER;

	if (holder < ROWS)
		c->turn_left -= (s64)row_at(c, holder)->used;
	each(i, c->n)
		others |= boost_row(c, i) && i != holder;
	if (holder < ROWS) {
		struct vm_row *vm = row_at(c, holder);

		if (vm->queued) {
			if (c->turn_left > margin(vm->micro))
				return 0;
			vm->ticket = ++c->tickets;
			if (!others) {
				c->turn_left = (s64)vm->micro;
				return 0;
			}
		}
	}
	c->turn = NOBODY;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->queued && vm->ticket < first) {
			first = vm->ticket;
			c->turn = i;
			c->turn_left = (s64)vm->micro;
		}
	}
	return 0;
}

/* What a batch VM may run before its turn; whether it has to wait for that. */
__sub int owner_row(struct slices *c __there, u32 i)
{
	struct vm_row *vm = row_at(c, i);
	s64 lag;

	if (!vm->params.id || vm->params.ls)
		return 0;
	if (vm->ready) {
		vm->preempt_left = most_of(vm->preempt_left - (s64)vm->used, 0);
		return vm->preempt_left == 0;
	}
	lag = lag_ns(vm);
	if (lag >= 0)
		vm->preempt_left = most_of(lag, MIN_PREEMPT_RUN);
	else if (lag < -MIN_PREEMPT_RUN)
		vm->preempt_left = 0;
	return 0;
}

/* Keeps the owner or chooses the next. */
__sub int choose_owner(struct slices *c __there)
{
	u32 i, owner = c->owner;

	c->waiting = 0;
	each(i, c->n)
		c->waiting += owner_row(c, i);
	if (owner < ROWS) {
		struct vm_row *vm = row_at(c, owner);
		u64 slice = c->batch_ready ? c->batch_slice : vm->micro;

		c->owner_left -= (s64)vm->used;
		if (vm->ready && (!vm->params.ls || (!c->batch_ready && c->turn >= ROWS)) &&
		    (c->owner_left > margin(slice) || c->contenders <= 1))
			return 0;
	}
	c->owner = owner = NOBODY;
	if (c->contenders <= 1 || (!c->batch_ready && c->turn < ROWS)) {
		c->owner_left = 0;
		return 0;
	}
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);
		u32 can = vm->ready && (c->batch_ready ? !vm->params.ls && vm->preempt_left == 0 : vm->params.ls);

		if (vm->params.id && can && (owner >= ROWS || is_behind(vm, row_at(c, owner))))
			owner = i;
	}
	c->owner = owner;
	c->owner_left = 0;
	if (owner < ROWS)
		c->owner_left = (s64)(c->batch_ready ? c->batch_slice : row_at(c, owner)->micro);
	return 0;
}

__sub int rank_of(const struct slices *c __there, u32 i)
{
	const struct vm_row *vm = row_seen(c, i);

	if (vm->capped)
		return CAPPED;
	if (vm->params.ls) {
		if (vm->boosted)
			return !vm->ready || c->turn == i ? BOOST : PREEMPT;
		return c->owner == i ? OWNER : BACKGROUND;
	}
	if (c->owner == i)
		return c->waiting > 1 || vm->rank == OWNER ? OWNER : WAITING;
	if (vm->preempt_left > 0)
		return PREEMPT;
	if (c->contenders <= 1 && vm->ready && (vm->rank == OWNER || vm->rank == PREEMPT))
		return vm->rank;
	return WAITING;
}

__small u64 to_budget(s64 ns)
{
	return (u64)most_of(ns, (s64)MIN_BUDGET);
}

__sub u64 budget_of(const struct slices *c __there, u32 i)
{
	const struct vm_row *vm = row_seen(c, i);
	u64 ns;

	if (c->contenders <= 1 && vm->ready) {
		ns = FOREVER;
	} else if (vm->params.ls) {
		s64 turn = c->turn == i ? c->turn_left : (s64)vm->micro;

		if (vm->rank == OWNER) {
			ns = to_budget(c->owner_left);
		} else if (vm->rank == BOOST) {
			ns = run_down(c, vm);
			if (ns == FOREVER)
				ns = to_budget(most_of(lag_ns(vm), 0) + (s64)vm->micro);
			else
				ns = to_budget(c->n_ls > 1 ? least_of((s64)ns, turn) : (s64)ns);
		} else {
			ns = to_budget(turn);
		}
	} else {
		ns = c->owner == i ? to_budget(c->owner_left) :
		     vm->rank == PREEMPT ? to_budget(vm->preempt_left) : c->batch_slice;
		ns = sooner(ns, c->wake_budget);
	}
	return vm->quota ? sooner(ns, (u64)most_of(vm->left, 0)) : ns;
}

/* While nothing contends nobody asks when an LSVM that is out comes back. */
__small u64 wake_budget_of(struct slices *c)
{
	u64 least = FOREVER, share;
	u32 i;

	if (c->contenders > 1)
		return FOREVER;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (vm->params.id && vm->params.ls && !vm->boosted)
			least = sooner(least, vm->micro);
	}
	if (least == FOREVER)
		return FOREVER;
	share = least / (c->vms > c->n_ls ? c->vms - c->n_ls : 1);
	return share > MIN_MICROSLICE ? share : MIN_MICROSLICE;
}

/* The VM's part of the answer; its rank. */
__sub int fill_row(struct slices *c __there, u32 i, u64 now)
{
	struct vm_row *vm = row_at(c, i);
	u64 back;

	vm->rank = rank_of(c, i);
	vm->budget = budget_of(c, i);
	if (vm->rank == CAPPED) {
		c->until = sooner(c->until, cap_refill_at(c, vm));
		return CAPPED;
	}
	if (c->contenders > 1 && vm->params.ls) {
		if (!vm->boosted && vm->member && c->owner != i) {
			back = time_to_zero(c, vm);
			c->until = sooner(c->until, later(now, back > MIN_BUDGET ? back : MIN_BUDGET));
		}
		c->notify_block |= vm->rank == PREEMPT;
	}
	return vm->rank;
}

__sub int fill_decision(struct slices *c __there, u64 now)
{
	u32 i, rank, running = CAPPED, lowest_asleep = BOOST;

	c->wake_budget = wake_budget_of(c);
	c->until = FOREVER;
	c->notify_block = 0;
	each(i, c->n) {
		struct vm_row *vm = row_at(c, i);

		if (!vm->params.id)
			continue;
		rank = fill_row(c, i, now);
		if (rank == CAPPED)
			continue;
		if (vm->ready)
			running = rank > running ? rank : running;
		else
			lowest_asleep = rank < lowest_asleep ? rank : lowest_asleep;
	}
	c->notify_wake = c->contenders == 1 && c->vms > 1 && lowest_asleep <= running;
	return 0;
}

/* Takes row i's controls. Rows of VMs that left have id 0. */
__small void slices_take(struct slices *c, u32 i, const struct vm_params *params, u64 now)
{
	struct vm_row *vm = row_at(c, i);
	u32 ls = params->ls != 0, cap = params->cap_permille, same = vm->params.id == params->id;

	/* A VM's vCPU on a turbo core is in the one pool or the other, and new there when it changes. */
	if (!same || (c->kind == TURBO && vm->params.ls != ls)) {
		vm->lag = 0;
		vm->lag_before = 0;
		vm->stop_lag = 0;
		vm->preempt_left = 0;
		vm->ticket = 0;
		vm->quota = 0;
		vm->left = 0;
		vm->permille = 0;
		vm->capped = 0;
		vm->member = 0;
		vm->ready = 0;
		vm->slept = 1;
		vm->boosted = 0;
		vm->queued = 0;
		vm->rank = WAITING;
		vm->used = 0;
		vm->runnable = 0;
		vm->paid = 0;
		vm->total = 0;
		vm->due = 0;
		vm->since = now;
		vm->position = BEHIND;
		if (c->pools[0].owner == i)
			c->pools[0].owner = NOBODY;
		if (c->pools[1].owner == i)
			c->pools[1].owner = NOBODY;
	}
	if (!same || vm->params.ls != ls) {
		vm->boosted = 0;
		vm->queued = 0;
		if (c->kind == INTERLEAVED)
			vm->preempt_left = 0;
		if (c->owner == i)
			c->owner = NOBODY;
		if (c->turn == i)
			c->turn = NOBODY;
	}
	vm->params = *params;
	vm->params.ls = ls;
	vm->pool = c->kind == TURBO && !ls;
	if (!params->id)
		return;
	vm->weight = params->weight < 1 ? 1 : params->weight > 65535 ? 65535 : params->weight;
	vm->micro = sooner(params->microslice > MIN_MICROSLICE ? params->microslice : MIN_MICROSLICE, 1000 * MS);
	vm->credit = (s64)(ls ? (c->credit_ls > vm->micro ? c->credit_ls : vm->micro) : c->credit_batch);
	vm->slice = c->batch_slice;
	if (c->kind == TURBO && ls)
		vm->slice = sooner(params->microslice > MIN_SLOT ? params->microslice : MIN_SLOT, MAX_SLOT);
	vm->floor_since = now;
	vm->floor_left = 0;
	vm->reserve_left = RESERVE_MAX_SAVED;
	vm->held = 0;
	vm->held_since = 0;
	vm->ran = 0;
	vm->regular_waits = 0;
	vm->due_known = 0;
	vm->moderated = 0;
	/* Of one core a whole one is no cap; of several it is. */
	set_cap(vm, c->kind == INTERLEAVED && cap >= 1000 ? 0 : cap < MAX_CAP ? cap : MAX_CAP);
	if (vm->member)
		pool_of(c, vm)->weight += vm->weight;
	pool_of(c, vm)->vms++;
	c->credit_sum += vm->credit;
	c->vms++;
	c->n_ls += ls;
	c->n = i + 1;
}

__small void pool_begin(struct pool *p, u32 first)
{
	p->weight = 0;
	p->remainder = 0;
	p->vms = 0;
	p->needs_wake = 0;
	if (!first)
		return;
	p->owner = NOBODY;
	p->owner_left = 0;
	p->contenders = 0;
}

/* Before and after slices_take of every row. */
__small void slices_begin(struct slices *c, u32 kind, u64 batch_slice, u64 credit_ls, u64 credit_batch, u32 reserve)
{
	u64 slice = batch_slice ? batch_slice : 4 * MS;
	u32 i, first = !c->batch_slice || c->kind != kind;

	if (first) {
		/* Another machine begins without what the one before knew. */
		each(i, ROWS) {
			row_at(c, i)->params.id = 0;
		}
		c->owner = NOBODY;
		c->turn = NOBODY;
		c->wake_budget = FOREVER;
		c->window_next = 0;
		c->floor_next = 0;
		c->tickets = 0;
		c->owner_left = 0;
		c->turn_left = 0;
		c->contenders = 0;
		c->batch_ready = 0;
	}
	c->kind = kind;
	c->reserve = reserve < 1000 ? reserve : 1000;
	c->batch_slice = sooner(slice > 100 * US ? slice : 100 * US, 1000 * MS);
	c->credit_ls = sooner(credit_ls, 100 * MS);
	c->credit_batch = sooner(credit_batch > (u64)MIN_PREEMPT_RUN ? credit_batch : (u64)MIN_PREEMPT_RUN, 100 * MS);
	pool_begin(&c->pools[0], first);
	pool_begin(&c->pools[1], first);
	c->credit_sum = 0;
	c->vms = 0;
	c->n_ls = 0;
	c->n = 0;
}

__small void pool_end(struct slices *c, struct pool *p)
{
	if (p->owner < ROWS)
		p->owner_left = least_of(p->owner_left, (s64)row_at(c, p->owner)->slice);
}

__small void slices_end(struct slices *c)
{
	c->owner_left = least_of(c->owner_left, (s64)c->batch_slice);
	pool_end(c, &c->pools[0]);
	pool_end(c, &c->pools[1]);
}

/* The default algorithm's decision. */
__small void interleaved_decide(struct slices *c, u64 now)
{
	account(c, now);
	update_members(c);
	pass_boost_turn(c);
	choose_owner(c);
	fill_decision(c, now);
}

#endif

// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measures the times of answers.h for the VMs whose NICs acct.bpf.c watches. It is loaded only while somebody wants these times,
 * and sees every packet of the host meanwhile.
 */
#include "types.h"
#include "acct_kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "acct.h"
#include "answers.h"
#include "hist.h"
#include "packets.h"
#include "nics.h"

char LICENSE[] SEC("license") = "GPL";

enum { BPF_MAP_TYPE_LRU_HASH = 9, BPF_NOEXIST = 1 };

/* One end of a conversation is the VM, whose addresses do not matter. */
struct conversation_key {
	u32 vm;
	u16 guest_port;
	u16 peer_port;
	u8 peer[16];
};

/* The times of one VM. */
struct vm_answers {
	struct hist connects;
	struct hist answers;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_CONVERSATIONS);
	__type(key, struct conversation_key);
	__type(value, struct conversation);
} conversations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_VMS);
	__type(key, u32);
	__type(value, struct vm_answers);
} vm_answers SEC(".maps");

/* Parses the TCP segment `at` bytes after skb->data. Returns 0 for any other packet. */
static __always_inline int parse_segment(const struct sk_buff *skb, u32 at, u32 to_guest, struct segment *s,
					 struct conversation_key *key)
{
	struct headers h;
	u32 from, to;

	if (!read_headers(skb, at, &h) || h.transport != TCP)
		return 0;
	copy_address(key->peer, &h, to_guest);
	from = source_port(&h);
	to = destination_port(&h);
	key->guest_port = s->guest_port = to_guest ? to : from;
	key->peer_port = s->peer_port = to_guest ? from : to;
	s->flags = h.tcp[13];
	/* Segments that the NIC would cut may be longer than the header can say. */
	s->has_data = h.bytes + (h.tcp[12] >> 4) * 4 < h.whole || skb->len > HEADER_BYTES;
	return 1;
}

static __always_inline int on_segment(const struct sk_buff *skb, const struct net_device *dev, u32 seen)
{
	struct nic_owner *owner = owner_of(dev);
	struct conversation_key key = {};
	struct conversation new = {}, *c;
	struct vm_answers *times;
	struct segment s;
	u32 to_guest, vm, kind;
	u64 time;

	if (!owner)
		return 0;
	to_guest = owner->to_guest == seen;
	vm = owner->vm;
	if (!parse_segment(skb, link_bytes(seen), to_guest, &s, &key))
		return 0;
	key.vm = vm;
	if (s.flags & SEGMENT_RST) {
		bpf_map_delete_elem(&conversations, &key);
		return 0;
	}
	if (!s.has_data && !(s.flags & SEGMENT_SYN))
		return 0;
	c = bpf_map_lookup_elem(&conversations, &key);
	if (!c) {
		bpf_map_update_elem(&conversations, &key, &new, BPF_NOEXIST);
		c = bpf_map_lookup_elem(&conversations, &key);
	}
	times = bpf_map_lookup_elem(&vm_answers, &vm);
	if (!c || !times)
		return 0;
	kind = conversation_step(c, &s, to_guest, bpf_ktime_get_ns(), &time);
	if (kind == TIME_CONNECT)
		hist_add(&times->connects, time, 1);
	else if (kind == TIME_ANSWER)
		hist_add(&times->answers, time, 1);
	return 0;
}

SEE_PACKETS(on_segment)

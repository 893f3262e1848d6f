/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Steering of the TCP connections that the host serves in place of a VM.
 *
 * The host's socket is in a network namespace of the VM, behind a veth. Its segments enter the bridge through the VM's own tap, as
 * if the VM had sent them, and the peer's segments leave the bridge there. So filters, MAC learning and spoof checks on the tap
 * hold as before, and two VMs may have the same address. Five hooks:
 *
 *   to_guest    tap, egress:             redirects flows of the host's socket to the veth, held flows to where their packets are
 *                                        kept or to nowhere
 *   from_guest  tap, ingress:            passes what the host's socket sent; drops what the VM sends on such a flow, except on
 *                                        one that is being returned, on which the VM sends nothing until it has it
 *   from_host   veth's end, ingress:     redirects flows of the host's socket into the tap, drops everything else
 *   gate        its other end, egress:   drops everything while the VM is stopped
 *   deliver     hold veth's end, ingress: sends packets that were held to the host's socket, or to the VM through the tap
 *
 * So a process that has both inner ends reaches this VM's tap and this VM's connections, and nothing else.
 *
 * Packets of flows that are not in the map pass. Fragments and VLAN tags are not parsed; an ICMP message "packet too big" goes to
 * the owner of the flow.
 */
#include "types.h"

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_F_INGRESS = 1,
};

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "pipe.h"

char LICENSE[] SEC("license") = "GPL";

/* The first fields of the kernel's structure; their offsets are stable (include/uapi/linux/bpf.h). */
struct __sk_buff {
	u32 len;
	u32 pkt_type;
	u32 mark;
	u32 queue_mapping;
	u32 protocol;
	u32 vlan_present;
	u32 vlan_tci;
	u32 vlan_proto;
	u32 priority;
	u32 ingress_ifindex;
	u32 ifindex;
};

/* Return values of a tcx program (enum tcx_action_base). */
enum { TCX_NEXT = -1, TCX_PASS = 0, TCX_DROP = 2 };

enum { ETH_IPV4 = 0x0800, ETH_IPV6 = 0x86dd, ETH_HEADER = 14 };
enum { PROTO_ICMP = 1, PROTO_TCP = 6, PROTO_ICMPV6 = 58 };

/* In skb->mark: set at the host's ends of the veths, and cleared at the tap. */
#define FROM_HOST 0x76505045

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

/* The tap behind the host's end of a veth. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u32);
} taps SEC(".maps");

/* Where packets that were held go, by the host's end of the hold veth. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, struct ends);
} held_ends SEC(".maps");

/* Whether the gate is closed: 1, or 0 while packets may leave. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u32);
} gate_closed SEC(".maps");

struct ipv4 {
	u8 version_length;
	u8 tos;
	u16 length;
	u16 id;
	u16 fragment;
	u8 ttl;
	u8 protocol;
	u16 sum;
	u8 source[4];
	u8 destination[4];
};

struct ipv6 {
	u32 version_class_label;
	u16 length;
	u8 next;
	u8 hops;
	u8 source[16];
	u8 destination[16];
};

struct ports {
	u16 source;
	u16 destination;
};

/* Fills in a key from an IP header and the ports behind it; the sender is the peer or the guest. Returns 0 for TCP. */
static __always_inline int key_at(struct __sk_buff *skb, u32 at, u32 protocol, int from_peer, struct flow_key *key)
{
	u8 source[16] = {}, destination[16] = {};
	struct ports ports;
	u32 size;

	if (protocol == bpf_htons(ETH_IPV4)) {
		struct ipv4 ip;

		if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)))
			return -1;
		if (ip.protocol != PROTO_TCP || (ip.fragment & bpf_htons(0x3fff)))
			return -1;
		__builtin_memcpy(source, ip.source, 4);
		__builtin_memcpy(destination, ip.destination, 4);
		size = (ip.version_length & 15) * 4;
	} else if (protocol == bpf_htons(ETH_IPV6)) {
		struct ipv6 ip;

		if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)))
			return -1;
		if (ip.next != PROTO_TCP)
			return -1;
		__builtin_memcpy(source, ip.source, 16);
		__builtin_memcpy(destination, ip.destination, 16);
		size = sizeof(ip);
	} else {
		return -1;
	}
	if (bpf_skb_load_bytes(skb, at + size, &ports, sizeof(ports)))
		return -1;
	if (from_peer) {
		__builtin_memcpy(key->peer, source, 16);
		__builtin_memcpy(key->guest, destination, 16);
		key->peer_port = ports.source;
		key->guest_port = ports.destination;
	} else {
		__builtin_memcpy(key->guest, source, 16);
		__builtin_memcpy(key->peer, destination, 16);
		key->guest_port = ports.source;
		key->peer_port = ports.destination;
	}
	return 0;
}

/* The offset of the packet that an ICMP message "too big" is about, or 0. */
static __always_inline u32 complained(struct __sk_buff *skb)
{
	if (skb->protocol == bpf_htons(ETH_IPV4)) {
		struct ipv4 ip;
		u8 what[2];
		u32 size;

		if (bpf_skb_load_bytes(skb, ETH_HEADER, &ip, sizeof(ip)) || ip.protocol != PROTO_ICMP)
			return 0;
		size = (ip.version_length & 15) * 4;
		if (bpf_skb_load_bytes(skb, ETH_HEADER + size, what, sizeof(what)))
			return 0;
		return what[0] == 3 && what[1] == 4 ? ETH_HEADER + size + 8 : 0;
	}
	if (skb->protocol == bpf_htons(ETH_IPV6)) {
		struct ipv6 ip;
		u8 what;

		if (bpf_skb_load_bytes(skb, ETH_HEADER, &ip, sizeof(ip)) || ip.next != PROTO_ICMPV6)
			return 0;
		if (bpf_skb_load_bytes(skb, ETH_HEADER + sizeof(ip), &what, sizeof(what)))
			return 0;
		return what == 2 ? ETH_HEADER + sizeof(ip) + 8 : 0;
	}
	return 0;
}

static __always_inline void count(u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

SEC("tc")
int to_guest(struct __sk_buff *skb)
{
	struct flow_key key = { .tap = skb->ifindex };
	struct flow *flow;

	/* a kept packet that is now released to the VM */
	if (skb->mark == FROM_HOST) {
		skb->mark = 0;
		return TCX_NEXT;
	}
	if (skb->vlan_present)
		return TCX_NEXT;
	if (key_at(skb, ETH_HEADER, skb->protocol, 1, &key)) {
		u32 inner = complained(skb);

		/* the inner packet was sent by this end */
		if (!inner || key_at(skb, inner, skb->protocol, 0, &key))
			return TCX_NEXT;
	}
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow)
		return TCX_NEXT;
	if (!flow->known && !bpf_skb_load_bytes(skb, 6, flow->next_hop, 6))
		flow->known = 1;
	if (flow->state != FLOW_REDIRECTED) {
		count(&flow->held);
		return flow->out ? bpf_redirect(flow->out, 0) : TCX_DROP;
	}
	count(&flow->in);
	return bpf_redirect(flow->out, 0);
}

SEC("tc")
int from_guest(struct __sk_buff *skb)
{
	struct flow_key key = { .tap = skb->ifindex };
	struct flow *flow;

	if (skb->mark == FROM_HOST) {
		skb->mark = 0;
		return TCX_NEXT;
	}
	if (skb->vlan_present || key_at(skb, ETH_HEADER, skb->protocol, 0, &key))
		return TCX_NEXT;
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow)
		return TCX_NEXT;
	if (flow->state == FLOW_HELD && flow->out)
		return TCX_NEXT;
	count(&flow->silenced);
	return TCX_DROP;
}

SEC("tc")
int from_host(struct __sk_buff *skb)
{
	u32 here = skb->ifindex;
	u32 *tap = bpf_map_lookup_elem(&taps, &here);
	struct flow_key key = {};
	struct flow *flow;
	u8 next_hop[6];

	if (!tap)
		return TCX_DROP;
	key.tap = *tap;
	if (key_at(skb, ETH_HEADER, skb->protocol, 0, &key))
		return TCX_DROP;
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow || flow->state == FLOW_HELD || !flow->known)
		return TCX_DROP;
	__builtin_memcpy(next_hop, flow->next_hop, 6);
	if (bpf_skb_store_bytes(skb, 0, next_hop, 6, 0))
		return TCX_DROP;
	count(&flow->from);
	skb->mark = FROM_HOST;
	return bpf_redirect(key.tap, BPF_F_INGRESS);
}

SEC("tc")
int deliver(struct __sk_buff *skb)
{
	u32 here = skb->ifindex;
	struct ends *ends = bpf_map_lookup_elem(&held_ends, &here);
	struct flow_key key = {};
	struct flow *flow;

	if (!ends)
		return TCX_DROP;
	key.tap = ends->tap;
	if (key_at(skb, ETH_HEADER, skb->protocol, 1, &key))
		return TCX_DROP;
	flow = bpf_map_lookup_elem(&flows, &key);
	if (flow && flow->state != FLOW_HELD)
		return bpf_redirect(ends->veth, 0);
	skb->mark = FROM_HOST;
	return bpf_redirect(ends->tap, 0);
}

/*
 * Before the veth and not behind it: a socket learns at once that its segment did not leave, and tries again twice a second
 * without backing off (tcp_retransmit_timer: local congestion). A segment lost later would double its timeout each time.
 */
SEC("tc")
int gate(struct __sk_buff *skb)
{
	u32 first = 0;
	u32 *is_closed = bpf_map_lookup_elem(&gate_closed, &first);

	return is_closed && *is_closed ? TCX_DROP : TCX_NEXT;
}

/* SPDX-License-Identifier: GPL-2.0-only */
/* The VMs' interfaces, for the programs that see packets. acct.bpf.c makes the map; the loader gives it to others. */
#ifndef VIOLA_NICS_H
#define VIOLA_NICS_H

#include "acct.h"
#include "headers.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_NICS);
	__type(key, struct nic_key);
	__type(value, struct nic_owner);
} nics SEC(".maps");

/* The owner of an interface; 0: no VM. */
static __always_inline struct nic_owner *owner_of(const struct net_device *dev)
{
	struct nic_key key = { .ifindex = dev->ifindex, .netns = dev->nd_net.net->ns.inum };

	return bpf_map_lookup_elem(&nics, &key);
}

/* Bytes before the IP header: transmitted packets have an Ethernet header, received ones have lost it. */
static __always_inline u32 link_bytes(u32 seen)
{
	return seen == PACKET_TRANSMITTED ? ETH_BYTES : 0;
}

/* The programs on_xmit and on_receive, which have handle(skb, dev, seen) see each packet of the host. */
#define SEE_PACKETS(handle)									\
	SEC("tp_btf/net_dev_start_xmit")							\
	int BPF_PROG(on_xmit, const struct sk_buff *skb, const struct net_device *dev)	\
	{											\
		return handle(skb, dev, PACKET_TRANSMITTED);					\
	}											\
												\
	SEC("tp_btf/netif_receive_skb")							\
	int BPF_PROG(on_receive, const struct sk_buff *skb)					\
	{											\
		return handle(skb, skb->dev, PACKET_RECEIVED);					\
	}

#endif

// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counts the bytes that HDFS DataNodes send to VMs, and that VMs send as DataNodes, by the sender's address, for the VMs whose NICs
 * acct.bpf.c watches. Addresses, ports and lengths are all that is read. It is loaded for a second at a time, and sees every
 * packet of the host meanwhile.
 */
#include "types.h"
#include "acct_kernel.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "acct.h"
#include "headers.h"
#include "nics.h"

char LICENSE[] SEC("license") = "GPL";

enum {
	BPF_MAP_TYPE_LRU_HASH = 9, BPF_NOEXIST = 1,
	MAX_FLOWS = 4096,
	/* Data transfer of HDFS 3 and of HDFS 2 (dfs.datanode.address) */
	HDFS3 = 9866, HDFS2 = 50010,
};

/* A DataNode's bytes at the NIC of a VM. */
struct flow_key {
	u32 vm;
	u32 to_guest;		/* 0: the VM is the DataNode */
	u8 sender[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FLOWS);
	__type(key, struct flow_key);
	__type(value, u64);
} flows SEC(".maps");

static __always_inline int on_packet(const struct sk_buff *skb, const struct net_device *dev, u32 seen)
{
	struct nic_owner *owner = owner_of(dev);
	struct flow_key key = {};
	struct headers h;
	u64 none = 0, *bytes;
	u32 port;

	if (!owner || !read_headers(skb, link_bytes(seen), &h) || h.transport != TCP)
		return 0;
	port = source_port(&h);
	if (port != HDFS3 && port != HDFS2)
		return 0;
	key.vm = owner->vm;
	key.to_guest = owner->to_guest == seen;
	copy_address(key.sender, &h, 1);
	bytes = bpf_map_lookup_elem(&flows, &key);
	if (!bytes) {
		bpf_map_update_elem(&flows, &key, &none, BPF_NOEXIST);
		bytes = bpf_map_lookup_elem(&flows, &key);
	}
	if (bytes)
		__sync_fetch_and_add(bytes, skb->len);
	return 0;
}

SEE_PACKETS(on_packet)

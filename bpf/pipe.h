/* SPDX-License-Identifier: GPL-2.0-only */
/* Structures shared by the steering program and its loader. Numbers are in network byte order where the packet's are. */
#ifndef VIOLA_PIPE_H
#define VIOLA_PIPE_H

/* A connection of a VM, as its tap sees it. An IPv4 address is in the first four bytes; the rest is zero. */
struct flow_key {
	u8 guest[16];
	u8 peer[16];
	u16 guest_port;
	u16 peer_port;
	u32 tap;		/* interface number of the tap: other VMs may have the same addresses */
};

enum flow_state {
	FLOW_HELD = 1,		/* neither the VM nor the host's socket gets or sends packets */
	FLOW_REDIRECTED = 2,	/* redirected to the host's socket */
	FLOW_RELAYED = 3,	/* the host's socket sends already; the peer's packets are kept and passed to it */
};

struct flow {
	u32 state;
	u32 out;		/* interface to the host's socket, or to where held packets are kept; 0: none */
	u64 held;		/* packets from the peer while it was held */
	u64 in;			/* packets redirected to the host's socket */
	u64 from;		/* packets from the host's socket */
	u64 silenced;		/* packets of the guest that were dropped */
	u8 next_hop[6];		/* MAC address from which the peer's packets come */
	u8 known;		/* whether next_hop is set */
	u8 pad;
};

/* Where packets that were held go. */
struct ends {
	u32 tap;		/* the VM's tap: packets for the VM */
	u32 veth;		/* the host's end of the veth: packets for the host's socket */
};

#endif

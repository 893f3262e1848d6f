/* SPDX-License-Identifier: GPL-2.0-only */
/* What the steering program and its loader share. Numbers are in network order where the packet's are. */
#ifndef VIOLA_PIPE_H
#define VIOLA_PIPE_H

/* A connection of a VM, seen from its tap. IPv4 addresses are in the first four bytes, the rest is zero. */
struct flow_key {
	u8 guest[16];
	u8 peer[16];
	u16 guest_port;
	u16 peer_port;
	u32 tap;		/* interface of the tap; addresses may be those of another VM, too */
};

enum flow_state {
	FLOW_HELD = 1,		/* nobody hears or says anything */
	FLOW_LED = 2,		/* the host's socket has it */
	FLOW_TAKEN = 3,		/* the host's socket speaks already; what the peer says is kept, and brought to it */
};

struct flow {
	u32 state;
	u32 out;		/* interface that leads to the host's socket, or to where held packets are kept; 0: nowhere */
	u64 held;		/* packets from the peer while it was held */
	u64 in;			/* packets led to the host's socket */
	u64 from;		/* packets from it */
	u64 silenced;		/* packets of the guest that were dropped */
	u8 next_hop[6];		/* MAC address from which the peer's packets come */
	u8 known;		/* whether that has been seen */
	u8 pad;
};

#endif

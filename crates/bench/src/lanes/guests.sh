# SPDX-License-Identifier: Apache-2.0
# Creates the bridge, the outside network and $G guests in the emulated host: network namespaces, each with a bond.
# eth0 is the PF, eth1 connects the outside network, eth2 is the bridge's uplink.
set -e
for m in igb virtio_net igbvf bonding veth bridge; do modprobe $m; done
sleep 1
echo 1 >/proc/sys/net/core/devconf_inherit_init_net
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
mkdir -p /run/netns
ip netns add peer; ip link set eth1 netns peer; ip -n peer link set lo up; ip -n peer link set eth1 up
ip -n peer addr add 10.9.0.1/24 dev eth1
ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0
ip link set br0 up; ip link set eth2 master br0; ip link set eth2 up; bridge link set dev eth2 learning off
ip link set eth0 up
for i in $(seq $G); do
    h=$(printf %02x $i)
    ip netns add n$i; ip -n n$i link set lo up
    ip link add v$i type veth peer name eth0 netns n$i
    ip link set v$i master br0 up; bridge link set dev v$i flood off
    ip -n n$i link add bond0 address 52:54:00:00:20:$h type bond mode active-backup miimon 50 fail_over_mac none num_grat_arp 2
    ip -n n$i link set eth0 master bond0; ip -n n$i link set bond0 up; ip -n n$i addr add 10.9.0.$((10 + i))/24 dev bond0
done
echo set up

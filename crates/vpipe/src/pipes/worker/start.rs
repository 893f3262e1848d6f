// SPDX-License-Identifier: Apache-2.0
//! Holds connections, and starts pipes.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Instant;

use viola_proto::pipe::{Connection, PipeId};

use super::super::pipe::{Pipe, Transfer, Wait};
use super::super::waiting::{HeldConnection, ReturnedConnections, release_to_vm};
use super::super::{Endpoint, PipeSpec, write_refusal};
use super::Worker;
use crate::transfer::{FileToSocket, SocketToFile, SocketToSocket};
use crate::vm_netns::vm_socket;
use crate::{Error, Flow, HostConnection};

/// A connection of a new pipe.
struct ConnectionSpec {
    flow: Flow,
    connection: Connection,
    next_hop: [u8; 6],
}

impl Worker {
    /// The flow of a connection.
    ///
    /// # Errors
    /// The address is not the VM's, or the host has the connection already.
    fn flow(&self, local: SocketAddr, peer: SocketAddr) -> Result<Flow, String> {
        let flow = self.resources.flow(local, peer);
        if !may_have(&self.resources.addresses, local.ip()) {
            return Err(format!("{} is no address of this VM", local.ip()));
        }
        let held = self.held.values().map(|held| held.flow);
        let pipes = self.pipes.values().flat_map(|(pipe, _)| pipe.flows());
        let returned = (self.returned.values()).flat_map(ReturnedConnections::flows);
        match held.chain(pipes).chain(returned).any(|f| f == flow) {
            true => Err("the host has this connection already".into()),
            false => Ok(flow),
        }
    }

    fn has_room(&self, id: PipeId) -> Result<(), String> {
        if self.pipes.contains_key(&id) || self.returned.contains_key(&id) {
            return Err("this pipe exists already".into());
        }
        let open = self.held.len() + self.pipes.len() + self.returned.len();
        match open < self.resources.max_pipes {
            true => Ok(()),
            false => Err(format!(
                "{} pipes are open already",
                self.resources.max_pipes
            )),
        }
    }

    /// Whether the host may receive in the VM's place.
    fn may_receive(&self) -> Result<(), String> {
        match &self.resources.receive_limit {
            None => Ok(()),
            Some(kind) => Err(format!(
                "this VM's NIC has a limit for what it receives ({kind}), which bytes to the host's socket would bypass; \
                 the VM receives them itself"
            )),
        }
    }

    pub(super) fn hold(
        &mut self,
        now: Instant,
        id: PipeId,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<(), String> {
        self.may_receive()?;
        self.has_room(id)?;
        if self.held.contains_key(&id) {
            return Err("this pipe holds a connection already".into());
        }
        let flow = self.flow(local, peer)?;
        let hold_veth = self.resources.hold_veth;
        (self.resources.flows.hold(&flow, None, Some(hold_veth))).map_err(|e| e.to_string())?;
        self.held.insert(id, HeldConnection::new(flow, now));
        Ok(())
    }

    pub(super) fn start(&mut self, now: Instant, spec: PipeSpec) -> Result<(), String> {
        let PipeSpec {
            pipe: id,
            source,
            sink,
            length,
        } = spec;
        let (source_file, source) = self.split(id, source)?;
        let (sink_file, sink) = self.split(id, sink)?;
        if source.is_some() {
            self.may_receive()?;
        }
        match self.held.get(&id) {
            None => self.has_room(id)?,
            Some(held) if source.as_ref().is_none_or(|s| s.flow != held.flow) => {
                return Err("this pipe holds another connection".into());
            }
            Some(_) => {}
        }
        if let (Some(source), Some(sink)) = (&source, &sink)
            && source.flow == sink.flow
        {
            return Err("source and sink are one connection".into());
        }
        let transfer = match (source_file, sink_file) {
            (Some(from), None) => {
                Transfer::Send(FileToSocket::new(from.image, from.map, from.offset, length))
            }
            (None, Some(to)) => {
                let transfer = SocketToFile::new(to.image, to.map, to.offset, length);
                Transfer::Receive(transfer.map_err(|e| write_refusal(&e))?)
            }
            (None, None) => {
                Transfer::Relay(SocketToSocket::new(length).map_err(|e| e.to_string())?)
            }
            (Some(_), Some(_)) => return Err("a copy has no connection".into()),
        };
        let source = source.map(|spec| self.restore(spec, true)).transpose()?;
        let sink = match sink.map(|spec| self.restore(spec, false)).transpose() {
            Ok(sink) => sink,
            Err(why) => {
                if let Some(source) = source {
                    self.undo_restore(source);
                }
                return Err(why);
            }
        };
        self.held.remove(&id);
        let pipe = Pipe::new(id, transfer, (source, sink), now);
        self.pipes.insert(id, (pipe, Wait::Nothing));
        self.counts.begun += 1;
        Ok(())
    }

    /// Splits an endpoint into a file or a connection, and checks the connection.
    fn split(
        &self,
        id: PipeId,
        endpoint: Endpoint,
    ) -> Result<(Option<crate::transfer::FileRange>, Option<ConnectionSpec>), String> {
        match endpoint {
            Endpoint::File(range) => Ok((Some(range), None)),
            Endpoint::Connection {
                connection,
                next_hop,
            } => {
                let flow = self.resources.flow(connection.local, connection.peer);
                // the source may be held for this pipe
                if self.held.get(&id).is_none_or(|held| held.flow != flow) {
                    self.flow(connection.local, connection.peer)?;
                }
                let spec = ConnectionSpec {
                    flow,
                    connection,
                    next_hop,
                };
                Ok((None, Some(spec)))
            }
        }
    }

    /// Restores a connection in a socket of the host. Packets of a source are held until then.
    fn restore(&mut self, spec: ConnectionSpec, is_source: bool) -> Result<HostConnection, String> {
        let resources = &mut self.resources;
        let state = viola_handover::from_wire(spec.connection);
        let hold_veth = is_source.then_some(resources.hold_veth);
        let hold = is_source.then_some((&mut resources.hold_queue, resources.hold_veth));
        let (flows, veth) = (&resources.flows, resources.veth);
        let restored = (flows.hold(&spec.flow, Some(spec.next_hop), hold_veth))
            .and_then(|()| vm_socket(spec.flow.guest.ip()))
            .and_then(|socket| {
                let controls = &resources.congestion_controls;
                let same = viola_handover::apply_pacing(socket.as_fd(), &state, controls);
                self.counts.other_congestion += u64::from(!same.map_err(Error::Connection)?);
                Ok(socket)
            })
            .and_then(|socket| {
                HostConnection::restore(flows, veth, socket, spec.flow, &state, hold)
            });
        restored.map_err(|e| {
            let _ = resources.flows.release(&spec.flow);
            e.to_string()
        })
    }

    /// Undoes the first of two restores after the second has failed: the VM goes on with both connections.
    fn undo_restore(&mut self, connection: HostConnection) {
        let flow = *connection.flow();
        let hold_veth = self.resources.hold_veth;
        if (connection.extract(&self.resources.flows, Some(hold_veth))).is_ok() {
            release_to_vm(&mut self.resources, &flow);
        }
    }
}

/// Whether a connection of the VM may have this local address. `allowed` is empty for any address that a NIC can have.
fn may_have(allowed: &[IpAddr], local: IpAddr) -> bool {
    let of_a_nic = !local.is_unspecified() && !local.is_loopback() && !local.is_multicast();
    let is_plain = match local {
        IpAddr::V4(address) => !address.is_broadcast(),
        // the flow of such a connection is that of the IPv4 address
        IpAddr::V6(address) => address.to_ipv4_mapped().is_none(),
    };
    of_a_nic && is_plain && (allowed.is_empty() || allowed.contains(&local))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_an_address_that_a_nic_can_have() {
        let own: IpAddr = [10, 66, 0, 2].into();
        let other: IpAddr = "fd66::3".parse().unwrap();
        assert!(may_have(&[], own) && may_have(&[], other));
        assert!(may_have(&[own], own) && !may_have(&[own], other));
        for none in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "ff02::1",
            "::ffff:10.66.0.2",
        ] {
            assert!(!may_have(&[], none.parse().unwrap()), "{none}");
        }
    }
}

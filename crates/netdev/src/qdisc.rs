// SPDX-License-Identifier: Apache-2.0
//! Queueing disciplines of an interface (tc(8)).

use std::io;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcMessage};

use crate::netlink::dump;

/// Kinds that set no rate for the interface: they order packets, drop packets of a long queue, or hold filters. Others (`htb`,
/// `tbf`, `hfsc`, `cake`, `netem`) can delay packets to keep a rate. `fq`, the default of many hosts, counts as one without,
/// though its `maxrate` limits each flow.
const WITHOUT_RATE: [&str; 16] = [
    "noqueue",
    "noop",
    "mq",
    "pfifo",
    "pfifo_fast",
    "pfifo_head_drop",
    "bfifo",
    "fq",
    "fq_codel",
    "fq_pie",
    "codel",
    "pie",
    "sfq",
    "prio",
    "ingress",
    "clsact",
];

/// The kind of the queueing discipline that can limit the rate at which an interface sends; `None` if there is none. For a VM's
/// tap, what the interface sends is what the VM receives.
///
/// # Errors
/// The kernel's.
pub fn rate_limiter(index: u32) -> io::Result<Option<String>> {
    let answers = dump(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default()))?;
    Ok(answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewQueueDiscipline(found)
            if u32::try_from(found.header.index) == Ok(index) =>
        {
            limiting_kind(&found)
        }
        _ => None,
    }))
}

fn limiting_kind(message: &TcMessage) -> Option<String> {
    message.attributes.iter().find_map(|a| match a {
        TcAttribute::Kind(kind) if !WITHOUT_RATE.contains(&kind.as_str()) => Some(kind.clone()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::tests::in_new_netns;
    use crate::{add_veth, link, set_up};

    fn tc(words: &str) -> Result<(), String> {
        let done = std::process::Command::new("tc")
            .args(words.split(' '))
            .output()
            .unwrap();
        match done.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
        }
    }

    #[test]
    fn kinds_that_delay_packets_limit_a_rate() {
        for (kind, limits) in [("htb", true), ("tbf", true), ("fq_codel", false)] {
            let mut message = TcMessage::default();
            message.attributes = vec![TcAttribute::Kind(kind.into())];
            assert_eq!(limiting_kind(&message).is_some(), limits, "{kind}");
        }
    }

    #[test]
    fn the_limit_of_one_interface_is_not_that_of_another() {
        in_new_netns(|_| {
            add_veth("a0", "b0", None).unwrap();
            let (a, b) = (link("a0").unwrap().index, link("b0").unwrap().index);
            set_up(a, true).unwrap();
            assert_eq!(rate_limiter(a).unwrap(), None);
            // What libvirt sets for <inbound>.
            if let Err(why) = tc("qdisc add dev a0 root handle 1: htb default 1") {
                assert!(why.contains("unknown"), "{why}");
                eprintln!("this kernel has no htb: only interfaces without a limit were read");
                return;
            }
            assert_eq!(rate_limiter(a).unwrap().as_deref(), Some("htb"));
            assert_eq!(rate_limiter(b).unwrap(), None);
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Filters, limits and counters of packets at a VM's tap and bridge, which must see what the host sends for the VM. `ebtables` and
//! libvirt's nwfilter set such rules in the kernel's tables of bridge packets, nft(8) in all of them.

use std::io::{ErrorKind, Read};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::common::guests::within;
use crate::faults::half_way;
use crate::rig::{CHANGE_TIMEOUT, GUEST, MIB, Rig};

/// Without a packet for this long, nothing comes through.
const SILENCE: Duration = Duration::from_secs(1);
/// Most bytes a second in the test of a limit.
const LIMIT: usize = 16 * MIB;

/// Rules for packets of the guest's server. They end with the value.
struct Rules<'a> {
    rig: &'a Rig,
    family: &'static str,
}

impl<'a> Rules<'a> {
    fn add(rig: &'a Rig, family: &'static str, hook: &str, verdict: &str) -> Self {
        let rules = Self { rig, family };
        rules.nft(&format!(
            "add table {family} t; add chain {family} t c {{ type filter hook {hook} priority 0; }}; \
             add rule {family} t c ip saddr {GUEST} tcp sport 80 {verdict}"
        ));
        rules
    }

    fn nft(&self, words: &str) -> String {
        let run = || Command::new("/usr/sbin/nft").arg(words).output().unwrap();
        let done = self.rig.lab.in_netns(run).unwrap();
        assert!(done.status.success(), "{words}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    /// Bytes that the rule's counter has seen.
    fn bytes(&self) -> usize {
        let text = self.nft(&format!("list table {} t", self.family));
        // `counter packets 3 bytes 180`
        let counter = text.split("counter packets ").nth(1).unwrap();
        counter.split_whitespace().nth(2).unwrap().parse().unwrap()
    }
}

impl Drop for Rules<'_> {
    fn drop(&mut self) {
        self.nft(&format!("delete table {} t", self.family));
    }
}

/// The guest's tap.
fn tap(rig: &Rig) -> String {
    let links = rig.lab.in_netns(|| viola_netdev::links().unwrap()).unwrap();
    let mut ports = links.into_iter().filter(|link| link.master.is_some());
    ports.next().unwrap().name
}

/// Reads until nothing has come for [`SILENCE`].
fn drain(client: &mut Client, got: &mut Vec<u8>) {
    client.0.get_ref().set_read_timeout(Some(SILENCE)).unwrap();
    let error = client.0.read_to_end(got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    let again = Some(CHANGE_TIMEOUT);
    client.0.get_ref().set_read_timeout(again).unwrap();
}

#[test]
fn a_filter_at_tap_or_bridge_stops_what_the_host_sends() {
    let rig = Rig::boot("pi-filter");
    rig.start_nginx();
    let tap = tap(&rig);
    let at_tap = format!("ingress device {tap}");
    let hooks = [
        ("netdev", at_tap.as_str()),
        ("bridge", "prerouting"),
        ("bridge", "input"),
    ];
    for (family, hook) in hooks {
        let (mut client, mut got) = half_way(&rig);
        let rules = Rules::add(&rig, family, hook, "counter drop");
        drain(&mut client, &mut got);
        let dropped = rules.bytes();
        assert!(dropped > 0, "{family} {hook}");
        drain(&mut client, &mut got);
        assert!(got.len() < rig.files[1].len(), "{family} {hook}");
        drop(rules);
        let head = got.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        let mut rest = vec![0; head + rig.files[1].len() - got.len()];
        client.0.read_exact(&mut rest).unwrap();
        got.extend(rest);
        assert!(got[head..] == rig.files[1], "{family} {hook}");
    }
    let work = rig.settled(3);
    assert_eq!(
        (work.begun, work.refused, work.broken),
        (3, 0, 0),
        "{work:?}"
    );
}

#[test]
fn a_counter_and_a_limit_at_the_tap_count_what_the_host_sends() {
    let rig = Rig::boot("pi-police");
    rig.start_nginx();
    let hook = format!("ingress device {}", tap(&rig));
    let file = &rig.files[1];
    let mut client = rig.client();
    let rules = Rules::add(&rig, "netdev", &hook, "counter");
    client.fetch("/f1", file);
    let bytes = rules.bytes();
    drop(rules);
    assert!(bytes > file.len(), "{bytes} of {}", file.len());
    // As libvirt's <outbound> does it: what is above the rate is dropped.
    let police = format!("limit rate over {LIMIT} bytes/second burst {MIB} bytes counter drop");
    let rules = Rules::add(&rig, "netdev", &hook, &police);
    let begin = Instant::now();
    client.fetch("/f1", file);
    let seconds = begin.elapsed().as_secs_f64();
    assert!(rules.bytes() > 0);
    // The kernel lets a burst and what is due in a second through at once (net/netfilter/nft_limit.c).
    let later = file.len() - MIB - LIMIT;
    assert!(
        seconds > 0.9 * later as f64 / LIMIT as f64,
        "{} bytes in {seconds:.2} s",
        file.len()
    );
    let work = rig.settled(2);
    assert_eq!(
        (work.begun, work.refused, work.broken),
        (2, 0, 0),
        "{work:?}"
    );
    within(CHANGE_TIMEOUT, "the bytes are the host's", || {
        rig.work().bytes as usize > 2 * file.len() - 2 * MIB
    });
}

// SPDX-License-Identifier: Apache-2.0
//! Resolves the names of other hosts, each on a thread of its own, since the name service may take seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A name is resolved again after this time.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(30);

type Answer = (String, Vec<String>);

/// Names and their addresses.
#[derive(Debug)]
pub struct Addresses {
    known: BTreeMap<String, (Instant, Vec<String>)>,
    /// Names that are being resolved.
    pending: BTreeSet<String>,
    answers: mpsc::Receiver<Answer>,
    to: mpsc::Sender<Answer>,
}

impl Default for Addresses {
    fn default() -> Self {
        let (to, answers) = mpsc::channel();
        Self {
            known: BTreeMap::new(),
            pending: BTreeSet::new(),
            answers,
            to,
        }
    }
}

impl Addresses {
    /// Addresses of `HOST:PORT`, with the port. There are none before the first answer, or when the name does not exist. A name that
    /// cannot be resolved any more keeps its addresses.
    pub fn resolve(&mut self, now: Instant, text: &str) -> Vec<String> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return vec![address.to_string()];
        }
        while let Ok((name, mut found)) = self.answers.try_recv() {
            self.pending.remove(&name);
            if found.is_empty()
                && let Some((_, before)) = self.known.get_mut(&name)
            {
                found = std::mem::take(before);
            }
            self.known.insert(name, (now, found));
        }
        let known = self.known.get(text);
        let is_old =
            known.is_none_or(|(at, _)| now.saturating_duration_since(*at) >= RESOLVE_INTERVAL);
        let addresses = known.map(|(_, a)| a.clone()).unwrap_or_default();
        if is_old && self.pending.insert(text.to_owned()) {
            let (to, name) = (self.to.clone(), text.to_owned());
            let look_up = move || {
                let found = name.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
                let mut found: Vec<String> = found
                    .unwrap_or_default()
                    .iter()
                    .map(ToString::to_string)
                    .collect();
                found.sort_unstable();
                found.dedup();
                let _ = to.send((name, found));
            };
            let thread = std::thread::Builder::new().name("vread-names".into());
            if thread.spawn(look_up).is_err() {
                self.pending.remove(text);
            }
        }
        addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(names: &mut Addresses, now: Instant, text: &str) -> Vec<String> {
        for _ in 0..500 {
            let found = names.resolve(now, text);
            if !found.is_empty() {
                return found;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Vec::new()
    }

    #[test]
    fn numbers_are_kept_and_names_are_resolved() {
        let mut names = Addresses::default();
        let now = Instant::now();
        assert_eq!(names.resolve(now, "10.0.0.2:7670"), ["10.0.0.2:7670"]);
        assert_eq!(names.resolve(now, "[fd00::2]:1"), ["[fd00::2]:1"]);
        assert!(names.resolve(now, "localhost:7670").is_empty());
        let found = wait(&mut names, now, "localhost:7670");
        assert!(found.contains(&"127.0.0.1:7670".to_owned()), "{found:?}");
    }

    #[test]
    fn a_name_that_no_longer_resolves_keeps_its_address() {
        let mut names = Addresses::default();
        let now = Instant::now();
        names
            .to
            .send(("b:1".into(), vec!["10.0.0.2:1".into()]))
            .unwrap();
        assert_eq!(names.resolve(now, "b:1"), ["10.0.0.2:1"]);
        names.to.send(("b:1".into(), Vec::new())).unwrap();
        assert_eq!(names.resolve(now, "b:1"), ["10.0.0.2:1"]);
    }
}

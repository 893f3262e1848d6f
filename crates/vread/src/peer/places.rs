// SPDX-License-Identifier: Apache-2.0
//! How many connections other hosts may have: in all, and from one source address, so that one address cannot take all
//! places. Connections count as unauthenticated until hello.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

/// Maximum connections. Together with the pool's threads they do not exceed the hazard cells.
pub(super) const MAX_LINKS: usize = 48;
/// Maximum connections from one source.
const MAX_LINKS_PER_SOURCE: usize = 32;
/// Maximum connections that have not said hello.
const MAX_UNAUTHENTICATED: usize = 16;
/// Maximum connections from one source that have not said hello.
const MAX_UNAUTHENTICATED_PER_SOURCE: usize = 8;

/// Where connections come from: an IPv4 address, or an IPv6 network of 64 bits, all of which one host may own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Source(IpAddr);

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => {
                let network = v6.to_bits() >> 64 << 64;
                IpAddr::V6(Ipv6Addr::from_bits(network))
            }
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(address) => write!(f, "{address}"),
            IpAddr::V6(network) => write!(f, "{network}/64"),
        }
    }
}

/// Why a connection gets no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Full {
    /// Of one source.
    #[error("it has {MAX_LINKS_PER_SOURCE} connections")]
    Source,
    /// Of one source, before hello.
    #[error("{MAX_UNAUTHENTICATED_PER_SOURCE} of its connections have not said hello")]
    UnauthenticatedOfSource,
    /// In all.
    #[error("{MAX_LINKS} connections are open")]
    All,
    /// In all, before hello.
    #[error("{MAX_UNAUTHENTICATED} connections have not said hello")]
    Unauthenticated,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    links: usize,
    unauthenticated: usize,
}

/// The places in use.
#[derive(Debug, Default)]
pub(super) struct Places {
    all: Count,
    /// Only sources with connections.
    by_source: HashMap<Source, Count>,
}

impl Places {
    /// Takes a place for a connection that has not said hello.
    ///
    /// # Errors
    /// Which limit is reached; the connection has no place then.
    pub(super) fn admit(&mut self, source: Source) -> Result<(), Full> {
        let own = self.by_source.get(&source).copied().unwrap_or_default();
        match () {
            () if own.links >= MAX_LINKS_PER_SOURCE => return Err(Full::Source),
            () if own.unauthenticated >= MAX_UNAUTHENTICATED_PER_SOURCE => {
                return Err(Full::UnauthenticatedOfSource);
            }
            () if self.all.links >= MAX_LINKS => return Err(Full::All),
            () if self.all.unauthenticated >= MAX_UNAUTHENTICATED => {
                return Err(Full::Unauthenticated);
            }
            () => {}
        }
        let own = self.by_source.entry(source).or_default();
        for count in [own, &mut self.all] {
            count.links += 1;
            count.unauthenticated += 1;
        }
        Ok(())
    }

    /// A connection with a place has said hello.
    pub(super) fn authenticate(&mut self, source: Source) {
        self.all.unauthenticated -= 1;
        if let Some(own) = self.by_source.get_mut(&source) {
            own.unauthenticated -= 1;
        }
    }

    /// A connection with a place has ended.
    pub(super) fn leave(&mut self, source: Source, is_authenticated: bool) {
        let unauthenticated = usize::from(!is_authenticated);
        self.all.links -= 1;
        self.all.unauthenticated -= unauthenticated;
        if let Some(own) = self.by_source.get_mut(&source) {
            own.links -= 1;
            own.unauthenticated -= unauthenticated;
            if own.links == 0 {
                self.by_source.remove(&source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(last: u8) -> Source {
        Source::from(IpAddr::from([10, 0, 0, last]))
    }

    #[test]
    fn an_address_is_counted_once_however_it_is_written() {
        let of = |text: &str| Source::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("::ffff:10.0.0.9"), of("10.0.0.9"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_ne!(of("10.0.0.9"), of("10.0.0.8"));
        assert_eq!(of("2001:db8::1").to_string(), "2001:db8::/64");
        assert_eq!(of("::ffff:10.0.0.9").to_string(), "10.0.0.9");
    }

    #[test]
    fn one_address_cannot_take_all_places() {
        let mut places = Places::default();
        // Connections that never say hello.
        let silent = (0..1000)
            .filter(|_| places.admit(source(1)).is_ok())
            .count();
        assert_eq!(silent, MAX_UNAUTHENTICATED_PER_SOURCE);
        assert_eq!(places.admit(source(1)), Err(Full::UnauthenticatedOfSource));
        assert_eq!(places.admit(source(2)), Ok(()));
        // Connections of a known host.
        let mut places = Places::default();
        let greeted = (0..1000).filter(|_| {
            let admitted = places.admit(source(1)).is_ok();
            if admitted {
                places.authenticate(source(1));
            }
            admitted
        });
        assert_eq!(greeted.count(), MAX_LINKS_PER_SOURCE);
        assert_eq!(places.admit(source(1)), Err(Full::Source));
        assert_eq!(places.admit(source(2)), Ok(()));
    }

    /// What a source does: connect, say hello on its n-th connection, close its n-th one.
    fn step() -> impl Strategy<Value = (u8, u8, prop::sample::Index)> {
        (0..4u8, 0..5u8, any::<prop::sample::Index>())
    }

    proptest! {
        #[test]
        fn limits_hold_and_the_last_connection_leaves_nothing(
            steps in proptest::collection::vec(step(), 0..400),
        ) {
            let mut places = Places::default();
            // Connections with a place: source, whether it said hello.
            let mut open: Vec<(u8, bool)> = Vec::new();
            for (from, what, which) in steps {
                let of = |open: &[(u8, bool)], only_silent: bool, from: Option<u8>| {
                    open.iter()
                        .filter(|(s, greeted)| from.is_none_or(|f| f == *s) && !(only_silent && *greeted))
                        .count()
                };
                match what {
                    0..3 => {
                        let room = of(&open, false, None) < MAX_LINKS
                            && of(&open, true, None) < MAX_UNAUTHENTICATED
                            && of(&open, false, Some(from)) < MAX_LINKS_PER_SOURCE
                            && of(&open, true, Some(from)) < MAX_UNAUTHENTICATED_PER_SOURCE;
                        let admitted = places.admit(source(from)).is_ok();
                        prop_assert_eq!(admitted, room);
                        if admitted {
                            open.push((from, false));
                        }
                    }
                    _ if open.is_empty() => {}
                    3 => {
                        let at = which.index(open.len());
                        if !open[at].1 {
                            open[at].1 = true;
                            places.authenticate(source(open[at].0));
                        }
                    }
                    _ => {
                        let (from, greeted) = open.remove(which.index(open.len()));
                        places.leave(source(from), greeted);
                    }
                }
                prop_assert_eq!(places.all.links, open.len());
            }
            for (from, greeted) in open {
                places.leave(source(from), greeted);
            }
            prop_assert!(places.by_source.is_empty());
            prop_assert_eq!((places.all.links, places.all.unauthenticated), (0, 0));
        }
    }
}

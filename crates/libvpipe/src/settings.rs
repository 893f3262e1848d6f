// SPDX-License-Identifier: Apache-2.0
//! What the environment says, read once.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use viola_proto::pipe::library::SOCKET;

/// Fewest bytes that are piped, unless `VIOLA_PIPE_MIN` says otherwise: a hand-over costs as much for a small file as for a
/// large one, and for less than this it did not pay where it was measured (`make bench-vpipe`).
pub const DEFAULT_MINIMUM: u64 = 2 << 20;

/// The same from a connection down another one, where two change hands and both have to be empty first.
pub const DEFAULT_RELAYED: u64 = 32 << 20;

/// What the environment says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where the agent listens: `VIOLA_PIPE_SOCKET`.
    pub agent: PathBuf,
    /// Fewest bytes that are piped: `VIOLA_PIPE_MIN`.
    pub minimum: u64,
    /// Whether that is only what [`crate::threshold`] begins with: not when it is said.
    pub adapts: bool,
    /// Fewest bytes that are relayed from connection to connection: `VIOLA_PIPE_MIN`, too.
    pub relayed: u64,
    /// Whether a whole body is piped when its first piece is sent: not when `VIOLA_PIPE_AHEAD` is 0.
    pub ahead: bool,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// This process's settings.
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Settings::from(|name: &str| std::env::var_os(name)))
}

impl Settings {
    fn from(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let named = |name| variable(name).filter(|text| !text.is_empty());
        let number = |text: OsString| text.to_str()?.parse::<u64>().ok();
        // nobody gains by a pipe of nothing
        let minimum = named("VIOLA_PIPE_MIN")
            .and_then(number)
            .map(|least| least.max(1));
        Self {
            agent: named("VIOLA_PIPE_SOCKET").map_or_else(|| SOCKET.into(), PathBuf::from),
            minimum: minimum.unwrap_or(DEFAULT_MINIMUM),
            adapts: minimum.is_none(),
            relayed: minimum.unwrap_or(DEFAULT_RELAYED),
            ahead: named("VIOLA_PIPE_AHEAD").is_none_or(|text| text != "0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_has_a_default_and_nonsense_is_not_heard() {
        let none = Settings::from(|_| None);
        assert_eq!(none.agent, PathBuf::from(SOCKET));
        assert_eq!((none.minimum, none.ahead), (DEFAULT_MINIMUM, true));
        assert!(none.adapts);
        let nonsense = Settings::from(|_| Some("x".into()));
        assert_eq!(nonsense.minimum, DEFAULT_MINIMUM);
        let zero = Settings::from(|_| Some("0".into()));
        assert_eq!((zero.minimum, zero.ahead), (1, false));
        assert!(!zero.adapts);
        assert_eq!((none.relayed, zero.relayed), (DEFAULT_RELAYED, 1));
    }
}

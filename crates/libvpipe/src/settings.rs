// SPDX-License-Identifier: Apache-2.0
//! Settings from environment variables, read once.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use viola_proto::pipe::library::SOCKET;

/// Fewest bytes of a pipe, unless `VIOLA_PIPE_MIN` sets another number. A handover costs as much for a small file as
/// for a large one; below this it did not pay in `make bench-vpipe`.
pub const DEFAULT_MIN_BYTES: u64 = 2 << 20;

/// Fewest bytes of a relay: two connections are handed over, and their queues must be empty first.
pub const DEFAULT_MIN_RELAY_BYTES: u64 = 32 << 20;

/// Settings of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Socket of the agent: `VIOLA_PIPE_SOCKET`.
    pub agent_socket: PathBuf,
    /// Fewest bytes that are piped: `VIOLA_PIPE_MIN`.
    pub min_bytes: u64,
    /// Whether [`crate::threshold`] adapts this minimum: only without `VIOLA_PIPE_MIN`.
    pub is_adaptive: bool,
    /// Fewest bytes of a relay: `VIOLA_PIPE_MIN`, too.
    pub min_relay_bytes: u64,
    /// Whether a whole HTTP body is piped when the program sends its first part: unless `VIOLA_PIPE_AHEAD` is 0.
    pub pipes_ahead: bool,
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
        // a pipe of zero bytes is useless
        let minimum = named("VIOLA_PIPE_MIN")
            .and_then(number)
            .map(|least| least.max(1));
        Self {
            agent_socket: named("VIOLA_PIPE_SOCKET").map_or_else(|| SOCKET.into(), PathBuf::from),
            min_bytes: minimum.unwrap_or(DEFAULT_MIN_BYTES),
            is_adaptive: minimum.is_none(),
            min_relay_bytes: minimum.unwrap_or(DEFAULT_MIN_RELAY_BYTES),
            pipes_ahead: named("VIOLA_PIPE_AHEAD").is_none_or(|text| text != "0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unset_and_invalid_variables_have_defaults() {
        let none = Settings::from(|_| None);
        assert_eq!(none.agent_socket, PathBuf::from(SOCKET));
        assert_eq!(
            (none.min_bytes, none.pipes_ahead),
            (DEFAULT_MIN_BYTES, true)
        );
        assert!(none.is_adaptive);
        let nonsense = Settings::from(|_| Some("x".into()));
        assert_eq!(nonsense.min_bytes, DEFAULT_MIN_BYTES);
        let zero = Settings::from(|_| Some("0".into()));
        assert_eq!((zero.min_bytes, zero.pipes_ahead), (1, false));
        assert!(!zero.is_adaptive);
        assert_eq!(
            (none.min_relay_bytes, zero.min_relay_bytes),
            (DEFAULT_MIN_RELAY_BYTES, 1)
        );
    }
}

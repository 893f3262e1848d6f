// SPDX-License-Identifier: Apache-2.0
//! Libvirt's row in `viola check`.

use viola_proto::{Libvirt, Row, RowState};

use viola_config::Config;

/// The row about libvirt; only a running daemon asks it.
pub fn row(daemon: Option<&Libvirt>, config: &Config) -> Row {
    let row = |state, value: &str, why: String| Row {
        name: "libvirt".into(),
        state,
        value: value.into(),
        why,
        change: None,
    };
    match daemon {
        _ if !config.daemon.libvirt => row(
            RowState::Info,
            "off",
            "it is not asked (libvirt = false in [daemon])".into(),
        ),
        None => row(RowState::Info, "-", "no daemon runs that asks it".into()),
        Some(told) if told.connected => {
            let domains = match told.domains {
                1 => "1 domain runs".to_owned(),
                n => format!("{n} domains run"),
            };
            let why = format!("{domains}; it tells when one starts, stops or gets other quotas");
            row(RowState::Yes, "yes", why)
        }
        // A host without it is a host like others.
        Some(told) => {
            let why = format!("{}; VMs are found in /proc", told.why);
            row(RowState::Info, "no", why)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn config(text: &str) -> Config {
        Config::parse(Path::new("v.toml"), text).unwrap()
    }

    #[test]
    fn a_host_without_libvirt_is_nothing_bad() {
        let mut told = Libvirt {
            on: true,
            why: "libvirt's daemon does not run".into(),
            ..Libvirt::default()
        };
        let on = config("");
        let said = row(Some(&told), &on);
        assert_eq!((said.state, said.value.as_str()), (RowState::Info, "no"));
        assert!(
            said.why.contains("does not run; VMs are found in /proc"),
            "{said:?}"
        );
        (told.connected, told.domains) = (true, 1);
        let said = row(Some(&told), &on);
        assert_eq!((said.state, said.value.as_str()), (RowState::Yes, "yes"));
        assert!(said.why.starts_with("1 domain runs;"), "{said:?}");
        assert_eq!(row(None, &on).value, "-");
        let off = config("[daemon]\nlibvirt = false\n");
        assert_eq!(row(Some(&Libvirt::default()), &off).value, "off");
    }
}

// SPDX-License-Identifier: Apache-2.0
//! `viola keys`

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::args;
use viola_cli::error::{Failure, Outcome};
use viola_cli::table::print;
use viola_config::vread::{DEFAULT_CERTIFICATE, DEFAULT_KEY};
use viola_config::{self as config, Config};
use viola_daemon::vread::keys::{Identity, host_name};

/// Port of vread between hosts in the proposed lines.
const DEFAULT_PORT: u16 = 7670;

/// Makes or shows this host's key.
pub fn keys(what: &args::Keys) -> Outcome {
    match what {
        args::Keys::Init(args) => {
            let files = Files::of(args)?;
            let host = name(args)?;
            let made = Identity::make(&host).map_err(Failure::usage)?;
            made.write(&files.key, &files.certificate)?;
            print(&format!(
                "made {} and {}\n{}",
                files.key.display(),
                files.certificate.display(),
                text(&host, &made, files.listen)
            ))
        }
        args::Keys::Show(args) => {
            let files = Files::of(args)?;
            let host = name(args)?;
            let found = Identity::read(&files.key, &files.certificate).map_err(Failure::run)?;
            print(&text(&host, &found, files.listen))
        }
    }
}

/// Paths of the key and the certificate, and the address on which this host listens.
struct Files {
    key: PathBuf,
    certificate: PathBuf,
    listen: Option<SocketAddr>,
}

impl Files {
    fn of(args: &args::KeysArgs) -> Outcome<Self> {
        let default = Path::new(config::DEFAULT_PATH);
        let file = match &args.config {
            Some(file) => Some(file.as_path()),
            None => default.exists().then_some(default),
        };
        Ok(match file {
            Some(file) => {
                let vread = Config::read(file)?.vread;
                Self {
                    key: vread.key,
                    certificate: vread.certificate,
                    listen: vread.listen,
                }
            }
            None => Self {
                key: DEFAULT_KEY.into(),
                certificate: DEFAULT_CERTIFICATE.into(),
                listen: None,
            },
        })
    }
}

fn name(args: &args::KeysArgs) -> Outcome<String> {
    let name = args.host.clone().unwrap_or_else(host_name);
    config::vread::peers::host(&name).map_err(Failure::usage)
}

fn text(host: &str, identity: &Identity, listen: Option<SocketAddr>) -> String {
    let address = match listen {
        Some(address) if !address.ip().is_unspecified() => address.to_string(),
        Some(address) => format!("{host}:{}", address.port()),
        None => format!("{host}:{DEFAULT_PORT}"),
    };
    format!(
        "fingerprint {}\n\n\
         # for viola.toml of the other hosts\n\
         [[vread.peer]]\n\
         name = \"{host}\"\n\
         address = \"{address}\"\n\
         fingerprint = \"{}\"\n",
        identity.fingerprint, identity.fingerprint
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_configuration_for_another_host() {
        let made = Identity::make("hosta").unwrap();
        let shown = text("hosta", &made, "10.0.0.1:77".parse().ok());
        let start = shown.find("# for").unwrap();
        let config = Config::parse(Path::new("v.toml"), &shown[start..]).unwrap();
        assert_eq!(
            config.vread.peers[0].fingerprints,
            std::slice::from_ref(&made.fingerprint)
        );
        assert_eq!(
            config.vread.peers[0].address.as_deref(),
            Some("10.0.0.1:77")
        );
        assert!(text("a", &made, "[::]:77".parse().ok()).contains("address = \"a:77\""));
        assert!(text("a", &made, None).contains("address = \"a:7670\""));
        assert!(!shown.contains("PRIVATE"));
    }
}

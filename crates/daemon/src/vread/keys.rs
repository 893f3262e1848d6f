// SPDX-License-Identifier: Apache-2.0
//! The key of this host, by which other hosts recognise it. `viola keys init` makes it once; only the daemon reads it.
//!
//! No authority signs it: the certificate is self-signed, and other hosts know its SHA-256, as with SSH host keys. Its dates are not
//! checked.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use viola_vread::peer;

use viola_cli::error::{Failure, Outcome, chain};

/// Largest key or certificate.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Key and certificate of a host, as PEM texts.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
    /// SHA-256 of the certificate, 64 hexadecimal digits.
    pub fingerprint: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.fingerprint)
    }
}

impl Identity {
    /// Makes a key and a certificate for a host of this name.
    ///
    /// # Errors
    /// When the name is not allowed in a certificate.
    pub fn make(host: &str) -> Result<Self, String> {
        let failed = |e: rcgen::Error| format!("no certificate can be made for {host}: {e}");
        let key = rcgen::KeyPair::generate().map_err(failed)?;
        let mut params = rcgen::CertificateParams::new(vec![host.to_owned()]).map_err(failed)?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, host);
        let certificate = params.self_signed(&key).map_err(failed)?.pem();
        Ok(Self {
            fingerprint: peer::fingerprint(&certificate).map_err(|e| chain(&e))?,
            certificate,
            key: key.serialize_pem(),
        })
    }

    /// Reads the files of this host.
    ///
    /// # Errors
    /// Which file is wrong, why, and what to do.
    pub fn read(key: &Path, certificate: &Path) -> Result<Self, String> {
        let key_text = read(key)?;
        let mode = fs::metadata(key).map_or(0, |m| m.mode());
        if mode & 0o077 != 0 {
            return Err(format!(
                "{}: others may read it (mode {:o}); chmod 600 it, or make another one if somebody has",
                key.display(),
                mode & 0o777
            ));
        }
        let certificate_text = read(certificate)?;
        let fingerprint = peer::fingerprint(&certificate_text)
            .map_err(|e| format!("{}: {}", certificate.display(), chain(&e)))?;
        peer::check_identity(&certificate_text, &key_text).map_err(|e| {
            format!(
                "{} and {} do not belong together or cannot be used: {}",
                certificate.display(),
                key.display(),
                chain(&e)
            )
        })?;
        Ok(Self {
            certificate: certificate_text,
            key: key_text,
            fingerprint,
        })
    }

    /// Writes new files; only the owner may read the key.
    ///
    /// # Errors
    /// [`Failure::Usage`] when one of the files exists, [`Failure::Run`] when one cannot be
    /// written.
    pub fn write(&self, key: &Path, certificate: &Path) -> Outcome {
        for path in [key, certificate] {
            if fs::symlink_metadata(path).is_ok() {
                return Err(exists(path));
            }
            let folder = path.parent().unwrap_or(Path::new("/"));
            fs::create_dir_all(folder)
                .map_err(|e| Failure::run(format!("{}: {e}", folder.display())))?;
        }
        create(key, 0o600, &self.key)?;
        create(certificate, 0o644, &self.certificate).inspect_err(|_| {
            // A key without certificate would prevent the next attempt.
            let _ = fs::remove_file(key);
        })
    }
}

fn exists(path: &Path) -> Failure {
    Failure::usage(format!(
        "{} is there already, and other hosts know this one by it; move it away to make another one",
        path.display()
    ))
}

fn create(path: &Path, mode: u32, text: &str) -> Outcome {
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::AlreadyExists => exists(path),
        _ => Failure::run(format!("{}: {e}", path.display())),
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .map_err(failed)?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(|e| {
            let _ = fs::remove_file(path);
            failed(e)
        })
}

fn read(path: &Path) -> Result<String, String> {
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => {
            format!("{} is missing; viola keys init makes it", path.display())
        }
        _ => format!("{}: {e}", path.display()),
    };
    let file = File::open(path).map_err(failed)?;
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(file, MAX_FILE_BYTES), &mut text)
        .map_err(failed)?;
    Ok(text)
}

/// The name of this host, without domain.
pub fn host_name() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    match name.split('.').next() {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => "host".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_written_once_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let (key, certificate) = (dir.path().join("x/h.key"), dir.path().join("x/h.crt"));
        let made = Identity::make("hosta").unwrap();
        made.write(&key, &certificate).unwrap();
        let mode = |p: &Path| fs::metadata(p).unwrap().mode() & 0o777;
        assert_eq!((mode(&key), mode(&certificate)), (0o600, 0o644));
        assert_eq!(Identity::read(&key, &certificate), Ok(made.clone()));
        let other = Identity::make("hosta").unwrap();
        assert_ne!(other.fingerprint, made.fingerprint);
        let refused = other.write(&key, &certificate);
        assert!(matches!(refused, Err(Failure::Usage(s)) if s.contains("h.key is there already")));
        fs::remove_file(&key).unwrap();
        let refused = other.write(&key, &certificate);
        assert!(matches!(refused, Err(Failure::Usage(s)) if s.contains("h.crt is there already")));
        assert!(!key.exists());
    }

    #[test]
    fn a_key_that_cannot_be_used_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (key, certificate) = (dir.path().join("h.key"), dir.path().join("h.crt"));
        let said = || Identity::read(&key, &certificate).unwrap_err();
        assert!(said().contains("h.key is missing; viola keys init makes it"));
        let (one, two) = (Identity::make("a").unwrap(), Identity::make("b").unwrap());
        one.write(&key, &certificate).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(said().contains("h.key: others may read it (mode 640)"));
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&certificate, &two.certificate).unwrap();
        assert!(said().contains("do not belong together"), "{}", said());
        fs::write(&certificate, "junk").unwrap();
        assert!(said().contains("h.crt: "), "{}", said());
    }

    #[test]
    fn debug_output_has_no_private_key() {
        let made = Identity::make("a").unwrap();
        assert!(!format!("{made:?}").contains("PRIVATE"));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Authenticates other hosts by pinned certificate fingerprints, in both directions of TLS 1.3.
//!
//! There is no certificate authority and no expiry: a certificate is valid while the operator lists its fingerprint.
//! Sessions are not resumed, because a resumed session would skip the check of the certificate.

use std::collections::HashSet;
use std::sync::{Arc, RwLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::{CryptoProvider, ring::default_provider, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, UnbufferedServerConnection};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    PeerIncompatible, ServerConfig, SignatureScheme,
};

use crate::lock::read;

/// What is wrong with a certificate or a key.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The text contains no certificate.
    #[error("the file contains no PEM certificate")]
    NoCertificate,
    /// The text contains no private key.
    #[error("the file contains no PEM private key")]
    NoKey,
    /// rustls rejects certificate or key.
    #[error("certificate or key is invalid: {0}")]
    Tls(#[from] Error),
}

/// SHA-256 of a certificate's DER.
pub type Fingerprint = [u8; 32];

fn digest(certificate: &CertificateDer<'_>) -> Fingerprint {
    let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(digest.as_ref());
    fingerprint
}

fn parse_certificate(pem: &str) -> Result<CertificateDer<'static>, PeerError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| PeerError::NoCertificate)
}

/// The fingerprint of the first certificate in a PEM text: 64 hexadecimal digits.
///
/// # Errors
/// [`PeerError::NoCertificate`].
pub fn fingerprint(pem: &str) -> Result<String, PeerError> {
    let digest = digest(&parse_certificate(pem)?);
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Parses the output of [`fingerprint`]; `None` for anything else.
#[must_use]
pub fn parse_fingerprint(text: &str) -> Option<Fingerprint> {
    let mut fingerprint = [0; 32];
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, byte) in fingerprint.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(fingerprint)
}

/// Checks that certificate and key are valid and belong together.
///
/// # Errors
/// [`PeerError`].
pub fn check_identity(certificate: &str, key: &str) -> Result<(), PeerError> {
    Identity::new(certificate, key).map(drop)
}

/// The fingerprints that are valid now.
pub type Pins = Arc<RwLock<HashSet<Fingerprint>>>;

/// This host's certificate and key.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Identity {
    /// Parses certificate and key from PEM texts.
    ///
    /// # Errors
    /// [`PeerError`], also when they do not belong together.
    pub fn new(certificate: &str, key: &str) -> Result<Self, PeerError> {
        let identity = Self {
            certificate: parse_certificate(certificate)?,
            key: PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|_| PeerError::NoKey)?,
            provider: Arc::new(default_provider()),
        };
        identity.server(&Pins::default())?;
        Ok(identity)
    }

    fn pinned(&self, pins: &Pins) -> Arc<Pinned> {
        Arc::new(Pinned {
            pins: pins.clone(),
            provider: self.provider.clone(),
        })
    }

    /// Server configuration for clients with these certificates.
    ///
    /// # Errors
    /// [`PeerError::Tls`].
    pub fn server(&self, pins: &Pins) -> Result<Arc<ServerConfig>, PeerError> {
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(self.pinned(pins))
            .with_single_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// A client connection to a host with one of these certificates.
    ///
    /// # Errors
    /// [`PeerError::Tls`].
    pub fn connect(
        &self,
        fingerprints: HashSet<Fingerprint>,
    ) -> Result<UnbufferedClientConnection, PeerError> {
        let pins = Pins::new(RwLock::new(fingerprints));
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(self.pinned(&pins))
            .with_client_auth_cert(vec![self.certificate.clone()], self.key.clone_key())?;
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        // rustls needs a name, but the verifier ignores it.
        let name = ServerName::from(std::net::IpAddr::from([0, 0, 0, 0]));
        Ok(UnbufferedClientConnection::new(Arc::new(config), name)?)
    }
}

/// A server connection.
///
/// # Errors
/// [`PeerError::Tls`].
pub fn accept(config: &Arc<ServerConfig>) -> Result<UnbufferedServerConnection, PeerError> {
    Ok(UnbufferedServerConnection::new(config.clone())?)
}

/// The fingerprint of the other side's certificate, after the handshake.
pub fn fingerprint_of(certificates: Option<&[CertificateDer<'_>]>) -> Option<Fingerprint> {
    certificates?.first().map(digest)
}

/// Verifies that a certificate is pinned, and that the other side has its key.
#[derive(Debug)]
struct Pinned {
    pins: Pins,
    provider: Arc<CryptoProvider>,
}

impl Pinned {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let pins = read(&self.pins);
        match pins.contains(&digest(certificate)) {
            true => Ok(()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn signed(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

/// Error of the TLS 1.2 functions. rustls never calls them, because only TLS 1.3 is enabled.
fn old() -> Error {
    PeerIncompatible::Tls13RequiredForQuic.into()
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate)
            .map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(certificate)
            .map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signed(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

//! Encrypted connections.

use std::io;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Why nothing can be encrypted.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate's file.
    #[error("the certificate: it has no PEM block CERTIFICATE that can be read")]
    Certificate,
    /// The key's file.
    #[error("the key: it has no PEM block PRIVATE KEY that can be read")]
    Key,
    /// They do not belong together, or are of a kind that is not supported.
    #[error("certificate and key: {0}")]
    Pair(String),
}

/// A certificate with its key, ready for connections of TLS 1.2 and 1.3.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads PEM files: a certificate with those that vouch for it, and its key.
    ///
    /// # Errors
    /// Something is missing, malformed, or does not fit.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificates).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(TlsError::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::Key)?;
        let pair = |error: rustls::Error| TlsError::Pair(error.to_string());
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(pair)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(pair)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.0.accept(stream).await
    }
}

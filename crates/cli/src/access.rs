//! Flags on who may ask, to what the server takes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_server::{ApiKey, ApiKeys, CorsOrigins, ServerConfig, Tls};

use crate::args::AccessArgs;

/// Sets what the flags say.
///
/// # Errors
/// What is wrong with which flag.
pub(crate) fn apply(args: &AccessArgs, config: &mut ServerConfig) -> Result<()> {
    config.keys = keys(args)?;
    config.cors_origins = origins(&args.cors_origin)?;
    config.max_body_bytes = (args.max_body_size as usize) << 20;
    config.max_connections = args.max_connections as usize;
    config.receive_timeout = Duration::from_secs(args.receive_timeout.into());
    config.request_timeout = args.request_timeout.map(|s| Duration::from_secs(s.into()));
    Ok(())
}

/// What encrypts connections, if anything does.
///
/// # Errors
/// A file cannot be read, or holds not what it should.
pub(crate) fn tls(args: &AccessArgs) -> Result<Option<Tls>> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let read = |flag: &str, path: &Path| {
        fs::read(path).with_context(|| format!("{flag} {}", path.display()))
    };
    let (chain, secret) = (read("--tls-cert", certificate)?, read("--tls-key", key)?);
    Ok(Some(Tls::from_pem(&chain, &secret).context("--tls-cert, --tls-key")?))
}

fn keys(args: &AccessArgs) -> Result<ApiKeys> {
    let mut keys = ApiKeys::default();
    for secret in &args.api_key {
        let key = ApiKey::new(secret).map(ApiKey::for_admins);
        key.and_then(|key| keys.add(key)).context("--api-key (or INFLIGHT_API_KEY)")?;
    }
    if let Some(path) = &args.api_key_file {
        let place = || format!("--api-key-file {}", path.display());
        let text = fs::read_to_string(path).with_context(place)?;
        keys.add_file(&text).with_context(place)?;
    }
    Ok(keys)
}

fn origins(origins: &[String]) -> Result<CorsOrigins> {
    let mut all = CorsOrigins::default();
    for origin in origins {
        let is_origin = all.add(origin);
        ensure!(is_origin, "--cors-origin {origin}: it must be * or as https://example.org");
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn applied(flags: &[&str]) -> Result<ServerConfig> {
        let Command::Serve(args) =
            Cli::try_parse_from([&["inflight", "serve"], flags].concat())?.command
        else {
            panic!("another command")
        };
        let mut config = ServerConfig::new("m");
        apply(&args.access, &mut config).map(|()| config)
    }

    #[test]
    fn flags_reach_the_server() {
        let flags = [
            "--api-key",
            "a",
            "--api-key",
            "b",
            "--max-body-size",
            "2",
            "--request-timeout",
            "7",
            "--receive-timeout",
            "9",
            "--cors-origin",
            "*",
        ];
        let config = applied(&flags).unwrap();
        assert_eq!(config.keys.all().len(), 2);
        assert!(config.keys.all().iter().all(|key| key.is_admin && key.name.is_none()));
        assert_eq!(config.max_body_bytes, 2 << 20);
        assert_eq!(config.request_timeout, Some(Duration::from_secs(7)));
        assert_eq!(config.receive_timeout, Duration::from_secs(9));
        assert_ne!(config.cors_origins, CorsOrigins::default());
        assert_eq!(applied(&[]).unwrap(), ServerConfig::new("m"), "defaults are the server's");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |flags: &[&str], named: &str| {
            let error = format!("{:#}", applied(flags).unwrap_err());
            assert!(error.contains(named), "{flags:?}: {error}");
        };
        check(&["--api-key", ""], "--api-key");
        check(&["--api-key", "a", "--api-key", "a"], "--api-key");
        check(&["--api-key-file", "/no/such/file"], "--api-key-file /no/such/file");
        check(&["--cors-origin", "example.org"], "--cors-origin example.org");
        check(&["--max-body-size", "0"], "--max-body-size");
        check(&["--request-timeout", "0"], "--request-timeout");
    }
}

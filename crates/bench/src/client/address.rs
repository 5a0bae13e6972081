//! Where a server is.

use std::fmt;
use std::str::FromStr;

/// `http://host:port/path`, read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    /// A name, or an address without brackets.
    host: String,
    port: u16,
    /// In front of every path; has no `/` at its end.
    base: String,
}

impl ServerAddress {
    /// What `TcpStream::connect` takes.
    pub(super) fn endpoint(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// The header `Host`.
    pub(super) fn authority(&self) -> String {
        let bracketed = self.host.contains(':').then(|| format!("[{}]", self.host));
        format!("{}:{}", bracketed.as_deref().unwrap_or(&self.host), self.port)
    }

    /// A path of the server behind the base. Those who give a base that ends in `/v1`, as
    /// OpenAI's clients want it, mean the same server.
    pub(super) fn path(&self, path: &str) -> String {
        let base = self.base.strip_suffix("/v1").unwrap_or(&self.base);
        format!("{base}{path}")
    }
}

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", _)) => return Err("https is not supported: use http".to_owned()),
            Some((scheme, _)) => return Err(format!("`{scheme}` is no scheme of HTTP")),
            None => url,
        };
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if path.contains(['?', '#', ' ']) || authority.contains(['@', ' ']) {
            return Err("write http://host:port, perhaps with a path".to_owned());
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => rest.split_once(']').ok_or("a `]` is missing")?,
            None => authority.find(':').map_or((authority, ""), |at| authority.split_at(at)),
        };
        if host.is_empty() {
            return Err("names no host".to_owned());
        }
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => 80,
            Some(port) => port.parse().map_err(|_| format!("`{port}` is no port"))?,
            None => return Err(format!("`{port}` is no port")),
        };
        let base = path.trim_end_matches('/').to_owned();
        Ok(Self { host: host.to_owned(), port, base })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority(), self.base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let check = |url: &str, endpoint, path: &str| {
            let address: ServerAddress = url.parse().unwrap();
            assert_eq!(address.endpoint(), endpoint, "{url}");
            assert_eq!(address.path("/v1/completions"), path, "{url}");
        };
        check("http://127.0.0.1:8000", ("127.0.0.1", 8000), "/v1/completions");
        check("localhost:81/", ("localhost", 81), "/v1/completions");
        check("http://a.b", ("a.b", 80), "/v1/completions");
        check("http://[::1]:9/x/", ("::1", 9), "/x/v1/completions");
        check("http://h:9/v1", ("h", 9), "/v1/completions");
        check("http://h:9/llm/v1/", ("h", 9), "/llm/v1/completions");
        let address: ServerAddress = "[::1]:9".parse().unwrap();
        assert_eq!(
            (address.authority(), address.to_string()),
            ("[::1]:9".to_owned(), "http://[::1]:9".to_owned())
        );
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let check = |url: &str, said: &str| {
            let error = url.parse::<ServerAddress>().unwrap_err();
            assert!(error.contains(said), "{url}: {error}");
        };
        check("https://h", "https is not supported");
        check("ftp://h", "ftp");
        check("", "no host");
        check("http://:80", "no host");
        check("h:70000", "70000");
        check("h:", "no port");
        check("[::1", "]");
        check("user@h", "http://host:port");
    }
}

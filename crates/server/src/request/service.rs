//! How a request is to be served among others.

use std::time::Duration;

use inflight_engine::Tenant;

use crate::error::ApiError;

/// Longest name of a user.
const MAX_USER_BYTES: usize = 256;
/// Longest timeout: a week.
const MAX_TIMEOUT_MS: u64 = 7 * 24 * 3600 * 1000;

/// What a request asks for, as the engine takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Service {
    /// As vLLM's: lower goes first.
    pub(crate) priority: i32,
    /// Time until the whole answer must be there; without it the client gets an error.
    pub(crate) timeout: Option<Duration>,
    /// OpenAI's `user`: whose account it is on, where tenants are served fairly.
    pub(crate) tenant: Tenant,
}

impl Service {
    pub(crate) fn resolve(
        priority: Option<i32>,
        timeout_ms: Option<u64>,
        user: Option<&str>,
    ) -> Result<Self, ApiError> {
        if let Some(ms) = timeout_ms
            && !(1..=MAX_TIMEOUT_MS).contains(&ms)
        {
            let reason = format!("is {ms}; it must be from 1 to {MAX_TIMEOUT_MS}");
            return Err(ApiError::invalid("timeout_ms", reason));
        }
        if user.is_some_and(|user| user.len() > MAX_USER_BYTES) {
            let reason = format!("is longer than {MAX_USER_BYTES} bytes");
            return Err(ApiError::invalid("user", reason));
        }
        Ok(Self {
            priority: priority.unwrap_or(0),
            timeout: timeout_ms.map(Duration::from_millis),
            tenant: user.map_or_else(Tenant::default, Tenant::named),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named() {
        let check = |timeout_ms, user: &str, param: Option<&str>| {
            let resolved = Service::resolve(None, timeout_ms, Some(user));
            let message = resolved.map(|_| String::new()).unwrap_or_else(|error| error.to_string());
            assert_eq!(message.is_empty(), param.is_none(), "{message}");
            assert!(message.starts_with(param.unwrap_or_default()), "{message}");
        };
        check(None, "", None);
        check(Some(1), &"u".repeat(256), None);
        check(Some(0), "", Some("`timeout_ms`: is 0"));
        check(Some(u64::MAX), "", Some("`timeout_ms`: is 18446744073709551615"));
        check(None, &"u".repeat(257), Some("`user`: is longer than 256"));
    }
}

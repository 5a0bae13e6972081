//! Whose key a request bears, and what is known of that on the disk.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::caller::Account;
use crate::files::FileStore;
use crate::state::ServerState;

/// Whose key a request bears; none, if the server is open to everybody. What comes from outside
/// gets it at the gate; what the server asks itself brings it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bearer(pub(super) Option<Arc<Account>>);

impl Bearer {
    /// Names whoever it is on the disk: by the key's name if it has one, so that a new key of that
    /// name finds what the old one left.
    pub(crate) fn owner(&self, salt: &str) -> Option<String> {
        let key = self.0.as_ref()?.key();
        Some(match &key.name {
            Some(name) => format!("name:{name}"),
            None => format!("key:{}", key.salted(salt)),
        })
    }

    /// Whoever [`Bearer::owner`] names; `None`: there is no such key any more.
    pub(crate) fn of_owner(
        state: &ServerState,
        store: &FileStore,
        owner: Option<&str>,
    ) -> Option<Self> {
        let keys = state.accounts().iter().map(|account| Self(Some(Arc::clone(account))));
        let mut all = keys.chain(state.accounts().is_empty().then(Self::default));
        all.find(|bearer| bearer.owner(store.salt()).as_deref() == owner)
    }
}

impl FromRequestParts<ServerState> for Bearer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &ServerState) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

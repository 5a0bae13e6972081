//! Who asks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use inflight_engine::Tenant;

use super::keys::ApiKey;
use super::meter::{Exceeded, Left, Meter};

/// What has become of one key.
#[derive(Debug)]
pub(crate) struct Account {
    key: ApiKey,
    meter: Mutex<Meter>,
    pub(crate) num_requests: AtomicU64,
    pub(crate) num_refused: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) generated_tokens: AtomicU64,
}

impl Account {
    pub(crate) fn new(key: ApiKey) -> Self {
        Self {
            meter: Mutex::new(Meter::new(key.limits, Instant::now())),
            key,
            num_requests: AtomicU64::default(),
            num_refused: AtomicU64::default(),
            prompt_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
        }
    }

    pub(crate) fn key(&self) -> &ApiKey {
        &self.key
    }

    /// Requests that have not ended.
    pub(crate) fn num_running(&self) -> u32 {
        self.meter().num_running()
    }

    /// What is left of requests and of tokens, where they are limited.
    pub(crate) fn left(&self) -> [Option<Left>; 2] {
        self.meter().left(Instant::now())
    }

    fn meter(&self) -> MutexGuard<'_, Meter> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// On whose account a request is. Cheap to clone; the request counts as running until the last
/// clone is dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller(Option<Arc<Visit>>);

/// A request of a key.
#[derive(Debug)]
struct Visit(Arc<Account>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.meter().end();
    }
}

impl Caller {
    /// A request that a key's limits let in.
    ///
    /// # Errors
    /// The limit that does not.
    pub(crate) fn enter(account: &Arc<Account>) -> Result<Self, Exceeded> {
        let begun = account.meter().begin(Instant::now());
        let counter = if begun.is_ok() { &account.num_requests } else { &account.num_refused };
        counter.fetch_add(1, Ordering::Relaxed);
        begun.map(|()| Self(Some(Arc::new(Visit(Arc::clone(account))))))
    }

    /// Whom the request is served for, if the key says so.
    pub(crate) fn tenant(&self) -> Option<Tenant> {
        self.account()?.key.name.as_deref().map(Tenant::named)
    }

    /// Puts a prompt's tokens on the account.
    pub(crate) fn spend_prompt(&self, num_tokens: usize) {
        if let Some(account) = self.account() {
            account.prompt_tokens.fetch_add(num_tokens as u64, Ordering::Relaxed);
            account.meter().spend(num_tokens);
        }
    }

    /// Puts a generated token on the account.
    pub(crate) fn spend_generated(&self) {
        if let Some(account) = self.account() {
            account.generated_tokens.fetch_add(1, Ordering::Relaxed);
            account.meter().spend(1);
        }
    }

    fn account(&self) -> Option<&Account> {
        self.0.as_ref().map(|visit| &*visit.0)
    }
}

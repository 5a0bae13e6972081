//! Who asks, and how much service each has had.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// On whose behalf a request comes. Requests without a name are one tenant's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Tenant(Option<Arc<str>>);

impl Tenant {
    /// A tenant with a name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self(Some(name.into()))
    }

    /// Its name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().unwrap_or("(nobody)"))
    }
}

/// Service in units: what tokens cost, in proportion.
///
/// # Source
/// Sheng et al., 2024, section 3.2: a generated token counts twice as much as one of a prompt. One
/// that the prefix cache had is never computed, but is still read by every later token.
pub(crate) mod cost {
    /// A prompt's token that is computed.
    pub(crate) const COMPUTED: u64 = 10;
    /// A prompt's token that the prefix cache had.
    pub(crate) const CACHED: u64 = 1;
    /// A generated token.
    pub(crate) const GENERATED: u64 = 20;
}

/// Accounts of tenants that are gone and whose service is remembered; beyond, those with the least
/// are forgotten.
const MAX_IDLE: usize = 1024;

/// A tenant's place in [`Accounts`], for as long as it has sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AccountId(u32);

#[derive(Debug, Clone, Default)]
struct Account {
    tenant: Tenant,
    /// Units of service: the virtual counter.
    service: u64,
    /// Sequences that have not ended.
    num_live: usize,
    num_waiting: usize,
}

/// A virtual counter for each tenant.
///
/// A tenant that had nothing in the queue starts level with those that wait, so that nobody saves
/// up service by staying away.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    accounts: Vec<Account>,
    by_tenant: HashMap<Tenant, AccountId>,
    unused: Vec<AccountId>,
    num_idle: usize,
    /// The counter of whoever left the queue last: the level when nobody waits.
    last_level: u64,
}

impl Accounts {
    /// Counts a sequence that has arrived.
    pub(crate) fn open(&mut self, tenant: &Tenant) -> AccountId {
        let id = match self.by_tenant.get(tenant) {
            Some(&id) => {
                self.num_idle -= usize::from(self.get(id).num_live == 0);
                id
            }
            None => self.create(tenant),
        };
        self.get_mut(id).num_live += 1;
        id
    }

    fn create(&mut self, tenant: &Tenant) -> AccountId {
        let account = Account { tenant: tenant.clone(), ..Account::default() };
        let id = match self.unused.pop() {
            Some(id) => {
                self.accounts[id.0 as usize] = account;
                id
            }
            None => {
                self.accounts.push(account);
                AccountId(u32::try_from(self.accounts.len() - 1).expect("sequences are bounded"))
            }
        };
        self.by_tenant.insert(tenant.clone(), id);
        id
    }

    /// Whose account it is.
    pub(crate) fn tenant(&self, id: AccountId) -> &Tenant {
        &self.accounts[id.0 as usize].tenant
    }

    /// Counts a sequence that has ended. The account stays while the tenant is ahead of others.
    pub(crate) fn close(&mut self, id: AccountId) {
        let level = self.level();
        let account = self.get_mut(id);
        account.num_live -= 1;
        if account.num_live > 0 {
            return;
        }
        if account.service <= level {
            return self.forget(id);
        }
        self.num_idle += 1;
        if self.num_idle > MAX_IDLE {
            let idle = self.by_tenant.values().filter(|id| self.get(**id).num_live == 0);
            let least = idle.min_by_key(|id| (self.get(**id).service, **id)).copied();
            self.num_idle -= 1;
            self.forget(least.expect("one is idle"));
        }
    }

    fn forget(&mut self, id: AccountId) {
        let account = std::mem::take(self.get_mut(id));
        self.by_tenant.remove(&account.tenant);
        self.unused.push(id);
    }

    /// Notes that a sequence joins the queue. A `newcomer` of a tenant that had none there lifts
    /// the tenant's counter to the others'.
    pub(crate) fn enter_queue(&mut self, id: AccountId, newcomer: bool) {
        if newcomer && self.get(id).num_waiting == 0 {
            let level = self.level();
            let account = self.get_mut(id);
            account.service = account.service.max(level);
        }
        self.get_mut(id).num_waiting += 1;
    }

    pub(crate) fn leave_queue(&mut self, id: AccountId) {
        self.last_level = self.get(id).service;
        self.get_mut(id).num_waiting -= 1;
    }

    pub(crate) fn charge(&mut self, id: AccountId, units: u64) {
        self.get_mut(id).service += units;
    }

    /// Units of service so far.
    pub(crate) fn service(&self, id: AccountId) -> u64 {
        self.get(id).service
    }

    /// Sequences that run, or whose last tokens are in flight.
    pub(crate) fn num_running(&self, id: AccountId) -> usize {
        self.get(id).num_live - self.get(id).num_waiting
    }

    /// Sequences counted, and those of them that wait.
    pub(crate) fn num_sequences(&self) -> (usize, usize) {
        let live = self.accounts.iter().map(|account| account.num_live).sum();
        (live, self.accounts.iter().map(|account| account.num_waiting).sum())
    }

    /// The least service among tenants that wait.
    fn level(&self) -> u64 {
        let waiting = self.accounts.iter().filter(|account| account.num_waiting > 0);
        waiting.map(|account| account.service).min().unwrap_or(self.last_level)
    }

    /// Tenants that are remembered, and what each has had.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Tenant, u64)> {
        let is_used = |account: &&Account| account.num_live > 0 || account.service > 0;
        self.accounts.iter().filter(is_used).map(|account| (&account.tenant, account.service))
    }

    fn get(&self, id: AccountId) -> &Account {
        &self.accounts[id.0 as usize]
    }

    fn get_mut(&mut self, id: AccountId) -> &mut Account {
        &mut self.accounts[id.0 as usize]
    }
}

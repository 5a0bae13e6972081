//! The sequences that wait, and who of them is next.

use std::collections::BTreeMap;

use crate::policy::Order;
use crate::sequence::Sequence;
use crate::tenant::{AccountId, Accounts};
use crate::{SequenceId, SequenceSpec};

/// Who gives way to whom: the lower is served first. Sequences that run and those that wait both
/// stand in this order.
///
/// By order of service: arrival; priority, then arrival; under fairness a sequence has no rank
/// until it is admitted, and then the admission counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) priority: i32,
    pub(crate) number: u64,
}

impl Rank {
    /// The rank of a sequence that has just arrived as the `arrival`th.
    pub(crate) fn of_newcomer(order: Order, spec: &SequenceSpec, arrival: u64) -> Self {
        let priority = if order == Order::Priority { spec.service.priority } else { 0 };
        Self { priority, number: arrival }
    }
}

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct WaitingQueue {
    order: Order,
    /// Under fairness these are the sequences that ran before: they come first.
    by_rank: BTreeMap<Rank, SequenceId>,
    /// Under fairness, those that never ran, each tenant's in order of arrival.
    by_tenant: BTreeMap<AccountId, BTreeMap<u64, SequenceId>>,
    num_by_tenant: usize,
}

impl WaitingQueue {
    pub(crate) fn new(order: Order) -> Self {
        Self { order, ..Self::default() }
    }

    /// Adds a sequence, new or preempted, at its place.
    pub(crate) fn insert(&mut self, id: SequenceId, sequence: &Sequence, accounts: &mut Accounts) {
        accounts.enter_queue(sequence.account, !sequence.has_run);
        if self.is_by_tenant(sequence) {
            self.num_by_tenant += 1;
            let ids = self.by_tenant.entry(sequence.account).or_default();
            ids.insert(sequence.arrival, id);
        } else {
            self.by_rank.insert(sequence.rank, id);
        }
    }

    /// Takes a sequence out, because it was admitted or has ended. To be called before its rank
    /// changes.
    pub(crate) fn remove(&mut self, sequence: &Sequence, accounts: &mut Accounts) {
        accounts.leave_queue(sequence.account);
        if !self.is_by_tenant(sequence) {
            self.by_rank.remove(&sequence.rank);
            return;
        }
        let Some(ids) = self.by_tenant.get_mut(&sequence.account) else { return };
        self.num_by_tenant -= usize::from(ids.remove(&sequence.arrival).is_some());
        if ids.is_empty() {
            self.by_tenant.remove(&sequence.account);
        }
    }

    /// Who is next, of those that do not `wait` for something else.
    pub(crate) fn next(
        &self,
        accounts: &Accounts,
        wait: impl Fn(SequenceId) -> bool,
    ) -> Option<SequenceId> {
        let ranked = self.by_rank.values().copied().find(|&id| !wait(id));
        ranked.or_else(|| self.next_by_tenant(accounts, wait))
    }

    /// The same, of those that never ran where tenants are served fairly.
    pub(crate) fn next_by_tenant(
        &self,
        accounts: &Accounts,
        wait: impl Fn(SequenceId) -> bool,
    ) -> Option<SequenceId> {
        // Of tenants with equal service, the one that has less running.
        let due = |account: AccountId| (accounts.service(account), accounts.num_running(account));
        let key = |account: AccountId, arrival: u64| (due(account), arrival);
        let first = self.by_tenant.iter().filter_map(|(&account, ids)| {
            let (&arrival, &id) = ids.first_key_value()?;
            Some((key(account, arrival), id))
        });
        let first = first.min().map(|(_, id)| id)?;
        if !wait(first) {
            return Some(first);
        }
        let others = self.by_tenant.iter().filter_map(|(&account, ids)| {
            let (&arrival, &id) = ids.iter().find(|&(_, &id)| !wait(id))?;
            Some((key(account, arrival), id))
        });
        others.min().map(|(_, id)| id)
    }

    /// All, those of each tenant together.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SequenceId> {
        let by_tenant = self.by_tenant.values().flat_map(BTreeMap::values);
        self.by_rank.values().chain(by_tenant).copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_rank.len() + self.num_by_tenant
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn is_by_tenant(&self, sequence: &Sequence) -> bool {
        self.order == Order::Fair && !sequence.has_run
    }
}

//! Makes way for a tenant that has nothing running while another has much.
//!
//! A flood that came first may hold every place for as long as its outputs are long. Where tenants
//! are served fairly, whoever was held back in the last plan, has had less service and has nothing
//! running gets the place of the newest sequence of the tenant that has most running:
//!
//! ```text
//!   running  [ flood | flood | flood | flood ]     waiting  modest
//!   running  [ flood | flood | flood | modest ]    waiting  flood, first of its tenant
//! ```
//!
//! The sequence that goes keeps its tokens, and comes back when another ends. A tenant is made way
//! for only while it has nothing running, and only by one that keeps at least one sequence.

use crate::SequenceId;
use crate::decision::HeldBack;
use crate::policy::{Batching, Order};
use crate::scheduler::Scheduler;
use crate::tenant::AccountId;

impl Scheduler {
    /// Has one sequence give way if a tenant without any was held back in the last plan.
    pub(crate) fn make_way(&mut self) {
        let is_fair = self.policy.order == Order::Fair;
        let is_continuous = self.policy.batching == Batching::Continuous;
        let was_held_back = matches!(
            self.decision.held_back,
            Some(HeldBack::Slots | HeldBack::Blocks | HeldBack::ItlTarget)
        );
        if self.policy.max_batch_total_tokens.is_some() {
            return; // nobody ever gives way then
        }
        // While blocks are on their way room is being made already.
        if !(is_fair && is_continuous && was_held_back && self.moves.is_empty()) {
            return;
        }
        let Some(next) = self.next_to_admit() else { return };
        if self.accounts.num_running(self.sequence(next).account) == 0
            && let Some(newest) = self.newest_to_go(next)
        {
            self.preempt(newest);
        }
    }

    /// The newest running sequence of the tenant that has most, if that had more service than the
    /// one of `next` and keeps another. The first rank never goes; nor does, for one that gave way
    /// itself, anybody of a rank before it, who would come back first.
    fn newest_to_go(&self, next: SequenceId) -> Option<SequenceId> {
        let next = self.sequence(next);
        let service = self.accounts.service(next.account);
        let others = self.running.iter().skip(1).map(|&id| (id, self.sequence(id)));
        let others = others.filter(|(_, other)| !next.has_run || other.rank > next.rank);
        let others = others.map(|(id, other)| (id, other.account));
        let may_go = |other: AccountId| {
            let is_ahead = self.accounts.service(other) > service;
            is_ahead && self.accounts.num_running(other) > 1
        };
        let others = others.filter(|(_, other)| may_go(*other));
        // The last of equals: the newest.
        let most = others.max_by_key(|(_, other)| self.accounts.num_running(*other));
        most.map(|(id, _)| id)
    }
}

//! Bugs to plant, for simulations that must find them. Only there with the feature `damage`.

use crate::scheduler::Scheduler;
use crate::sequence::Phase;
use crate::{Batch, SequenceId};

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// A block is taken and forgotten.
    LeakBlock,
    /// A running sequence's block is freed as if twice.
    DoubleFree,
    /// Blocks that are being moved are given back when the move begins, not when it is done.
    ReuseEarly,
}

impl Scheduler {
    /// Does it once; false if there is nothing now that could go wrong like this.
    pub fn damage(&mut self, damage: Damage) -> bool {
        match damage {
            Damage::LeakBlock => self.cache.allocate().is_some(),
            Damage::DoubleFree => {
                let holds = |id: &&SequenceId| {
                    let sequence = self.sequence(**id);
                    let is_running = matches!(sequence.phase, Phase::Running(_));
                    is_running && !sequence.tables.first().blocks().is_empty()
                };
                let Some(&id) = self.running.iter().find(holds) else { return false };
                let block = self.sequence(id).tables.first().blocks()[0];
                self.cache.free(block);
                true
            }
            Damage::ReuseEarly => {
                let Some(number) = self.moves.leaving_in_flight() else { return false };
                self.collect(&Batch::new(number));
                true
            }
        }
    }
}

//! Who gives way when a running sequence needs a block and none is free.

use crate::SequenceId;
use crate::scheduler::Scheduler;
use crate::sequence::Phase;

impl Scheduler {
    /// Gives a running sequence the block that its next token needs, if need be at the cost of
    /// newer ones. False when it is the newest itself and had to give way.
    pub(crate) fn make_room(&mut self, id: SequenceId) -> bool {
        loop {
            let sequence = self.sequences.get_mut(&id).expect("running sequences have a record");
            if sequence.table.grow_to(sequence.num_computed + 1, &mut self.cache).is_ok() {
                return true;
            }
            assert!(self.running.len() > 1, "sequence {id} was admitted but does not fit alone");
            if self.preempt_newest() == id {
                return false;
            }
        }
    }

    /// Takes all blocks from the newest running sequence and returns it to the queue, where it is
    /// first. It keeps its tokens, and computes their keys and values again when it comes back.
    ///
    /// That cannot be in the same plan: it needs as many blocks as it gave, or one more if it gave
    /// way to itself, and no others are free, or nobody would have had to give way.
    fn preempt_newest(&mut self) -> SequenceId {
        let id = *self.running.last().expect("only called while sequences run");
        self.release(id, Phase::Waiting);
        self.sequence_mut(id).num_computed = 0;
        self.waiting.insert(id, &self.sequences[&id]);
        self.num_preemptions += 1;
        id
    }
}

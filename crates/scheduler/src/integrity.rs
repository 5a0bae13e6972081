//! Checks that lists, records, blocks and slots agree: for tests, and for moments of idleness.

use std::collections::HashSet;

use inflight_kv_cache::BlockId;

use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence};
use crate::{SequenceId, StateSlot};

impl Scheduler {
    /// Checks every invariant that can be seen from the state alone: free and held blocks and slots
    /// add up, nothing is held twice, lists and records agree, and arrival order is kept.
    ///
    /// Holds between any two calls. Costs a pass over all sequences and blocks.
    ///
    /// # Errors
    /// The first violation found, in words.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.pool.check_integrity().map_err(|violation| violation.to_string())?;
        self.check_blocks()?;
        self.check_slots()?;
        self.check_lists()?;
        for (&id, sequence) in &self.sequences {
            check_sequence(sequence).map_err(|what| format!("sequence {id}: {what}"))?;
        }
        Ok(())
    }

    /// Reference counts are what the tables say, and, as nothing is shared, each block has one
    /// holder and so one writer.
    fn check_blocks(&self) -> Result<(), String> {
        let mut holders: Vec<Option<SequenceId>> = vec![None; self.pool.num_total()];
        for (&id, sequence) in &self.sequences {
            for &block in sequence.table.blocks() {
                if let Some(other) = holders[block.index()].replace(id) {
                    return Err(format!("block {block} is held by sequences {other} and {id}"));
                }
            }
        }
        for (block, holder) in (0u32..).map(BlockId).zip(holders) {
            let (counted, held) = (self.pool.ref_count(block), u32::from(holder.is_some()));
            if counted != held {
                return Err(format!("block {block} counts {counted} references, has {held}"));
            }
        }
        Ok(())
    }

    /// Every state slot is free or owned by exactly one running sequence.
    fn check_slots(&self) -> Result<(), String> {
        let owned = self.sequences.values().filter_map(|sequence| match sequence.phase {
            Phase::Running(slot) => Some(slot),
            Phase::Waiting | Phase::Finishing => None,
        });
        let mut slots: Vec<StateSlot> = owned.collect();
        slots.extend(self.state_slots.free_slots());
        slots.sort_unstable();
        let all = (0u32..).map(StateSlot).take(self.config.max_num_seqs);
        if slots.iter().copied().eq(all) {
            return Ok(());
        }
        Err(format!("free and owned state slots are not each slot once: {slots:?}"))
    }

    /// The two lists hold each sequence that waits or runs once, in order of arrival.
    fn check_lists(&self) -> Result<(), String> {
        let mut listed = HashSet::new();
        let mut latest = None;
        for &id in self.running.iter().chain(&self.waiting) {
            let Some(sequence) = self.sequences.get(&id) else {
                return Err(format!("sequence {id} is listed but has no record"));
            };
            if latest.replace(sequence.arrival).is_some_and(|latest| latest >= sequence.arrival) {
                return Err(format!("sequence {id} is listed behind one that arrived later"));
            }
            let runs = matches!(sequence.phase, Phase::Running(_));
            if sequence.phase == Phase::Finishing || runs != (listed.len() < self.running.len()) {
                return Err(format!("sequence {id} is in the wrong list for {:?}", sequence.phase));
            }
            listed.insert(id);
        }
        let unlisted = |(id, sequence): (&SequenceId, &Sequence)| {
            (sequence.phase != Phase::Finishing && !listed.contains(id)).then_some(*id)
        };
        match self.sequences.iter().find_map(unlisted) {
            Some(id) => Err(format!("sequence {id} is in no list")),
            None => Ok(()),
        }
    }
}

/// One record agrees with itself.
fn check_sequence(sequence: &Sequence) -> Result<(), String> {
    let Sequence { num_computed, num_pending, final_len, .. } = *sequence;
    let (len, capacity) = (sequence.len(), sequence.table.capacity());
    let is_sound = match sequence.phase {
        // What was computed for it is gone, but a token may still be on its way.
        Phase::Waiting => num_computed == 0 && capacity == 0 && len < final_len,
        // Something is left to compute; behind a pending token, exactly that token.
        Phase::Running(_) => {
            let num_left = len.checked_sub(num_computed);
            let is_behind = num_left.is_some_and(|left| left == 1 || left > 1 && num_pending == 0);
            is_behind && num_computed <= capacity && len < final_len
        }
        Phase::Finishing => num_pending > 0 && capacity == 0 && len == final_len,
    };
    if is_sound {
        return Ok(());
    }
    Err(format!(
        "{:?} with {num_computed} of {len} tokens computed, {num_pending} pending, \
         {capacity} places, ending at {final_len}",
        sequence.phase
    ))
}

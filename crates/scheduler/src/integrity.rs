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
        self.cache.check_integrity().map_err(|violation| violation.to_string())?;
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
        let mut holders: Vec<Option<SequenceId>> = vec![None; self.cache.num_total()];
        for (&id, sequence) in &self.sequences {
            for &block in sequence.table.blocks() {
                if let Some(other) = holders[block.index()].replace(id) {
                    return Err(format!("block {block} is held by sequences {other} and {id}"));
                }
            }
        }
        for (block, holder) in (0u32..).map(BlockId).zip(holders) {
            let (counted, held) = (self.cache.ref_count(block), u32::from(holder.is_some()));
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
        for id in self.running.iter().copied().chain(self.waiting.iter()) {
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

#[cfg(test)]
mod tests {
    use inflight_kv_cache::BlockId;

    use crate::sequence::Phase;
    use crate::{Scheduler, SchedulerConfig, SequenceId, SequenceSpec, StateSlot};

    const A: SequenceId = SequenceId(0);
    const B: SequenceId = SequenceId(1);
    const C: SequenceId = SequenceId(2);

    /// A has launched its prompt, B half of it, C waits.
    fn busy() -> Scheduler {
        let mut scheduler = Scheduler::new(SchedulerConfig {
            max_num_seqs: 2,
            max_num_batched_tokens: 6,
            max_model_len: 100,
            block_size: 2,
            num_blocks: 20,
        })
        .unwrap();
        for id in [A, B, C] {
            let (prompt, stop_token_ids) = (vec![1; 4], Vec::new());
            let spec = SequenceSpec { id, prompt, max_tokens: 4, min_tokens: 0, stop_token_ids };
            scheduler.add(spec).unwrap();
        }
        let batch = scheduler.plan().unwrap();
        scheduler.advance(&batch);
        assert_eq!(scheduler.check_integrity(), Ok(()));
        scheduler
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        let check = |damage: fn(&mut Scheduler), expected: &str| {
            let mut scheduler = busy();
            damage(&mut scheduler);
            let violation = scheduler.check_integrity().unwrap_err();
            assert!(violation.contains(expected), "{violation:?} does not say {expected:?}");
        };
        check(|s| s.cache.free(BlockId(0)), "block 0 counts 0 references, has 1");
        check(|s| s.cache.retain(BlockId(2)), "block 2 counts 2 references, has 1");
        check(|s| assert!(s.cache.allocate().is_some()), "block 4 counts 1 references, has 0");
        check(
            |s| {
                let shared = s.sequence(A).table.share(2, &mut s.cache.clone());
                s.sequence_mut(C).table = shared;
            },
            "block 0 is held by sequences",
        );
        check(|s| s.state_slots.free(StateSlot(1)), "state slots are not each slot once");
        check(|s| s.sequence_mut(A).phase = Phase::Waiting, "state slots are not each slot once");
        check(|s| s.running.swap(0, 1), "sequence 0 is listed behind one that arrived later");
        check(
            |s| {
                s.sequence_mut(C).arrival = 0;
                s.waiting.insert(C, &s.sequences[&C]);
            },
            "sequence 2 is listed behind one that arrived later",
        );
        check(|s| s.sequence_mut(C).phase = Phase::Finishing, "sequence 2 is in the wrong list");
        check(|s| s.waiting = Default::default(), "sequence 2 is in no list");
        check(|s| drop(s.sequences.remove(&C)), "sequence 2 is listed but has no record");
        check(
            |s| s.sequence_mut(B).num_pending = 1,
            "sequence 1: Running(StateSlot(1)) with 2 of 5",
        );
        check(
            |s| s.sequence_mut(A).num_computed = 5,
            "sequence 0: Running(StateSlot(0)) with 5 of 5",
        );
        check(|s| s.sequence_mut(C).num_computed = 1, "sequence 2: Waiting with 1 of 4");
    }
}

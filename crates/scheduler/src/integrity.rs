//! Checks that lists, records, blocks and slots agree: for tests, and for moments of idleness.

use std::collections::HashSet;

use inflight_kv_cache::{BlockId, BlockTable, HostBlockId};

use crate::policy::Order;
use crate::scheduler::Scheduler;
use crate::sequence::{Phase, Sequence, Swapped};
use crate::{SequenceId, StateSlot};

impl Scheduler {
    /// Checks every invariant that can be seen from the state alone: free and held blocks and slots
    /// add up, nothing is held twice, lists and records agree, and ranks are kept.
    ///
    /// Holds between any two calls. Costs a pass over all sequences and blocks.
    ///
    /// # Errors
    /// The first violation found, in words.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.cache.check_integrity().map_err(|violation| violation.to_string())?;
        self.check_blocks()?;
        self.check_swap()?;
        self.check_slots()?;
        self.check_lists()?;
        self.check_ranks()?;
        self.check_accounts()?;
        for (&id, sequence) in &self.sequences {
            check_sequence(sequence).map_err(|what| format!("sequence {id}: {what}"))?;
        }
        Ok(())
    }

    /// Reference counts are what tables, the prefix cache and moves hold, and a sequence alone
    /// holds the blocks that it is still to write.
    fn check_blocks(&self) -> Result<(), String> {
        let mut held = vec![0; self.cache.num_total()];
        let mut owned = vec![false; self.cache.num_total()];
        let in_tables = self.sequences.values().flat_map(|sequence| sequence.tables.held());
        for block in in_tables.chain(self.moves.held_blocks()) {
            held[block.index()] += 1;
            // While a copy is made of a block, it may be the prefix cache's all the same.
            owned[block.index()] = !self.cache.is_unheld(block);
        }
        for (block, held) in (0u32..).map(BlockId).zip(held) {
            let (counted, held) =
                (self.cache.ref_count(block), held + u32::from(self.cache.is_cached(block)));
            if counted != held {
                let why =
                    if counted > held { "it is leaked" } else { "it was freed once too often" };
                return Err(format!(
                    "block {block} counts {counted} references, has {held}: {why}"
                ));
            }
        }
        let num_owned = owned.iter().filter(|&&owned| owned).count();
        let (free, cached) = (self.cache.num_free(), self.cache.num_cached());
        if free + num_owned + cached != self.cache.num_total() {
            return Err(format!("{free} free, {num_owned} owned and {cached} cached are not all"));
        }
        for (&id, sequence) in &self.sequences {
            for table in sequence.tables.iter() {
                let to_write = sequence.num_computed..table.capacity();
                let mut to_write = to_write.step_by(self.config.block_size);
                if to_write.any(|at| self.is_shared_with_tables(table, at)) {
                    return Err(format!("sequence {id} is to write to a block that others hold"));
                }
                if table.turned().any(|copy| self.cache.ref_count(copy.to) > 1) {
                    return Err(format!("sequence {id} is to turn keys that others hold"));
                }
            }
        }
        Ok(())
    }

    /// Moves from the host hold their blocks, too, until they are done; they come before any write.
    fn is_shared_with_tables(&self, table: &BlockTable, position: usize) -> bool {
        let block = table.blocks()[(position - table.num_dropped()) / self.config.block_size];
        let by_moves = self.moves.held_blocks().filter(|&held| held == block).count();
        self.cache.ref_count(block) as usize - by_moves > 1
    }

    /// The same for the host's blocks, which sequences hold that gave way.
    fn check_swap(&self) -> Result<(), String> {
        self.swap.check_integrity().map_err(|violation| format!("swap space: {violation}"))?;
        let mut held = vec![0; self.swap.num_total()];
        let swapped = self.sequences.values().filter_map(|sequence| sequence.swapped.as_ref());
        let by_sequences = swapped.flat_map(Swapped::blocks);
        for block in by_sequences.chain(self.moves.held_host_blocks()) {
            held[block.0 as usize] += 1;
        }
        for (block, held) in (0u32..).map(HostBlockId).zip(held) {
            let counted = self.swap.ref_count(block);
            let held = held + u32::from(self.swap.is_kept(block));
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

    /// The two lists hold each sequence that waits or runs once.
    fn check_lists(&self) -> Result<(), String> {
        let mut listed = HashSet::new();
        for id in self.running.iter().copied().chain(self.waiting.iter()) {
            let Some(sequence) = self.sequences.get(&id) else {
                return Err(format!("sequence {id} is listed but has no record"));
            };
            let runs = matches!(sequence.phase, Phase::Running(_));
            if sequence.phase == Phase::Finishing || runs != (listed.len() < self.running.len()) {
                return Err(format!("sequence {id} is in the wrong list for {:?}", sequence.phase));
            }
            if !listed.insert(id) {
                return Err(format!("sequence {id} is listed twice"));
            }
        }
        let unlisted = |(id, sequence): (&SequenceId, &Sequence)| {
            (sequence.phase != Phase::Finishing && !listed.contains(id)).then_some(*id)
        };
        match self.sequences.iter().find_map(unlisted) {
            Some(id) => Err(format!("sequence {id} is in no list")),
            None => Ok(()),
        }
    }

    /// Those that run stand by rank, and so do those that wait where they have ranks.
    fn check_ranks(&self) -> Result<(), String> {
        let waiting: Vec<SequenceId> = match self.policy.order {
            Order::Fcfs | Order::Priority => self.waiting.iter().collect(),
            Order::Fair => Vec::new(),
        };
        for list in [&self.running, &waiting] {
            for pair in list.windows(2) {
                if self.sequence(pair[0]).rank >= self.sequence(pair[1]).rank {
                    let (id, before) = (pair[1], pair[0]);
                    return Err(format!("sequence {id} stands behind {before} and ranks higher"));
                }
            }
        }
        Ok(())
    }

    /// Accounts count the sequences there are, and every time limit is watched.
    fn check_accounts(&self) -> Result<(), String> {
        let counted = self.accounts.num_sequences();
        let (num_live, num_waiting) = (self.sequences.len(), self.waiting.len());
        if counted != (num_live, num_waiting) {
            return Err(format!("accounts count {counted:?}, not ({num_live}, {num_waiting})"));
        }
        let limits = |sequence: &Sequence| {
            usize::from(sequence.deadline.is_some()) + usize::from(sequence.queue_limit.is_some())
        };
        let num_limits: usize = self.sequences.values().map(limits).sum();
        if num_limits != self.num_lapses() {
            return Err(format!("{} of {num_limits} time limits are watched", self.num_lapses()));
        }
        Ok(())
    }
}

/// One record agrees with itself.
fn check_sequence(sequence: &Sequence) -> Result<(), String> {
    let Sequence { num_computed, num_pending, final_len, .. } = *sequence;
    let (len, capacity) = (sequence.len(), sequence.tables.capacity());
    let is_sound = match sequence.phase {
        // What was computed for it is gone, but a token may still be on its way.
        Phase::Waiting => num_computed == 0 && capacity == 0 && len < final_len,
        // Something is left to compute; behind a pending token, exactly that token.
        Phase::Running(_) => {
            let num_left = len.checked_sub(num_computed);
            let is_behind = num_left.is_some_and(|left| left == 1 || left > 1 && num_pending == 0);
            let is_here = sequence.swapped.is_none();
            is_behind && is_here && num_computed <= capacity && len < final_len
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
    use crate::{
        MemoryConfig, Preemption, Scheduler, SchedulerConfig, SequenceId, SequenceSpec, StateSlot,
    };

    const A: SequenceId = SequenceId(0);
    const B: SequenceId = SequenceId(1);
    const C: SequenceId = SequenceId(2);

    /// A has launched its prompt, B half of it, C waits.
    fn busy() -> Scheduler {
        let mut scheduler = Scheduler::new(SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs: 2,
            max_num_batched_tokens: 6,
            max_model_len: 100,
            block_size: 2,
            num_blocks: 20,
            memory: MemoryConfig {
                prefix_caching: false,
                preemption: Preemption::Auto,
                num_swap_blocks: 1,
                keeps_cold_prefixes: false,
                max_moved_blocks: 1,
            },
        })
        .unwrap();
        for id in [A, B, C] {
            scheduler
                .add(SequenceSpec { max_tokens: 4, ..SequenceSpec::new(id, vec![1; 4]) })
                .unwrap();
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
            let says_references = violation.contains("references");
            assert!(!says_references || scheduler.num_leaked_blocks() > 0, "{violation}");
            assert!(violation.contains(expected), "{violation:?} does not say {expected:?}");
        };
        check(|s| s.cache.free(BlockId(0)), "block 0 counts 0 references, has 1");
        check(|s| s.cache.retain(BlockId(2)), "block 2 counts 2 references, has 1");
        check(|s| assert!(s.cache.allocate().is_some()), "block 4 counts 1 references, has 0");
        check(
            |s| {
                let start = s.sequence(A).tables.shared(2).unwrap();
                let (sequence, mut other) = (s.sequences.get_mut(&C).unwrap(), s.cache.clone());
                sequence.tables.adopt(&start, &mut other);
            },
            "block 0 counts 1 references, has 2",
        );
        check(|s| s.state_slots.free(StateSlot(1)), "state slots are not each slot once");
        check(|s| s.sequence_mut(A).phase = Phase::Waiting, "state slots are not each slot once");
        check(
            |s| s.sequence_mut(A).num_computed = 0,
            "sequence 0: Running(StateSlot(0)) with 0 of 5",
        );
        check(
            |s| {
                let start = s.sequences[&B].tables.shared(4).unwrap();
                let tables = &mut s.sequences.get_mut(&A).unwrap().tables;
                tables.release(&mut s.cache);
                tables.adopt(&start, &mut s.cache);
            },
            "sequence 1 is to write to a block that others hold",
        );
        check(|s| drop(s.swap.allocate(1)), "block host 0 counts 1 references, has 0");
        check(|s| s.running.swap(0, 1), "sequence 0 stands behind 1 and ranks higher");
        check(|s| s.running.push(B), "sequence 1 is listed twice");
        check(|s| s.sequence_mut(C).deadline = Some(s.now), "0 of 1 time limits are watched");
        check(|s| s.accounts.leave_queue(s.sequence(C).account), "accounts count (3, 0), not");
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

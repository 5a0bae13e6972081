//! Sequences without their tokens: lengths, and which blocks are like whose.

use std::collections::HashMap;
use std::time::Duration;

use inflight_kv_cache::{Attended, Retention, SinkWindow};
use serde::{Deserialize, Serialize};

use crate::{SequenceId, SequenceSpec, Service, Tenant};

/// A sequence as a record has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRecord {
    /// Its id.
    pub id: u64,
    /// Tokens of its prompt.
    pub prompt_len: usize,
    /// Most tokens after it.
    pub max_tokens: usize,
    /// Its full blocks, as far as it came: the same number for the same tokens behind the same
    /// tokens.
    pub blocks: Vec<u64>,
    /// The sequence whose prompt it shares.
    pub shares_prompt_of: Option<u64>,
    /// Whether its tokens are counted.
    pub counts_tokens: bool,
    /// Whether its prompt's tokens are probed.
    pub probes_prompt: bool,
    /// Its priority.
    pub priority: i32,
    /// Its tenant, by number; `None`: it has no name.
    pub tenant: Option<u64>,
    /// When it is of no use any more, in nanoseconds.
    pub deadline_ns: Option<u64>,
    /// Tokens that it had generated before the one that stopped it, if one did.
    pub stopped_after: Option<usize>,
    /// What stays of it in the cache: which kind, and the kind's two numbers of tokens.
    #[serde(default)]
    pub retention: [usize; 3],
}

impl SequenceRecord {
    pub(super) fn new(spec: &SequenceSpec, tenant: Option<u64>) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            id: spec.id.0,
            prompt_len: spec.prompt.len(),
            max_tokens: spec.max_tokens,
            blocks: Vec::new(),
            shares_prompt_of: spec.shares_prompt_of.map(|leader| leader.0),
            counts_tokens: spec.counts_tokens,
            probes_prompt: spec.probes_prompt,
            priority: spec.service.priority,
            tenant,
            deadline_ns: spec.service.deadline.map(ns),
            stopped_after: None,
            retention: match spec.retention {
                Retention::All => [0; 3],
                Retention::Window { window } => [1, window, 0],
                Retention::Sinks(sinks) => [2, sinks.num_sinks(), sinks.window()],
                Retention::Attended(attended) => [3, attended.num_kept(), attended.num_observed()],
            },
        }
    }

    /// What the sequence was to keep, in blocks of this size.
    fn retention(&self, block_size: usize) -> Retention {
        let [kind, first, second] = self.retention;
        match kind {
            1 => Retention::Window { window: first },
            2 => Retention::Sinks(SinkWindow::new(first, second, block_size)),
            3 if first > second => {
                Retention::Attended(Attended::new(self.prompt_len, first, second, block_size))
            }
            _ => Retention::All,
        }
    }
}

/// Tokens that stand for those that were not kept.
///
/// All tokens of a block are its number, so blocks are alike where they were. Where a prompt ends
/// within a block, the block's tokens before that end are zero, as outputs of one request have the
/// same prompt and different blocks.
#[derive(Debug)]
pub(super) struct StandIns<'a> {
    sequences: &'a [SequenceRecord],
    block_size: usize,
    /// By block: how many of its first tokens are zero.
    zeros: HashMap<u64, usize>,
}

impl<'a> StandIns<'a> {
    pub(super) fn new(sequences: &'a [SequenceRecord], block_size: usize) -> Self {
        let mut zeros: HashMap<u64, usize> = HashMap::new();
        for sequence in sequences {
            if let Some(&block) = sequence.blocks.get(sequence.prompt_len / block_size) {
                let most = zeros.entry(block).or_default();
                *most = (*most).max(sequence.prompt_len % block_size);
            }
        }
        Self { sequences, block_size, zeros }
    }

    /// A sequence's token at a position.
    pub(super) fn token(&self, place: usize, position: usize) -> u32 {
        let blocks = &self.sequences[place].blocks;
        let Some(&block) = blocks.get(position / self.block_size) else { return 0 };
        let zeros = self.zeros.get(&block).copied().unwrap_or(0);
        if position % self.block_size < zeros { 0 } else { block as u32 }
    }

    /// What the sequence was added as.
    pub(super) fn spec(&self, place: usize) -> SequenceSpec {
        let sequence = &self.sequences[place];
        let stop = sequence.stopped_after.map(|num| self.token(place, sequence.prompt_len + num));
        let prompt = (0..sequence.prompt_len).map(|position| self.token(place, position));
        SequenceSpec {
            max_tokens: sequence.max_tokens,
            // No earlier token stops it, whatever stands in for it.
            min_tokens: sequence.stopped_after.unwrap_or(0),
            stop_token_ids: stop.into_iter().collect(),
            shares_prompt_of: sequence.shares_prompt_of.map(SequenceId),
            counts_tokens: sequence.counts_tokens,
            probes_prompt: sequence.probes_prompt,
            retention: sequence.retention(self.block_size),
            service: Service {
                priority: sequence.priority,
                tenant: sequence
                    .tenant
                    .map_or_else(Tenant::default, |n| Tenant::named(&format!("tenant {n}"))),
                deadline: sequence.deadline_ns.map(Duration::from_nanos),
            },
            ..SequenceSpec::new(SequenceId(sequence.id), prompt.collect())
        }
    }
}

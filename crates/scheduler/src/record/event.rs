//! One call of a scheduler, and how it lies in a record.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::varint;
use crate::{Batch, Decision, MoveCosts};

/// What a plan was: enough to tell it from another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Planned {
    /// Of all rows and moves; 0 if nothing was planned.
    pub digest: u64,
    /// Tokens to compute.
    pub num_tokens: usize,
    /// Rows of one token.
    pub num_single: usize,
    /// Rows of several.
    pub num_chunks: usize,
    /// Sequences that joined.
    pub num_admitted: usize,
    /// Sequences that gave way.
    pub num_preempted: usize,
}

impl Planned {
    pub(super) fn new(batch: Option<&Batch>, decision: &Decision) -> Self {
        Self {
            digest: batch.map_or(0, digest),
            num_tokens: batch.map_or(0, |batch| batch.num_tokens),
            num_single: decision.num_single,
            num_chunks: decision.num_chunks,
            num_admitted: decision.num_admitted,
            num_preempted: decision.num_preempted,
        }
    }
}

/// Of everything that a batch runs and moves, blocks of moves included.
fn digest(batch: &Batch) -> u64 {
    let mut hasher = DefaultHasher::new();
    batch.number.hash(&mut hasher);
    for row in &batch.rows {
        (row.id, row.state_slot, row.start, row.len, row.samples, row.fresh).hash(&mut hasher);
        row.num_uncounted.hash(&mut hasher);
    }
    for copy in &batch.moves.copies {
        (copy.from, copy.to).hash(&mut hasher);
    }
    for (way, moves) in [(0, &batch.moves.swap_out), (1, &batch.moves.swap_in)] {
        for block in moves {
            (way, block.sequence(), block.device, block.host).hash(&mut hasher);
        }
    }
    hasher.finish().max(1)
}

/// A call. Batches are told by their order, sequences by their place in the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// `set_now`, so long after the time before.
    Now(Duration),
    Add(usize),
    /// By id: also of sequences that are gone.
    Abort(u64),
    Expire,
    /// `set_policy`, by its place in the record.
    Policy(usize),
    Costs(MoveCosts),
    Plan(Planned),
    Advance,
    /// Of the oldest batch in flight.
    Observe(Duration),
    Collect,
    /// `commit` for so many further sampled rows of the batch collected last.
    Commit(usize),
    /// A planted bug, by its number.
    Damage(u64),
}

impl Event {
    pub(super) fn write(self, bytes: &mut Vec<u8>) {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut put = |numbers: &[u64]| numbers.iter().for_each(|&n| varint::write(bytes, n));
        match self {
            Self::Now(after) => put(&[0, ns(after)]),
            Self::Add(place) => put(&[1, place as u64]),
            Self::Abort(id) => put(&[2, id]),
            Self::Expire => put(&[3]),
            Self::Policy(place) => put(&[4, place as u64]),
            Self::Costs(MoveCosts { token_ns, swap_out_ns, swap_in_ns }) => {
                put(&[5, token_ns, swap_out_ns, swap_in_ns]);
            }
            Self::Plan(planned) => {
                let Planned { digest, num_tokens, num_single, num_chunks, .. } = planned;
                let counts = [num_tokens, num_single, num_chunks].map(|count| count as u64);
                let [tokens, single, chunks] = counts;
                let (admitted, preempted) = (planned.num_admitted, planned.num_preempted);
                put(&[6, digest, tokens, single, chunks, admitted as u64, preempted as u64]);
            }
            Self::Advance => put(&[7]),
            Self::Observe(took) => put(&[8, ns(took)]),
            Self::Collect => put(&[9]),
            Self::Commit(count) => put(&[10, count as u64]),
            Self::Damage(kind) => put(&[11, kind]),
        }
    }

    /// Takes an event from the front of `bytes`; `None` if that is none.
    pub(super) fn read(bytes: &mut &[u8]) -> Option<Self> {
        let mut number = || varint::read(bytes);
        let tag = number()?;
        let mut count = || usize::try_from(varint::read(bytes)?).ok();
        Some(match tag {
            0 => Self::Now(Duration::from_nanos(count()? as u64)),
            1 => Self::Add(count()?),
            2 => Self::Abort(count()? as u64),
            3 => Self::Expire,
            4 => Self::Policy(count()?),
            5 => {
                let [token_ns, swap_out_ns, swap_in_ns] =
                    [count()? as u64, count()? as u64, count()? as u64];
                Self::Costs(MoveCosts { token_ns, swap_out_ns, swap_in_ns })
            }
            6 => Self::Plan(Planned {
                digest: count()? as u64,
                num_tokens: count()?,
                num_single: count()?,
                num_chunks: count()?,
                num_admitted: count()?,
                num_preempted: count()?,
            }),
            7 => Self::Advance,
            8 => Self::Observe(Duration::from_nanos(count()? as u64)),
            9 => Self::Collect,
            10 => Self::Commit(count()?),
            11 => Self::Damage(count()? as u64),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_back() {
        let costs = MoveCosts { token_ns: 1, swap_out_ns: 300, swap_in_ns: 70_000 };
        let planned = Planned { digest: u64::MAX, num_tokens: 512, ..Planned::default() };
        let events = [
            Event::Now(Duration::from_micros(1500)),
            Event::Add(7),
            Event::Abort(1 << 40),
            Event::Expire,
            Event::Policy(1),
            Event::Costs(costs),
            Event::Plan(planned),
            Event::Advance,
            Event::Observe(Duration::from_millis(5)),
            Event::Collect,
            Event::Commit(255),
            Event::Damage(2),
        ];
        let mut bytes = Vec::new();
        events.iter().for_each(|event| event.write(&mut bytes));
        let mut rest = &bytes[..];
        assert_eq!(events.map(|_| Event::read(&mut rest)), events.map(Some));
        assert_eq!(Event::read(&mut &[99][..]), None);
    }
}

//! Operators around a step: unpacking, counting, sampling; and graphs of them.

use super::{
    F32_TOLERANCE, Pair,
    rig::{Rig, normal, uniform},
    steps::RandomStep,
};
use crate::{
    Backend, BackendError, LateWriter, OutputLayout, RowState, SamplingRow,
    late::{late_words, mask_words},
    ops::{Sample, SamplingState},
    step::MAX_TOP_LOGPROBS,
};

/// How many draws may differ: where a draw falls between two tokens, rounding decides.
const DRAWS_THAT_MAY_DIFFER: f64 = 0.02;

pub(super) fn check<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    let step = RandomStep::mixed(16);
    let (out, expected) = (unpacked(&pair.device, &step)?, unpacked(&pair.reference, &step)?);
    pair.same("unpack", &out, &expected, 0.0);
    let (out, expected) = (tracked(&pair.device)?, tracked(&pair.reference)?);
    pair.same("track_tokens", &out, &expected, 0.0);
    for (kind, may_differ) in [
        (Kind::Greedy, 0.0),
        (Kind::Penalised, 0.0),
        (Kind::Temperature, DRAWS_THAT_MAY_DIFFER),
        (Kind::Truncated, DRAWS_THAT_MAY_DIFFER),
        (Kind::Late, DRAWS_THAT_MAY_DIFFER),
        (Kind::Unusual, DRAWS_THAT_MAY_DIFFER),
    ] {
        for (vocab_size, num_rows) in [(1000, 24), (128_256, 6)] {
            let case = SamplingCase { kind, vocab_size, num_rows };
            let out = case.run(&pair.device, false)?;
            let expected = case.run(&pair.reference, false)?;
            case.compare(pair, "", &out, &expected, may_differ);
        }
    }
    graph(pair)
}

/// A replayed graph must give what the operators one by one give, also for a step of fewer rows
/// than it is padded to.
fn graph<B: Backend>(pair: &mut Pair<'_, B>) -> Result<(), BackendError> {
    let case = SamplingCase { kind: Kind::Penalised, vocab_size: 1000, num_rows: 21 };
    let step = case.step();
    if pair.device.backend.padded_shape(step.shape(), step.capacity()).is_none() {
        return Ok(());
    }
    let (out, expected) = (case.run(&pair.device, true)?, case.run(&pair.reference, false)?);
    case.compare(pair, "graph of ", &out, &expected, 0.0);
    Ok(())
}

fn unpacked<B: Backend>(rig: &Rig<'_, B>, step: &RandomStep) -> Result<Vec<u32>, BackendError> {
    let (batch, shape) = step.unpack(rig)?;
    let mut words = Vec::new();
    for (buffer, len) in [
        (&batch.token_ids, shape.num_tokens),
        (&batch.positions, shape.num_tokens),
        (&batch.slot_mapping, shape.num_tokens),
        (&batch.row_starts, shape.num_rows + 1),
        (&batch.context_lens, shape.num_rows),
        (&batch.block_starts, shape.num_rows + 1),
        (&batch.row_states, shape.num_rows * RowState::WORDS),
        (&batch.blocks, shape.num_blocks),
        (&batch.sample_indices, shape.num_sampled),
        (&batch.sampling, shape.num_sampled * SamplingRow::WORDS),
    ] {
        words.extend(rig.read_words(buffer, len)?);
    }
    Ok(words)
}

/// Counts after two steps: a fresh sequence's prompt and then its output, beside others.
fn tracked<B: Backend>(rig: &Rig<'_, B>) -> Result<Vec<u32>, BackendError> {
    let vocab_size = RandomStep::VOCAB_SIZE;
    let num_slots = 8;
    let token_counts = rig.words(&uniform(70, num_slots * vocab_size, 3))?;
    let state = SamplingState { token_counts, vocab_size };
    for fresh in [true, false] {
        let mut step = RandomStep::mixed(16);
        for (slot, row) in (0..).zip(&mut step.inputs.row_states) {
            let tracked = slot % 3 != 2;
            let state_slot = tracked.then_some(slot);
            *row = RowState { state_slot, prompt_len: 600, fresh: fresh && slot % 2 == 0 };
        }
        let (batch, shape) = step.unpack(rig)?;
        rig.backend.track_tokens(&batch, shape, &state, &rig.stream)?;
        rig.finish()?;
    }
    rig.read_words(&state.token_counts, num_slots * vocab_size)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Greedy,
    Penalised,
    Temperature,
    Truncated,
    Late,
    Unusual,
}

/// Rows to sample, all in one way.
struct SamplingCase {
    kind: Kind,
    vocab_size: usize,
    num_rows: usize,
}

/// What sampling wrote.
struct Sampled {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    top_ids: Vec<u32>,
    top_logprobs: Vec<f32>,
}

impl SamplingCase {
    fn compare<B: Backend>(
        &self,
        pair: &mut Pair<'_, B>,
        prefix: &str,
        out: &Sampled,
        expected: &Sampled,
        may_differ: f64,
    ) {
        let Self { kind, vocab_size, .. } = self;
        let name = |what| format!("{prefix}sample {kind:?} of {vocab_size}: {what}");
        pair.same(name("tokens"), &out.tokens, &expected.tokens, may_differ);
        // A logprob is that of the token drawn: compare where both drew the same.
        let agree = |logprobs: &[f32]| {
            let pairs = out.tokens.iter().zip(&expected.tokens).zip(logprobs);
            pairs.filter(|((a, b), _)| a == b).map(|(_, logprob)| *logprob).collect::<Vec<_>>()
        };
        let (logprobs, others) = (agree(&out.logprobs), agree(&expected.logprobs));
        pair.compare(name("logprobs"), &logprobs, &others, F32_TOLERANCE);
        pair.same(name("likeliest"), &out.top_ids, &expected.top_ids, 0.0);
        let (top, others) = (&out.top_logprobs, &expected.top_logprobs);
        pair.compare(name("likeliest logprobs"), top, others, F32_TOLERANCE);
    }

    fn step(&self) -> RandomStep {
        let mut step = RandomStep::decode(&vec![20; self.num_rows], 16);
        for (i, row) in (0..).zip(&mut step.inputs.sampling) {
            let seed = u64::from(i) << 33 | 5;
            let top_logprobs = Some(i % (MAX_TOP_LOGPROBS as u32 + 1));
            let base = SamplingRow { seed, position: 20 + i, top_logprobs, ..SamplingRow::GREEDY };
            *row = match self.kind {
                Kind::Greedy => base,
                Kind::Penalised => SamplingRow {
                    state_slot: Some(i),
                    repetition_penalty: 1.3,
                    presence_penalty: 0.4,
                    frequency_penalty: 0.2,
                    bias_start: 2 * i,
                    bias_len: 2,
                    ..base
                },
                Kind::Temperature => SamplingRow { temperature: 0.8, ..base },
                Kind::Truncated => SamplingRow {
                    temperature: 1.2,
                    top_k: [0, 1, 5, 50, 2000][i as usize % 5],
                    top_p: [1.0, 0.9, 0.3][i as usize % 3],
                    min_p: [0.0, 0.02][i as usize % 2],
                    ..base
                },
                Kind::Unusual => SamplingRow {
                    temperature: 1.1,
                    top_k: [0, 60][i as usize % 2],
                    typical_p: [1.0, 0.6, 0.95][i as usize % 3],
                    top_n_sigma: [0.0, 1.0, 2.5, 0.0][i as usize % 4],
                    xtc_probability: [0.0, 0.5, 1.0][i as usize % 3],
                    xtc_threshold: 0.01,
                    ..base
                },
                Kind::Late => SamplingRow {
                    late_row: Some(i),
                    temperature: [0.0, 1.1][i as usize % 2],
                    ..base
                },
            };
        }
        if self.kind == Kind::Penalised {
            let ids = uniform(80, 2 * self.num_rows, self.vocab_size);
            let value = |i: usize| if i.is_multiple_of(7) { f32::NEG_INFINITY } else { 2.5 };
            step.inputs.bias = ids.iter().enumerate().map(|(i, id)| (*id, value(i))).collect();
        }
        step
    }

    /// A random mask for most rows, and bias for some.
    fn late_inputs(&self) -> Vec<u32> {
        let Self { vocab_size, num_rows, .. } = *self;
        let mut words = vec![0; late_words(num_rows, vocab_size)];
        let mut writer = LateWriter::new(&mut words, num_rows);
        for row in 0..num_rows {
            let seed = 90 + row as u64;
            if row % 4 != 3 {
                writer.mask(row, &uniform(seed, mask_words(vocab_size), u32::MAX as usize));
            }
            if row % 3 == 1 {
                let ids = uniform(seed, 5, vocab_size);
                writer.bias(row, &ids.iter().map(|id| (*id, 4.0)).collect::<Vec<_>>());
            }
        }
        words
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, graph: bool) -> Result<Sampled, BackendError> {
        let Self { vocab_size, num_rows, .. } = *self;
        let step = self.step();
        let max_rows = step.capacity().max_rows;
        let logits: Vec<f32> = normal(81, num_rows * vocab_size);
        let mut padded = logits.iter().map(|logit| logit * 3.0).collect::<Vec<_>>();
        padded.resize(max_rows * vocab_size, 0.0);
        let logits = rig.state(&padded)?;
        let token_counts = rig.words(&uniform(82, max_rows * vocab_size, 3))?;
        let state = SamplingState { token_counts, vocab_size };
        let layout = OutputLayout { max_rows };
        let outputs = rig.words(&vec![0x7fc0_0000; layout.num_words()])?;
        let (batch, packed) = (step.batch(rig)?, step.pack(rig)?);
        let previous = rig.words(&step.previous)?;
        let late = rig.words(&self.late_inputs())?;
        let enqueue = |shape| {
            rig.backend.unpack(&packed, &previous, shape, &batch, &rig.stream)?;
            let (logits, state, batch, outputs) = (&logits, &state, &batch, &outputs);
            let is_unusual = self.kind == Kind::Unusual;
            let (step, late) = (shape, &late);
            let args = Sample { logits, state, batch, step, is_unusual, late, outputs, max_rows };
            rig.backend.sample(args, &rig.stream)
        };
        let padded = rig.backend.padded_shape(step.shape(), step.capacity());
        match padded.filter(|_| graph) {
            Some(shape) => {
                let graph = rig.backend.capture(&rig.stream, &|| enqueue(shape))?;
                rig.backend.replay(&graph, &rig.stream)?;
                rig.backend.replay(&graph, &rig.stream)?;
                rig.finish()?; // before the graph goes
            }
            None => enqueue(step.shape())?,
        }
        let words = rig.read_words(&outputs, layout.num_words())?;
        Ok(self.read(&words, &step, layout))
    }

    /// The outputs that the rows asked for.
    fn read(&self, words: &[u32], step: &RandomStep, layout: OutputLayout) -> Sampled {
        let float = |word: &u32| f32::from_bits(*word);
        let mut sampled = Sampled {
            tokens: Vec::new(),
            logprobs: Vec::new(),
            top_ids: Vec::new(),
            top_logprobs: Vec::new(),
        };
        for (row, options) in step.inputs.sampling.iter().enumerate() {
            let num_top = options.top_logprobs.unwrap_or(0) as usize;
            sampled.tokens.push(words[layout.token(row)]);
            sampled.logprobs.push(float(&words[layout.logprob(row)]));
            sampled.top_ids.extend(&words[layout.top_ids(row)][..num_top]);
            let top = &words[layout.top_logprobs(row)][..num_top];
            sampled.top_logprobs.extend(top.iter().map(float));
        }
        sampled
    }
}

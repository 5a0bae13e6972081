//! What the model thinks of a given text: the same steps, whose tokens are told instead of drawn.

use inflight_backend::{Backend, SamplingRow};
use inflight_scheduler::{Batch, Row, SequenceId, SequenceSpec};

use super::{Draw, Engine};
use crate::{EngineError, ValidRequest, probes::Probing, staging};

/// A token that is told is made likelier than any other. What is reported does not count that.
const TOLD: f32 = 1e30;

/// What scoring a text has found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// `[num_tokens]`: log-probability of every token after the prompt's first, or after what was
    /// found in the KV cache.
    pub logprobs: Vec<f32>,
    /// `[num_tokens]`: whether it is the token that greedy sampling takes.
    pub likeliest: Vec<bool>,
    /// Most blocks that were in use.
    pub num_blocks: usize,
    /// Blocks that were in use for the last token.
    pub num_blocks_last: usize,
}

impl<B: Backend> Engine<B> {
    /// Scores the tokens of a request's prompt, and those of `answer` after it, each given those
    /// before. The prompt is computed as any and the answer token by token, but nothing overlaps
    /// and nobody else is served. `done` is told how many tokens were scored.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if the device is lost.
    ///
    /// # Panics
    /// If `max_num_batched_tokens` is over `max_num_seqs`: every token of a batch is scored. If the
    /// answer has not the request's `max_tokens`.
    pub fn score(
        &mut self,
        request: ValidRequest,
        answer: &[u32],
        done: &mut dyn FnMut(usize),
    ) -> Result<Scores, EngineError> {
        let most = self.config.max_num_seqs;
        assert!(self.config.max_num_batched_tokens <= most, "every token of a batch is scored");
        assert!(self.is_idle(), "scoring is for engines that serve nobody");
        let (spec, max_tokens, retention) = request.into_spec();
        assert_eq!(answer.len(), max_tokens, "the answer is as long as was asked for");
        let id = SequenceId(u64::MAX);
        let targets: Vec<u32> =
            spec.prompt[1..].iter().copied().chain(answer.iter().copied()).collect();
        let sequence = SequenceSpec { retention, max_tokens, ..SequenceSpec::new(id, spec.prompt) };
        self.scheduler.add(sequence).expect("the request was validated");
        let mut scores = Scores::default();
        while let Some(batch) = self.scheduler.plan() {
            self.score_batch(&batch, &targets, &mut scores)?;
            done(scores.logprobs.len());
        }
        assert!(self.scheduler.is_idle(), "one sequence alone always gets on");
        Ok(scores)
    }

    fn score_batch(
        &mut self,
        batch: &Batch,
        targets: &[u32],
        scores: &mut Scores,
    ) -> Result<(), EngineError> {
        let id = self.io.advance();
        self.history.clear();
        self.probes.clear();
        staging::stage_scored(batch, &self.scheduler, targets, &mut self.inputs);
        let io = self.io.get_mut(id);
        let inputs = &self.inputs;
        let step = self.backend.write_host(&mut io.host_inputs, |words| inputs.pack(words));
        let draw = Draw {
            step,
            is_unusual: false,
            num_output_words: self.outputs.num_words(),
            probing: Probing::default(),
        };
        self.enqueue_forward(id, step, batch)?;
        self.enqueue_draw(id, draw, &batch.moves)?;
        scores.num_blocks_last = self.config.num_blocks - self.scheduler.num_free_blocks();
        scores.num_blocks = scores.num_blocks.max(scores.num_blocks_last);
        self.scheduler.advance(batch);
        self.backend.synchronize(&self.io.get(id).d2h.done)?;
        self.scheduler.collect(batch);
        let at = self.outputs;
        let row_targets = |row: &Row| targets[row.start..row.context_len].iter().copied();
        let told: Vec<u32> = batch.rows.iter().flat_map(row_targets).collect();
        self.backend.read_host(&self.io.get(id).host_outputs, |words| {
            let logprob = |row| f32::from_bits(words[at.logprob(row)]);
            scores.logprobs.extend((0..step.num_sampled).map(logprob));
            let top = |row| words[at.top_ids(row).start];
            scores.likeliest.extend(told.iter().enumerate().map(|(row, told)| top(row) == *told));
        });
        for row in batch.sampled_rows() {
            self.scheduler.commit(row.id, targets[row.context_len - 1]);
        }
        Ok(())
    }
}

/// How a token is drawn that is told.
pub(crate) fn told(target: u32, bias: &mut Vec<(u32, f32)>) -> SamplingRow {
    let bias_start = u32::try_from(bias.len()).expect("a batch's bias fits 32 bits");
    bias.push((target, TOLD));
    SamplingRow { top_logprobs: Some(0), bias_start, bias_len: 1, ..SamplingRow::GREEDY }
}

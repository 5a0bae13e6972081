//! Probes: what is asked of every token of a prompt, its logprob or its state.
//!
//! The forward pass of a step with probes leaves the states of all its tokens on the device. After
//! the step's own tokens were drawn, those of a prompt that is probed go through the output matrix,
//! too, in the rows of logits that are free again: so no more of them are in a step than there are
//! such rows, and a prompt of any length needs no more memory. The scheduler sees to that.
//!
//! A logprob is reported with every draw; so each probe draws, but has the token that the prompt
//! goes on with forced by a bias, which logprobs do not see.

use inflight_backend::{OutputLayout, SamplingRow, StepInputs, StepShape, step::MAX_TOP_LOGPROBS};
use inflight_scheduler::{Row, SequenceId};

use crate::PromptToken;

/// Leaves no other token a chance; finite, so that the draw is an ordinary one.
const FORCING: f32 = 1e30;

/// What is asked of a prompt's tokens, and how far the answer has come.
pub(crate) struct Probe {
    question: Question,
    /// Positions of the prompt that are staged. A sequence that gave way computes them again, but
    /// is not asked again.
    num_staged: usize,
}

enum Question {
    /// How likely each token after the first was, and so many of the likeliest in its place.
    Logprobs(usize),
    /// The mean of the normed states: the sum and number of those collected so far.
    Mean(Vec<f64>, u32),
}

/// A stretch of one prompt among a batch's probes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    pub(crate) id: SequenceId,
    /// Its first row among the probes.
    pub(crate) first_row: usize,
    pub(crate) len: usize,
}

/// How a batch's probes are computed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Probing {
    /// No tokens and no rows, only what is sampled.
    pub(crate) shape: StepShape,
    pub(crate) wants_states: bool,
    pub(crate) wants_logprobs: bool,
}

/// A batch's probes while the host puts them together. Kept between steps.
#[derive(Default)]
pub(crate) struct ProbeInputs {
    pub(crate) inputs: StepInputs,
    pub(crate) stretches: Vec<Stretch>,
    pub(crate) wants_states: bool,
    pub(crate) wants_logprobs: bool,
}

impl ProbeInputs {
    pub(crate) fn clear(&mut self) {
        self.inputs.clear();
        self.stretches.clear();
        (self.wants_states, self.wants_logprobs) = (false, false);
    }

    pub(crate) fn probing(&self) -> Probing {
        Probing {
            shape: self.inputs.shape(),
            wants_states: self.wants_states,
            wants_logprobs: self.wants_logprobs,
        }
    }

    /// Stages what `row`, whose first token is the step's token `first_token`, has of the prompt.
    pub(crate) fn stage(
        &mut self,
        probe: &mut Probe,
        row: &Row,
        prompt: &[u32],
        first_token: usize,
    ) {
        let first_row = self.inputs.sample_indices.len();
        for position in row.start.max(probe.num_staged)..row.context_len.min(prompt.len()) {
            probe.num_staged = position + 1;
            let mut sampling = SamplingRow::GREEDY;
            if let Question::Logprobs(_) = probe.question {
                let Some(&next) = prompt.get(position + 1) else { break };
                sampling.top_logprobs = Some(to_word(MAX_TOP_LOGPROBS));
                sampling.bias_start = to_word(self.inputs.bias.len());
                sampling.bias_len = 1;
                self.inputs.bias.push((next, FORCING));
            }
            self.inputs.sample_indices.push(to_word(first_token + position - row.start));
            self.inputs.sampling.push(sampling);
        }
        let len = self.inputs.sample_indices.len() - first_row;
        if len > 0 {
            self.stretches.push(Stretch { id: row.id, first_row, len });
            match probe.question {
                Question::Logprobs(_) => self.wants_logprobs = true,
                Question::Mean(..) => self.wants_states = true,
            }
        }
    }
}

impl Probe {
    pub(crate) fn logprobs(num_top: u32) -> Self {
        Self { question: Question::Logprobs(num_top as usize), num_staged: 0 }
    }

    pub(crate) fn mean() -> Self {
        Self { question: Question::Mean(Vec::new(), 0), num_staged: 0 }
    }

    /// How many of the likeliest tokens are told; `None`: logprobs are not what was asked for.
    pub(crate) fn num_top(&self) -> Option<usize> {
        match self.question {
            Question::Logprobs(num_top) => Some(num_top),
            Question::Mean(..) => None,
        }
    }

    /// Takes the normed state of one more token.
    pub(crate) fn add_state(&mut self, state: &[f32]) {
        let Question::Mean(sum, num_states) = &mut self.question else { return };
        *num_states += 1;
        sum.resize(state.len(), 0.0);
        sum.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
    }

    /// The mean of the states taken.
    pub(crate) fn mean_state(&self) -> Vec<f32> {
        let Question::Mean(sum, num_states) = &self.question else { return Vec::new() };
        sum.iter().map(|sum| (sum / f64::from(*num_states)) as f32).collect()
    }
}

/// What the probes of a stretch have found, from their output words.
pub(crate) fn read_logprobs(
    words: &[u32],
    at: OutputLayout,
    stretch: Stretch,
    num_top: usize,
) -> Vec<PromptToken> {
    let rows = stretch.first_row..stretch.first_row + stretch.len;
    let one = |row| {
        let token = words[at.token(row)];
        let ids = &words[at.top_ids(row)];
        let logprobs = words[at.top_logprobs(row)].iter().map(|bits| f32::from_bits(*bits));
        let top = ids.iter().copied().zip(logprobs).filter(|(id, _)| *id != u32::MAX);
        PromptToken {
            token,
            logprob: f32::from_bits(words[at.logprob(row)]),
            rank: ids.iter().position(|id| *id == token).map(|place| to_word(place + 1)),
            top_logprobs: top.take(num_top).collect(),
        }
    };
    rows.map(one).collect()
}

fn to_word(value: usize) -> u32 {
    u32::try_from(value).expect("tokens and rows of a batch fit 32 bits")
}
